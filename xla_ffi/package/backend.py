"""The build backend: scikit-build-core, which skips the native libraries if CMake or its build tool is missing.

`pip install` fetches CMake and Ninja itself; with `--no-build-isolation` it uses the installed ones.
"""

import importlib.util
import os
import shutil
from typing import Any

import scikit_build_core.build
from scikit_build_core.build import (
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
]


def build_wheel(directory: str, settings: dict[str, Any] | None = None, metadata: str | None = None) -> str:
    """See PEP 517."""
    _choose()
    return scikit_build_core.build.build_wheel(directory, settings, metadata)


def build_editable(directory: str, settings: dict[str, Any] | None = None, metadata: str | None = None) -> str:
    """See PEP 660."""
    _choose()
    return scikit_build_core.build.build_editable(directory, settings, metadata)


def _choose() -> None:
    # pyproject.toml documents JAXFERRY_PURE.
    has_cmake = shutil.which("cmake") is not None or importlib.util.find_spec("cmake") is not None
    has_builder = any(map(shutil.which, ("ninja", "make"))) or importlib.util.find_spec("ninja") is not None
    if not (has_cmake and has_builder):
        os.environ.setdefault("JAXFERRY_PURE", "1")
