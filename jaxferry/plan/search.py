"""Pools of plans, from which a budget picks.

A pool depends only on the profile and the gradients; a budget only picks from it. So a larger budget never gives a
slower plan: a plan that fits still fits, and waits for fewer gradient transfers. Nothing reads a clock.

The search assumes updates in backward order. It tries updates by need for the best plans of the pool and for marked
plans, independently of the budget. With a greedy order fewer waits can be slower. So by need a plan is evaluated
without the budget's room for gradients, or without any waits if the budget ends them all.
"""

import dataclasses
from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from jaxferry.plan.base import Objective
from jaxferry.plan.best import Best
from jaxferry.plan.effort import fewer, is_searched
from jaxferry.plan.evaluate import Outcomes, PlanEvaluator
from jaxferry.plan.records import Loads, UpdateOrder, Updates
from jaxferry.profiling.records import Profile
from jaxferry.room import UNLIMITED

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


class _Lazily:
    """Outcomes of plans without waits for room, each evaluated when it is asked for."""

    def __init__(self, of: _Evaluated, evaluate: Callable[..., Outcomes], by_need: bool):
        self.of, self.evaluate, self.by_need = of, evaluate, by_need
        self.is_known, self.outcomes = np.zeros(len(of.plans), dtype=bool), of.outcomes

    def __call__(self, rows: np.ndarray) -> Outcomes:
        """The outcomes of some of the plans, in this order."""
        new = rows[~self.is_known[rows]]
        if len(new):
            more = {"memory_bytes": UNLIMITED, "by_need": self.by_need}
            self.outcomes = self.outcomes.replaced(new, self.evaluate(self.of.kind, self.of.plans[new], **more))
            self.is_known[new] = True
        return self.outcomes.some(rows)


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
        self._by_need: dict[tuple[int, Objective], _Option] = {}
        self._without_waits: dict[tuple[int, bool], _Lazily] = {}

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
        modes = np.atleast_2d(np.asarray(modes, dtype=np.int8))
        codes = np.asarray(grad_on_host, dtype=np.int8) + _RECOMPUTES * np.asarray(recomputes, dtype=np.int8)
        codes = codes + _ON_DEVICE * np.asarray(on_device, dtype=np.int8)
        plans = np.stack([modes, np.broadcast_to(codes, modes.shape)], axis=1)
        self.parts.setdefault((loads, updates), []).append(plans)
        if marked:
            self.marked.setdefault((loads, updates), set()).update(_row_bytes(plans))

    def run(self) -> None:
        """Evaluates each added plan once, in backward order and without a budget."""
        for kind, parts in self.parts.items():
            plans, known = np.concatenate(parts), self.known.setdefault(kind, set())
            new = plans[_different_rows(plans, known)]
            if len(new):
                known.update(_row_bytes(new))
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
            rows = _different_rows(plans)
            outcomes = Outcomes.joined([each.outcomes for each in parts]).some(rows)
            joined.append(_Evaluated(kind, plans[rows], outcomes))
        self.evaluated = joined

    def _outcomes(self, kind: _Kind, plans: np.ndarray, **more: Any) -> Outcomes:
        bulk, after_all = _flags_of(kind)
        return self.evaluate(*_columns(plans), bulk=bulk, after_all=after_all, **more)

    def best(self, objective: Objective, budget_bytes: int | None, leanest: bool = False) -> Best | None:
        """The plan with the least objective that fits into the budget; ties go to steady time, step, memory.

        Updates follow backward order unless updates by need are faster.

        Args:
          objective: the quantity to minimize.
          budget_bytes: device memory, which gradients may fill; None for no limit.
          leanest: whether only memory decides among plans that are equally fast up to rounding.
        """
        found = self._pick(self._in_backward_order(objective, budget_bytes), objective, budget_bytes, leanest)
        if objective is Objective.FORWARD:
            return found
        rival = self._pick(self._by_need_options(objective, budget_bytes), objective, budget_bytes, leanest)
        if rival is None or (found is not None and rival.objective_s >= found.objective_s * (1 - _ROUNDING)):
            return found
        return rival

    def _in_backward_order(self, objective: Objective, budget_bytes: int | None) -> list[_Option]:
        options = []
        for number, each in enumerate(self.evaluated):
            rows = np.arange(len(each.plans))
            outcomes = each.outcomes
            if budget_bytes is not None and self.is_searched and outcomes.room_matters.any():
                outcomes = self._with_room(number, objective, budget_bytes)
            options.append(_Option(number, rows, outcomes, UpdateOrder.BACKWARD, budget_bytes))
        return options

    def _with_room(self, number: int, objective: Objective, budget_bytes: int) -> Outcomes:
        """The outcomes with the budget's room, for the plans that this room can make the best."""
        each = self.evaluated[number]
        fits = each.outcomes.in_window & (each.outcomes.needed_bytes <= budget_bytes)
        known_s = float(_keys(each.outcomes, objective)[0][fits].min(initial=np.inf))
        rows = np.flatnonzero(each.outcomes.room_matters & fits)
        if objective is Objective.STEADY:
            rows = rows[self._bounds_s(each, rows) < known_s]
        rows = rows[_keys(self._unlimited(number, rows, by_need=False), objective)[0] < known_s]
        if len(rows) == 0:
            return each.outcomes
        better = self._outcomes(each.kind, each.plans[rows], memory_bytes=budget_bytes)
        return each.outcomes.replaced(rows, better)

    def _by_need_options(self, objective: Objective, budget_bytes: int | None) -> list[_Option]:
        options = []
        for number, each in enumerate(self.evaluated):
            key = number, objective
            if key not in self._by_need:
                rows = self._rows_by_need(each, objective)
                self._by_need[key] = self._option_by_need(number, rows, None)
            options.append(self._by_need[key])
            rows = self._by_need[key].rows
            if budget_bytes is None or not self.is_searched:
                continue
            waits = each.outcomes.room_matters[rows] & (each.outcomes.needed_bytes[rows] <= budget_bytes)
            rows = rows[waits]
            if len(rows):
                rows = rows[
                    ~self.evaluate.waits_for_room(_columns(each.plans[rows]), *_flags_of(each.kind), budget_bytes)
                ]
            if len(rows):
                outcomes = self._unlimited(number, rows, by_need=True)
                options.append(_Option(number, rows, outcomes, UpdateOrder.NEED, budget_bytes))
        return options

    def _unlimited(self, number: int, rows: np.ndarray, by_need: bool) -> Outcomes:
        """The outcomes of some plans if no backward waits for room."""
        key = number, by_need
        if key not in self._without_waits:
            self._without_waits[key] = _Lazily(self.evaluated[number], self._outcomes, by_need)
        return self._without_waits[key](rows)

    def _bounds_s(self, each: _Evaluated, rows: np.ndarray) -> np.ndarray:
        """Lower bounds on the steady steps of some plans, (rows,)."""
        return self.evaluate.bounds_s(_columns(each.plans[rows])) if len(rows) else np.zeros(0)

    def _option_by_need(self, number: int, rows: np.ndarray, memory_bytes: int | None) -> _Option:
        each = self.evaluated[number]
        outcomes = self._outcomes(each.kind, each.plans[rows], by_need=True, memory_bytes=memory_bytes)
        return _Option(number, rows, outcomes, UpdateOrder.NEED, memory_bytes)

    def _rows_by_need(self, each: _Evaluated, objective: Objective) -> np.ndarray:
        """The plans of one kind to try with updates by need, independent of a budget."""
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
            number = fewer(_FRONTIER_BY_NEED, num_layers)
            chosen += list(frontier[np.unique(np.linspace(0, len(frontier) - 1, number).astype(int))])
            bounds_s, sizes = self._bounds_s(each, candidates), each.outcomes.needed_bytes[candidates]
            could_be = candidates[on_fronts(bounds_s, sizes, 1)]
            chosen += list(could_be[np.unique(np.linspace(0, len(could_be) - 1, number).astype(int))])
        marked = self.marked.get(each.kind, set())
        if marked:
            chosen += [
                row for row, key in zip(candidates, _row_bytes(each.plans[candidates]), strict=True) if key in marked
            ]
        return self._promising(each, np.unique(np.array(chosen, dtype=np.int64)), objective)

    def _promising(self, each: _Evaluated, rows: np.ndarray, objective: Objective) -> np.ndarray:
        """Of these plans, those that are not proven to be no faster by need than others with no more memory."""
        if objective is not Objective.STEADY or len(rows) < _MANY_BY_NEED:
            return rows
        known = np.flatnonzero(each.outcomes.in_window)
        known = known[np.argsort(each.outcomes.needed_bytes[known], kind="stable")]
        least_s = np.minimum.accumulate([np.inf, *each.outcomes.steady_step_s[known]])
        place = np.searchsorted(each.outcomes.needed_bytes[known], each.outcomes.needed_bytes[rows], side="right")
        return rows[self._bounds_s(each, rows) < least_s[place]]

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
        grad_on_host, recomputes, on_device = _flags(each.plans[row, 1])
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


