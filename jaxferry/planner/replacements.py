"""Replaces choices that rely on the machine model, where the plan stays equal to the fastest one without them.

    plan --neighbours with less score--> judged --those that fit and count as equal--> the one with the least score
     ^                                                                                              |
     `----------------------------------------------------------------------------------------------'

`planner/preference.py` defines scores and equality, `planner/neighbours.py` neighbours: one layer, or several equal
layers, become GFGB, RESIDENT or RELOAD in place of DHA, DFGB or RELOAD, keep their gradient on the device, or do not
recompute. The score falls with each step, so the search ends; for a long model it ends after `MOST_WORK` or
`MOST_SIMULATED` layers. The place of each update stays.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from jaxferry.costs.records import Profile
from jaxferry.planner.base import Objective
from jaxferry.planner.best import Best, picked_plan
from jaxferry.planner.evaluate import PlanEvaluator
from jaxferry.planner.neighbours import Neighbours
from jaxferry.planner.order import best_order
from jaxferry.planner.preference import scores
from jaxferry.planner.search import objective_values
from jaxferry.step.holdings import RESIDENT
from jaxferry.step.records import Loads, UpdateOrder, Updates
from jaxferry.step.room import UNLIMITED
from jaxferry.step.schedule import StepSchedules, needed_bytes

MOST_WORK = 8_000
"""The most layers of plans that are evaluated for one plan."""

MOST_SIMULATED = 160
"""Likewise if its updates stream, so that each plan is simulated by itself."""

_AT_ONCE = 16
_OPTIONS = ((UpdateOrder.BACKWARD, True), (UpdateOrder.NEED, False), (UpdateOrder.NEED, True))
"""Orders of updates, and whether gradients have room, as in `planner/order.py`."""

Columns = tuple[np.ndarray, ...]
"""Modes and flags of gradients, recomputation and updates on the device, (plans, layers) each."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """What every plan must keep.

    Attributes:
      objective: the quantity that the search minimizes.
      longest_s: the longest time, in seconds, that counts as equal to the fastest plan's.
      budget_bytes: device memory; None for no limit.
      memory_bytes: those of the plans, which gradients may fill.
      allows: tells of plans, given as `Columns`, which ones the request allows: flags, (plans,).
    """

    objective: Objective
    longest_s: float
    budget_bytes: int | None
    memory_bytes: int | None
    allows: Callable[..., np.ndarray]

    @property
    def most_bytes(self) -> int:
        """The most bytes that a plan may need."""
        return UNLIMITED if self.budget_bytes is None else self.budget_bytes


def replaced(profile: Profile, start: Best, limits: Limits) -> Best:
    """Returns the plan after all replacements that keep the limits, which the plan itself keeps.

    Args:
      profile: the layers.
      start: the plan.
      limits: what every plan must keep.
    """
    judge = _Evaluated(profile, start, limits) if start.through_gpu is None else _Simulated(profile, start, limits)
    neighbours = Neighbours(profile, np.array([layer.can_recompute for layer in profile.layers]))
    found: Best | None = start
    while found is not None:
        current, found = found, None
        score = scores(profile, *(each[None] for each in current.columns))[0]
        plans = neighbours.of(current)
        plans = _some(plans, scores(profile, *plans) < score)
        plans = _some(plans, limits.allows(*plans) & judge.may_keep(*plans))
        if len(plans[0]):
            found = judge.best(plans, scores(profile, *plans))
    return current


def _some(plans: Sequence[np.ndarray], which: np.ndarray) -> list[np.ndarray]:
    """The plans at these places."""
    return [each[which] for each in plans]


class _Evaluated:
    """Judges plans whose updates do not stream, all at once, in either order of updates."""

    def __init__(self, profile: Profile, start: Best, limits: Limits):
        self.start, self.limits, self.evaluate, self.work = start, limits, PlanEvaluator(profile), 0
        num_options = 1 if limits.objective is Objective.FORWARD else len(_OPTIONS) - (limits.memory_bytes is None)
        self.options = _OPTIONS[:num_options]
        self.bulk, self.after_all = start.loads is Loads.BULK, start.updates is Updates.AFTER_ALL

    def may_keep(self, *plans: np.ndarray) -> np.ndarray:
        """Flags of the plans that may keep the limits, (plans,), by bounds."""
        bounds_s, needed_bytes = self.evaluate.bounds(plans)
        if self.limits.objective is not Objective.STEADY:
            return needed_bytes <= self.limits.most_bytes
        return (needed_bytes <= self.limits.most_bytes) & (bounds_s <= self.limits.longest_s)

    def best(self, plans: list[np.ndarray], score: np.ndarray) -> Best | None:
        """Returns the plan with the least score, then memory, then time, of the first ones that keep the limits."""
        order = np.argsort(score, kind="stable")
        for first in range(0, len(order), _AT_ONCE):
            rows = order[first : first + _AT_ONCE]
            for update_order, has_room in self.options:
                if self.work >= MOST_WORK:
                    return None
                found = self._best_of(_some(plans, rows), score[rows], update_order, has_room)
                if found is not None:
                    return found
        return None

    def _best_of(self, plans: list[np.ndarray], score: np.ndarray, order: UpdateOrder, has_room: bool) -> Best | None:
        """Likewise of all these plans, with one order of updates, and room for gradients or none."""
        limits, by_need = self.limits, order is UpdateOrder.NEED
        memory_bytes = limits.memory_bytes if has_room else None
        if by_need and memory_bytes is not None:  # fewer waits could be slower
            waits = self.evaluate.waits_for_room(plans, self.bulk, self.after_all, memory_bytes)
            plans, score = _some(plans, ~waits), score[~waits]
        if len(score) == 0:
            return None
        self.work += plans[0].size
        outcomes = self.evaluate(
            *plans, bulk=self.bulk, after_all=self.after_all, by_need=by_need, memory_bytes=memory_bytes
        )
        seconds = objective_values(outcomes, limits.objective)
        fits = np.flatnonzero((seconds <= limits.longest_s) & (outcomes.needed_bytes <= limits.most_bytes))
        if len(fits) == 0:
            return None
        row = fits[np.lexsort((seconds[fits], outcomes.needed_bytes[fits], score[fits]))[0]]
        modes, grad_on_host, recomputes, on_device = (each[row] for each in plans)
        return dataclasses.replace(
            self.start,
            modes=modes,
            grad_on_host=grad_on_host,
            recomputes=recomputes,
            on_device=on_device if on_device.any() else None,
            needed_bytes=int(outcomes.needed_bytes[row]),
            objective_s=float(seconds[row]),
            update_order=order,
            memory_bytes=memory_bytes,
        )


class _Simulated:
    """Judges plans whose updates stream, one after another, the least score first."""

    def __init__(self, profile: Profile, start: Best, limits: Limits):
        self.profile, self.start, self.limits, self.work = profile, start, limits, 0
        plan = picked_plan("replaced", 1.0, profile, start)
        self.room_bytes = start.needed_bytes - needed_bytes(profile, plan)

    def may_keep(self, modes: np.ndarray, *_: np.ndarray) -> np.ndarray:
        """Flags of the plans whose streamed groups keep no other copies on the device than before, (plans,)."""
        same = (modes == RESIDENT) == (self.start.modes == RESIDENT)
        return same[:, self.start.through_gpu].all(axis=1)

    def best(self, plans: list[np.ndarray], score: np.ndarray) -> Best | None:
        """Returns the plan with the least score of those that keep the limits; None after `MOST_SIMULATED`."""
        for row in np.argsort(score, kind="stable"):
            if self.work >= MOST_SIMULATED:
                return None
            self.work += len(self.profile.layers)
            modes, grad_on_host, recomputes, _ = (each[row] for each in plans)
            changed = {"modes": modes, "grad_on_host": grad_on_host, "recomputes": recomputes}
            made = picked_plan(
                "replaced", 1.0, self.profile, dataclasses.replace(self.start, **changed, memory_bytes=None)
            )
            schedules = StepSchedules(self.profile, made)
            num_bytes = int(schedules.needs.natural[0]) + self.room_bytes
            if num_bytes > self.limits.most_bytes:
                continue
            made = dataclasses.replace(made, memory_bytes=num_bytes if self.room_bytes > 0 else None)
            made, seconds = best_order(made, schedules)
            if seconds <= self.limits.longest_s:
                return Best.of(made, seconds, num_bytes)
        return None
