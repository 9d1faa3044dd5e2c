"""The search behind `auto` and `exact`: columns, a linear programme, moves, and the simulator as judge.

    columns of each layer --linear programme--> starts --moves, judged by the simulator--> fastest --> preferred

A plan is one column for each layer (`planner/columns.py`). The search starts from the plans of all policies, from plans
of one column, or of two, and from the solution of the linear programme whose value also proves the bound
(`planner/place_bound.py`). From the best of them it takes the move that the rows rank highest and the simulator
confirms (`planner/moves.py`), until none helps. Then it changes a plan near the best one at random (with a fixed seed),
and starts again, as long as the plan is not proven and there is effort left. So no policy that fits is faster.

Of the plans that count as equal to the fastest, the search takes the one that relies least on the machine model
(`planner/preference.py`), and moves on from it to others that rely less and still count as equal.

Where there are few plans in all, every one is simulated, so that the result is the optimum.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import gc
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from jaxferry.modes import Mode, Remat, Subgroups, UpdatePlace
from jaxferry.planner.base import check_budget
from jaxferry.planner.columns import Column, streamable_groups
from jaxferry.planner.judge import Judged
from jaxferry.planner.moves import Estimates, Kinds, Ranking
from jaxferry.planner.place_bound import Solution, solve
from jaxferry.planner.preference import longest_equal_s, preferred
from jaxferry.planner.problem import MOST_CHECKED, UNLIMITED_BYTES, Problem
from jaxferry.planner.starts import alternating, of_two_columns, rounded
from jaxferry.step import UpdateOrder, slots_bytes

MOST_EFFORT = 130_000
"""The tasks of the plans that a search for one budget lowers or simulates."""

EFFORT_A_LAYER = 350
"""What every search begins with costs about as much, for each layer of the model."""

_LONG = 96
"""With more layers that takes as long as half of the effort."""

MOST_ENUMERATED = 729
"""The most plans that are all simulated."""

_LEAST_PLANS = 24
_MOST_PLANS = 400
_PROVEN = 1 + 1e-4
_GAIN = 1e-6

_FAMILIES = 200
_SHARE_OF_FAMILIES = 0.4
_LIKELY_FAMILY = 1.04
_REPAIRS = 12
_DESCENTS = 4
_DIFFERENT = 0.2
_NEAR = 1.02
_LIKELY = 1.2
_FASTER = 0.3
_MOST_CHANGES = 3
_MOST_FAILED = 16
_FAILED_AFTER_RESTART = 4
_MOST_SIDEWAYS = 4
_MOST_ALIKE = 4
_RESTARTS_A_LAYER = 20
_RESTARTED_LAYERS = 8_000
_MOST_PREFERRED = 32
_FAILED_PREFERRED = 8
_SHARES = (1.0, 0.8)
_EVERY = slice(None)
_MUCH = 0.1
"""Updates stream in small subgroups where large ones take more of the budget."""


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    """Pauses the cyclic garbage collector, which takes a third of a search: its many tasks are in no cycles."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Search(Problem):
    """The search for one profile, any number of budgets. All plans are remembered; arguments as for `Problem`."""

    @functools.cached_property
    def searched(self) -> dict[tuple[int | None, float], _BudgetSearch]:
        """The searches so far, by budget and share of the work."""
        return {}

    def within(self, budget_bytes: int | None, share: float = 1.0) -> _BudgetSearch:
        """The search within a budget, or without one.

        Args:
          budget_bytes: the budget; None for none.
          share: of the work of a search, for an answer that may be less exact.

        Raises:
          BudgetError: if no plan fits.
        """
        key = budget_bytes, share
        if key not in self.searched:
            if budget_bytes is not None:
                least, codes = self.judge.needed_bytes(self.leanest), self.leanest
                again = sum(self.columns.all[code].remat is not Remat.NONE for code in codes)
                check_budget(self.judge.policy, budget_bytes, least, again)
            self.searched[key] = _BudgetSearch(self, budget_bytes, share)
            with _without_collector():
                self.searched[key].run()
        return self.searched[key]


