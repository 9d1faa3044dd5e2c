"""All policies side by side, and a policy over reserve factors and budgets."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxferry.costs import Profile
from jaxferry.errors import BudgetError
from jaxferry.planner.base import Request
from jaxferry.planner.granularity import FinestPlanner, candidates
from jaxferry.planner.place_bound import any_plan_lower_bound_s
from jaxferry.planner.planning import policies
from jaxferry.planner.preference import longest_equal_s
from jaxferry.step import Plan, needed_bytes, simulate

_ROUNDING = 1e-12


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


def compare_finest(profile: Profile, request: Request, granularity: str) -> Compared:
    """Every policy's answer to the same request, each with what `plan_finest` plans.

    Raises:
      BudgetError: if no policy has a plan that fits; it names the smallest feasible budget of all.
    """
    budget_bytes = request.memory_budget_bytes
    bound_s = min(any_plan_lower_bound_s(each, budget_bytes) for each in candidates(profile, granularity).values())
    rows = tuple(_compared(profile, request, granularity, name, bound_s) for name in policies())
    if all(row.plan is None for row in rows):
        leanest = min(rows, key=lambda row: row.smallest_bytes)
        raise BudgetError(leanest.problem, leanest.smallest_bytes)
    return Compared(rows, bound_s)


def _compared(profile: Profile, request: Request, granularity: str, name: str, bound_s: float) -> Comparison:
    request.report(name)
    try:
        profile, made = FinestPlanner(profile, name, request, granularity).plan(request.memory_budget_bytes)
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


def sweep_finest(
    profile: Profile,
    policy: str,
    reserve_factors: list[float],
    budgets_bytes: list[int] | None,
    request: Request,
    granularity: str,
) -> list[SweepPoint]:
    """What `plan_finest` plans for each reserve factor and each budget; without budgets, for each reserve factor.

    A plan whose gradients satisfy a smaller factor also satisfies a larger one below 1, so a smaller factor's plan
    stands for a larger one's that is slower and not equal (`planner/preference.py`). With 1 no gradient is GO.

    Args:
      profile: the profile.
      policy: name of the policy.
      reserve_factors: the factors.
      budgets_bytes: the budgets.
      request: the other requirements.
      granularity: as for `plan_finest`.

    Raises:
      BudgetError: if no plan fits at any setting; it names the smallest feasible budget.
    """
    points: list[SweepPoint] = []
    for factor in reserve_factors:
        asked = dataclasses.replace(request, reserve_factor=factor, memory_budget_bytes=None)
        asked.report(f"reserve factor {factor:g}")
        planner = FinestPlanner(profile, policy, asked, granularity)
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


def _sweep_point(planner: FinestPlanner, factor: float, budget: int | None) -> SweepPoint:
    try:
        return SweepPoint(factor, budget, planner.plan(budget)[1])
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
