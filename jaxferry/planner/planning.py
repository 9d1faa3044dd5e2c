"""Plans and predictions: one policy's plan, all policies side by side, sweeps."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from jaxferry.costs import Profile
from jaxferry.errors import BudgetError, InputError
from jaxferry.modes import Mode, UpdatePlace
from jaxferry.planner.auto import Auto, AutoSearch
from jaxferry.planner.base import Objective, Request, read_objective
from jaxferry.planner.baselines import L2L, NativeOverlapped
from jaxferry.planner.columns import updatable_groups
from jaxferry.planner.exact import gap_details
from jaxferry.planner.place_bound import any_plan_lower_bound_s
from jaxferry.planner.preference import longest_equal_s
from jaxferry.planner.registry import make_policy, policies
from jaxferry.step import Plan, Updates, needed_bytes, predict, simulate

Planner = Callable[[int | None], Plan]
"""The plan for a memory budget in bytes, or for none."""


_ROUNDING = 1e-12
FULL_LAYERS = 96
_SECONDS_OF = {Objective.FORWARD: "forward_s", Objective.STEP: "step_s", Objective.STEADY: "steady_step_s"}


def make_plan(
    profile: Profile,
    policy: str = "exact",
    *,
    objective: Objective | str = Objective.STEADY,
    reserve_factor: float | None = None,
    memory_budget_bytes: int | None = None,
    progress: Callable[[str], None] | None = None,
) -> Plan:
    """The plan of a policy for a profile, with `predicted`.

    Args:
      profile: the layers' times in seconds and sizes in bytes.
      policy: one of `jaxferry.planner.registry.policies()`.
      objective: what `exact` makes least.
      reserve_factor: share of all gradient bytes, in [0, 1], that may stay on the device; None for the policy's
        default.
      memory_budget_bytes: device memory that the plan must fit into; None for no limit.
      progress: called with a short description as each part of a long search starts.

    Raises:
      InputError: if an argument is not acceptable.
      BudgetError: if no plan of the policy fits; it names the smallest feasible budget.
    """
    return plan_for(profile, policy, Request(reserve_factor, memory_budget_bytes, read_objective(objective), progress))


def plan_for(profile: Profile, policy: str, request: Request) -> Plan:
    """Like `make_plan`, for a request."""
    budget_bytes = request.memory_budget_bytes
    return with_gap(profile, planner_of(profile, policy, request)(budget_bytes), budget_bytes)


def planner_of(profile: Profile, policy: str, request: Request) -> Planner:
    """A function that plans for any budget, without the gap of `plan_for`; `auto` searches once for all budgets."""
    plan: Planner = functools.partial(_plan_within, profile, policy, request)
    if policy == Auto.name:
        plan = AutoSearch(profile, request).plan
    return lambda budget_bytes: predict(profile, as_run(profile, plan(budget_bytes)))


def _plan_within(profile: Profile, policy: str, request: Request, budget_bytes: int | None) -> Plan:
    return make_policy(policy).plan(profile, dataclasses.replace(request, memory_budget_bytes=budget_bytes))


def with_gap(profile: Profile, plan: Plan, budget_bytes: int | None) -> Plan:
    """The plan with its gap to a proven bound on all plans within the budget, or to the policy's own bound.

    Unless a search of all plans was possible: with few layers, and no choice of where each group is updated.
    """
    is_searched = plan.policy != Auto.name or not updatable_groups(profile)
    if plan.predicted is None or (is_searched and len(profile.layers) <= FULL_LAYERS):
        return plan
    objective = Objective(plan.details.get("objective", Objective.STEADY))
    value_s = getattr(plan.predicted, _SECONDS_OF[objective])
    bound_s = plan.details.get("lower_bound_s") or any_plan_lower_bound_s(profile, budget_bytes)
    return dataclasses.replace(plan, details={**plan.details, **gap_details(objective, value_s, bound_s)})


def as_run(profile: Profile, plan: Plan) -> Plan:
    """The plan; with updates after all gradients if the profile says that they wait.

    Of several devices, updates that would stream are on the host; so are all updates of several processes.
    """
    if profile.num_devices > 1:
        plan = plan.without_streams() if profile.num_processes == 1 else plan.updated_on_host()
    return dataclasses.replace(plan, updates=Updates.AFTER_ALL) if profile.updates_after_all else plan


def check_updates(profile: Profile, plan: Plan) -> None:
    """Raises InputError if the plan updates a layer on the device, and the profile does not state what that costs."""
    for layer, planned in zip(profile.layers, plan.layers, strict=True):
        missing = [key for key in ("update_gpu_s", "state_bytes") if not getattr(layer, key)]
        if planned.update is not UpdatePlace.HOST and layer.has_gradient and missing:
            raise InputError(
                f"layer {layer.name!r} has the update {planned.update.value!r}, but the profile does not state its "
                f"{missing[0]!r}: estimated profiles do, and so do those measured on an accelerator"
            )


def copies_bytes(profile: Profile, plan: Plan) -> int:
    """Host memory that each of several processes needs for layers that programs read there; they have these whole."""
    if profile.num_processes == 1:
        return 0
    layers = zip(profile.layers, plan.modes, strict=True)
    read = {layer.parameters: layer.param_bytes for layer, mode in layers if mode in (Mode.DHA, Mode.DFGB)}
    return sum(read.values())


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One policy's row in a comparison.

    Attributes:
      policy: its name.
      plan: its plan, or None if none fits the budget.
      link_bytes: bytes over the host link in one step.
      gap: steady time divided by `Compared.lower_bound_s`, minus 1.
      smallest_bytes: the smallest budget that accepts the plan; if no plan fits, the smallest feasible one.
      problem: the error's message, if no plan fits.
    """

    policy: str
    plan: Plan | None
    link_bytes: int = 0
    gap: float = 0.0
    smallest_bytes: int = 0
    problem: str = ""

    def to_json(self) -> dict[str, Any]:
        """The row as JSON values."""
        if self.plan is None:
            return {"policy": self.policy, "fits": False, "smallest_budget_bytes": self.smallest_bytes}
        predicted = self.plan.predicted.to_json() if self.plan.predicted else {}
        budget = {"smallest_budget_bytes": self.smallest_bytes}
        return {
            "policy": self.policy,
            "fits": True,
            **predicted,
            "link_bytes": self.link_bytes,
            "gap": self.gap,
            **budget,
        }


