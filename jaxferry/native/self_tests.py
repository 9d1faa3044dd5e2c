"""The self-test of the native library: one load, store, product, gradient and mark, compared with plain JAX.

    training asks for the library of a GPU --first time in the process--> run_self_test --> checks.py
      passed: it uses the library             failed: a warning names the check; plain copies (device_put)

On a CPU it runs on request: `jaxferry doctor`.
"""

from __future__ import annotations

import atexit
import dataclasses
import threading
import time
import warnings
from collections.abc import Callable

import jax

from jaxferry.native.checks import CHECKS, Bench
from jaxferry.native.loading import is_available, library, status
from jaxferry.settings import with_own_settings

NUM_BYTES = 2**18
"""The size of the checks' operands in the self-test of a training step."""

LIMIT_S = 120.0
"""A self-test that takes longer hangs. Most of its time is compilation, well under a second on an idle machine."""

_PLATFORMS = ("CUDA",)  # those that are tested on first use
_NUM_REPETITIONS = 3
_MOST_CHARACTERS = 300
_lock = threading.Lock()
_failures: dict[jax.Device, str | None] = {}
_warned: set[jax.Device] = set()


@dataclasses.dataclass(frozen=True)
class CheckResult:
    """The result of one check.

    Attributes:
      name: one of `CHECKS`.
      message: None if the check passed; else one line: how the library differs from plain JAX, or why it failed.
      bytes_per_s: the rate at which bytes crossed the link; None if not measured.
    """

    name: str
    message: str | None = None
    bytes_per_s: float | None = None

    @property
    def passed(self) -> bool:
        """Whether the library did the same as plain JAX."""
        return self.message is None


def is_usable(device: jax.Device) -> bool:
    """Returns whether training can use the native library on a device; if not, warns why, once per process.

    On a GPU, the first call runs the self-test.

    Raises:
      InputError: for an unknown platform.
    """
    if not is_available(device.platform):
        return False
    reason = unusable_reason(device)
    with _lock:
        is_news = reason is not None and device not in _warned
        _warned.add(device)
    if is_news:
        warnings.warn(f"{reason}; training goes on with plain copies (device_put)", stacklevel=2)
    return reason is None


def unusable_reason(device: jax.Device) -> str | None:
    """Returns why training cannot use the native library on a device, in one line; None if it can. See `is_usable`."""
    found = status(device.platform)
    if not found.is_available:
        return found.message
    if found.platform not in _PLATFORMS:
        return None
    with _lock:
        if device not in _failures:
            _failures[device] = _failure(device, run_self_test(device))
        return _failures[device]


def run_self_test(
    device: jax.Device, *, num_bytes: int = NUM_BYTES, measures: bool = False, limit_s: float = LIMIT_S
) -> tuple[CheckResult, ...]:
    """Compares the native library with plain JAX on a device.

    The checks run in a thread of their own: the caller may be tracing a function or have changed JAX's settings.

    Args:
      device: the device, with pinned host memory.
      num_bytes: the size of the larger operand of each check.
      measures: whether to measure the rates.
      limit_s: seconds after which the running check has failed and the later ones are left out. A device that hangs
        stays so; the rest of the process may wait for it forever.

    Returns:
      The results, in the order of `CHECKS`.

    Raises:
      InputError: for an unknown platform.
      NativeError: if the platform has no library that can be used.
    """
    native = library(device.platform)
    bench, results = Bench(device, native, num_bytes), list[CheckResult]()

    def run() -> None:
        for name in CHECKS:
            results.append(_run_check(name, bench, measures))

    thread = threading.Thread(target=with_own_settings(run), name="jaxferry self-test", daemon=True)
    thread.start()
    thread.join(limit_s)
    found = tuple(results)
    if thread.is_alive() and len(found) < len(CHECKS):
        # A queue that never empties would keep the process from ending.
        atexit.unregister(native.finish)
        return (*found, CheckResult(list(CHECKS)[len(found)], f"no result within {limit_s:g} s"))
    return found


def shortest_s(run: Callable[[], object], num_repetitions: int = _NUM_REPETITIONS) -> float:
    """Returns the shortest of a few times, in seconds; `run` must return only when its work has ended."""
    times_s = []
    for _ in range(num_repetitions):
        start_s = time.perf_counter()
        run()
        times_s.append(time.perf_counter() - start_s)
    return min(times_s)


def _run_check(name: str, bench: Bench, measures: bool) -> CheckResult:
    try:
        check = CHECKS[name](bench)
        try:
            message = check.compare(check.run())
            is_measured = measures and message is None and check.num_bytes > 0
            rate = check.num_bytes / shortest_s(check.run) if is_measured else None
        finally:
            # Copies in flight may still use the check's arrays.
            bench.library.synchronize()
    except Exception as error:  # noqa: BLE001 - whatever a broken library causes is a failed check
        lines = str(error).strip().splitlines() or [""]
        return CheckResult(name, f"{type(error).__name__}: {lines[0]}"[:_MOST_CHARACTERS])
    return CheckResult(name, message, rate)


def _failure(device: jax.Device, results: tuple[CheckResult, ...]) -> str | None:
    failed = [f"{result.name}: {result.message}" for result in results if not result.passed]
    if not failed:
        return None
    return (
        f"the native library failed its self-test on {device} ({device.device_kind}): {'; '.join(failed)}; "
        "see `jaxferry doctor`, rebuild it with `jaxferry build-native`"
    )
