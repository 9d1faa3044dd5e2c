"""The judge of all plans: the step's tasks, run by the simulator, and the memory that they need."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence

import numpy as np

from jaxferry.costs import Profile
from jaxferry.modes import Mode, Subgroups
from jaxferry.planner.base import Objective, best_order, steady_s
from jaxferry.planner.columns import Columns
from jaxferry.planner.preference import score_of
from jaxferry.step import (
    Demand,
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

_GAIN = 1e-4


Counts = dict[tuple[Kind, Lane], np.ndarray]
"""How often a step has tasks of a kind on a lane, by layer, (layers,)."""


@dataclasses.dataclass(frozen=True, eq=False)
class Judged:
    """A plan that has been simulated. Its tasks are not kept: a search knows hundreds of plans.

    Attributes:
      profile: the layers.
      plan: in the order of updates that is faster.
      codes: its columns, (layers,).
      objective_s: its objective in seconds.
      needs: its memory.
      critical: of a way, or of a cycle of a chain, that sets the objective.
    """

    profile: Profile
    plan: Plan
    codes: np.ndarray
    objective_s: float
    needs: Demand
    critical: Counts

    @property
    def needed_bytes(self) -> int:
        """The least memory budget within which it runs."""
        return self.needs.natural

    @property
    def schedules(self) -> StepSchedules:
        """Its tasks, listed anew."""
        return StepSchedules(self.profile, self.plan)

    @functools.cached_property
    def score(self) -> int:
        """How much the plan relies on the machine model (`jaxferry.planner.preference`)."""
        return score_of(self.profile, self.plan)

    @property
    def rank(self) -> tuple[float, int, int]:
        """The smaller, the better: time, then reliance on the model, then memory."""
        return self.objective_s, self.score, self.needed_bytes


class Judge:
    """Simulates plans, each of them once.

    Args:
      columns: what the plans consist of.
      policy: the name that the plans carry.
      objective: what is to be least.
      reserve_factor_of: the reserve factor of a plan, from its columns.

    Attributes:
      judged: every plan so far.
      is_thorough: whether it tries both orders of updates where a few rules say that the other one is no faster.
      effort: the tasks of all plans that were lowered or simulated, the measure of the time that this took.
    """

    def __init__(
        self, columns: Columns, policy: str, objective: Objective, reserve_factor_of: Callable[[np.ndarray], float]
    ):
        self.columns, self.policy, self.objective = columns, policy, objective
        self.reserve_factor_of = reserve_factor_of
        self.judged: dict[tuple[bytes, Subgroups, int | None], Judged | None] = {}
        self.effort, self.is_thorough = 0, False
        self._needs: dict[tuple[bytes, Subgroups], Demand] = {}
        self._last: tuple[tuple[bytes, Subgroups] | None, StepSchedules | None] = None, None

    @property
    def profile(self) -> Profile:
        """The layers."""
        return self.columns.profile

    def needed_bytes(self, codes: np.ndarray, subgroups: Subgroups = Subgroups.LARGE) -> int:
        """The least memory budget within which a plan runs."""
        return self.needs(codes, subgroups).natural

    def needs(self, codes: np.ndarray, subgroups: Subgroups = Subgroups.LARGE) -> Demand:
        """The memory of a plan."""
        key = codes.tobytes(), subgroups
        if key not in self._needs:
            self._needs[key] = self.schedules(codes, subgroups).needs
        return self._needs[key]

    def schedules(self, codes: np.ndarray, subgroups: Subgroups = Subgroups.LARGE) -> StepSchedules:
        """The tasks of a plan, for any budget; those of the last plan are kept."""
        key, (last, found) = (codes.tobytes(), subgroups), self._last
        if found is None or key != last:
            layers = self.columns.layers(codes)
            found = StepSchedules(
                self.profile, Plan(self.policy, self.reserve_factor_of(codes), layers, subgroups=subgroups)
            )
            self.effort += len(layers)
            self._last = key, found
        return found

    def __call__(
        self, codes: np.ndarray, memory_bytes: int | None, subgroups: Subgroups = Subgroups.LARGE
    ) -> Judged | None:
        """A plan with so much memory for gradients; None if it breaks a rule of all policies (`planner/base.py`)."""
        key = codes.tobytes(), subgroups, memory_bytes
        if key not in self.judged:
            schedules = self.schedules(codes, subgroups)
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
        cycle, num_steps = self._critical(schedules, memory_bytes)
        tries = functools.partial(self._tries_order, schedules, memory_bytes, cycle)
        plan, seconds = best_order(plan, schedules, self._seconds, tries, self.is_thorough)
        counts, size = Counts(), len(codes)
        for task in cycle:
            # Of an update in several parts, each part of the cycle counts as much of the whole as it is.
            counts.setdefault((task.kind, task.lane), np.zeros(size))[task.segment] += 1 / (
                num_steps * task.num_subgroups
            )
        return Judged(self.profile, plan, codes, seconds, schedules.needs, counts)

    def _critical(self, schedules: StepSchedules, memory_bytes: int | None) -> tuple[list[Task], int]:
        """The tasks of a way, or of a cycle of a chain, that sets the objective, and the number of steps it takes."""
        if self.objective is Objective.STEADY:
            return schedules.steady(memory_bytes).critical()
        one = run(schedules.within(memory_bytes))
        ends = (Kind.FORWARD, Kind.INTER_FORWARD) if self.objective is Objective.FORWARD else None
        return [one.schedule.tasks[index] for index in critical_path(one, ends)], 1

    def _tries_order(
        self, schedules: StepSchedules, memory_bytes: int | None, critical: Sequence[Task], seconds: float
    ) -> bool:
        """Whether updates by need may be faster: some, but not all, critical tasks are updates in a row."""
        if self.objective is not Objective.STEADY or self.is_thorough:
            return self.objective is not Objective.FORWARD
        on_host = [task.lane is Lane.HOST for task in critical]
        in_a_row = any(map(operator.and_, on_host, [*on_host[1:], *on_host[:1]]))
        may_gain = schedules.steady(memory_bytes).least_s < seconds * (1 - _GAIN)
        return in_a_row and not all(on_host) and may_gain

    def _seconds(self, schedules: StepSchedules, memory_bytes: int | None, by_need: bool) -> float:
        if self.objective is Objective.STEADY:
            return steady_s(schedules, memory_bytes, by_need)
        step = dataclasses.replace(schedules.within(memory_bytes), updates_by_need=by_need)
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
