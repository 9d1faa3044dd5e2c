"""What a search is about: the plans that may be taken, their judge, and what is the same for all budgets."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence

import numpy as np

from jaxferry.modes import ActivationPlace, GradientPlace, Mode, Remat
from jaxferry.planner.columns import Column
from jaxferry.planner.judge import Judge
from jaxferry.planner.moves import Estimates
from jaxferry.step import Plan

UNLIMITED_BYTES = 2**53
"""What plans may need without a budget."""

MOST_CHECKED = 40
"""The most moves, the likeliest first, of which a search finds out whether they fit."""


@dataclasses.dataclass(eq=False)
class Problem:
    """What a search is about, and what it knows for any budget.

    Attributes:
      judge: simulates the plans, which consist of its columns.
      allows: whether a plan with these columns, (layers,), may be taken.
      of_policies: makes plans of other policies.
      report: called with a short description as each part of a long search starts.
      memory_bytes: `memory_bytes` of plans without a budget.
    """

    judge: Judge
    allows: Callable[[np.ndarray], bool]
    of_policies: Callable[[], Sequence[Plan]]
    report: Callable[[str], None]
    memory_bytes: int | None = UNLIMITED_BYTES

    def __post_init__(self) -> None:
        self.columns, self.profile = self.judge.columns, self.judge.profile

    @functools.cached_property
    def starts(self) -> Sequence[Plan]:
        """Plans of other policies."""
        self.report("plans of all policies")
        return self.of_policies()

    @functools.cached_property
    def estimates(self) -> Estimates:
        """The estimates."""
        self.report("costs of all choices")
        return Estimates(self.judge)

    @functools.cached_property
    def leanest(self) -> np.ndarray:
        """The plan with the least memory: a uniform one by DHA, then moves that save memory, one after another."""
        self.report("the plan with the least memory")
        choices = itertools.product((Mode.DHA, Mode.RELOAD), (GradientPlace.HOST, GradientPlace.DEVICE), Remat)
        columns = [Column(*choice) for choice in choices]
        columns += [Column(Mode.RELOAD, remat=each, activations=ActivationPlace.HOST) for each in Remat]
        starts = [self.columns.uniform(column) for column in columns]
        best = min(filter(self.allows, starts), key=self.judge.needed_bytes)
        late = np.array([column.mode is Mode.DFGB for column in self.columns.all])
        for _ in range(len(best)):
            least, moves = self.judge.needed_bytes(best), self.estimates.moves(best)
            leaner = np.argsort(moves.num_bytes.max(axis=0), kind="stable")[:MOST_CHECKED]
            tried = (moves.taken(self.columns, best, move) for move in leaner)
            better = [each for each in tried if each is not None and self.allows(each) and not late[each].any()]
            found = min(better, key=self.judge.needed_bytes, default=best)
            if self.judge.needed_bytes(found) >= least:
                break
            best = found
        return best
