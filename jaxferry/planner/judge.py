"""The judge of all plans: the step's tasks, run by the simulator, and the memory that they need."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import numpy as np

from jaxferry.costs import Profile
from jaxferry.modes import Mode, Subgroups
from jaxferry.planner.base import Objective
from jaxferry.planner.columns import Columns
from jaxferry.planner.preference import score_of
from jaxferry.step import (
    Kind,
    Lane,
    Loads,
    Plan,
    Run,
    StepSchedules,
    Task,
    UpdateOrder,
    Updates,
    critical_path,
    forward_s,
    run,
    step_s,
)

_ROUNDING = 1e-12


@dataclasses.dataclass(frozen=True, eq=False)
class Judged:
    """A plan that has been simulated.

    Attributes:
      plan: in the order of updates that is faster.
      codes: its columns, (layers,).
      objective_s: its objective in seconds.
      needed_bytes: the least memory budget within which it runs.
      schedules: its tasks.
    """

    plan: Plan
    codes: np.ndarray
    objective_s: float
    needed_bytes: int
    schedules: StepSchedules

    @functools.cached_property
    def score(self) -> int:
        """How much the plan relies on the machine model (`jaxferry.planner.preference`)."""
        return score_of(self.schedules.profile, self.plan)

    @property
    def rank(self) -> tuple[float, int, int]:
        """The smaller, the better: time, then reliance on the model, then memory."""
        return self.objective_s, self.score, self.needed_bytes

    def critical(self, objective: Objective) -> tuple[list[Task], int]:
        """The tasks of a way, or of a cycle of a chain, that sets the objective, and the number of steps it takes."""
        if objective is Objective.STEADY:
            return self.schedules.steady(self.plan.memory_bytes).critical()
        one = run(self.schedules.within(self.plan.memory_bytes))
        ends = (Kind.FORWARD, Kind.INTER_FORWARD) if objective is Objective.FORWARD else None
        return [one.schedule.tasks[index] for index in critical_path(one, ends)], 1


class Judge:
    """Simulates plans, each of them once.

    Args:
      columns: what the plans consist of.
      policy: the name that the plans carry.
      objective: what is to be least.
      reserve_factor_of: the reserve factor of a plan, from its columns.

    Attributes:
      judged: every plan so far.
      effort: the tasks of all plans that were lowered or simulated, the measure of the time that this took.
    """

    def __init__(
        self, columns: Columns, policy: str, objective: Objective, reserve_factor_of: Callable[[np.ndarray], float]
    ):
        self.columns, self.policy, self.objective = columns, policy, objective
        self.reserve_factor_of = reserve_factor_of
        self.judged: dict[tuple[bytes, Subgroups, int | None], Judged | None] = {}
        self.effort = 0
        self._lowered: dict[tuple[bytes, Subgroups], StepSchedules] = {}

    @property
    def profile(self) -> Profile:
        """The layers."""
        return self.columns.profile

    def needed_bytes(self, codes: np.ndarray, subgroups: Subgroups = Subgroups.LARGE) -> int:
        """The least memory budget within which a plan runs."""
        return self.lowered(codes, subgroups).needs.natural

    def lowered(self, codes: np.ndarray, subgroups: Subgroups = Subgroups.LARGE) -> StepSchedules:
        """The tasks of a plan, for any budget."""
        key = codes.tobytes(), subgroups
        if key not in self._lowered:
            layers = self.columns.layers(codes)
            plan = Plan(self.policy, self.reserve_factor_of(codes), layers, subgroups=subgroups)
            self._lowered[key] = StepSchedules(self.profile, plan)
            self.effort += len(layers)
        return self._lowered[key]

    def __call__(
        self, codes: np.ndarray, memory_bytes: int | None, subgroups: Subgroups = Subgroups.LARGE
    ) -> Judged | None:
        """A plan with so much memory for gradients; None if it breaks a rule of all policies (`planner/base.py`)."""
        key = codes.tobytes(), subgroups, memory_bytes
        if key not in self.judged:
            schedules = self.lowered(codes, subgroups)
            breaks = Mode.DFGB in schedules.effective.modes and not _keeps_window(schedules)
            self.judged[key] = None if breaks else self._judged(codes, schedules, memory_bytes)
        return self.judged[key]

    def other(self, plan: Plan, memory_bytes: int | None) -> Judged | None:
        """Likewise for a plan of another policy; None if it has a choice that no column has."""
        codes = self.columns.codes(plan.layers)
        if codes is None:
            return None
        if (plan.loads, plan.updates) == (Loads.LAYERWISE, Updates.OVERLAPPED):
            return self(codes, memory_bytes, plan.subgroups)
        own = dataclasses.replace(
            plan, policy=self.policy, reserve_factor=self.reserve_factor_of(codes), update_order=UpdateOrder.BACKWARD
        )
        return self._judged(codes, StepSchedules(self.profile, own), memory_bytes)

    def _judged(self, codes: np.ndarray, schedules: StepSchedules, memory_bytes: int | None) -> Judged:
        self.effort += len(schedules.within(memory_bytes).tasks)
        plan = dataclasses.replace(schedules.plan, memory_bytes=memory_bytes)
        plan, seconds = self._ordered(plan, schedules)
        return Judged(plan, codes, seconds, schedules.needs.natural, schedules)

    def _ordered(self, plan: Plan, schedules: StepSchedules) -> tuple[Plan, float]:
        """The plan in the order of updates that is faster, and its objective in seconds."""
        seconds, memory_bytes = self._seconds(schedules, plan, False), plan.memory_bytes
        num_updates = sum(task.lane is Lane.HOST for task in schedules.within(memory_bytes).tasks)
        if num_updates < 2 or self.objective is Objective.FORWARD:
            return plan, seconds
        other = schedules.in_order(UpdateOrder.NEED)
        if memory_bytes is not None and other.needs.natural > memory_bytes:
            return plan, seconds
        # As in `best_order`: a greedy order may be slower with more memory, so that counts only if it ends all waits.
        by_need = plan
        if memory_bytes is not None and other.waits_for_room(memory_bytes):
            by_need = dataclasses.replace(plan, memory_bytes=None)
        by_need_s = self._seconds(other, by_need, True)
        if by_need_s < seconds * (1 - _ROUNDING):
            return dataclasses.replace(by_need, update_order=UpdateOrder.NEED), by_need_s
        return plan, seconds

    def _seconds(self, schedules: StepSchedules, plan: Plan, by_need: bool) -> float:
        if self.objective is Objective.STEADY:
            return schedules.steady(plan.memory_bytes).seconds(by_need)
        step = dataclasses.replace(schedules.within(plan.memory_bytes), updates_by_need=by_need)
        return (forward_s if self.objective is Objective.FORWARD else step_s)(run(step))


def _keeps_window(schedules: StepSchedules) -> bool:
    """Whether the loads of DFGB layers end before the first gradient leaves, in a step alone (MemFerry's rule)."""
    one: Run = run(schedules.within(None))
    closes_s = loaded_s = 0.0
    last = schedules.profile.program_ends[-1][0]
    for task, end_s in zip(one.schedule.tasks, one.ends_s, strict=True):
        if task.kind in (Kind.FORWARD, Kind.INTER_FORWARD):
            closes_s, loaded_s = end_s, 0.0
        elif task.kind is Kind.LOAD:
            loaded_s = end_s
        elif task.kind in (Kind.INTER_BACKWARD, Kind.BACKWARD) and task.segment >= last:
            closes_s += task.duration_s
    return loaded_s <= closes_s
