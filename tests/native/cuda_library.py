"""The CUDA library for tests that compile programs which call it."""

import ctypes
import functools

import jax

from built import built_once
from jaxferry.native import TARGETS, status
from native import cuda_build


@functools.cache
def cuda_library():
    """Path and functions of the library, whose targets are registered.

    This is the package's own, unless it has none, or one that is older than its sources. A build with whatever nvcc
    there is then takes its place. XLA takes each name once, so an older library of the package stays registered.
    """
    own = status("cuda")
    if own.is_available and own.path.stat().st_mtime > newest_source():
        return own.path, ctypes.CDLL(str(own.path))
    path = built_once("cuda", build) / "libjaxferry_cuda.so"
    functions = ctypes.CDLL(str(path))
    for name in () if own.is_available else TARGETS:
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(functions, name)), platform="CUDA")
    return path, functions


def newest_source():
    """When a source of the native libraries was last changed, in seconds since the epoch."""
    return max(file.stat().st_mtime for file in cuda_build.SOURCES.rglob("*") if file.is_file())


def build(folder, *settings):
    """Builds the library for one architecture, so that it takes half of the time: no source depends on it."""
    quick = "-DJAXFERRY_CUDA_ARCHITECTURES=90", "-DCMAKE_CXX_FLAGS_RELEASE=-O0 -DNDEBUG"
    return cuda_build.build(folder, *quick, *settings)
