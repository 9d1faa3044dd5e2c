"""Times calls: warm-up, repetitions, median.

Arguments are made anew for each repetition, outside the timed part, so that programs may donate them. Caches are
emptied before each call. The median discards repetitions that other work on the machine disturbs.
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
    empty_caches: Callable[[], Any] = lambda: None,
) -> float:
    """Returns the median seconds of one call of `run`, after one warm-up call.

    Args:
      run: the timed function; the time ends when its whole result is ready (`jax.block_until_ready`).
      prepare: `prepare(n)` makes the arguments of n calls, outside the timed part.
      effort: limits on the repetitions.
      max_calls: how many calls may be timed in a row if one is shorter than `SHORT_S`.
      clock: a monotonic clock, in seconds.
      empty_caches: called before each call, on the same device; its time is subtracted between calls in a row.
    """

    def repetition(num_calls: int, emptying_s: float = 0.0) -> float:
        arguments = jax.block_until_ready(list(prepare(num_calls)))
        jax.block_until_ready(empty_caches())
        start = clock()
        results = [run(arguments[0])]
        for argument in arguments[1:]:
            empty_caches()
            results.append(run(argument))
        jax.block_until_ready(results)
        return max(clock() - start - (num_calls - 1) * emptying_s, 0.0) / num_calls

    begin = clock()
    # The first call loads code and touches memory.
    first_s = repetition(1)
    num_calls = max(1, min(max_calls, int(SHORT_S / max(first_s, SHORT_S / max_calls))))
    emptying_s = _emptying_s(empty_caches, num_calls, clock) if num_calls > 1 else 0.0
    times_s: list[float] = []
    while len(times_s) < effort.min_repetitions or (
        len(times_s) < effort.max_repetitions
        and sum(times_s) * num_calls < effort.min_total_s
        and clock() - begin < effort.budget_s
    ):
        times_s.append(repetition(num_calls, emptying_s))
    return statistics.median(times_s)


def _emptying_s(empty_caches: Callable[[], Any], num_calls: int, clock: Callable[[], float]) -> float:
    """The median seconds of `empty_caches` as one of several calls in a row."""
    times_s = []
    for _ in range(_EMPTYING_REPETITIONS):
        jax.block_until_ready(empty_caches())
        start = clock()
        for _ in range(num_calls):
            last = empty_caches()
        jax.block_until_ready(last)
        times_s.append((clock() - start) / num_calls)
    return statistics.median(times_s)


_EMPTYING_REPETITIONS = 5
