"""The CUDA library for tests that compile programs which call it."""

import ctypes
import functools

import jax

from built import built_once
from jaxferry.native.library import TARGETS, is_available
from native import cuda_build


@functools.cache
def cuda_library():
    """Path and functions of the library, built once with whatever nvcc there is.

    Its targets are registered, unless the package has a CUDA library of its own: XLA takes each name once.
    """
    path = built_once("cuda", build) / "libjaxferry_cuda.so"
    functions = ctypes.CDLL(str(path))
    for name in () if is_available("cuda") else TARGETS:
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(functions, name)), platform="CUDA")
    return path, functions


def build(folder):
    """Builds the library for one architecture, so that it takes half of the time: no source depends on it."""
    return cuda_build.build(folder, "-DJAXFERRY_CUDA_ARCHITECTURES=90", "-DCMAKE_CXX_FLAGS_RELEASE=-O0 -DNDEBUG")


def know_cuda_targets():
    """Has XLA know the library's targets: of the package's own, which takes no build, or of one that is built here."""
    if not is_available("cuda"):
        cuda_library()
