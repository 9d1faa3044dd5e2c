"""Pools of plans, from which a budget picks.

A pool depends only on the profile and the gradients; a budget only picks from it. So a larger budget never gives a
slower plan: a plan that fits still fits, and waits for fewer gradient transfers. Nothing reads a clock.

The search assumes updates in backward order. It tries updates by need for the best plans of the pool and for marked
plans, independently of the budget. With a greedy order fewer waits can be slower. So by need a plan is evaluated
without the budget's room for gradients, or without any waits if the budget ends them all.
"""

import dataclasses
from typing import Any

import numpy as np

from jaxferry.costs import Profile
from jaxferry.planner.base import Objective
from jaxferry.planner.effort import fewer, is_searched
from jaxferry.planner.evaluate import Outcomes, PlanEvaluator
from jaxferry.planner.preference import Best, coded, columns, different_rows, flags, row_bytes, scores
from jaxferry.step import UNLIMITED, Loads, UpdateOrder, Updates

_Kind = tuple[Loads, Updates]


@dataclasses.dataclass(frozen=True)
class _Evaluated:
    """Plans of one kind, (plans, 2, layers) codes, and their outcomes in backward order without a budget."""

    kind: _Kind
    plans: np.ndarray
    outcomes: Outcomes


@dataclasses.dataclass(frozen=True)
class _Option:
    """Rows of an `_Evaluated` with one order of updates and one room for gradients."""

    number: int
    rows: np.ndarray
    outcomes: Outcomes
    order: UpdateOrder
    memory_bytes: int | None


class _Known:
    """The outcomes of a part's plans with one order of updates and one room for gradients; only those asked for."""

    def __init__(self, of: _Evaluated):
        self.is_known, self._outcomes = np.zeros(len(of.plans), dtype=bool), of.outcomes

    def missing(self, rows: np.ndarray) -> np.ndarray:
        """Those of the plans that are not known yet."""
        return rows[~self.is_known[rows]]

    def learn(self, rows: np.ndarray, outcomes: Outcomes) -> None:
        """Adds the outcomes of some of the plans."""
        self._outcomes = self._outcomes.replaced(rows, outcomes)
        self.is_known[rows] = True

    def __call__(self, rows: np.ndarray) -> Outcomes:
        """The outcomes of plans that are known, in this order."""
        return self._outcomes.some(rows)


