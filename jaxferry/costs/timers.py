"""Repeats measurements: warm-up, repetitions, median.

The median discards repetitions that other work on the machine disturbs.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax

from jaxferry.errors import InputError


@dataclasses.dataclass(frozen=True)
class Effort:
    """Limits on the repetitions for one median.

    Attributes:
      min_repetitions: minimum number, regardless of their duration.
      max_repetitions: maximum number.
      min_total_s: repeat until this much time was measured,
      budget_s: or until this much time has passed, including the making of arguments.

    Raises:
      InputError: if `min_repetitions` is below 1 or above `max_repetitions`.
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

    Args:
      repetition: does what is measured, once, and returns its seconds.
      effort: limits on the repetitions.
      clock: a monotonic clock, in seconds, for the budget.
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

    Args:
      run: the timed function.
      prepare: makes its arguments anew for each call, so that it may donate them; not timed.
      clock: a monotonic clock, in seconds.
      empty_caches: called before each call; not timed.
    """

    def once() -> float:
        arguments = jax.block_until_ready(prepare())
        jax.block_until_ready(empty_caches())
        start = clock()
        jax.block_until_ready(run(*arguments))
        return clock() - start

    return once
