"""Times calls: warm-up, repetitions, median.

Arguments are made anew for each repetition, outside the timed part, so that programs may donate them. The median
discards repetitions that other work on the machine disturbs.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxferry.errors import InputError

SHORT_S = 1e-3
"""Shorter calls are timed several in a row if allowed: dispatch and synchronisation then overlap the previous call, as
they do within a step."""


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


def median_s(
    run: Callable[[Any], Any],
    prepare: Callable[[int], Sequence[Any]],
    effort: Effort = Effort(),
    max_calls: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Returns the median seconds of one call of `run`, after one warm-up call.

    Args:
      run: the timed function; the time ends when its whole result is ready (`jax.block_until_ready`).
      prepare: `prepare(n)` makes the arguments of n calls, outside the timed part.
      effort: limits on the repetitions.
      max_calls: how many calls may be timed in a row if one is shorter than `SHORT_S`.
      clock: a monotonic clock, in seconds.
    """

    def repetition(num_calls: int) -> float:
        arguments = jax.block_until_ready(list(prepare(num_calls)))
        start = clock()
        results = [run(argument) for argument in arguments]
        jax.block_until_ready(results)
        return (clock() - start) / num_calls

    begin = clock()
    # The first call loads code and touches memory.
    first_s = repetition(1)
    num_calls = max(1, min(max_calls, int(SHORT_S / max(first_s, SHORT_S / max_calls))))
    times_s: list[float] = []
    while len(times_s) < effort.min_repetitions or (
        len(times_s) < effort.max_repetitions
        and sum(times_s) * num_calls < effort.min_total_s
        and clock() - begin < effort.budget_s
    ):
        times_s.append(repetition(num_calls))
    return statistics.median(times_s)
