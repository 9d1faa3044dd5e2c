"""Plans for a budget of which somebody else counts the bytes, more than the planner's model does.

The engine knows what a device's allocator takes beyond buffers, and what programs of updates need once they are
compiled. A plan that turns out to need too much is planned again for a budget that is smaller by the excess. What a
plan needs beyond its model differs from plan to plan, so that step may be too long: between a budget whose plan fits
and one whose plan does not, further budgets are tried as long as that may be worth it.
"""

import dataclasses
from collections.abc import Callable, Iterable

from jaxferry.planner.l2l import L2L
from jaxferry.planner.native_overlapped import NativeOverlapped
from jaxferry.planner.preference import longest_equal_s
from jaxferry.step.records import Plan

SIMPLE_POLICIES = (NativeOverlapped.name, L2L.name)
"""Policies whose plans `auto` takes where they fit as counted and are faster than what it plans itself and fits."""

_MOST_PLANS = 8
"""The most budgets that are tried."""
_FINEST = 1 / 512
"""Of the budget: nearer budgets are not told apart."""


def fastest_that_fits(
    plan_of: Callable[[int], Plan],
    excess_of: Callable[[Plan], int],
    budget_bytes: int,
    least_bytes: int = 1,
    others: Callable[[], Iterable[Plan]] = tuple,
) -> Plan | None:
    """Returns the fastest plan found that needs no more than a budget, as counted; None if none does.

    Args:
      plan_of: plans for a budget in bytes.
      excess_of: counts the bytes that a plan needs beyond the budget; 0 or less if it fits.
      budget_bytes: the budget.
      least_bytes: the smallest budget to plan for.
      others: makes plans to take in place of the fastest one where they fit and are faster; called if a plan of these
        does not fit and another one does.
    """
    left, best, low, failed = budget_bytes, None, None, None
    for _ in range(_MOST_PLANS):
        plan = plan_of(left)
        excess_bytes = excess_of(plan)
        if excess_bytes <= 0:
            low = left
            if best is None or _step_s(plan) < _step_s(best):
                best = plan
        else:
            failed = left, plan
        if failed is None or (low is None and failed[0] <= least_bytes):
            break
        high, too_large = failed
        if low is None:
            left = max(left - excess_bytes, least_bytes)
            continue
        assert best is not None
        if high - low <= budget_bytes * _FINEST or _step_s(best) <= longest_equal_s(_step_s(too_large)):
            break
        left = (low + high) // 2
    if failed is None or best is None:
        return best
    for other in others():
        if longest_equal_s(_step_s(other)) < _step_s(best) and excess_of(other) <= 0:
            best = dataclasses.replace(other, policy=failed[1].policy, details=failed[1].details)
    return best


def _step_s(plan: Plan) -> float:
    return 0.0 if plan.predicted is None else plan.predicted.steady_step_s