@dataclasses.dataclass(frozen=True)
class Compared:
    """All policies side by side.

    Attributes:
      rows: one per policy.
      lower_bound_s: no plan with any modes and any gradients has a smaller steady step. It is the same for all rows, so
        their gaps are comparable. For plans of GFGB, DHA and DFGB `exact` proves more, and states its own gap.
    """

    rows: tuple[Comparison, ...]
    lower_bound_s: float

    def plan_of(self, policy: str) -> Plan:
        """The plan of a policy.

        Raises:
          BudgetError: if none of its plans fits.
        """
        row = next(row for row in self.rows if row.policy == policy)
        if row.plan is None:
            raise BudgetError(row.problem, row.smallest_bytes)
        return row.plan

    def to_json(self) -> dict[str, Any]:
        """The comparison as JSON values."""
        return {"lower_bound_s": self.lower_bound_s, "policies": [row.to_json() for row in self.rows]}


def compare_plans(plan: Callable[[str], tuple[Profile, Plan]], bound_s: float, request: Request) -> Compared:
    """Every policy's answer to the same request.

    Args:
      plan: plans by the policy of this name; returns the profile that the plan is for too.
      bound_s: no plan has a smaller steady step.
      request: its progress is told of each policy.

    Raises:
      BudgetError: if no policy has a plan that fits; it names the smallest feasible budget of all.
    """
    rows = tuple(_compared(plan, request, name, bound_s) for name in policies())
    if all(row.plan is None for row in rows):
        leanest = min(rows, key=lambda row: row.smallest_bytes)
        raise BudgetError(leanest.problem, leanest.smallest_bytes)
    return Compared(rows, bound_s)


def _compared(plan: Callable[[str], tuple[Profile, Plan]], request: Request, name: str, bound_s: float) -> Comparison:
    request.report(name)
    try:
        profile, made = plan(name)
    except BudgetError as error:
        return Comparison(name, None, smallest_bytes=error.smallest_bytes, problem=str(error))
    simulation = simulate(profile, made)
    gap = simulation.steady_step_s / bound_s - 1 if bound_s > 0 else 0.0
    gap = 0.0 if abs(gap) < _ROUNDING else gap
    predicted = dataclasses.replace(made, predicted=simulation.predicted)
    return Comparison(name, predicted, simulation.link_bytes, gap, needed_bytes(profile, made))


@dataclasses.dataclass(frozen=True)
class SweepPoint:
    """One setting of a sweep with its plan and `predicted`, or with the error's message if no plan fits."""

    reserve_factor: float
    memory_budget_bytes: int | None
    plan: Plan | None
    smallest_bytes: int = 0
    problem: str = ""

    def to_json(self) -> dict[str, Any]:
        """The point as JSON values."""
        setting = {"reserve_factor": self.reserve_factor, "memory_budget_bytes": self.memory_budget_bytes}
        if self.plan is None or self.plan.predicted is None:
            return {**setting, "fits": False, "smallest_budget_bytes": self.smallest_bytes}
        return {**setting, "fits": True, **self.plan.predicted.to_json()}