class _BudgetSearch:
    """The search within one budget.

    Attributes:
      known: the plans that fit, by columns and size of subgroups.
      solution: the bound on all plans within the budget.
      is_complete: whether every plan was simulated.
    """

    def __init__(self, search: Search, budget_bytes: int | None, share: float):
        self.search, self.columns, self.judge = search, search.columns, search.judge
        self.profile, self.budget_bytes = search.profile, budget_bytes
        self.limit = UNLIMITED_BYTES if budget_bytes is None else budget_bytes
        self.memory_bytes = search.memory_bytes if budget_bytes is None else budget_bytes
        self.known: dict[bytes, Judged] = {}
        self.solution = Solution(0.0)
        self._best: Judged | None = None
        self._tried: set[bytes] = set()
        self._random = np.random.default_rng(0)
        self._first_effort, self._num_plans = self.judge.effort, 0
        size = len(search.profile.layers)
        effort = MOST_EFFORT // 2 if size > _LONG else MOST_EFFORT - EFFORT_A_LAYER * size
        self._most_effort, self._least_plans = int(share * effort), int(share * _LEAST_PLANS)
        groups = streamable_groups(search.profile)
        is_much = slots_bytes(search.profile, groups) > _MUCH * self.limit
        self._subgroups = Subgroups.SMALL if is_much else Subgroups.LARGE
        self._slots_bytes = slots_bytes(search.profile, groups, size=self._subgroups)
        self.is_complete = False

    @functools.cached_property
    def estimates(self) -> Estimates:
        """The estimates, with the rows of this search's plans: its rows for other budgets would mislead."""
        return self.search.estimates.copied()

    @functools.cached_property
    def _ranking(self) -> Ranking:
        return Ranking(self.estimates, self.limit, self._slots_bytes)

    @property
    def best(self) -> Judged:
        """The fastest plan."""
        assert self._best is not None
        return self._best

    def run(self) -> None:
        """Searches."""
        if self._enumerated():
            return
        self._try_plain()
        self.solution = solve(self.profile, self.budget_bytes, self.columns, self.judge.objective)
        if self._is_proven:
            return
        self._try_starts()
        self.search.report("moves from the best plans")
        self._descend_all()
        self._restart()

    def _enumerated(self) -> bool:
        """Simulates every plan if there are few; whether that is so."""
        choices = [np.flatnonzero(flags) for flags in self.columns.allowed]
        if math.prod(map(len, choices)) > MOST_ENUMERATED:
            return False
        self.is_complete = self.judge.is_thorough = True
        for chosen in itertools.product(*choices):
            codes = self.columns.agreed(np.array(chosen, dtype=np.int8))
            if codes.tobytes() not in self._tried and self._fits(codes):
                self._simulate(codes)
        for judged in self._of_other_policies():
            self._keep(judged)
        return True

    @property
    def _is_proven(self) -> bool:
        """Whether no plan can be faster, but for a ten-thousandth."""
        return self._best is not None and self.best.objective_s <= self.solution.bound_s * _PROVEN

    @property
    def _is_over(self) -> bool:
        used = self.judge.effort - self._first_effort
        most = self._most_effort
        is_enough = used > most and (self._num_plans >= self._least_plans or used > 8 * most)
        return is_enough or self._num_plans >= _MOST_PLANS or self._is_proven

    def _fits(self, codes: np.ndarray) -> bool:
        if not self.search.allows(codes):
            return False
        needs = self.judge.needs(codes, self._subgroups)
        fits = needs.natural <= self.limit
        if not fits and not self.is_complete:
            self.estimates.add_place(needs)
        return fits

    def _simulate(self, codes: np.ndarray) -> Judged | None:
        """Simulates a plan that fits; None if a rule forbids it."""
        self._tried.add(codes.tobytes())
        judged = self.judge(codes, self.memory_bytes, self._subgroups)
        self._num_plans += 1
        if judged is not None:
            self._keep(judged)
            self._learn_from(judged)
        return judged

    def _learn_from(self, judged: Judged) -> None:
        """Makes a plan's critical cycle the latest row."""
        # With updates by need a plan is faster than the cycle of the other order says.
        in_order = judged.plan.update_order is UpdateOrder.BACKWARD
        if judged.objective_s > 0 and in_order and not self.is_complete:
            self.estimates.add(judged.critical)

    def _keep(self, judged: Judged) -> None:
        key = judged.codes.tobytes()
        if key not in self.known or judged.objective_s < self.known[key].objective_s:
            self.known[key] = judged
            if self._best is None or judged.rank < self._best.rank:
                self._best = judged

    def _try_plain(self) -> None:
        """Plain training, if it fits: everything stays on the device."""
        stays = Column(Mode.RESIDENT, update=UpdatePlace.RESIDENT)
        if stays in self.columns.number:
            codes = self.columns.uniform(stays)
            if self.search.allows(codes) and self.judge.needed_bytes(codes) <= self.limit:
                judged = self.judge(codes, self.memory_bytes)
                assert judged is not None
                self._keep(judged)

    def _of_other_policies(self) -> Iterator[Judged]:
        for plan in self.search.starts:
            judged = self.judge.other(plan, self.memory_bytes)
            if judged is not None and judged.needed_bytes <= self.limit and self.search.allows(judged.codes):
                yield judged

    def _try_starts(self) -> None:
        """Simulates the plans from which moves start."""
        for judged in self._of_other_policies():
            self._keep(judged)
        for codes in self._starts():
            made = self._repaired(codes)
            if made is not None and made.tobytes() not in self._tried:
                self._simulate(made)
        self._try_families()

    def _starts(self) -> Iterator[np.ndarray]:
        for searched in self.search.searched.values():
            if searched._best is not None and searched.best.needed_bytes <= self.limit:
                yield searched.best.codes
        if self.budget_bytes is not None:
            yield self.search.leanest
        yield from alternating(self.columns, self.solution, self._fits)
        for share in _SHARES if self.budget_bytes is not None else (1.0,):
            budget = None if self.budget_bytes is None else int(share * self.budget_bytes)
            is_same = share == 1.0
            yield from rounded(
                self.columns,
                self.solution if is_same else solve(self.profile, budget, self.columns, self.judge.objective),
            )

    def _try_families(self) -> None:
        """Simulates plans of two columns: each simulation tells which others are not as fast as they seem."""
        most = self.judge.effort + int(_SHARE_OF_FAMILIES * self._most_effort)
        limit = None if self.budget_bytes is None else self.limit * _NEAR
        for codes, seconds in itertools.islice(of_two_columns(self.columns, self.estimates, limit), _FAMILIES):
            if seconds >= self.best.objective_s * _LIKELY_FAMILY or self.judge.effort > most or self._is_proven:
                return
            if codes.tobytes() not in self._tried and self._fits(codes):
                self._simulate(codes)

    def _repaired(self, codes: np.ndarray, holds: np.ndarray | slice = _EVERY) -> np.ndarray | None:
        """The plan, changed by moves that save memory until it fits; None if they do not suffice.

        `holds` are the rows that count.
        """
        estimates = self.estimates
        for _ in range(_REPAIRS):
            if self._fits(codes):
                return codes
            needs = self.judge.needs(codes, self._subgroups)
            now_s, now_bytes, moves = estimates.seconds(codes), estimates.bytes_of(needs), estimates.moves(codes)
            needed = needs.natural
            seconds = (now_s[holds, None] + moves.seconds[holds]).max(axis=0)
            saved = now_bytes.max() - (now_bytes[:, None] + moves.num_bytes).max(axis=0)
            enough = saved >= needed - self.limit
            ranks = np.where(enough, seconds, np.inf) if enough.any() else -saved
            made = (moves.taken(self.columns, codes, move) for move in np.argsort(ranks, kind="stable")[:MOST_CHECKED])
            better = next((each for each in made if each is not None and self.search.allows(each)), None)
            if better is None or (self.judge.needed_bytes(better, self._subgroups) >= needed and not enough.any()):
                return None
            codes = better
        return None

    def _descend_all(self) -> None:
        """Moves on from several starts that differ, the fastest first."""
        chosen: list[Judged] = []
        for each in sorted(self.known.values(), key=lambda judged: judged.rank):
            if all((each.codes != other.codes).mean() > _DIFFERENT for other in chosen):
                chosen.append(each)
        for each in chosen[:_DESCENTS]:
            self._descend(each)

    def _descend(self, current: Judged, most_failed: int = _MOST_FAILED) -> None:
        """Takes the most promising move, again and again, until too many in turn do not help."""
        failed, num_sideways = list[Kinds](), 0
        while not self._is_over and len(failed) < most_failed:
            kinds, codes = self._promising(current, failed)
            if codes is None:
                return
            judged = self._simulate(codes)
            if judged is not None and judged.objective_s < current.objective_s * (1 - _GAIN):
                current, failed, num_sideways = judged, list[Kinds](), 0
                continue
            failed.append(kinds)
            if judged is not None and judged.objective_s <= current.objective_s and num_sideways < _MOST_SIDEWAYS:
                current = judged  # one of the rows that hold the step up is shorter now
                num_sideways += 1

    def _promising(self, current: Judged, failed: Sequence[Kinds]) -> tuple[Kinds, np.ndarray | None]:
        """The plan one move or two away that fits, and by the rows is the fastest, with the moves; None if none is.

        Moves like others that failed are not tried again.
        """
        self._learn_from(current)
        num_left, too_large = MOST_CHECKED, set[Kinds]()
        tried = collections.Counter(tuple(kind[1:] for kind in kinds) for kinds in failed)
        for kinds, made in self._ranking.of(current.codes, current.needs, current.objective_s):
            is_known = any((kind,) in failed for kind in kinds)
            is_known |= tried[tuple(kind[1:] for kind in kinds)] >= _MOST_ALIKE
            if not num_left or is_known or kinds in too_large or made.tobytes() in self._tried:
                continue
            if self._fits(made):
                return kinds, made
            too_large.add(kinds)
            num_left -= 1
        return (), None

    def _restart(self) -> None:
        """Moves on from plans near the best one, changed by a move that is faster but may not fit, or at random."""
        size = len(self.profile.layers)
        for _ in range(min(_RESTARTS_A_LAYER * size, _RESTARTED_LAYERS // size + 1)):
            if self._is_over:
                return
            near = [each for each in self.known.values() if each.objective_s <= self.best.objective_s * _NEAR]
            start = near[self._random.integers(len(near))]
            moves, now_s = self.estimates.moves(start.codes), self.estimates.seconds(start.codes)
            holds = now_s <= start.objective_s * (1 + _GAIN)
            seconds = (now_s[holds, None] + moves.seconds[holds]).max(axis=0)
            is_faster = self._random.random() < _FASTER
            number = 1 if is_faster else self._random.integers(1, _MOST_CHANGES + 1)
            longest_s = now_s[holds].max() * (1 - _GAIN) if is_faster else self.best.objective_s * _LIKELY
            likely = np.flatnonzero(seconds <= longest_s)
            made: np.ndarray | None = start.codes
            for move in self._random.permutation(likely)[:number]:
                made = None if made is None else moves.taken(self.columns, made, move)
            made = None if made is None else self._repaired(made, holds)
            if made is None or made.tobytes() in self._tried:
                continue
            judged = self._simulate(made)
            if judged is not None:
                self._descend(judged, _FAILED_AFTER_RESTART)

    def chosen(self) -> Judged:
        """Of the plans that count as equal to the fastest, the preferred one, or one that moves lead to from it."""
        longest_s = longest_equal_s(self.best.objective_s)
        current = preferred(self.known.values(), lambda each: each.score)
        if self.is_complete:
            return current
        for _ in range(_MOST_PREFERRED):
            judged = next(self._relying_less(current, longest_s), None)
            if judged is None:
                break
            current = judged
        return current

    def _relying_less(self, current: Judged, longest_s: float) -> Iterator[Judged]:
        """Plans one move away that rely less on the machine model and count as equal to the fastest."""
        if current.score == 0:
            return
        estimates, codes, reliance = self.estimates, current.codes, self.columns.reliance
        moves, ranked = estimates.moves(codes), []
        now_s = estimates.seconds(codes)
        holds = now_s <= longest_s
        seconds = (now_s[holds, None] + moves.seconds[holds]).max(axis=0)
        for move in np.flatnonzero(seconds <= longest_s).tolist():
            less = tuple((reliance[moves.column[move]] - reliance[codes[moves.layers(move)]]).sum(axis=0))
            if less < (0,) * len(less):
                ranked.append((less, seconds[move], move))
        failed = 0
        for _, _, move in sorted(ranked, key=lambda each: each[:2])[:MOST_CHECKED]:
            made = moves.taken(self.columns, codes, move)
            if made is None or made.tobytes() in self._tried or not self._fits(made):
                continue
            judged = self._simulate(made)
            if judged is not None and judged.objective_s <= longest_s and judged.score < current.score:
                yield judged
            failed += 1
            if failed >= _FAILED_PREFERRED:
                return
