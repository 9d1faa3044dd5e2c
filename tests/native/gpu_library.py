"""The CUDA library on a real GPU, under names of its own, so that the package's may be loaded as well."""

import ctypes
import os
import pathlib

import jax

from native import cuda_build
from native.emulated_cuda import TARGETS
from native.native_operations import Operations

LIBRARY_VARIABLE = "JAXFERRY_CHECK_LIBRARY"

# TF32 keeps ten bits of a fraction, and may drop the others; JAX's own products at default precision are TF32
# as well.
PRODUCT_EPSILON = {"float32": 2.0**-9, "bfloat16": 2.0**-16, "float16": 2.0**-16}


def find(folder):
    """The library that the environment names, else one built into `folder`."""
    named = os.environ.get(LIBRARY_VARIABLE)
    return pathlib.Path(named) if named else cuda_build.build(folder)


def register(path):
    library = ctypes.CDLL(str(path))
    for name in TARGETS:
        handler = getattr(library, f"jaxferry_{name}")
        jax.ffi.register_ffi_target(f"checked_{name}", jax.ffi.pycapsule(handler), platform="CUDA")
    return Operations(jax.devices("cuda")[0], "checked_", PRODUCT_EPSILON)
