"""Times tasks of an accelerator by the marks that steps use (`transport/marks.py`).

    compute   emptied caches ... | mark | program | mark     all issued while the device still empties its caches
    a link                         start | copy | end        marked by the transport, on its own queue

A task takes as long as in a step: a call from Python and the wait for its result take up to a millisecond longer, which
a step overlaps with other work. Of copies of the runtime only ends are known, as a thread sees them: what each further
one of several in a row takes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxferry.native import library, status
from jaxferry.training.measure.cold_caches import cold_caches
from jaxferry.transport.marks import Marks, TaskMark
from jaxferry.transport.placement import Placement

MOST_REPETITIONS = 15
"""Marks scatter little, so a median of few is exact."""
LEAST_LEAD_S, MOST_LEAD_S = 0.002, 0.05
"""Device time for which caches are emptied so that a program is issued before the device gets there."""
MOST_LATE = 0.01
"""The share of a program's time for which the device may have waited for its issue; else the lead becomes longer."""
MOST_RETRIES = 8
"""Further attempts for all repetitions of a program; some take longer to issue than the longest lead."""
ROW_LENGTH = 4
"""The copies in a row that are compared with one where only ends are known."""


@dataclasses.dataclass(frozen=True)
class Copy:
    """A transport's copy, which may be repeated.

    Attributes:
      prepare: makes what is copied.
      begin: begins the copy of that, with a mark if there is one.
      arrive: returns the arrays of a copy, for the caller to wait for.
      end: frees a copy that has arrived.
    """

    prepare: Callable[[], Any]
    begin: Callable[[Any, TaskMark | None], Any]
    arrive: Callable[[Any], Any]
    end: Callable[[Any], object]


class DeviceTimer:
    """Makes functions that each run a task of an accelerator once and return its seconds on the device.

    Args:
      placement: one device that is not a CPU, or a CPU that is driven like an accelerator.
      clock: that of the marks, in seconds.
    """

    def __init__(self, placement: Placement, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        native = library(placement.platform) if status(placement.platform).is_available else None
        self._marks = Marks(placement, 1, native)
        # A CPU runs programs in any order that their arguments allow.
        self._is_emulated = placement.platform == "cpu"
        self._empty_caches = cold_caches(placement.device)
        self._empty_host_caches = cold_caches(placement.host_compute)
        empty = self.program(lambda: [self._empty_caches()], lambda: ())
        self._emptying_s = math.inf
        self._emptying_s = min(empty() for _ in range(3))

    def program(self, run: Callable[..., Any], prepare: Callable[[], Any]) -> Callable[[], float]:
        """Times a program.

        Args:
          run: issues it.
          prepare: makes its arguments, which it may donate.
        """
        lead_s, num_left, is_first = LEAST_LEAD_S, MOST_RETRIES, True

        def attempt() -> tuple[float, float]:
            """Returns the program's seconds, and those that the device may have waited for its issue."""
            arguments, marks = jax.block_until_ready(prepare()), self._marks.begin()
            for _ in range(int(lead_s / self._emptying_s)):
                self._empty_caches()
            marks.after(0, [self._empty_caches()])
            if self._is_emulated:
                marks.times()
            # Pinned memory is free as soon as its array goes, so all results stay until the program has ended.
            made = run(*arguments)
            marks.after(1, [_smallest(made)])
            issued_s = self._clock()
            times = marks.times()
            jax.block_until_ready(made)
            (_, start_s), (_, end_s) = times[0], times[1]
            return max(end_s - start_s, 0.0), 0.0 if self._is_emulated else issued_s - start_s

        def once() -> float:
            nonlocal lead_s, num_left, is_first
            seconds, late_s = attempt()
            # The first call compiles marks.
            while late_s > MOST_LATE * seconds and num_left > 0 and not is_first:
                num_left -= 1
                lead_s = min(2 * (lead_s + late_s), MOST_LEAD_S)
                seconds, late_s = attempt()
            is_first = False
            return seconds

        return once

    def copy(self, copy: Copy) -> Callable[[], float]:
        """Times a copy on its link."""

        def row(length: int) -> tuple[float, list[tuple[float, float]]]:
            """Returns when the first of some copies in a row was begun, and start and end of each."""
            sources = jax.block_until_ready([copy.prepare() for _ in range(length)])
            jax.block_until_ready(self._empty_host_caches())
            marks, begin_s = self._marks.begin(), self._clock()
            begun = [copy.begin(source, marks.of(number)) for number, source in enumerate(sources)]
            times = list(marks.times().values())
            for each in begun:
                jax.block_until_ready(copy.arrive(each))
                copy.end(each)
            return begin_s, times

        def once() -> float:
            begin_s, [(start_s, end_s)] = row(1)
            if not math.isnan(start_s):
                return max(end_s - start_s, 0.0)
            alone_s = end_s - begin_s
            begin_s, times = row(ROW_LENGTH)
            return max(max(end for _, end in times) - begin_s - alone_s, 0.0) / (ROW_LENGTH - 1)

        return once

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


@functools.lru_cache(maxsize=1)
def device_timer(placement: Placement) -> DeviceTimer:
    """The one of a device; `cache_clear()` frees what it keeps there."""
    return DeviceTimer(placement)


def _smallest(results: Any) -> jax.Array:
    """Some result of a program; a mark reads it."""
    leaves = [leaf for leaf in jax.tree.leaves(results) if not jnp.issubdtype(leaf.dtype, jax.dtypes.extended)]
    smallest: jax.Array = min(leaves, key=lambda leaf: (leaf.size == 0, leaf.nbytes))
    return smallest
