"""Plan, then simulate: the plan of a policy with its prediction; all policies side by side; sweeps."""

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxferry.errors import BudgetError
from jaxferry.plan.auto import Auto, AutoSearch
from jaxferry.plan.base import Objective, Request, read_objective
from jaxferry.plan.bounds import steady_lower_bound_s
from jaxferry.plan.evaluate import gradient_flags
from jaxferry.plan.frontier import optimal_forward
from jaxferry.plan.records import Plan
from jaxferry.plan.registry import make_policy, policies
from jaxferry.profiling.records import Profile
from jaxferry.simulate.report import predict, simulate

_ROUNDING = 1e-12


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
      policy: one of `jaxferry.plan.registry.policies()`.
      objective: what `exact` makes least.
      reserve_factor: share of all gradient bytes, in [0, 1], that may stay on the device; None for the policy's
        default.
      memory_budget_bytes: device memory that the plan must fit into; None for no limit.
      progress: called with a few words whenever a long search enters its next part.

    Raises:
      InputError: if an argument is not acceptable.
      BudgetError: if no plan of the policy fits; it names the smallest feasible budget.
    """
    request = Request(reserve_factor, memory_budget_bytes, read_objective(objective), progress)
    return predict(profile, make_policy(policy).plan(profile, request))


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One policy's row beside those of the others.

    Attributes:
      policy: its name.
      plan: its plan, or None where none fits the budget.
      link_bytes: bytes over the host link in one step.
      gap: steady time over the proven lower bound for plans of GFGB, DHA and DFGB with these gradients, less 1; below 0
        only where RESIDENT layers beat what such plans can do.
      smallest_bytes: the smallest feasible budget, where no plan fits.
    """

    policy: str
    plan: Plan | None
    link_bytes: int = 0
    gap: float = 0.0
    smallest_bytes: int = 0

    def to_json(self) -> dict[str, Any]:
        """The row as JSON values."""
        if self.plan is None:
            return {"policy": self.policy, "fits": False, "smallest_budget_bytes": self.smallest_bytes}
        predicted = self.plan.predicted.to_json() if self.plan.predicted else {}
        return {"policy": self.policy, "fits": True, **predicted, "link_bytes": self.link_bytes, "gap": self.gap}


def compare(profile: Profile, request: Request) -> list[Comparison]:
    """Every policy's answer to the same request."""
    optimum_s = optimal_forward(profile).bound_s
    rows = []
    for name in policies():
        request.report(name)
        try:
            plan = make_policy(name).plan(profile, request)
        except BudgetError as error:
            rows.append(Comparison(name, None, smallest_bytes=error.smallest_bytes))
            continue
        simulation = simulate(profile, plan)
        bound_s = steady_lower_bound_s(profile, gradient_flags(plan), optimum_s)
        gap = simulation.steady_step_s / bound_s - 1 if bound_s > 0 else 0.0
        gap = 0.0 if abs(gap) < _ROUNDING else gap
        plan = dataclasses.replace(plan, predicted=simulation.predicted)
        rows.append(Comparison(name, plan, simulation.link_bytes, gap))
    return rows


@dataclasses.dataclass(frozen=True)
class SweepPoint:
    """One setting of a sweep and its plan, with `predicted`; no plan where none fits."""

    reserve_factor: float
    memory_budget_bytes: int | None
    plan: Plan | None

    def to_json(self) -> dict[str, Any]:
        """The point as JSON values."""
        setting = {"reserve_factor": self.reserve_factor, "memory_budget_bytes": self.memory_budget_bytes}
        if self.plan is None or self.plan.predicted is None:
            return {**setting, "fits": False}
        return {**setting, "fits": True, **self.plan.predicted.to_json()}


def sweep(
    profile: Profile,
    policy: str,
    reserve_factors: list[float],
    budgets_bytes: list[int] | None,
    request: Request,
) -> list[SweepPoint]:
    """A policy's plan for each reserve factor and each budget; without budgets, one for each reserve factor."""
    points = []
    for factor in reserve_factors:
        asked = dataclasses.replace(request, reserve_factor=factor, memory_budget_bytes=None)
        asked.report(f"reserve factor {factor:g}")
        search = AutoSearch(profile, asked) if policy == Auto.name and budgets_bytes is not None else None
        for budget in budgets_bytes if budgets_bytes is not None else [None]:
            points.append(SweepPoint(factor, budget, _fitting_plan(profile, policy, asked, budget, search)))
    return points


def _fitting_plan(
    profile: Profile, policy: str, request: Request, budget: int | None, search: AutoSearch | None
) -> Plan | None:
    try:
        if search is not None and budget is not None:
            return predict(profile, search.plan(budget))
        asked = dataclasses.replace(request, memory_budget_bytes=budget)
        return predict(profile, make_policy(policy).plan(profile, asked))
    except BudgetError:
        return None


def knee(points: list[SweepPoint]) -> SweepPoint | None:
    """Where more memory stops paying.

    Of the points that none beats in both memory and steady time, the farthest below the line from the leanest to the
    fastest one, both axes scaled to their range; the fastest one of two or fewer.
    """
    known = []
    for point in points:
        if point.plan is not None and point.plan.predicted is not None:
            predicted = point.plan.predicted
            known.append((predicted.peak_device_bytes, predicted.steady_step_s, point))
    known.sort(key=lambda row: row[:2])
    frontier: list[tuple[int, float, SweepPoint]] = []
    for row in known:
        if not frontier or row[1] < frontier[-1][1]:
            frontier.append(row)
    if len(frontier) < 3:
        return frontier[-1][2] if frontier else None
    (low, slow, _), (high, fast, _) = frontier[0], frontier[-1]
    return max(frontier, key=lambda row: (high - row[0]) / (high - low) + (slow - row[1]) / (slow - fast))[2]