class Pool:
    """Plans for one profile; DFGB outside MemFerry's window is never picked.

    Args:
      profile: the layers.
      by_need_on_frontier: whether to try updates by need over the whole frontier of time and memory, not only for the
        fastest plans.
    """

    def __init__(self, profile: Profile, by_need_on_frontier: bool = False):
        self.profile, self.evaluate = profile, PlanEvaluator(profile)
        self.is_searched = is_searched(len(profile.layers))
        self.by_need_on_frontier = by_need_on_frontier
        self.parts: dict[_Kind, list[np.ndarray]] = {}
        self.marked: dict[_Kind, set[bytes]] = {}
        self.known: dict[_Kind, set[bytes]] = {}
        self.evaluated: list[_Evaluated] = []
        self._rows: dict[tuple[int, Objective], np.ndarray] = {}
        self._known_outcomes: dict[tuple[int, UpdateOrder, int | None], _Known] = {}
        self._known_bounds: dict[int, np.ndarray] = {}

    def add(
        self,
        modes: np.ndarray,
        grad_on_host: np.ndarray,
        loads: Loads = Loads.LAYERWISE,
        updates: Updates = Updates.OVERLAPPED,
        recomputes: np.ndarray | bool = False,
        on_device: np.ndarray | bool = False,
        marked: bool = False,
    ) -> None:
        """Adds plans: (plans, layers) or (layers,) mode codes; flags of gradients, recomputation and updates likewise.

        With `marked`, updates by need are tried for all of these.
        """
        plans = coded(modes, grad_on_host, recomputes, on_device)
        self.parts.setdefault((loads, updates), []).append(plans)
        if marked:
            self.marked.setdefault((loads, updates), set()).update(row_bytes(plans))

    def run(self) -> None:
        """Evaluates each added plan once, in backward order and without a budget."""
        for kind, parts in self.parts.items():
            plans, known = np.concatenate(parts), self.known.setdefault(kind, set())
            new = plans[different_rows(plans, known)]
            if len(new):
                known.update(row_bytes(new))
                self.evaluated.append(_Evaluated(kind, new, self._outcomes(kind, new)))
        self.parts = {}

    def take(self, other: "Pool") -> None:
        """Takes over the plans that another pool of the profile has evaluated; each part keeps its own by need."""
        self.evaluated += other.evaluated
        for kind, plans in other.known.items():
            self.known.setdefault(kind, set()).update(plans)
        for kind, plans in other.marked.items():
            self.marked.setdefault(kind, set()).update(plans)

    def join(self) -> None:
        """Makes one part of all evaluated plans of each kind, so that updates by need are tried for the best of all."""
        kinds = dict.fromkeys(each.kind for each in self.evaluated)
        joined = []
        for kind in kinds:
            parts = [each for each in self.evaluated if each.kind == kind]
            plans = np.concatenate([each.plans for each in parts])
            rows = different_rows(plans)
            outcomes = Outcomes.joined([each.outcomes for each in parts]).some(rows)
            joined.append(_Evaluated(kind, plans[rows], outcomes))
        self.evaluated = joined
        self._rows, self._known_outcomes, self._known_bounds = {}, {}, {}

    def _outcomes(self, kind: _Kind, plans: np.ndarray, **more: Any) -> Outcomes:
        bulk, after_all = _flags_of(kind)
        return self.evaluate(*columns(plans), bulk=bulk, after_all=after_all, **more)

    def best(
        self, objective: Objective, budget_bytes: int | None, leanest: bool = False, below_s: float = np.inf
    ) -> Best | None:
        """The plan with the least objective that fits into the budget; ties go to steady time, step, memory.

        Updates follow backward order unless updates by need are faster.

        Args:
          objective: the quantity to minimize.
          budget_bytes: device memory, which gradients may fill; None for no limit.
          leanest: whether only memory decides among plans that are equally fast up to rounding.
          below_s: plans that are no faster may be left out, in whole or in part.
        """
        options = self._in_backward_order(objective, budget_bytes, below_s)
        found = self._pick(options, objective, budget_bytes, leanest)
        if objective is Objective.FORWARD:
            return found
        below_s = min(below_s, np.inf if found is None else found.objective_s * (1 - _ROUNDING))
        rival = self._pick(self._by_need_options(objective, budget_bytes, below_s), objective, budget_bytes, leanest)
        return rival if rival is not None and rival.objective_s < below_s else found

    def preferred(self, objective: Objective, budget_bytes: int | None, longest_s: float) -> Best | None:
        """Returns the plan that `planner/preference.py` prefers of those known to fit and to take at most `longest_s`.

        None if no such plan is known. Room for gradients within the budget does not count: it could only save time.
        """
        found, least = None, None
        for option in [*self._in_backward_order(objective, None), *self._known_by_need(objective)]:
            outcomes, seconds = option.outcomes, _keys(option.outcomes, objective)[0]
            fits = outcomes.in_window & (seconds <= longest_s)
            fits &= True if budget_bytes is None else outcomes.needed_bytes <= budget_bytes
            rows = np.flatnonzero(fits)
            if len(rows) == 0:
                continue
            score = scores(self.profile, *columns(self.evaluated[option.number].plans[option.rows[rows]]))
            keys = [score, *(values[rows] for values in (outcomes.needed_bytes, seconds))]
            first = np.lexsort(keys[::-1])[0]
            key = [values[first] for values in keys]
            if least is None or key < least:
                least, found = key, self._picked(option, int(rows[first]), float(seconds[rows[first]]), None)
        return found

    def _known_by_need(self, objective: Objective) -> list[_Option]:
        """The plans of each part whose outcomes by need are known; none if these do not matter."""
        known = {number: self._known_of(number, UpdateOrder.NEED, None) for number in range(len(self.evaluated))}
        rows = {number: np.flatnonzero(each.is_known) for number, each in known.items()}
        return [
            _Option(number, each, known[number](each), UpdateOrder.NEED, None)
            for number, each in rows.items()
            if len(each) and objective is not Objective.FORWARD
        ]

    def least_s(self, budget_bytes: int | None) -> float:
        """The least steady step of plans that fit, in backward order and without the budget's room; in seconds."""
        most = np.iinfo(np.int64).max if budget_bytes is None else budget_bytes
        outcomes = [each.outcomes for each in self.evaluated]
        fits = [each.in_window & (each.needed_bytes <= most) for each in outcomes]
        pairs = zip(outcomes, fits, strict=True)
        return min((float(each.steady_step_s[which].min(initial=np.inf)) for each, which in pairs), default=np.inf)

    def _in_backward_order(
        self, objective: Objective, budget_bytes: int | None, below_s: float = np.inf
    ) -> list[_Option]:
        all_outcomes = [each.outcomes for each in self.evaluated]
        if budget_bytes is not None and self.is_searched:
            all_outcomes = self._with_room(objective, budget_bytes, below_s)
        return [
            _Option(number, np.arange(len(each.plans)), outcomes, UpdateOrder.BACKWARD, budget_bytes)
            for number, (each, outcomes) in enumerate(zip(self.evaluated, all_outcomes, strict=True))
        ]

    def _with_room(self, objective: Objective, budget_bytes: int, below_s: float) -> list[Outcomes]:
        """The outcomes of all parts with the budget's room, for the plans that this room can make the best."""
        every = {number: each.outcomes for number, each in enumerate(self.evaluated)}
        fits = {number: each.in_window & (each.needed_bytes <= budget_bytes) for number, each in every.items()}
        known_s = min(
            (float(_keys(every[number], objective)[0][which].min(initial=below_s)) for number, which in fits.items()),
            default=below_s,
        )
        rows = {number: np.flatnonzero(every[number].room_matters & which) for number, which in fits.items()}
        rows = self._faster(rows, objective, known_s)
        unlimited = self._outcomes_of(rows, UpdateOrder.BACKWARD, UNLIMITED)
        rows = {number: each[_keys(unlimited[number], objective)[0] < known_s] for number, each in rows.items()}
        better = self._outcomes_of(rows, UpdateOrder.BACKWARD, budget_bytes)
        return [every[number].replaced(rows[number], better[number]) for number in every]

    def _by_need_options(self, objective: Objective, budget_bytes: int | None, below_s: float) -> list[_Option]:
        """Those with updates by need that fit; plans that are no faster than `below_s` may be left out."""
        found = {}
        for number in range(len(self.evaluated)):
            if (number, objective) not in self._rows:
                self._rows[number, objective] = self._rows_by_need(number, objective)
            rows = self._rows[number, objective]
            outcomes = self.evaluated[number].outcomes
            found[number] = rows if budget_bytes is None else rows[outcomes.needed_bytes[rows] <= budget_bytes]
        found = self._faster(found, objective, below_s)
        options = self._options(found, None)
        if budget_bytes is None or not self.is_searched:
            return options
        without_waits = {number: self._not_waiting(number, rows, budget_bytes) for number, rows in found.items()}
        return options + self._options(without_waits, budget_bytes)

    def _not_waiting(self, number: int, rows: np.ndarray, budget_bytes: int) -> np.ndarray:
        """Those of the plans whose backwards wait for room, but not within the budget."""
        each = self.evaluated[number]
        rows = rows[each.outcomes.room_matters[rows]]
        if len(rows) == 0:
            return rows
        return rows[~self.evaluate.waits_for_room(columns(each.plans[rows]), *_flags_of(each.kind), budget_bytes)]

    def _options(self, rows: dict[int, np.ndarray], budget_bytes: int | None) -> list[_Option]:
        """Plans of each part with updates by need; with a budget, their backwards wait for no room within it."""
        outcomes = self._outcomes_of(rows, UpdateOrder.NEED, None if budget_bytes is None else UNLIMITED)
        return [
            _Option(number, each, outcomes[number], UpdateOrder.NEED, budget_bytes) for number, each in rows.items()
        ]

    def _outcomes_of(
        self, rows: dict[int, np.ndarray], order: UpdateOrder, memory_bytes: int | None
    ) -> dict[int, Outcomes]:
        """The outcomes of plans of each part; those that are not known are evaluated together, which is far faster."""
        known = {number: self._known_of(number, order, memory_bytes) for number in rows}
        missing = {number: known[number].missing(each) for number, each in rows.items()}
        for kind in dict.fromkeys(self.evaluated[number].kind for number in rows):
            numbers = [number for number in rows if self.evaluated[number].kind == kind and len(missing[number])]
            if not numbers:
                continue
            plans = np.concatenate([self.evaluated[number].plans[missing[number]] for number in numbers])
            by_need = order is UpdateOrder.NEED
            outcomes, first = self._outcomes(kind, plans, by_need=by_need, memory_bytes=memory_bytes), 0
            for number in numbers:
                last = first + len(missing[number])
                known[number].learn(missing[number], outcomes.some(np.arange(first, last)))
                first = last
        return {number: known[number](each) for number, each in rows.items()}

    def _known_of(self, number: int, order: UpdateOrder, memory_bytes: int | None) -> _Known:
        if memory_bytes not in (None, UNLIMITED):  # of one budget
            return _Known(self.evaluated[number])
        return self._known_outcomes.setdefault((number, order, memory_bytes), _Known(self.evaluated[number]))

    def _faster(self, rows: dict[int, np.ndarray], objective: Objective, below_s: float) -> dict[int, np.ndarray]:
        """The plans of each part that are not proven to be no faster than `below_s`."""
        if objective is not Objective.STEADY or below_s == np.inf:
            return rows
        return {number: each[self._bounds_s(number, each) < below_s] for number, each in rows.items()}

    def _bounds_s(self, number: int, rows: np.ndarray) -> np.ndarray:
        """Lower bounds on the steady steps of plans of a part, (rows,)."""
        each = self.evaluated[number]
        bounds_s = self._known_bounds.setdefault(number, np.full(len(each.plans), np.nan))
        missing = rows[np.isnan(bounds_s[rows])]
        if len(missing):
            bounds_s[missing] = self.evaluate.bounds_s(columns(each.plans[missing]))
        return bounds_s[rows]

    def _rows_by_need(self, number: int, objective: Objective) -> np.ndarray:
        """The plans of a part to try with updates by need, independent of a budget."""
        each = self.evaluated[number]
        candidates = np.flatnonzero(each.outcomes.in_window)
        num_layers = each.plans.shape[2]
        if each.plans.shape[0] * num_layers <= _ALL_BY_NEED:
            return candidates
        keys = [values[candidates] for values in _keys(each.outcomes, objective)]
        order = candidates[np.lexsort(keys[::-1])]
        chosen = list(order[: fewer(_FASTEST_BY_NEED, num_layers)])
        if self.by_need_on_frontier:
            needed = each.outcomes.needed_bytes[order]
            smallest_before = np.minimum.accumulate(np.concatenate([[np.iinfo(np.int64).max], needed]))[:-1]
            frontier = order[needed < smallest_before]
            most = fewer(_FRONTIER_BY_NEED, num_layers)
            chosen += list(frontier[np.unique(np.linspace(0, len(frontier) - 1, most).astype(int))])
            bounds_s, sizes = self._bounds_s(number, candidates), each.outcomes.needed_bytes[candidates]
            could_be = candidates[on_fronts(bounds_s, sizes, 1)]
            chosen += list(could_be[np.unique(np.linspace(0, len(could_be) - 1, most).astype(int))])
        marked = self.marked.get(each.kind, set())
        if marked:
            chosen += [
                row for row, key in zip(candidates, row_bytes(each.plans[candidates]), strict=True) if key in marked
            ]
        return self._promising(number, np.unique(np.array(chosen, dtype=np.int64)), objective)

    def _promising(self, number: int, rows: np.ndarray, objective: Objective) -> np.ndarray:
        """Of these plans, those that are not proven to be no faster by need than others with no more memory."""
        each = self.evaluated[number]
        if objective is not Objective.STEADY or len(rows) < _MANY_BY_NEED:
            return rows
        known = np.flatnonzero(each.outcomes.in_window)
        known = known[np.argsort(each.outcomes.needed_bytes[known], kind="stable")]
        least_s = np.minimum.accumulate([np.inf, *each.outcomes.steady_step_s[known]])
        place = np.searchsorted(each.outcomes.needed_bytes[known], each.outcomes.needed_bytes[rows], side="right")
        return rows[self._bounds_s(number, rows) < least_s[place]]

    def _pick(
        self, options: list[_Option], objective: Objective, budget_bytes: int | None, leanest: bool
    ) -> Best | None:
        def fits(option: _Option) -> np.ndarray:
            inside = option.outcomes.in_window
            return inside if budget_bytes is None else inside & (option.outcomes.needed_bytes <= budget_bytes)

        allowed = [fits(option) for option in options]
        if leanest:
            times = [_keys(option.outcomes, objective)[0] for option in options]
            pairs = list(zip(times, allowed, strict=True))
            fastest = min((float(x[which].min(initial=np.inf)) for x, which in pairs), default=np.inf)
            allowed = [which & (x <= fastest * (1 + _ROUNDING)) for x, which in pairs]
        found, least = None, None
        for option, which in zip(options, allowed, strict=True):
            index = _least(option.outcomes, objective, which, leanest)
            if index is None:
                continue
            keys = _keys(option.outcomes, objective)
            key = [float(values[index]) for values in ([keys[-1], *keys] if leanest else keys)]
            if least is None or key < least:
                least, found = key, self._picked(option, index, float(keys[0][index]), budget_bytes)
        return found

    def frontier(self) -> list[Best]:
        """The plans that no other plan of the pool beats in both steady time and needed memory, fastest first."""
        options = self._in_backward_order(Objective.STEADY, None)
        rows = [np.flatnonzero(option.outcomes.in_window) for option in options]
        number = np.repeat(np.arange(len(rows)), [len(found) for found in rows])
        row = np.concatenate(rows)
        pairs = list(zip(options, rows, strict=True))
        steady_s = np.concatenate([option.outcomes.steady_step_s[found] for option, found in pairs])
        needed = np.concatenate([option.outcomes.needed_bytes[found] for option, found in pairs])
        order = np.lexsort((needed, steady_s))
        smallest_before = np.minimum.accumulate(np.concatenate([[np.iinfo(np.int64).max], needed[order]]))[:-1]
        return [
            self._picked(options[number[index]], int(row[index]), float(steady_s[index]), None)
            for index in order[needed[order] < smallest_before]
        ]

    def _picked(self, option: _Option, index: int, objective_s: float, budget_bytes: int | None) -> Best:
        each, row = self.evaluated[option.number], int(option.rows[index])
        grad_on_host, recomputes, on_device = flags(each.plans[row, 1])
        return Best(
            each.plans[row, 0],
            grad_on_host,
            recomputes,
            *each.kind,
            objective_s=objective_s,
            needed_bytes=int(option.outcomes.needed_bytes[index]),
            update_order=option.order,
            memory_bytes=option.memory_bytes if each.outcomes.room_matters[row] else budget_bytes,
            on_device=on_device if on_device.any() else None,
        )

    def smallest_needed_bytes(self) -> int:
        """The smallest budget within which a plan of the pool runs."""
        inside = [each.outcomes.needed_bytes[each.outcomes.in_window] for each in self.evaluated]
        return min(int(needed.min()) for needed in inside if len(needed))


