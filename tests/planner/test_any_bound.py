"""The bound on any plan, against all plans of few layers."""

import dataclasses
import itertools

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from jaxferry.costs import Contention, LayerProfile, Profile
from jaxferry.modes import GradientPlace, Mode
from jaxferry.planner import AutoSearch, Objective, Request, any_plan_lower_bound_s, make_plan, policies, solve
from jaxferry.step import UpdateOrder, needed_bytes, simulate
from profiles import UNLIMITED_BYTES, examples, planned, profiles, recomputing, transformer, with_modes

many = examples(100)


@many
@given(st.booleans().flatmap(lambda programs: planned(max_layers=5, programs=programs)))
def test_no_plan_is_below_the_bound(case):
    profile, plan = case
    assert simulate(profile, plan).steady_step_s >= any_plan_lower_bound_s(profile) * (1 - 1e-12)


@many
@given(
    st.tuples(st.booleans(), st.booleans()).flatmap(
        lambda has: planned(max_layers=5, programs=has[0], recomputing=True, offloading=has[1])
    )
)
def test_no_plan_is_below_the_bound_within_the_memory_that_it_needs(case):
    profile, plan = case
    budget = needed_bytes(profile, plan)
    assert simulate(profile, plan).steady_step_s >= any_plan_lower_bound_s(profile, budget) * (1 - 1e-12)


def test_a_backward_that_writes_its_gradient_may_be_the_faster_one_as_measured_times_say():
    times = {"load_s": 0.01, "forward_s": 1.0, "backward_s": 2.0, "forward_dha_s": 1.5, "backward_dha_s": 2.6}
    times |= {"backward_go_s": 1.98, "offload_s": 0.01, "update_s": 0.01, "update_gpu_s": 0.05, "state_bytes": 300}
    layers = tuple(LayerProfile(name=name, param_bytes=100, grad_bytes=100, **times) for name in "abc")
    profile = Profile({}, layers)
    fastest = AutoSearch(profile, Request()).fastest(None)
    assert any_plan_lower_bound_s(profile) <= fastest.objective_s < 3 * (1.0 + 2.0)


def even(**changed):
    """Four equal layers; every way of doing something takes an eighth of a second, but for what is changed."""
    keys = ("load", "offload", "update", "forward", "forward_dha", "backward", "backward_dha", "backward_go")
    costs = {f"{key}_s": 0.125 for key in keys} | {"param_bytes": 8, "grad_bytes": 8, "activation_bytes": 8} | changed
    return Profile({}, tuple(LayerProfile(name=name, **costs) for name in "abcd"))


@pytest.mark.parametrize(
    ("changed", "least_s"),
    [
        (
            {"forward_s": 9.0, "forward_dha_s": 9.0, "backward_s": 2.0, "backward_dha_s": 2.0, "backward_go_s": 2.0},
            44.0,
        ),
        ({"load_s": 9.0, "forward_dha_s": 400.0}, 36.0),
        ({"offload_s": 9.0, "backward_go_s": 400.0}, 36.0),
        ({"update_s": 9.0}, 36.0),
    ],
    ids=["GPU", "H2D", "D2H", "host"],
)
def test_the_bound_is_at_least_the_work_of_each_lane_that_no_plan_avoids(changed, least_s):
    profile = even(**changed)
    step_s = make_plan(profile, "auto").predicted.steady_step_s
    assert 0.95 * least_s <= any_plan_lower_bound_s(profile) <= step_s <= 1.25 * least_s


@pytest.mark.parametrize(
    "slow",
    [
        {"offload_s": 9.0},
        {"load_s": 9.0},
        {"forward_dha_s": 9.0, "backward_dha_s": 9.0},
        {"update_s": 9.0, "update_gpu_s": 0.125, "state_bytes": 8},
        {"update_s": 9.0, "update_gpu_s": 0.125, "state_bytes": 8, "state_up_s": 9.0, "state_down_s": 9.0},
    ],
    ids=["offload", "load", "DHA", "host's update", "stream"],
)
def test_the_bound_counts_no_work_that_a_plan_avoids(slow):
    profile = even(**slow)
    step_s = make_plan(profile, "auto").predicted.steady_step_s
    assert any_plan_lower_bound_s(profile) <= step_s < 4.0


def test_the_bound_counts_kept_activations():
    """Two of four layers may keep theirs, or the last one none; the others run their forward again."""
    profile = even(activation_bytes=1000, recompute_s=9.0, recompute_activation_bytes=0)
    assert any_plan_lower_bound_s(profile, 2100) >= 9.0 > any_plan_lower_bound_s(profile, 4100)


