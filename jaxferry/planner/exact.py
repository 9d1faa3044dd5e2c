"""The best plan of GFGB, DHA and DFGB: the default of this package.

The search is that of `auto` (`planner/search.py`) with these modes alone, for any objective, with gradients by the
reserve factor. With few layers every plan is simulated in both orders of updates, so the result is the optimum. With
more, the plan states its `gap` to the proven `lower_bound_s` of the linear programme with the same choices.

The reserve factor decides the gradients, as for any policy: with 1 no gradient is GO; with less, GO-MemFerry chooses
those that stay (`planner/base.py`). Without a given factor the policies have two defaults: 0 for `go-memferry`, 1
for all others. `exact` then plans with both, so its search loses to no policy. It takes 1 unless 0 is worth it, and the
plan states the factor. The bound holds for both.

`auto` can be faster still, because it may keep layers on the device (RESIDENT) and choose any gradients, at the price
of their memory.
"""

import dataclasses
import functools

import numpy as np

from jaxferry.costs import Profile
from jaxferry.errors import BudgetError
from jaxferry.modes import Mode
from jaxferry.planner.base import Objective, Policy, Request, best_order, gradients_to_host
from jaxferry.planner.baselines import NativeOffload, NativeOverlapped, ZeroOffload
from jaxferry.planner.columns import Columns
from jaxferry.planner.judge import Judge, Judged
from jaxferry.planner.memferry import GOMemFerry, MemFerry
from jaxferry.planner.preference import longest_equal_s, preferred
from jaxferry.planner.search import Search
from jaxferry.step import Plan, StepSchedules

_MODES = (Mode.GFGB, Mode.DHA, Mode.DFGB)
_PREFIXES = 16
"""The number of evenly spread lengths of which the best one is refined."""

_POLICIES = (NativeOverlapped, NativeOffload, ZeroOffload, MemFerry)


class Exact(Policy):
    """A plan equal to the optimum, or to the best plan that was found, with its gap to a bound."""

    name = "exact"
    summary = "the optimum under the machine model, or its proven gap"

    def plan(self, profile: Profile, request: Request | None = None) -> Plan:
        """The preferred plan, with `objective`, `lower_bound_s` and `gap` as details.

        Raises:
          BudgetError: if no plan fits.
        """
        request = request or Request()
        found, errors, bound_s, fastest_s = list[Judged](), list[BudgetError](), np.inf, np.inf
        for factor in reserve_factors(request):
            try:
                searched = _search(profile, request, factor).within(request.memory_budget_bytes)
            except BudgetError as error:
                errors.append(error)
                continue
            found.append(searched.chosen())
            own_s = searched.best.objective_s if searched.is_complete else searched.solution.bound_s
            bound_s, fastest_s = min(bound_s, own_s), min(fastest_s, searched.best.objective_s)
        if not found:
            raise min(errors, key=lambda error: error.smallest_bytes)
        equal = [each for each in found if each.objective_s <= longest_equal_s(fastest_s)]
        best = preferred(equal, lambda each: each.score)
        plan, objective = best.plan, request.objective
        plan = dataclasses.replace(plan, memory_bytes=request.memory_budget_bytes)
        if objective is Objective.FORWARD:
            plan = best_order(plan, StepSchedules(profile, plan))[0]
        return dataclasses.replace(plan, details=gap_details(objective, best.objective_s, float(bound_s)))


def reserve_factors(request: Request) -> tuple[float, ...]:
    """The reserve factors to plan with, the preferred one first: the request's, or the defaults of all policies."""
    if request.reserve_factor is not None:
        return (request.reserve_factor,)
    return (Exact.default_reserve_factor, GOMemFerry.default_reserve_factor)


def _search(profile: Profile, request: Request, factor: float) -> Search:
    """The search of plans whose gradients the reserve factor decides."""
    columns = Columns(
        profile, (), modes=_MODES, may_recompute=False, goes=gradients_to_host(profile, factor), may_go=factor < 1
    )

    def starts() -> list[Plan]:
        plans = [policy().plan(profile, Request(factor)) for policy in _POLICIES]
        return [*plans, _with_first_by_dha(profile, plans[0])] if request.objective is Objective.STEADY else plans

    judge = Judge(columns, Exact.name, request.objective, lambda _: factor)
    return Search(judge, lambda _: True, starts, request.report, None)


def _with_first_by_dha(profile: Profile, plan: Plan) -> Plan:
    """The plan with its first layers by DHA, so many that its steady step is about the shortest of these.

    The next step's first loads wait for the host's last updates; layers that are not loaded wait the least.
    """

    def with_first(number: int) -> Plan:
        first = (dataclasses.replace(layer, mode=Mode.DHA) for layer in plan.layers[:number])
        return dataclasses.replace(plan, layers=(*first, *plan.layers[number:]))

    @functools.cache
    def seconds(number: int) -> float:
        return StepSchedules(profile, with_first(number)).steady(None).seconds(by_need=False)

    count = len(plan.layers)
    stride = max(count // _PREFIXES, 1)
    best = min(range(0, count + 1, stride), key=seconds)
    while stride > 1:
        stride = -(-stride // 2)
        best = min((number for number in (best, best - stride, best + stride) if 0 <= number <= count), key=seconds)
    return with_first(best)


def gap_details(objective: Objective, value_s: float, bound_s: float) -> dict[str, object]:
    """The details of a plan that state its gap to a lower bound; a bound above the value proves no more than that."""
    bound_s = min(bound_s, value_s)
    gap = value_s / bound_s - 1 if bound_s > 0 else 0.0
    return {"objective": objective.value, "lower_bound_s": bound_s, "gap": gap}
