"""Finds, checks, loads and registers the native libraries.

    status, is_available, library
      | first call for a platform
    folders (paths.py) --newest first--> inspect: contract, FFI version --> register the targets with XLA

A library that XLA rejects must not be registered: the whole backend would fail to start.
"""

import atexit
import ctypes
import dataclasses
import functools
import json
import pathlib
import re
import threading
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jaxlib.version
import numpy as np
from scipy.linalg import cython_blas

from jaxferry.errors import InputError, NativeError
from jaxferry.native import cpus
from jaxferry.native.paths import FILE_NAMES, REMEDY, check_is_whole, describe_missing, library_directories
from jaxferry.native.targets import CPU_FUNCTIONS, DTYPE_NUMBERS, TARGETS

ABI = 9

SIMD = ("portable", "avx2", "avx512", "avx512-bf16")  # instruction sets of the host step, in ascending order
DIRECTIONS = ("load", "store", "host")  # the directions of the link, and the host's own memory traffic
_PLATFORMS = {"cpu": "cpu", "gpu": "CUDA", "cuda": "CUDA"}
_lock = threading.RLock()
_warned: set[str] = set()


@dataclasses.dataclass(frozen=True)
class LibraryStatus:
    """Whether a platform's library can be used.

    Attributes:
      platform: XLA's name of the platform, "cpu" or "CUDA".
      path: the library's file, or None if there is none.
      message: one line: how it was built, or why it cannot be used and what to do.
      build_info: the library's own description; empty if it has none.
    """

    platform: str
    path: pathlib.Path | None
    is_available: bool
    message: str
    build_info: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class NativeLibrary:
    """A loaded library: its functions that are not XLA operations.

    Attributes:
      platform: XLA's name of its platform.
      emulated: the emulated link's settings: bytes per second by direction, and `delay` in seconds; empty without
        limits. Cached measurements depend on it.
    """

    def __init__(self, platform: str, functions: ctypes.CDLL):
        self.platform = platform
        self._functions = functions
        # The same library, called without releasing Python's lock.
        self._brief_functions = ctypes.PyDLL(functions._name) if platform == "cpu" else functions
        self.emulated: dict[str, float] = {}
        self._threads_wanted, self._best_simd = 0, SIMD[-1]

    @property
    def host_threads(self) -> int:
        """The number of threads that share a host step."""
        return self.set_host_threads(self._threads_wanted)

    @property
    def host_simd(self) -> str:
        """The instruction set of host steps."""
        return self.set_host_simd(self._best_simd)

    def synchronize(self) -> None:
        """Waits until no copy is queued or in flight in either direction."""
        self._functions.jaxferry_ferry_synchronize()

    def wait_for(self, addresses: Sequence[int], sizes: Sequence[int]) -> None:
        """Waits until all queued copies to or from some ranges of memory have ended; others can queue more meanwhile.

        Raises:
          NativeError: if the device has failed.
        """
        num = len(addresses)
        starts, lengths = (ctypes.c_void_p * num)(*addresses), (ctypes.c_int64 * num)(*sizes)
        if self._functions.jaxferry_ferry_wait_for(ctypes.c_int64(num), starts, lengths):
            raise NativeError("a copy has failed; the device's next operation says why")

    def plan_product(self, ordinal: int, is_gradient: bool, sizes: Sequence[int]) -> int:
        """Finds the algorithms of a GPU's product (`targets.PRODUCTS`), which the first product would otherwise do.

        `sizes` are as in `xla_ffi/cuda/matmul_handlers.cc`. Returns how many algorithms are known there; -1 if the
        library finds none ahead.
        """
        plan = getattr(self._functions, "jaxferry_plan_product", None)  # an older library of this version has none
        if plan is None:
            return -1
        plan.restype = ctypes.c_int64
        numbers = (ctypes.c_int64 * len(sizes))(*sizes)
        return int(plan(ctypes.c_int(ordinal), ctypes.c_int(is_gradient), numbers))

    def finish(self) -> None:
        """Completes all queued copies at full speed and waits for them, before arrays are freed at exit."""
        if self.platform == "cpu":
            self.set_delay(0)
            for direction in DIRECTIONS:
                self.set_bandwidth(direction, 0)
        self.synchronize()

    def open_marks(self, token: int, num_kept: int) -> None:
        """Starts a list of the token's marks (`targets.mark`)."""
        self._functions.jaxferry_marks_open(ctypes.c_void_p(token), ctypes.c_int64(num_kept))

    def close_marks(self, token: int) -> None:
        """Discards the token's list of marks."""
        self._functions.jaxferry_marks_close(ctypes.c_void_p(token))

    def read_marks(self, tokens: Sequence[int], numbers: Sequence[int]) -> list[tuple[float, float]]:
        """Returns start and end of each mark in seconds of `time.perf_counter`; NaN if it has not ended or is unknown.

        A mark is the address of its token, and its number among the marks of that token, counted from 0.
        """
        count = len(tokens)
        addresses, places = np.asarray(tokens, np.uintp), np.asarray(numbers, np.int64)
        starts_s, ends_s = np.full(count, np.nan), np.full(count, np.nan)
        pointers = [ctypes.c_void_p(array.ctypes.data) for array in (addresses, places, starts_s, ends_s)]
        self._functions.jaxferry_marks_read(ctypes.c_int64(count), *pointers)
        return list(zip(starts_s.tolist(), ends_s.tolist(), strict=True))

    def set_bandwidth(self, direction: str, bytes_per_s: float) -> None:
        """Sets the speed of the emulated link or of the host's own memory; 0 for no limit.

        `direction` is "load" or "store" for copies and for operations that read or write host memory, "host" for host
        steps. Raises `InputError` for another one or a negative speed, `NativeError` if the library is not the CPU's.
        """
        functions = self._of_cpu("set_bandwidth")
        if direction not in DIRECTIONS:
            raise InputError(f'direction must be "load", "store" or "host", got {direction!r}')
        if not bytes_per_s >= 0:
            raise InputError(f"bytes_per_s must be 0 (no limit) or more, got {bytes_per_s}")
        functions.jaxferry_ferry_set_bandwidth(ctypes.c_int(DIRECTIONS.index(direction)), ctypes.c_double(bytes_per_s))
        self._remember(direction, bytes_per_s)

    def set_delay(self, seconds: float, seed: int = 0) -> None:
        """Delays the start of each copy by a random time of up to `seconds`, for tests; raises as `set_bandwidth`."""
        functions = self._of_cpu("set_delay")
        if not seconds >= 0:
            raise InputError(f"seconds must be 0 (no delays) or more, got {seconds}")
        functions.jaxferry_ferry_set_delay(ctypes.c_double(seconds), ctypes.c_uint(seed))
        self._remember("delay", seconds)

    def _of_cpu(self, function: str) -> Any:
        if self.platform != "cpu":
            raise NativeError(f"{function} needs the CPU library, not the one for {self.platform}")
        return self._functions

    def _remember(self, name: str, value: float) -> None:
        self.emulated.pop(name, None)
        if value:
            self.emulated[name] = float(value)

    def set_host_threads(self, count: int) -> int:
        """Sets the number of threads that share a host step, including its caller; returns the actual number.

        With 0 it is the value of `JAXFERRY_HOST_THREADS`, by default one for each CPU that the process may use. Raises
        `InputError` if either is no number of threads, `NativeError` if the library is not the CPU's.
        """
        function = self._of_cpu("set_host_threads").jaxferry_set_host_threads
        if count < 0:
            raise InputError(f"count must be 0 (the default) or more, got {count}")
        self._threads_wanted = count
        function.restype = ctypes.c_int64
        return int(function(ctypes.c_int64(count or cpus.num_host_threads()[0])))

    def clear(self, target: np.ndarray) -> None:
        """Fills a contiguous array with zeros, on the threads of host steps."""
        self._of_cpu("clear").jaxferry_host_clear(_data(target), ctypes.c_int64(target.nbytes))

    def add(self, target: np.ndarray, source: np.ndarray, adds: bool = True) -> None:
        """Adds an array to another one in place, in fp32, or casts it there; on the threads of host steps.

        Both are contiguous, of as many elements, of dtypes of `targets.DTYPE_NUMBERS`.
        """
        numbers = [ctypes.c_int(DTYPE_NUMBERS[array.dtype]) for array in (source, target)]
        size = ctypes.c_int64(target.size)
        arguments = (numbers[0], _data(source), numbers[1], _data(target), size, int(adds))
        self._of_cpu("add").jaxferry_host_add(*arguments)

    def add_rows(self, target: np.ndarray, rows: np.ndarray, indices: np.ndarray, start: int = 0) -> None:
        """Adds rows to a table, one after another, in fp32, and rounds once; on the threads of host steps.

        As `host_sums.add_rows`; dtypes as for `add`, `indices` int32.
        """
        number, columns = rows.shape
        numbers = [ctypes.c_int(DTYPE_NUMBERS[array.dtype]) for array in (rows, target)]
        sizes = [ctypes.c_int64(size) for size in (number, columns, start, start + target.size)]
        added = (numbers[0], _data(rows), _data(indices), *sizes[:2])
        self._of_cpu("add_rows").jaxferry_host_add_rows(*added, numbers[1], _data(target), *sizes[2:])

    def split(self, masters: np.ndarray, copy: np.ndarray, rest: np.ndarray) -> bool:
        """Writes what a bf16 copy lacks of fp32 masters (`host_steps.rest_size`); False if both are not the masters.

        All are contiguous, the copy as uint16; on the threads of host steps.
        """
        function = self._of_cpu("split").jaxferry_host_split
        return bool(function(_data(masters), _data(copy), ctypes.c_int64(masters.size), _data(rest)))

    def join(self, copy: np.ndarray, low: np.ndarray, up: np.ndarray, masters: np.ndarray) -> None:
        """Undoes `split`: writes masters, from as many elements or more of `copy` and `low`, and bits of bytes `up`."""
        size = ctypes.c_int64(masters.size)
        self._of_cpu("join").jaxferry_host_join(_data(copy), _data(low), _data(up), size, _data(masters))

    def host_update(self, record: ctypes.c_void_p, is_brief: bool) -> int:
        """Runs a host step, see `host_step.HostStep`.

        A brief one keeps Python's lock: whoever gives it away may wait 5 ms for it. An emulated host takes its time.
        """
        functions = self._brief_functions if is_brief and "host" not in self.emulated else self._functions
        result: int = functions.jaxferry_host_update(record)
        return result

    @property
    def host_step_bytes(self) -> int:
        """The bytes of host memory that all host steps of the process have read and written so far."""
        function = self._of_cpu("host_step_bytes").jaxferry_host_step_bytes
        function.restype = ctypes.c_int64
        return int(function())

    def set_host_simd(self, simd: str) -> str:
        """Sets the best instruction set that host steps may use, of `SIMD`; returns the one in use.

        All give the same bits.

        Raises `InputError` for another one, `NativeError` if the library is not the CPU's.
        """
        functions = self._of_cpu("set_host_simd")
        if simd not in SIMD:
            raise InputError(f"simd must be one of {', '.join(SIMD)}, got {simd!r}")
        self._best_simd = simd
        return SIMD[functions.jaxferry_set_host_simd(ctypes.c_int(SIMD.index(simd)))]