def sweep(
    profile: Profile,
    policy: str,
    reserve_factors: list[float],
    budgets_bytes: list[int] | None,
    request: Request,
    planner_of: Callable[[Profile, str, Request], Planner] = planner_of,
) -> list[SweepPoint]:
    """A policy's plan for each reserve factor and each budget; without budgets, one for each reserve factor.

    A plan whose gradients satisfy a smaller factor also satisfies a larger one below 1, so a smaller factor's plan
    stands for a larger one's that is slower and not equal (`planner/preference.py`). With 1 no gradient is GO.

    Args:
      profile: the profile.
      policy: name of the policy.
      reserve_factors: the factors.
      budgets_bytes: the budgets.
      request: the other requirements.
      planner_of: makes the function that plans for any budget.

    Raises:
      BudgetError: if no plan fits at any setting; it names the smallest feasible budget.
    """
    points: list[SweepPoint] = []
    for factor in reserve_factors:
        asked = dataclasses.replace(request, reserve_factor=factor, memory_budget_bytes=None)
        asked.report(f"reserve factor {factor:g}")
        planner = planner_of(profile, policy, asked)
        for budget in budgets_bytes if budgets_bytes is not None else [None]:
            found = _sweep_point(planner, factor, budget)
            other = min(_allowed(points, factor, budget), key=_steady_s, default=found)
            points.append(other if longest_equal_s(_steady_s(other)) < _steady_s(found) else found)
    if all(point.plan is None for point in points):
        leanest = min(points, key=lambda point: (point.smallest_bytes, -(point.memory_budget_bytes or 0)))
        raise BudgetError(f"at reserve factor {leanest.reserve_factor:g}, {leanest.problem}", leanest.smallest_bytes)
    return points


def _allowed(points: Sequence[SweepPoint], factor: float, budget: int | None) -> list[SweepPoint]:
    """The plans for smaller factors and the same budget, as points of this factor; none for 1."""
    return [
        dataclasses.replace(point, reserve_factor=factor, plan=dataclasses.replace(point.plan, reserve_factor=factor))
        for point in points
        if point.plan is not None and point.reserve_factor <= factor < 1 and point.memory_budget_bytes == budget
    ]


def _steady_s(point: SweepPoint) -> float:
    has_plan = point.plan is not None and point.plan.predicted is not None
    return _memory_and_time(point)[1] if has_plan else float("inf")


def _sweep_point(planner: Planner, factor: float, budget: int | None) -> SweepPoint:
    try:
        return SweepPoint(factor, budget, planner(budget))
    except BudgetError as error:
        return SweepPoint(factor, budget, None, error.smallest_bytes, str(error))


def pareto_front(points: Sequence[SweepPoint]) -> list[SweepPoint]:
    """The points that no other point beats in both memory and steady time, by ascending memory; one of equal points."""
    known = []
    for point in points:
        if point.plan is not None and point.plan.predicted is not None:
            known.append((*_memory_and_time(point), point))
    known.sort(key=lambda row: row[:2])
    front: list[tuple[int, float, SweepPoint]] = []
    for row in known:
        if not front or row[1] < front[-1][1]:
            front.append(row)
    return [point for _, _, point in front]


def knee(points: list[SweepPoint]) -> SweepPoint | None:
    """The point beyond which more memory stops paying.

    Candidates are the points of the Pareto front. The knee is the candidate farthest below the line from the leanest to
    the fastest one, with both axes scaled to their range. With two candidates or fewer, or with none below the line, it
    is the fastest one.
    """
    front = [(*_memory_and_time(point), point) for point in pareto_front(points)]
    if len(front) < 3:
        return front[-1][2] if front else None
    (low, slow, _), (high, fast, _) = front[0], front[-1]
    return max(front[::-1], key=lambda row: (high - row[0]) / (high - low) + (slow - row[1]) / (slow - fast))[2]


def _memory_and_time(point: SweepPoint) -> tuple[int, float]:
    assert point.plan is not None and point.plan.predicted is not None
    return point.plan.predicted.peak_device_bytes, point.plan.predicted.steady_step_s


SIMPLE_POLICIES = (NativeOverlapped.name, L2L.name)
"""Policies whose plans `auto` takes where they fit as counted and are faster than what it plans itself and fits."""
