"""One suite that every policy passes: the contract of `jaxferry.planner.base.Policy`."""

import dataclasses
import json

import hypothesis.strategies as st
import pytest
from hypothesis import given

from jaxferry.errors import BudgetError, InputError
from jaxferry.modes import GradientPlace, Mode
from jaxferry.planner import Objective, Request, make_plan, make_policy, policies
from jaxferry.step import Plan, simulate
from oracle import Oracle
from profiles import UNLIMITED_BYTES, examples, profiles, transformer

few = examples(12)
factors = st.sampled_from([None, 0.0, 0.29, 0.5, 1.0])
everyone = pytest.mark.parametrize("name", policies())


@everyone
@few
@given(profiles(max_layers=5), factors)
def test_a_plan_is_one_for_the_profile_and_within_the_reserve_factor(name, profile, factor):
    policy = make_policy(name)
    plan = policy.plan(profile, Request(factor))
    plan.check_profile(profile)
    assert plan.policy == name
    total = sum(layer.grad_bytes for layer in profile.layers)
    stays = sum(
        layer.grad_bytes
        for layer, place in zip(profile.layers, plan.gradients, strict=True)
        if place is GradientPlace.DEVICE
    )
    assert stays <= plan.reserve_factor * total * (1 + 1e-12)
    if factor is not None:
        assert plan.reserve_factor == factor
    elif name not in ("exact", "auto"):
        assert plan.reserve_factor == policy.default_reserve_factor
    if plan.reserve_factor == 1:
        assert GradientPlace.HOST not in plan.gradients


@everyone
@few
@given(profiles(max_layers=5), factors)
def test_dfgb_keeps_the_window(name, profile, factor):
    plan = make_policy(name).plan(profile, Request(factor))
    if set(plan.modes) <= {Mode.GFGB, Mode.DHA, Mode.DFGB}:
        assert Oracle(profile, plan).keeps_window()
    assert plan.modes[-1] is not Mode.DFGB


@everyone
@few
@given(profiles(max_layers=5), factors, st.integers(0, 400))
def test_a_plan_fits_the_budget_or_the_error_names_one_that_does(name, profile, factor, budget):
    try:
        plan = make_policy(name).plan(profile, Request(factor, budget))
    except BudgetError as error:
        assert error.smallest_bytes > budget
        assert str(error.smallest_bytes) in str(error)
        plan = make_policy(name).plan(profile, Request(factor, error.smallest_bytes))
        budget = error.smallest_bytes
        if budget > 0:
            with pytest.raises(BudgetError):
                make_policy(name).plan(profile, Request(factor, budget - 1))
    assert simulate(profile, plan).peak_device_bytes <= budget


@everyone
@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_same_question_has_the_same_answer(name, tied):
    profile = transformer(7, tied=tied)
    assert make_plan(profile, name, reserve_factor=0.5) == make_plan(profile, name, reserve_factor=0.5)


@everyone
def test_a_plan_with_its_prediction_survives_json(name):
    plan = make_plan(transformer(7), name)
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


@everyone
def test_a_profile_without_any_cost_has_a_plan(name):
    free = {key: 0 for key, value in transformer(3).layers[0].to_json().items() if not isinstance(value, str)}
    layers = [free | {"name": f"l{index}"} for index in range(3)]
    profile = type(transformer(3)).from_json({"format": "jaxferry.profile/1", "machine": {}, "layers": layers})
    assert make_plan(profile, name).predicted.step_s == 0


@pytest.mark.parametrize("name", ["zero-offload", "native-offload", "native-overlapped", "l2l"])
def test_baselines_use_one_mode(name):
    plan = make_policy(name).plan(transformer(9))
    assert set(plan.modes) == {Mode.RELOAD if name == "l2l" else Mode.GFGB}
    expected = {
        "zero-offload": ("bulk", "after-all"),
        "native-offload": ("layerwise", "after-all"),
        "native-overlapped": ("layerwise", "overlapped"),
        "l2l": ("layerwise", "overlapped"),
    }
    assert (plan.loads, plan.updates) == expected[name]


@pytest.mark.parametrize("name", ["zero-offload", "native-offload", "native-overlapped", "l2l", "memferry", "exact"])
def test_gradients_may_fill_the_budget(name):
    """Without activations, backwards wait for the transfers of gradients unless a budget gives these room."""
    profile = transformer(8)
    layers = tuple(dataclasses.replace(x, activation_bytes=0, param_bytes=1, offload_s=2e-3) for x in profile.layers)
    profile = dataclasses.replace(profile, layers=layers)
    without, plenty = (
        make_plan(profile, name, reserve_factor=1.0, memory_budget_bytes=x) for x in (None, UNLIMITED_BYTES)
    )
    assert plenty.predicted.step_s < without.predicted.step_s
    assert plenty.predicted.peak_device_bytes > without.predicted.peak_device_bytes


def test_l2l_holds_less_than_native_overlapped():
    profile = transformer(20)
    least, most = (make_plan(profile, name).predicted.peak_device_bytes for name in ("l2l", "native-overlapped"))
    assert least < most


def test_go_memferry_is_memferry_with_another_default():
    profile = transformer(14)
    go, memferry = make_policy("go-memferry"), make_policy("memferry")
    assert set(go.plan(profile).gradients) == {GradientPlace.HOST}
    assert go.plan(profile, Request(0.4)).layers == memferry.plan(profile, Request(0.4)).layers


def test_an_unknown_policy_lists_the_known_ones():
    with pytest.raises(InputError, match=r"unknown policy 'fastest'.*zero-offload.*exact, auto"):
        make_policy("fastest")


@pytest.mark.parametrize("factor", [-0.1, 1.1, float("nan"), True])
def test_a_reserve_factor_that_is_none_is_refused(factor):
    with pytest.raises(InputError, match="reserve_factor must lie in"):
        Request(factor)


def test_objectives_and_budgets_that_are_none_are_refused():
    with pytest.raises(InputError, match="objective must be one of forward, step, steady, got 'speed'"):
        make_plan(transformer(4), "exact", objective="speed")
    with pytest.raises(InputError, match="memory_budget_bytes"):
        Request(memory_budget_bytes=-1)


def test_prediction_agrees_with_the_search_s_own_numbers():
    profile = transformer(10)
    for objective in Objective:
        plan = make_plan(profile, "exact", objective=objective)
        found_s = plan.details["lower_bound_s"] * (1 + plan.details["gap"])
        predicted = {"forward": "forward_s", "step": "step_s", "steady": "steady_step_s"}[objective]
        assert getattr(plan.predicted, predicted) == pytest.approx(found_s, rel=1e-9)
