"""Builds the CUDA library on a machine without a network. Usage: build.py FOLDER; prints the library's path.

Uses CMake; if that is missing or fails, uses nvcc alone. Builds for the machine's GPU.
"""

import pathlib
import shutil
import subprocess
import sys

import jaxlib.version

SOURCES = pathlib.Path(__file__).resolve().parents[2] / "xla_ffi"
HEADERS = pathlib.Path(jaxlib.version.__file__).parent / "include"


def find_tool(name):
    """Finds a program on the PATH, beside this Python, or in CUDA's usual folder; None if missing."""
    beside = pathlib.Path(sys.executable).parent
    return shutil.which(name) or shutil.which(name, path=f"{beside}:/usr/local/cuda/bin")


def cmake_commands(cmake, ninja, folder, architecture):
    """Returns the CMake commands that build for one architecture such as "90", or for the default ones if None."""
    generator = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"] if ninja else []
    settings = {
        "Python_EXECUTABLE": sys.executable,
        "JAXFERRY_FFI_INCLUDE": HEADERS,
        "JAXFERRY_JAXLIB": jaxlib.version.__version__,
    }
    if architecture:
        settings["JAXFERRY_CUDA_ARCHITECTURES"] = architecture
    configure = [cmake, *generator, "-S", SOURCES / "cuda", "-B", folder]
    configure += [f"-D{key}={value}" for key, value in settings.items()]
    return [configure, [cmake, "--build", folder, "--parallel"]]


def nvcc_commands(nvcc, folder, architecture):
    """Returns the nvcc commands that build without CMake."""
    defines = [
        f'-DJAXFERRY_JAXLIB_VERSION="{jaxlib.version.__version__}"',
        '-DJAXFERRY_NVCC_VERSION="unknown"',
        f"-DJAXFERRY_ARCHITECTURES={architecture or ''}",
    ]
    code = [f"-gencode=arch=compute_{architecture},code=sm_{architecture}"] if architecture else ["-arch=native"]
    units = [*sorted((SOURCES / "cuda").glob("*.c[cu]")), *sorted((SOURCES / "common").glob("*.cc"))]
    flags = ["-std=c++17", "-O3", "--threads", "0", "-Xcompiler", "-fPIC,-fvisibility=hidden"]
    link = [
        "-shared",
        "-cudart",
        "static",
        "-Xlinker",
        f"--version-script={SOURCES / 'common' / 'exports.map'}",
        "-ldl",
    ]
    includes = [f"-I{SOURCES}", "-isystem", HEADERS]
    return [[nvcc, *flags, *defines, *code, *includes, *units, *link, "-o", folder / "libjaxferry_cuda.so"]]


def gpu_architecture():
    """Returns the compute capability of the first GPU, such as "90"; None if nvidia-smi does not report it."""
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    digits = found.splitlines()[0].replace(".", "").strip() if found.strip() else ""
    return digits if digits.isdigit() else None


def ways(folder):
    """Returns the possible builds, best first, as lists of commands."""
    architecture = gpu_architecture()
    cmake, nvcc = find_tool("cmake"), find_tool("nvcc")
    found = []
    if cmake:
        found.append(cmake_commands(cmake, find_tool("ninja"), folder, architecture))
    if nvcc:
        found.append(nvcc_commands(nvcc, folder, architecture))
    return found


def run_all(commands):
    """Runs commands until one fails; returns whether all succeeded."""
    for command in commands:
        status = subprocess.run([str(part) for part in command], stdout=sys.stderr).returncode
        if status != 0:
            print(f"build.py: {command[0]} failed with status {status}", file=sys.stderr)
            return False
    return True


def main():
    folder = pathlib.Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    found = ways(folder)
    if not found:
        sys.exit("build.py: found neither cmake nor nvcc; install the CUDA toolkit")
    if not any(run_all(commands) for commands in found):
        sys.exit("build.py: the CUDA library cannot be built")
    print(folder / "libjaxferry_cuda.so")


if __name__ == "__main__":
    main()
