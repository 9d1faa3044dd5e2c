"""Times tasks of a host and of an accelerator, with cold caches, by the marks that steps use.

A measurement is a warm-up and the median of repetitions, which discards those that other work on the machine disturbs.
Caches are emptied before each: in a step, a layer's parameters, kept values and optimizer state were last used many
layers ago. Repeated on the same arrays, the update of a small layer takes less than half of that time.

    compute   products ... | empty caches | mark | program | mark | products ...    issued while products run

A task takes as long as in a step: a call from Python and the wait for its result take up to a millisecond longer, which
a step overlaps with other work. A step does not pause either, so products keep an accelerator busy (`BusyDevice`). Of
copies of the runtime only ends are known, as a thread sees them: what each further one of several in a row takes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxferry.errors import InputError
from jaxferry.native import library, status
from jaxferry.training.samples import made_on_device
from jaxferry.transport import Marks, Placement, TaskMark


@dataclasses.dataclass(frozen=True)
class Effort:
    """Limits on the repetitions for one median.

    Raises `InputError` if `min_repetitions` is below 1 or above `max_repetitions`.

    Attributes:
      min_repetitions: minimum number, regardless of their duration.
      max_repetitions: maximum number.
      min_total_s: repeat until this much time was measured,
      budget_s: or until this much time has passed, including the making of arguments.
    """

    min_repetitions: int = 3
    max_repetitions: int = 50
    min_total_s: float = 0.1
    budget_s: float = math.inf

    def __post_init__(self) -> None:
        if not 1 <= self.min_repetitions <= self.max_repetitions:
            raise InputError(
                f"min_repetitions must lie in 1 .. max_repetitions ({self.max_repetitions}), got {self.min_repetitions}"
            )

    def at_most(self, max_repetitions: int) -> Effort:
        """The same with no more repetitions than these, or than its own minimum."""
        return dataclasses.replace(
            self, max_repetitions=max(self.min_repetitions, min(self.max_repetitions, max_repetitions))
        )


def median_s(
    repetition: Callable[[], float], effort: Effort = Effort(), clock: Callable[[], float] = time.perf_counter
) -> float:
    """Returns the median seconds of a repetition, after one warm-up that loads code and touches memory.

    `repetition` does what is measured, once, and returns its seconds; `clock`, in seconds, is for the effort's budget.
    """
    begin = clock()
    repetition()
    times_s: list[float] = []
    while len(times_s) < effort.min_repetitions or (
        len(times_s) < effort.max_repetitions
        and sum(times_s) < effort.min_total_s
        and clock() - begin < effort.budget_s
    ):
        times_s.append(repetition())
    return statistics.median(times_s)


def timed_call(
    run: Callable[..., Any],
    prepare: Callable[[], Any],
    clock: Callable[[], float] = time.perf_counter,
    empty_caches: Callable[[], Any] = lambda: None,
) -> Callable[[], float]:
    """Returns a function that times a call once, until its whole result is ready (`jax.block_until_ready`).

    `prepare` makes the arguments anew for each call, so that `run` may donate them; that and `empty_caches`, called
    before each call, are not timed.
    """

    def once() -> float:
        arguments = jax.block_until_ready(prepare())
        jax.block_until_ready(empty_caches())
        start = clock()
        jax.block_until_ready(run(*arguments))
        return clock() - start

    return once


ACCELERATOR_BYTES = 2**28
"""Twice the caches of NVIDIA's largest GPUs or more; JAX does not tell their size."""
UNKNOWN_BYTES = 2**26
"""The caches of a host CPU that Linux does not describe."""
MOST_BYTES = 2**31
"""The most host memory that is written to empty caches."""

_CPUS = pathlib.Path("/sys/devices/system/cpu")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