def _flags_of(kind: _Kind) -> tuple[bool, bool]:
    """Whether loads are in bulk, and whether updates wait for all gradients."""
    return kind[0] is Loads.BULK, kind[1] is Updates.AFTER_ALL


def _keys(outcomes: Outcomes, objective: Objective) -> list[np.ndarray]:
    steady, step, needed = outcomes.steady_step_s, outcomes.step_s, outcomes.needed_bytes
    first = {Objective.FORWARD: outcomes.forward_s, Objective.STEP: step, Objective.STEADY: steady}[objective]
    return [first, steady, step, needed]


def _least(outcomes: Outcomes, objective: Objective, among: np.ndarray, leanest: bool = False) -> int | None:
    candidates = np.flatnonzero(among)
    if len(candidates) == 0:
        return None
    keys = [values[candidates] for values in _keys(outcomes, objective)]
    keys = [keys[-1], *keys] if leanest else keys
    return int(candidates[np.lexsort(keys[::-1])[0]])


def objective_values(outcomes: Outcomes, objective: Objective) -> np.ndarray:
    """The objective of each plan in seconds, infinite where DFGB breaks the window."""
    return np.where(outcomes.in_window, _keys(outcomes, objective)[0], np.inf)


def on_fronts(times: np.ndarray, sizes: np.ndarray, number: int) -> np.ndarray:
    """Which pairs no other one beats in both, and likewise of the rest, so many times over; flags, (pairs,)."""
    found = np.zeros(len(times), dtype=bool)
    left = np.lexsort((sizes, times))
    for _ in range(number):
        smallest_before = np.minimum.accumulate(np.concatenate([[np.inf], sizes[left]]))[:-1]
        is_best = sizes[left] < smallest_before
        found[left[is_best]] = True
        left = left[~is_best]
    return found


_ROUNDING = 1e-12
_ALL_BY_NEED = 5000
_FASTEST_BY_NEED = 16
_MANY_BY_NEED = 64
_FRONTIER_BY_NEED = 48
