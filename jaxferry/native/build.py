"""Builds a native library from the packaged sources for the installed jaxlib."""

import dataclasses
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

import jax
import jaxlib.version

from jaxferry.errors import NativeError
from jaxferry.native.loading import canonical_platform, inspect_library
from jaxferry.native.paths import DIRECTORY_VARIABLE, FILE_NAMES, PACKAGE_DIRECTORY, find_sources, user_directory


@dataclasses.dataclass(frozen=True)
class Build:
    """A library that was built, and the tools that built it; `headers` are XLA's, in the installed jaxlib."""

    platform: str
    path: pathlib.Path
    compiler: str
    nvcc: str | None
    headers: str
    jaxlib: str


def build_library(platform: str, directory: pathlib.Path | None = None) -> Build:
    """Builds the library of "cpu", "gpu" or "cuda" and installs it where `library` finds it, replacing an existing one.

    `directory` is by default `JAXFERRY_NATIVE_DIR`, else the package's folder, or the user's if that is not writable.

    Raises:
      InputError: for another platform.
      NativeError: if it cannot be built; the message names the log.
    """
    name = canonical_platform(platform)
    sources = find_sources()
    if sources is None:
        raise NativeError("the package holds no C++ sources; install it with `pip install --force-reinstall jaxferry`")
    default = PACKAGE_DIRECTORY if os.access(PACKAGE_DIRECTORY, os.W_OK) else user_directory()
    target = directory or pathlib.Path(os.environ.get(DIRECTORY_VARIABLE) or default)
    descriptor, log_name = tempfile.mkstemp(prefix=f"jaxferry-build-{name.lower()}-", suffix=".log")
    os.close(descriptor)
    log = pathlib.Path(log_name)
    with tempfile.TemporaryDirectory(prefix="jaxferry-build-") as folder:
        build = pathlib.Path(folder)
        for command in _commands(name, sources, build):
            _run(command, name, log)
        path = _move(build / "installed" / FILE_NAMES[name], target)
        text = (build / "CMakeCache.txt").read_text()
        cache = dict(re.findall(r"^([A-Za-z_]\w*):\w+=(.*)$", text, re.MULTILINE))
    found = inspect_library(path, name)
    if not found.is_available:
        raise NativeError(f"the {name} library was built but cannot be used: {found.message}; the log is {log}")
    log.unlink()
    nvcc = cache.get("JAXFERRY_NVCC") or cache.get("CMAKE_CUDA_COMPILER")
    compiler = f"{cache.get('CMAKE_CXX_COMPILER')} ({found.build_info.get('compiler')})"
    headers, jaxlib_version = cache["JAXFERRY_FFI_INCLUDE"], cache["JAXFERRY_JAXLIB"]
    return Build(name, path, compiler, nvcc if name == "CUDA" else None, headers, jaxlib_version)


def _commands(platform: str, sources: pathlib.Path, build: pathlib.Path) -> list[list[str]]:
    cmake, ninja = _find_tool("cmake"), _find_tool("ninja")
    if cmake is None:
        raise NativeError(f"building the {platform} library needs cmake; install it: `pip install cmake ninja`")
    generator = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"] if ninja is not None else []
    settings = {
        "CMAKE_BUILD_TYPE": "Release",
        "JAXFERRY_PLATFORMS": platform.lower(),
        "JAXFERRY_FFI_INCLUDE": jax.ffi.include_dir(),
        "JAXFERRY_JAXLIB": jaxlib.version.__version__,
        "JAXFERRY_INSTALL_DIR": ".",
        "Python_EXECUTABLE": sys.executable,
    }
    defined = [f"-D{key}={value}" for key, value in settings.items()]
    return [
        [cmake, "-S", str(sources), "-B", str(build), *generator, *defined],
        [cmake, "--build", str(build), "--parallel"],
        [cmake, "--install", str(build), "--prefix", str(build / "installed")],
    ]


def _find_tool(name: str) -> str | None:
    # Finds the tools of a virtual environment even if it is not activated.
    return shutil.which(name) or shutil.which(name, path=str(pathlib.Path(sys.executable).parent))


def _run(command: list[str], platform: str, log: pathlib.Path) -> None:
    with log.open("a") as output:
        output.write(" ".join(command) + "\n")
        output.flush()
        status = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL).returncode
    if status != 0:
        raise NativeError(f"the {platform} library cannot be built: {_reason(log.read_text())}; the log is {log}")


def _reason(text: str) -> str:
    """Extracts the first failure from a log: the text of CMake's error, or the compiler's line."""
    of_cmake = re.search(r"^CMake Error[^\n]*:\n+((?:(?:  [^\n]*)?\n)+)", text, re.MULTILINE)
    if of_cmake is not None:
        return " ".join(of_cmake[1].split()).rstrip(".")
    lines = [line.strip() for line in text.splitlines() if re.search(r"\b(fatal )?error\b", line, re.IGNORECASE)]
    return lines[0] if lines else "the build failed"


def _move(built: pathlib.Path, directory: pathlib.Path) -> pathlib.Path:
    """Installs a library atomically; a process that uses the old one keeps it."""
    path = directory / built.name
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=directory, prefix=f".{built.name}-", delete=False) as temporary:
            temporary.write(built.read_bytes())
        os.chmod(temporary.name, 0o755)
        os.replace(temporary.name, path)
    except OSError as error:
        raise NativeError(f"the library cannot be written to {directory}: {error}") from error
    return path