class ColdCaches:
    """Writes more bytes than the caches of a processor hold."""

    def __init__(self, where: Any) -> None:
        [device] = where.device_set
        num_bytes = min(2 * host_cache_bytes(), MOST_BYTES) if device.platform == "cpu" else ACCELERATOR_BYTES
        self._array = jax.device_put(np.zeros(num_bytes // 4, np.float32), where, may_alias=False)

    def __call__(self) -> jax.Array:
        """Issues the program that empties the caches; the result is ready when it has run."""
        self._array = _written(self._array)
        return self._array


@functools.lru_cache(maxsize=2)
def cold_caches(where: Any) -> ColdCaches:
    """The one of a processor, since its memory takes longer to allocate than to write; `cache_clear()` frees it."""
    return ColdCaches(where)


@functools.partial(jax.jit, donate_argnums=0)
def _written(array: jax.Array) -> jax.Array:
    return array + 1


@functools.cache
def host_cache_bytes(cpus: pathlib.Path = _CPUS) -> int:
    """The bytes of all caches of the host's processors, each shared one counted once; `UNKNOWN_BYTES` if unknown."""
    sizes: dict[tuple[str, ...], int] = {}
    for cache in cpus.glob("cpu[0-9]*/cache/index[0-9]*"):
        try:
            about = {name: (cache / name).read_text().strip() for name in ("level", "type", "shared_cpu_list", "size")}
            size = about.pop("size")
            sizes[tuple(about.values())] = int(size.rstrip("KMG")) * _UNITS.get(size[-1:], 1)
        except (OSError, ValueError):
            continue
    return sum(sizes.values()) or UNKNOWN_BYTES


MOST_REPETITIONS = 15
"""Marks scatter little, so a median of few is exact."""
SUSTAINED_S = 0.15
"""Device time without a pause before a program is timed. An H200 lowers its clock within the first 0.1 s of products
(benchmarks/results/gpu/h200/sustained_products.json)."""
LEAST_LEAD_S, MOST_LEAD_S = 0.002, 0.05
"""Device time of products so that a program is issued before the device gets there."""
MOST_LATE = 0.01
"""The share of a program's time for which the device may have waited for its issue, for less than `LEAST_LEAD_S`; else
the lead becomes longer."""
MOST_RETRIES = 8
"""Further attempts for all repetitions of a program; some take longer to issue than the longest lead."""
ROW_LENGTH = 4
"""The copies in a row that are compared with one where only ends are known."""
PRODUCTS_WIDTH, NUM_PRODUCTS = 4096, 4
"""Products of square matrices in a program that keeps a device busy: some 0.5 TFLOP, which take longer than a call."""
PRODUCTS_BYTES = 5 * 2 * PRODUCTS_WIDTH**2
"""The device memory that it takes, at most."""


LEAST_WORK_S = 1e-4
"""The time of that program at least, where threads see marks at the same time."""


@dataclasses.dataclass(frozen=True)
class Copy:
    """A transport's copy, which may be repeated.

    `prepare` makes what is copied, `begin` begins its copy, with a mark if there is one, `arrive` returns the arrays of
    a copy to wait for, and `end` frees a copy that has arrived.
    """

    prepare: Callable[[], Any]
    begin: Callable[[Any, TaskMark | None], Any]
    arrive: Callable[[Any], Any]
    end: Callable[[Any], object]


def products(where: Any) -> Callable[[], jax.Array]:
    """Makes the program that keeps a device busy; each call issues it."""
    shape, dtype = (PRODUCTS_WIDTH, PRODUCTS_WIDTH), np.dtype(jnp.bfloat16)
    left, right = made_on_device(shape, dtype, where)(), made_on_device(shape, dtype, where)()

    @jax.jit
    def multiply(left: jax.Array, right: jax.Array) -> jax.Array:
        for _ in range(NUM_PRODUCTS):
            left = left @ right
        return left

    return lambda: multiply(left, right)


class BusyDevice:
    """Keeps a device busy, since a device that pauses runs faster for a while; decides how much work that takes.

    `work` issues a program that takes `work_s` on the device; None for a device whose clock does not depend on it. The
    device has not paused since `since_s`, and will have ended at `until_s` all that was issued.
    """

    def __init__(self, work: Callable[[], Any] | None, work_s: float, clock: Callable[[], float]) -> None:
        self._work, self._work_s, self._clock = work, work_s, clock
        self.since_s = self.until_s = -math.inf

    def lead(self, lead_s: float, sustained_s: float = 0.0) -> None:
        """Issues work for `lead_s` seconds from now, and until the device has worked `sustained_s` without a pause."""
        if (now_s := self._clock()) > self.until_s:
            self.since_s = self.until_s = now_s
        self.more(max(now_s + lead_s, self.since_s + sustained_s) - self.until_s)

    def more(self, seconds: float) -> float:
        """Issues work of at least these seconds; returns its seconds."""
        if self._work is None:
            return 0.0
        number = max(math.ceil(seconds / self._work_s), 0)
        for _ in range(number):
            self._work()
        self.until_s += number * self._work_s
        return number * self._work_s


class DeviceTimer:
    """Makes functions that each run a task of an accelerator once and return its seconds on the device.

    The device is not a CPU, or a CPU that is driven like an accelerator; `clock` is the marks' own.
    """

    def __init__(self, placement: Placement, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        native = library(placement.platform) if status(placement.platform).is_available else None
        self._marks = Marks(placement, 1, native)
        # A CPU runs programs in any order that their arguments allow, and always at the same clock.
        self._is_emulated = placement.platform == "cpu"
        self._empty_caches = cold_caches(placement.device)
        self._empty_host_caches = cold_caches(placement.host_compute)
        work = None if self._is_emulated else products(placement.device)
        self._busy = BusyDevice(work, math.inf if work is None else self._seconds_of(work), clock)

    def _seconds_of(self, work: Callable[[], jax.Array]) -> float:
        """The seconds of a program that has been repeated for `SUSTAINED_S`; the first calls compile it and marks."""
        work_s = math.inf
        for _ in range(3):
            marks = self._marks.begin()
            for _ in range(int(SUSTAINED_S / work_s)):
                work()
            for index in range(2):
                work()
                marks.after(index, [work()])
            times = marks.times()
            (_, begin_s), (_, end_s) = times[0], times[1]
            work_s = max((end_s - begin_s) / 2, LEAST_WORK_S)
        return work_s

    def program(self, run: Callable[..., Any], prepare: Callable[[], Any]) -> Callable[[], float]:
        """Times a program."""
        busy, last_end_s, gap_s = self._busy, math.inf, LEAST_LEAD_S

        def attempt(lead_s: float) -> tuple[float, float]:
            nonlocal last_end_s, gap_s
            arguments = prepare()
            # What the device has to do meanwhile, next time.
            gap_s = min(max(gap_s, self._clock() - last_end_s), SUSTAINED_S)
            busy.lead(lead_s)
            jax.block_until_ready(arguments)
            # The first call is no measurement.
            busy.lead(lead_s, SUSTAINED_S if last_end_s < math.inf else 0.0)
            marks = self._marks.begin()
            marks.after(0, [self._empty_caches()])
            if self._is_emulated:
                marks.times()
            # Pinned memory is free as soon as its array goes, so all results stay until the program has ended.
            made = run(*arguments)
            marks.after(1, [_smallest(made)])
            issued_s = self._clock()
            after_s = busy.more(gap_s)
            times = marks.times()
            jax.block_until_ready(made)
            (_, start_s), (_, last_end_s) = times[0], times[1]
            busy.until_s = last_end_s + after_s
            if (late_s := issued_s - start_s) > 0:
                busy.since_s = issued_s
            return max(last_end_s - start_s, 0.0), 0.0 if self._is_emulated else late_s

        return _in_time(attempt)

    def copy(self, copy: Copy) -> Callable[[], float]:
        """Times a copy on its link."""
        arrived: list[Any] = []
        has_start = True

        def row(length: int, lead_s: float) -> tuple[float, float, list[tuple[float, float]]]:
            """Returns when some copies in a row were begun, from first to last, and start and end of each."""
            sources = jax.block_until_ready([copy.prepare() for _ in range(length)])
            jax.block_until_ready(self._empty_host_caches())
            # All of a copy waits for the device, or for the buffers that the device is to free behind this.
            self._busy.lead(lead_s)
            while arrived:
                copy.end(arrived.pop())
            marks, begin_s = self._marks.begin(), self._clock()
            begun = [copy.begin(source, marks.of(number)) for number, source in enumerate(sources)]
            issued_s = self._clock()
            times = list(marks.times().values())
            for each in begun:
                jax.block_until_ready(copy.arrive(each))
            arrived.extend(begun)
            return begin_s, issued_s, times

        def attempt(lead_s: float) -> tuple[float, float]:
            nonlocal has_start
            begin_s, issued_s, [(start_s, end_s)] = row(1, lead_s if has_start else 0.0)
            if has_start := not math.isnan(start_s):
                return max(end_s - start_s, 0.0), 0.0 if self._is_emulated else issued_s - start_s
            alone_s = end_s - begin_s
            begin_s, _, times = row(ROW_LENGTH, 0.0)
            return max(max(end for _, end in times) - begin_s - alone_s, 0.0) / (ROW_LENGTH - 1), 0.0

        return _in_time(attempt)

    def arrival(self, copy: Copy) -> Callable[[], float]:
        """Times what the host does with a copy that its link has brought."""

        def once() -> float:
            source = jax.block_until_ready(copy.prepare())
            marks = self._marks.begin()
            begun = copy.begin(source, marks.of(0))
            marks.times()
            jax.block_until_ready(self._empty_host_caches())
            begin_s = self._clock()
            jax.block_until_ready(copy.arrive(begun))
            seconds = self._clock() - begin_s
            copy.end(begun)
            return seconds

        return once


def _in_time(attempt: Callable[[float], tuple[float, float]]) -> Callable[[], float]:
    """Repeats what is timed with a longer lead where the device did not have enough work until it was issued.

    `attempt` returns its seconds for a lead, and the seconds that the device may have waited for its issue.
    """
    lead_s, num_left, is_first = LEAST_LEAD_S, MOST_RETRIES, True

    def once() -> float:
        nonlocal lead_s, num_left, is_first
        seconds, late_s = attempt(lead_s)
        # The first call compiles marks.
        while late_s > min(MOST_LATE * seconds, LEAST_LEAD_S) and num_left > 0 and not is_first:
            num_left -= 1
            lead_s = min(2 * (lead_s + late_s), MOST_LEAD_S)
            seconds, late_s = attempt(lead_s)
        is_first = False
        return seconds

    return once


@functools.lru_cache(maxsize=1)
def device_timer(placement: Placement) -> DeviceTimer:
    """The one of a device; `cache_clear()` frees what it keeps there."""
    return DeviceTimer(placement)


def _smallest(results: Any) -> jax.Array:
    """Some result of a program; a mark reads it."""
    leaves = [leaf for leaf in jax.tree.leaves(results) if not jnp.issubdtype(leaf.dtype, jax.dtypes.extended)]
    smallest: jax.Array = min(leaves, key=lambda leaf: (leaf.size == 0, leaf.nbytes))
    return smallest
