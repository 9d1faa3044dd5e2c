"""Builds the CUDA library with the nvcc that is there, for all three architectures; a warning is an error."""

import pathlib
import shutil
import subprocess
import sys

import jax
import jaxlib.version

SOURCES = pathlib.Path(__file__).parents[2] / "xla_ffi"


def find_tool(name):
    """A program on the PATH or beside this Python, where pip puts it."""
    found = shutil.which(name) or shutil.which(name, path=str(pathlib.Path(sys.executable).parent))
    assert found, f"there is no {name}: install the `test` extra"
    return found


def run(*command):
    finished = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    output = finished.stdout + finished.stderr
    assert finished.returncode == 0, output
    return output


def find_nvcc():
    """The setting that names the nvcc beside this Python's environment; none where the system has one."""
    found = sorted(pathlib.Path(sys.prefix).glob("gpu-packages/nvidia/cu*/bin/nvcc"))
    return [f"-DJAXFERRY_NVCC={found[-1]}"] if found and not shutil.which("nvcc") else []


def configure(build, *settings):
    """Configures the CUDA library by itself in the folder `build` and returns what CMake printed."""
    return run(
        *(find_tool("cmake"), "-G", "Ninja", "-S", SOURCES / "cuda", "-B", build),
        f"-DCMAKE_MAKE_PROGRAM={find_tool('ninja')}",
        f"-DPython_EXECUTABLE={sys.executable}",
        f"-DJAXFERRY_FFI_INCLUDE={jax.ffi.include_dir()}",
        f"-DJAXFERRY_JAXLIB={jaxlib.version.__version__}",
        "-DJAXFERRY_WARNINGS_AS_ERRORS=ON",
        *find_nvcc(),
        *settings,
    )


def build(folder, *settings):
    """Builds the library and returns its path."""
    configure(folder, *settings)
    run(find_tool("cmake"), "--build", folder, "--parallel")
    return folder / "libjaxferry_cuda.so"
