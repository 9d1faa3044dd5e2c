"""The CUDA library on a machine without a GPU: its own sources, compiled with an emulation of CUDA's runtime.

The emulation (`cuda_emulation/`) runs kernels thread by thread, and streams as late and in as mixed an order as their
events allow. What it cannot show: whether the GPU's memory is as consistent, how fast anything is, and cuBLASLt itself.
"""

import concurrent.futures
import ctypes
import pathlib
import subprocess

import jax

from built import built_once
from jaxferry.native import NativeLibrary
from native.native_operations import Operations

FOLDER = pathlib.Path(__file__).parent / "cuda_emulation"
SOURCES = pathlib.Path(__file__).parents[2] / "xla_ffi"

TARGETS = (
    "scratch",
    "dha_gather",
    "dha_matmul",
    "dha_read",
    "gradient_store",
    "dha_matmul_gradient",
    "row_store",
    "ferry_load",
    "ferry_store",
    "ferry_wait",
    "ferry_vacate",
    "mark",
)

FLAGS = ["-std=c++17", "-Og", "-fPIC", "-fvisibility=hidden"]
# A misaligned vector or an overflow ends the process.
FLAGS += ["-fsanitize=undefined", "-fsanitize-undefined-trap-on-error"]


LIBRARY = "libemulated_cuda.so"


def load():
    """The library, compiled once."""
    return ctypes.CDLL(str(built_once("emulated", build) / LIBRARY))


def build(folder):
    """Compiles the library into `folder`."""
    units = [FOLDER / "unity.cc", *(SOURCES / "cuda" / name for name in ("matmul.cc", "product.cc"))]
    includes = [f"-I{FOLDER / 'include'}", f"-I{FOLDER}", f"-I{SOURCES}", "-isystem", jax.ffi.include_dir()]
    objects = [folder / f"{unit.stem}.o" for unit in units]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        commands = [["g++", *FLAGS, *includes, "-c", str(unit), "-o", str(made)] for unit, made in zip(units, objects)]
        for finished in pool.map(lambda command: subprocess.run(command, capture_output=True, text=True), commands):
            assert finished.returncode == 0, finished.stderr
    subprocess.run(["g++", "-shared", *map(str, objects), "-o", str(folder / LIBRARY)], check=True)


class _Functions:
    """The library's functions that are no operations; those that look at streams take the emulation's lock."""

    def __init__(self, library):
        self.jaxferry_marks_open, self.jaxferry_marks_close = library.jaxferry_marks_open, library.jaxferry_marks_close
        self.jaxferry_marks_read = library.emulation_marks_read
        self.jaxferry_ferry_synchronize = library.emulation_synchronize
        self.jaxferry_ferry_wait_for = library.emulation_ferry_wait_for


def functions(library):
    """The same as `jaxferry.native.loading` gives for a real one."""
    return NativeLibrary("CUDA", _Functions(library))


def register(library):
    """Registers the library's handlers for programs on the CPU, and returns the operations."""
    for name in TARGETS:
        handler = getattr(library, f"emulated_{name}")
        jax.ffi.register_ffi_target(f"emulated_{name}", jax.ffi.pycapsule(handler), platform="cpu")
    epsilon = dict.fromkeys(("float32", "bfloat16", "float16"), 2.0**-18)
    return Operations(jax.devices("cpu")[0], "emulated_", epsilon)