def _different_rows(plans: np.ndarray, known: Collection[bytes] = ()) -> np.ndarray:
    """The first of each group of equal plans that are not known, by index; `np.unique` compares far slower.

    In lexicographic order.
    """
    first: dict[bytes, int] = {}
    for row, key in enumerate(_row_bytes(plans)):
        if key not in known:
            first.setdefault(key, row)
    return np.array([first[key] for key in sorted(first)], dtype=np.int64)


def _row_bytes(plans: np.ndarray) -> list[bytes]:
    """The bytes of each plan."""
    size = plans[0].nbytes if len(plans) else 1
    joined = plans.tobytes()
    return [joined[first : first + size] for first in range(0, len(joined), size)]


def _flags_of(kind: _Kind) -> tuple[bool, bool]:
    """Whether loads are in bulk, and whether updates wait for all gradients."""
    return kind[0] is Loads.BULK, kind[1] is Updates.AFTER_ALL


def _columns(plans: np.ndarray) -> tuple[np.ndarray, ...]:
    """Modes and flags of gradients, of recomputation and of updates on the device, (plans, layers) each."""
    return plans[:, 0], *_flags(plans[:, 1])


def _flags(codes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Flags of gradients, of recomputation and of updates on the device."""
    return codes % _RECOMPUTES == 1, codes % _ON_DEVICE >= _RECOMPUTES, codes >= _ON_DEVICE


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


_RECOMPUTES = 2
_ON_DEVICE = 4
_ROUNDING = 1e-12
_ALL_BY_NEED = 5000
_FASTEST_BY_NEED = 16
_MANY_BY_NEED = 64
_FRONTIER_BY_NEED = 48
