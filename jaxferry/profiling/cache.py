"""What was measured once, on disk: one small JSON file for each measurement.

    content of what is measured + surroundings (device, threads, versions) --digest--> ab/cdef....json: seconds

A file is written beside its place and moved there, so that there is a whole one or none, whoever else writes. A file
that cannot be read, or holds something else, is as good as none; a folder that cannot be written keeps nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import math
import os
import pathlib
import platform
import tempfile
from collections.abc import Mapping
from typing import Any

import jax
import jaxlib.version

from jaxferry.native import library, status

CACHE_VARIABLE = "JAXFERRY_CACHE_DIR"
OFF = "off"
MEASUREMENT_FORMAT = "jaxferry.measurement/1"
"""Another number here makes every older measurement one that is not found."""

THREAD_VARIABLES = ("NPROC", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OPENBLAS_CORETYPE")
"""What XLA's CPU backend, and the BLAS that products in host memory are computed by, take threads and kernels from."""

_LARGEST = 10_000
"""Characters of a file that one measurement is ever written to."""


class MeasurementCache:
    """Seconds by what was measured.

    Args:
      directory: where the files are; None keeps nothing.
      surroundings: what else a time depends on, JSON values by name.
    """

    def __init__(self, directory: str | os.PathLike[str] | None, surroundings: Mapping[str, Any]) -> None:
        self._directory = None if directory is None else pathlib.Path(directory)
        self._surroundings = dict(surroundings)

    def get(self, content: str) -> float | None:
        """The seconds that were measured for this content, or None.

        Args:
          content: whatever tells what was measured from everything else, such as a program's text.
        """
        if self._directory is None:
            return None
        key = self._key(content)
        try:
            with self._path(key).open(encoding="utf-8") as file:
                text = file.read(_LARGEST + 1)
            # Deep nesting can end the process, so what is too long is not even parsed.
            document = None if len(text) > _LARGEST else json.loads(text)
        except (OSError, ValueError, RecursionError):
            return None
        if not isinstance(document, dict) or document.get("format") != MEASUREMENT_FORMAT or document.get("key") != key:
            return None
        seconds = document.get("seconds")
        if isinstance(seconds, bool) or not isinstance(seconds, int | float):
            return None
        return float(seconds) if math.isfinite(seconds) and seconds >= 0 else None

    def put(self, content: str, seconds: float) -> None:
        """Keeps the seconds measured for this content, if the folder can be written."""
        if self._directory is None:
            return
        key = self._key(content)
        document = {"format": MEASUREMENT_FORMAT, "key": key, "seconds": seconds, "surroundings": self._surroundings}
        path = self._path(key)
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            _replace(path, json.dumps(document, indent=1))

    def _key(self, content: str) -> str:
        text = json.dumps([MEASUREMENT_FORMAT, self._surroundings, content], sort_keys=True)
        return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()

    def _path(self, key: str) -> pathlib.Path:
        assert self._directory is not None
        return self._directory / "measurements" / key[:2] / f"{key[2:]}.json"


def cache_directory() -> pathlib.Path | None:
    """The folder of the cache: `JAXFERRY_CACHE_DIR` (None if that is "off"), else `jaxferry` in the user's cache."""
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return None if chosen == OFF else pathlib.Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return pathlib.Path(base).expanduser() / "jaxferry"
    except RuntimeError:  # a user without a home
        return None


def surroundings(platform_name: str, device_kind: str) -> dict[str, Any]:
    """What times depend on beside what is measured: device, host, threads, versions, the native libraries.

    Args:
      platform_name: JAX's name of the device's platform, "cpu" or "gpu".
      device_kind: what the device calls itself.
    """
    return {
        "device": device_kind,
        "host_cpu": _host_cpu(),
        "num_threads": num_threads(),
        "environment": {name: os.environ[name] for name in THREAD_VARIABLES if name in os.environ},
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "jax": jax.__version__,
        "jaxlib": jaxlib.version.__version__,
        "jaxferry": _version("jaxferry"),
        "scipy": _version("scipy"),
        "native": {name: _native(name) for name in sorted({"cpu", platform_name})},
    }


def num_threads() -> int:
    """How many CPU threads this process may run on at a time."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _replace(path: pathlib.Path, text: str) -> None:
    """Puts a whole file in place of what is there, whatever stops it in between."""
    descriptor, name = tempfile.mkstemp(prefix=".", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def _native(platform_name: str) -> dict[str, Any] | None:
    """The native library's digest, what its host steps run on, and the link that it emulates, if it does."""
    found = status(platform_name)
    if not found.is_available or found.path is None:
        return None
    with open(found.path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    loaded = library(platform_name)
    about: dict[str, Any] = {"sha256": digest, "emulated": dict(loaded.emulated)}
    if platform_name == "cpu":
        about |= {"host_threads": loaded.host_threads, "host_simd": loaded.host_simd}
    return about


def _host_cpu() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
