"""How long a call takes: warm-up, repetitions, median.

What a call is given is made anew outside the timed part, so that a program may be timed that takes its arguments'
memory for its results. The median is what is left when a machine that does other things as well disturbs some of the
repetitions.
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
"""Calls that take less are timed several in a row where they may be: what it takes to issue one and to see its end is
hidden behind the one before, as it is within a step."""


@dataclasses.dataclass(frozen=True)
class Effort:
    """How much is done for one median.

    Attributes:
      min_repetitions: never fewer, whatever they take.
      max_repetitions: never more.
      min_total_s: as long as less was timed, it is repeated;
      budget_s: but not once all of it, the making of arguments included, has taken this long.

    Raises:
      InputError: if there is to be no repetition.
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
    """Seconds of one call of `run`: the median over repetitions, after one call that does not count.

    Args:
      run: what is timed, until all of its result is ready (`jax.block_until_ready`).
      prepare: `prepare(n)` makes the arguments of n calls, outside the timed part.
      effort: how often.
      max_calls: how many calls may be timed in a row, where one is shorter than `SHORT_S`.
      clock: seconds of a steady clock.
    """

    def repetition(num_calls: int) -> float:
        arguments = jax.block_until_ready(list(prepare(num_calls)))
        start = clock()
        results = [run(argument) for argument in arguments]
        jax.block_until_ready(results)
        return (clock() - start) / num_calls

    begin = clock()
    # The first call loads code and touches memory that later ones find.
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
