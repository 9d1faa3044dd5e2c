"""The memory budget as the only knob."""

import dataclasses

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from every_plan import every_plan, least_within
from jaxferry.errors import BudgetError
from jaxferry.modes import GradientPlace, Mode
from jaxferry.planner import EQUAL_WITHIN, AutoSearch, Request, make_plan, policies, score_of
from jaxferry.step import UpdateOrder, predict, simulate
from profiles import UNLIMITED_BYTES, examples, profiles, smallest_peak_bytes, transformer

few = examples(15)
fewer = examples(3)
NEARLY = 1 + 1e-9


@few
@given(profiles(max_layers=2), st.integers(0, 250))
def test_no_plan_of_few_layers_that_fits_is_faster(profile, budget):
    least = least_within(profile, budget)
    if least == np.inf:
        with pytest.raises(BudgetError):
            make_plan(profile, "auto", memory_budget_bytes=budget)
    else:
        assert AutoSearch(profile, Request()).fastest(budget).objective_s <= least * NEARLY
        found = make_plan(profile, "auto", memory_budget_bytes=budget)
        assert found.predicted.steady_step_s <= least * (1 + EQUAL_WITHIN)


@pytest.mark.parametrize("sizes", [(3, 4), pytest.param((4, 6), marks=pytest.mark.slow)])
@fewer
@given(st.data(), st.sampled_from([None, 0.4, 1.0]))
def test_more_memory_is_never_slower_and_no_policy_that_fits_is_faster(sizes, data, factor):
    """Each budget is asked for on its own, as a user would. What the search finds is so, what it takes within 2 %."""
    profile = data.draw(profiles(*sizes))
    before, before_s, search = np.inf, np.inf, AutoSearch(profile, Request(factor))
    for budget in (40, 120, None):
        try:
            plan = make_plan(profile, "auto", reserve_factor=factor, memory_budget_bytes=budget)
        except BudgetError:
            assert before == np.inf
            continue
        assert budget is None or plan.predicted.peak_device_bytes <= budget
        assert plan.predicted.steady_step_s <= before * (1 + EQUAL_WITHIN)
        before, fastest_s = plan.predicted.steady_step_s, search.fastest(budget).objective_s
        assert fastest_s <= before_s * NEARLY
        before_s = fastest_s
        for other in policies():
            try:
                rival = make_plan(profile, other, reserve_factor=factor, memory_budget_bytes=budget)
            except BudgetError:
                continue
            assert plan.predicted.steady_step_s <= rival.predicted.steady_step_s * (1 + EQUAL_WITHIN)
            assert fastest_s <= rival.predicted.steady_step_s * NEARLY


