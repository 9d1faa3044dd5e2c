"""The build backend: scikit-build-core, which skips the native libraries if CMake or its build tool is missing.

`pip install` fetches CMake and Ninja itself; with `--no-build-isolation` it uses the installed ones. A build without a
library says what is missing and what that costs; pip shows it with `-v`. JAXFERRY_LIBRARIES names the libraries to
build, of which none may be missing then: release wheels have "cpu,cuda", which fetches nvcc if the system has none.
"""

import importlib.util
import os
import pathlib
import shutil
import sys
import zipfile
from typing import Any

import scikit_build_core.build
from scikit_build_core.build import build_sdist, get_requires_for_build_editable, get_requires_for_build_sdist

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
]

LIBRARIES_VARIABLE = "JAXFERRY_LIBRARIES"
NVCC_PACKAGES = ("nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cuda-crt", "nvidia-cuda-runtime")
COSTS = {
    "cpu": "layers move by plain JAX copies, layers read in host memory are loaded, XLA compiles optimizer updates",
    "cuda": "on a GPU, layers move by plain JAX copies and layers read in host memory are loaded",
}
REMEDIES = {
    "cpu": "install a C++ compiler (g++ or clang++)",
    "cuda": f"on a machine with an NVIDIA GPU, `pip install {' '.join(NVCC_PACKAGES)}`",
}


def get_requires_for_build_wheel(settings: dict[str, Any] | None = None) -> list[str]:
    """See PEP 517."""
    required = list(scikit_build_core.build.get_requires_for_build_wheel(settings))
    if "cuda" in _required_libraries() and shutil.which("nvcc") is None:
        required += NVCC_PACKAGES
    return required


def build_wheel(directory: str, settings: dict[str, Any] | None = None, metadata: str | None = None) -> str:
    """See PEP 517."""
    _choose()
    name = scikit_build_core.build.build_wheel(directory, settings, metadata)
    _tell(pathlib.Path(directory) / name)
    return name


def build_editable(directory: str, settings: dict[str, Any] | None = None, metadata: str | None = None) -> str:
    """See PEP 660."""
    _choose()
    name = scikit_build_core.build.build_editable(directory, settings, metadata)
    _tell(pathlib.Path(directory) / name)
    return name


def _choose() -> None:
    # pyproject.toml documents JAXFERRY_PURE.
    has_cmake = shutil.which("cmake") is not None or importlib.util.find_spec("cmake") is not None
    has_builder = any(map(shutil.which, ("ninja", "make"))) or importlib.util.find_spec("ninja") is not None
    if not (has_cmake and has_builder):
        os.environ.setdefault("JAXFERRY_PURE", "1")


def _required_libraries() -> list[str]:
    named = os.environ.get(LIBRARIES_VARIABLE, "").replace(",", " ").split()
    unknown = [name for name in named if name not in COSTS]
    if unknown:
        raise SystemExit(f"{LIBRARIES_VARIABLE} must name {' and '.join(COSTS)}, got {unknown[0]!r}")
    return named


def _tell(wheel: pathlib.Path) -> None:
    """Says which libraries a wheel lacks, at what cost; those that JAXFERRY_LIBRARIES asks for may not be missing."""
    with zipfile.ZipFile(wheel) as archive:
        files = {pathlib.PurePosixPath(name).name for name in archive.namelist()}
    asked = _required_libraries()
    missing = [name for name in asked or COSTS if f"libjaxferry_{name}.so" not in files]
    for name in missing:
        remedy = f"{REMEDIES[name]}, then `jaxferry build-native --platform {name}`"
        print(f"JaxFerry: no {name} library. Without it, {COSTS[name]}. To have it, {remedy}.", file=sys.stderr)
    if asked and missing:
        wheel.unlink()
        raise SystemExit(f"{LIBRARIES_VARIABLE} asks for the {' and the '.join(missing)} library, which was not built")