def _data(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def status(platform: str) -> LibraryStatus:
    """Returns whether a platform's library can be used; loads and registers it if so. `InputError` if unknown."""
    return _load(canonical_platform(platform))[0]


def is_available(platform: str) -> bool:
    """Returns whether a platform's library can be used; warns why not, once per process. `InputError` if unknown."""
    found = status(platform)
    with _lock:
        is_news = not found.is_available and found.platform not in _warned
        _warned.add(found.platform)
    if is_news:
        warnings.warn(found.message, stacklevel=2)
    return found.is_available


def library(platform: str) -> NativeLibrary:
    """Returns a platform's native library; raises `NativeError` if it cannot be used, `InputError` if unknown."""
    found, loaded = _load(canonical_platform(platform))
    if loaded is None:
        raise NativeError(found.message)
    return loaded


def find_library(platform: str) -> LibraryStatus:
    """Finds the newest compatible library for "cpu" or "CUDA", or says why there is none; registers nothing."""
    directories = library_directories()
    paths = [path for directory in directories if (path := directory / FILE_NAMES[platform]).is_file()]
    # The library built or installed last is the intended one; older ones are fallbacks.
    paths.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    found = [inspect_library(path, platform) for path in paths]
    if not found:
        return LibraryStatus(platform, None, False, describe_missing(platform))
    return next((candidate for candidate in found if candidate.is_available), found[0])


def inspect_library(path: pathlib.Path, platform: str) -> LibraryStatus:
    """Checks whether a file is a library for "cpu" or "CUDA" that this process can use; registers nothing."""
    name = path.name
    try:
        check_is_whole(path)
        functions = ctypes.CDLL(str(path))
        functions.jaxferry_build_info.restype = ctypes.c_char_p
        abi, build_info = functions.jaxferry_abi(), json.loads(functions.jaxferry_build_info() or b"null")
    except RecursionError:
        return LibraryStatus(platform, path, False, f"{path} describes itself by nested JSON; {REMEDY}")
    except (OSError, AttributeError, ValueError) as error:
        return LibraryStatus(platform, path, False, f"{path} is not a native library ({error}); {REMEDY}")
    if not isinstance(build_info, dict):
        build_info = {}
    reason = _mismatch(platform, abi, build_info, functions)
    if reason is not None:
        return LibraryStatus(platform, path, False, f"{name} {reason}; {REMEDY}", build_info)
    message = f"{name} built by {build_info.get('compiler')} for jaxlib {build_info.get('jaxlib')}"
    return LibraryStatus(platform, path, True, message, build_info)


def ffi_version() -> tuple[int, int]:
    """Returns the version of XLA's FFI in the installed jaxlib; raises `NativeError` if that has no headers."""
    header = pathlib.Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
    try:
        text = header.read_text()
    except OSError as error:
        raise NativeError(f"jaxlib {jaxlib.version.__version__} has no FFI headers: {error}") from error
    numbers = [re.search(rf"^#define XLA_FFI_API_{part} (\d+)", text, re.MULTILINE) for part in ("MAJOR", "MINOR")]
    if numbers[0] is None or numbers[1] is None:
        raise NativeError(f"{header} defines no FFI version")
    return int(numbers[0][1]), int(numbers[1][1])


def canonical_platform(platform: str) -> str:
    """Returns XLA's name, "cpu" or "CUDA", of a platform of JAX's; raises `InputError` for an unknown one."""
    if platform.lower() not in _PLATFORMS:
        raise InputError(f'platform must be "cpu", "gpu" or "cuda", got {platform!r}')
    return _PLATFORMS[platform.lower()]


def _mismatch(platform: str, abi: int, build_info: dict[str, Any], functions: ctypes.CDLL) -> str | None:
    if abi != ABI:
        return f"has version {abi} of the native interface, but this package needs version {ABI}"
    if build_info.get("platform") != platform:
        return f"is for platform {build_info.get('platform')!r}, not {platform!r}"
    wanted = (*TARGETS, *CPU_FUNCTIONS) if platform == "cpu" else TARGETS
    missing = [name for name in wanted if not hasattr(functions, name)]
    if missing:
        return f"lacks {', '.join(missing)}"
    # XLA accepts handlers of an older minor version than its own; with newer ones it fails to start.
    built, installed = (build_info.get("ffi_major"), build_info.get("ffi_minor")), ffi_version()
    if built[0] != installed[0] or not isinstance(built[1], int) or built[1] > installed[1]:
        here = f"jaxlib {jaxlib.version.__version__} has {installed[0]}.{installed[1]}"
        return f"was built for version {built[0]}.{built[1]} of XLA's FFI (jaxlib {build_info.get('jaxlib')}), {here}"
    return None


@functools.cache
def _load(platform: str) -> tuple[LibraryStatus, NativeLibrary | None]:
    with _lock:
        found = find_library(platform)
        if found.path is None or not found.is_available:
            return found, None
        functions = ctypes.CDLL(str(found.path))
        if platform == "cpu":
            functions.jaxferry_set_blas(ctypes.c_void_p(_sgemm()))
        for target in TARGETS:
            jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(getattr(functions, target)), platform=platform)
        loaded = NativeLibrary(platform, functions)
        if platform == "cpu":
            loaded.set_host_threads(0)
        # Runs before XLA shuts down: XLA was imported earlier, and exit handlers run in reverse order.
        atexit.register(loaded.finish)
        return found, loaded


def _sgemm() -> int:
    """Returns the address of the Fortran sgemm that SciPy links, with 32-bit sizes."""
    capsule = cython_blas.__pyx_capi__["sgemm"]
    get_name, get_pointer = ctypes.pythonapi.PyCapsule_GetName, ctypes.pythonapi.PyCapsule_GetPointer
    get_name.restype, get_name.argtypes = ctypes.c_char_p, [ctypes.py_object]
    get_pointer.restype, get_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    signature = get_name(capsule)
    return get_pointer(capsule, signature)