@pytest.mark.slow
def test_a_long_model_gets_faster_with_memory_and_says_what_binds():
    profile = transformer(14, 2)
    search = AutoSearch(profile, Request())
    smallest = search.smallest_bytes
    plenty = search.plan(10 * sum(layer.param_bytes for layer in profile.layers))
    assert smallest == smallest_peak_bytes(profile)
    assert plenty.details["binding"] in ("GPU", "H2D", "D2H", "host")
    tight = search.plan(smallest)
    assert tight.details["binding"] == "memory"
    middle = search.plan((smallest + plenty.details["unlimited_needed_bytes"]) // 2)
    times = [predict(profile, plan).predicted.steady_step_s for plan in (tight, middle, plenty)]
    assert times[0] > times[1] > times[2]


def test_an_infeasible_budget_names_the_smallest_feasible_one():
    profile = transformer(12)
    smallest = smallest_peak_bytes(profile)
    with pytest.raises(BudgetError, match=f"smallest feasible.*{smallest} bytes") as caught:
        make_plan(profile, "auto", memory_budget_bytes=smallest - 1)
    assert caught.value.smallest_bytes == smallest
    assert make_plan(profile, "auto", memory_budget_bytes=smallest).predicted.peak_device_bytes == smallest


@few
@given(profiles(max_layers=4), st.sampled_from([None, 0.4, 1.0]))
def test_no_budget_is_at_least_as_good_as_any(profile, factor):
    free = make_plan(profile, "auto", reserve_factor=factor)
    assert "memory_budget_bytes" not in free.details
    for budget in (free.predicted.peak_device_bytes, 10**9):
        limited = make_plan(profile, "auto", reserve_factor=factor, memory_budget_bytes=budget)
        assert free.predicted.steady_step_s <= limited.predicted.steady_step_s * (1 + EQUAL_WITHIN)


@pytest.mark.slow
def test_no_budget_is_at_least_as_good_as_any_on_a_long_model_and_as_exact():
    profile = transformer(22, 2)
    free, exact = make_plan(profile, "auto"), make_plan(profile, "exact")
    plenty = make_plan(profile, "auto", memory_budget_bytes=10 * sum(layer.param_bytes for layer in profile.layers))
    for other in (plenty, exact):
        assert free.predicted.steady_step_s <= other.predicted.steady_step_s * (1 + EQUAL_WITHIN)


@few
@given(profiles(max_layers=2))
def test_no_memory_is_taken_for_nothing(profile):
    """Of plans that count as equal, one is taken that relies least on the model, also without a budget."""
    modes = tuple(mode for mode in Mode if mode is not Mode.DFGB)
    found = [*every_plan(profile, modes=modes), *every_plan(profile, modes=modes, memory_bytes=UNLIMITED_BYTES)]
    least_s = min(step_s for _, step_s, _ in found)
    equal = [each for each in found if each[1] < least_s * (1 + EQUAL_WITHIN) + (least_s == 0)]
    least_score = min(score_of(profile, plan) for plan, *_ in equal)
    plan = make_plan(profile, "auto")
    assert plan.predicted.steady_step_s <= least_s * (1 + EQUAL_WITHIN)
    assert score_of(profile, plan) <= least_score
    if score_of(profile, plan) == least_score:
        alike = [needed for other, _, needed in equal if score_of(profile, other) == least_score]
        assert plan.predicted.peak_device_bytes <= max(alike)


def test_a_given_factor_lets_no_gradient_stay_for_nothing():
    """Gradients whose backward is no faster for them go to the host, as with every policy."""
    layers = [dataclasses.replace(x, backward_go_s=x.backward_s, offload_s=0.0) for x in transformer(3).layers[:2]]
    profile = dataclasses.replace(transformer(3), layers=tuple(layers))
    assert set(make_plan(profile, "auto", reserve_factor=0.9).gradients) == {GradientPlace.HOST}


def test_gradients_that_leave_as_rows_take_no_share_of_a_given_factor():
    """They are never GO. Here they are most of all gradient bytes, more than the factor lets stay."""
    profile = transformer(5)
    table = dataclasses.replace(
        profile.layers[0], gradient_rows=True, grad_bytes=sum(x.grad_bytes for x in profile.layers)
    )
    profile = dataclasses.replace(profile, layers=(table, *profile.layers[1:]))
    plan = make_plan(profile, "auto", reserve_factor=0.2)
    rival = make_plan(profile, "native-overlapped", reserve_factor=0.2)
    assert plan.predicted.steady_step_s <= rival.predicted.steady_step_s * (1 + EQUAL_WITHIN)
    pairs = zip(profile.layers[1:], plan.gradients[1:], strict=True)
    stays = sum(layer.grad_bytes for layer, place in pairs if place is GradientPlace.DEVICE)
    assert stays <= 0.2 * sum(layer.grad_bytes for layer in profile.layers)


def test_the_stated_factor_is_rounded_up_so_that_the_plan_satisfies_it():
    """One of three gradients stays: 0.333334. Those of layers 0 and 1 cost nothing in host memory, layer 2's much."""
    first, second, third = transformer(3).layers
    layers = [
        dataclasses.replace(x, name=f"l{i}", grad_bytes=1, backward_go_s=x.backward_s + cost, offload_s=1.0)
        for i, (x, cost) in enumerate(((first, 0.0), (second, 0.0), (third, 9.0)))
    ]
    plan = AutoSearch(dataclasses.replace(transformer(3), layers=tuple(layers)), Request()).fastest(None).plan
    assert [place == "device" for place in plan.gradients] == [False, False, True]
    assert plan.reserve_factor == 0.333334


@few
@given(profiles(max_layers=2), st.integers(1, 2))
def test_a_plan_is_the_fastest_with_the_gradient_buffers_that_there_are(profile, num):
    whole = dataclasses.replace(profile, updates_after_all=False)
    buffered = dataclasses.replace(whole, gradient_buffers=num)
    plan = make_plan(buffered, "auto")
    assert plan.gradient_buffers == num and plan.update_order is UpdateOrder.BACKWARD
    assert simulate(whole, plan).steady_step_s == plan.predicted.steady_step_s
    found = every_plan(buffered, modes=tuple(mode for mode in Mode if mode is not Mode.DFGB))
    assert plan.predicted.steady_step_s <= min(step_s for _, step_s, _ in found) * (1 + EQUAL_WITHIN)
