"""The CUDA library for tests that compile programs which call it."""

import atexit
import ctypes
import functools
import pathlib
import shutil
import tempfile

import jax

from jaxferry.native.library import TARGETS
from native import cuda_build


@functools.cache
def cuda_library():
    """Path and functions of the library, built once with whatever nvcc there is; its targets are registered."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="jaxferry-cuda-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = cuda_build.build(folder)
    functions = ctypes.CDLL(str(path))
    for name in TARGETS:
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(functions, name)), platform="CUDA")
    return path, functions
