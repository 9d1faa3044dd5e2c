"""Plans for a budget of which the engine counts more bytes than the planner's model does."""

import dataclasses

import pytest

from jaxferry.modes import Mode
from jaxferry.planner import fastest_that_fits
from jaxferry.step import LayerPlan, Plan, Predicted

BUDGET = 1000
PREDICTED = Predicted(forward_s=1.0, step_s=9.0, steady_step_s=9.0, peak_device_bytes=600)
LEANEST = Plan("any", 1.0, (LayerPlan("h", Mode.GFGB),), predicted=PREDICTED)


def plan_of(budget):
    """A plan that fills its budget; more memory makes it faster, but for the least memory the price is steep."""
    used = max(budget, 600)
    step_s = 9.0 if used == 600 else 4.0 - 2e-3 * (used - 600)
    predicted = dataclasses.replace(PREDICTED, step_s=step_s, steady_step_s=step_s, peak_device_bytes=used)
    return dataclasses.replace(LEANEST, predicted=predicted)


@pytest.mark.parametrize("beyond", [150, 300, 390])
@pytest.mark.parametrize("more_for_large", [0, 100])
def test_a_plan_is_found_near_the_fastest_that_fits_by_the_count(beyond, more_for_large):
    """The excess of a large plan is larger, so a budget that is smaller by that excess is too small."""

    def excess(plan):
        used = plan.predicted.peak_device_bytes
        return used + beyond + (more_for_large if used > 800 else 0) - BUDGET

    found = fastest_that_fits(plan_of, excess, BUDGET)
    best = min(plan_of(b).predicted.step_s for b in range(1, BUDGET + 1) if excess(plan_of(b)) <= 0)
    assert excess(found) <= 0 and found.predicted.step_s <= 1.02 * best


def test_where_no_plan_fits_there_is_none_and_the_least_budget_is_tried():
    tried = []

    def counted(budget):
        tried.append(budget)
        return plan_of(budget)

    assert fastest_that_fits(counted, lambda plan: 10_000, BUDGET, least_bytes=600) is None
    assert tried == [BUDGET, 600]


def test_a_plan_that_fits_at_once_is_the_only_one():
    tried = []

    def counted(budget):
        tried.append(budget)
        return plan_of(budget)

    assert fastest_that_fits(counted, lambda plan: 0, BUDGET) == plan_of(BUDGET) and tried == [BUDGET]


def test_where_only_slow_plans_fit_another_policys_plan_is_taken_if_it_fits():
    """The steps between plans may be coarse: here only the leanest one fits, which is slow."""
    others = [plan_of(700), plan_of(900)]  # as counted, the first one fits

    def excess(plan):
        return 0 if plan == LEANEST or plan is others[0] else 500

    found = fastest_that_fits(plan_of, excess, BUDGET, others=lambda: others)
    assert found.predicted == others[0].predicted and found.policy == LEANEST.policy
    assert fastest_that_fits(plan_of, excess, BUDGET) == LEANEST