def test_the_bound_counts_no_bytes_that_a_plan_does_not_need():
    """Parameters may be read in host memory, and activations recomputed."""
    profile = even(forward_dha_s=0.5, backward_dha_s=0.5, recompute_s=0.5, recompute_activation_bytes=1)
    search = AutoSearch(profile, Request())
    for budget in range(search.smallest_bytes, search.fastest(None).needed_bytes + 8, 4):
        assert any_plan_lower_bound_s(profile, budget) <= search.fastest(budget).objective_s * (1 + 1e-12)


def test_a_step_alone_ends_with_its_last_update_before_backwards_of_layers_that_are_not_trained():
    first, *others = even().layers
    first = dataclasses.replace(first, has_gradient=False, backward_s=9.0, backward_dha_s=9.0)
    profile = Profile({}, (first, *others))
    plan = make_plan(profile, "exact", objective="step")
    assert solve(profile, None, None, Objective.STEP).bound_s <= plan.predicted.step_s < 9.0
    assert plan.predicted.steady_step_s > 9.0


def test_lanes_without_tasks_lose_nothing():
    """Programs read all parameters in host memory, beside updates that take all of the link's time."""
    times = {"load_s": 9.0, "forward_s": 1.0, "backward_s": 1.0, "forward_dha_s": 1.0, "backward_dha_s": 1.0}
    times |= {"backward_go_s": 1.0, "offload_s": 0.0, "update_s": 1.0, "forward_read_s": 1.0, "backward_read_s": 1.0}
    layers = tuple(LayerProfile(name=name, param_bytes=1, grad_bytes=1, **times) for name in "ab")
    profile = Profile({}, layers, contention=Contention({"H2D": {"host": 1.0}}))
    plan = with_modes(profile, [Mode.DHA] * 2, [GradientPlace.HOST] * 2)
    step_s = simulate(profile, dataclasses.replace(plan, update_order=UpdateOrder.NEED)).steady_step_s
    reads_s, lost_s, update_s = 4.0, 2.0, 1.0
    assert step_s == reads_s + update_s < reads_s + lost_s
    assert any_plan_lower_bound_s(profile) <= step_s


def test_a_budget_that_makes_layers_recompute_raises_the_bound():
    profile = recomputing(transformer(9), seconds_of_forward=1.0, share=0.0)
    kept = sum(layer.activation_bytes for layer in profile.layers)
    again_s = sum(layer.recompute_s for layer in profile.layers[:-1])
    free_s = any_plan_lower_bound_s(profile, 100 * kept)
    half = any_plan_lower_bound_s(profile, profile.layers[-1].activation_bytes)
    assert free_s == pytest.approx(any_plan_lower_bound_s(profile), rel=0.02)
    least_s = sum(x.forward_s + x.backward_s + x.inter_forward_s + x.inter_backward_s for x in profile.layers)
    assert half >= 0.99 * (least_s + again_s)


@examples(6)
@given(profiles(max_layers=2))
def test_no_plan_of_two_layers_is_below_the_bound(profile):
    bound_s = any_plan_lower_bound_s(profile)
    choices = list(itertools.product(Mode, GradientPlace))
    for chosen in itertools.product(choices, repeat=len(profile.layers)):
        plan = with_modes(profile, [mode for mode, _ in chosen], [place for _, place in chosen])
        for order in UpdateOrder:
            found = simulate(profile, dataclasses.replace(plan, update_order=order, memory_bytes=UNLIMITED_BYTES))
            assert found.steady_step_s >= bound_s * (1 - 1e-12)


@pytest.mark.slow
def test_it_is_near_the_best_plans_of_transformers():
    gaps = []
    for seed in range(2):
        profile = transformer(14, seed)
        bound_s = any_plan_lower_bound_s(profile)
        times = [make_plan(profile, name).predicted.steady_step_s for name in policies()]
        assert min(times) >= bound_s * (1 - 1e-12)
        gaps.append(min(times) / bound_s - 1)
    assert np.mean(gaps) < 0.1


def test_layers_without_cost_are_bounded_by_nothing():
    free = {key: 0 for key, value in transformer(3).layers[0].to_json().items() if not isinstance(value, str)}
    layers = [free | {"name": f"l{index}"} for index in range(3)]
    profile = Profile.from_json({"format": "jaxferry.profile/1", "machine": {}, "layers": layers})
    assert any_plan_lower_bound_s(profile) == 0
