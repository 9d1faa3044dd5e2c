"""A cache of measurements on disk: one small JSON file per measurement.

    content of what is measured + surroundings (device, threads, versions) --digest--> ab/cdef....json: a number

Files are written to a temporary name and moved into place, so a reader never sees a partial file. Unreadable or invalid
files count as missing; a folder that is not writable caches nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import pathlib
import platform
import tempfile
from collections.abc import Mapping
from typing import Any

import jax
import jaxlib.version

from jaxferry.errors import InputError
from jaxferry.native import library, num_cpus, status
from jaxferry.records import MAX_SECONDS

CACHE_VARIABLE = "JAXFERRY_CACHE_DIR"
OFF = "off"
MEASUREMENT_FORMAT = "jaxferry.measurement/5"
"""A new number invalidates all older measurements."""

THREAD_VARIABLES = ("NPROC", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OPENBLAS_CORETYPE")
"""Variables that set threads and kernels of XLA's CPU backend and of the BLAS that multiplies in host memory."""

_LARGEST = 10_000
"""Maximum characters in a file; longer ones were not written by this cache."""


class MeasurementCache:
    """Stores measured numbers, such as seconds, under the content of what was measured and its surroundings.

    `surroundings` are JSON values by name; without a directory, nothing is stored.
    """

    def __init__(self, directory: str | os.PathLike[str] | None, surroundings: Mapping[str, Any]) -> None:
        self._directory = None if directory is None else pathlib.Path(directory)
        self._surroundings = dict(surroundings)

    def get(self, content: str) -> float | None:
        """Returns the number measured for this content, or None."""
        if self._directory is None:
            return None
        key = self._key(content)
        try:
            with self._path(key).open(encoding="utf-8") as file:
                text = file.read(_LARGEST + 1)
            # Deeply nested JSON can crash the process, so long files are not parsed.
            document = None if len(text) > _LARGEST else json.loads(text)
        except (OSError, ValueError, RecursionError):
            return None
        if not isinstance(document, dict) or document.get("format") != MEASUREMENT_FORMAT or document.get("key") != key:
            return None
        value = document.get("value")
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        return float(value) if 0 <= value <= MAX_SECONDS else None

    def put(self, content: str, value: float) -> None:
        """Stores the number measured for this content, if the folder is writable."""
        if self._directory is None:
            return
        key = self._key(content)
        document = {"format": MEASUREMENT_FORMAT, "key": key, "value": value, "surroundings": self._surroundings}
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
    """Returns the cache folder: `JAXFERRY_CACHE_DIR` (None if "off"), else `jaxferry` in the user's cache folder.

    Raises `InputError` if `JAXFERRY_CACHE_DIR` lies in the folder of a user that does not exist.
    """
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        try:
            return None if chosen == OFF else pathlib.Path(chosen).expanduser()
        except RuntimeError as error:
            raise InputError(f'{CACHE_VARIABLE} must be a folder or "{OFF}", got {chosen!r}: {error}') from error
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return pathlib.Path(base).expanduser() / "jaxferry"
    except RuntimeError:  # a user without a home
        return None


def surroundings(platform_name: str, device_kind: str) -> dict[str, Any]:
    """Returns what times depend on besides the measured program: device, host, threads, versions, native libraries."""
    return {
        "device": device_kind,
        "host_cpu": _host_cpu(),
        "num_threads": num_cpus(),
        "environment": {name: os.environ[name] for name in THREAD_VARIABLES if name in os.environ},
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "jax": jax.__version__,
        "jaxlib": jaxlib.version.__version__,
        "jaxferry": installed_version("jaxferry"),
        "scipy": installed_version("scipy"),
        "native": {name: _native(name) for name in sorted({"cpu", platform_name})},
    }


def _replace(path: pathlib.Path, text: str) -> None:
    """Replaces a file atomically."""
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
    """Returns the native library's digest, the threads and instruction set of its host steps, and its emulated link."""
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


def installed_version(package: str) -> str | None:
    """Returns the version of an installed package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
