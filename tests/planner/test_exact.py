"""The exact policy against brute force, its bounds, and every other policy."""

import dataclasses
import itertools

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from jaxferry.costs import LayerProfile, Profile
from jaxferry.errors import BudgetError
from jaxferry.modes import GradientPlace, Mode
from jaxferry.planner import (
    EQUAL_WITHIN,
    Columns,
    Exact,
    Objective,
    Request,
    gradients_to_host,
    make_plan,
    make_policy,
    policies,
    reserve_factors,
    search,
    solve,
)
from jaxferry.step import UpdateOrder, simulate
from oracle import Oracle
from profiles import (
    UNLIMITED_BYTES,
    drawn,
    examples,
    profiles,
    smallest_peak_bytes,
    transformer,
    with_modes,
)
from slowly import slow_cases

STEADY_OFTEN = [
    Objective.STEADY,
    *(pytest.param(objective, marks=pytest.mark.slow) for objective in (Objective.FORWARD, Objective.STEP)),
]
few = examples(25)
many = examples(60)
GFGB_OR_DHA = ("GFGB", "DHA")
SECONDS = {Objective.FORWARD: "forward_s", Objective.STEP: "step_s", Objective.STEADY: "steady_step_s"}
RIVALS = tuple(name for name in policies() if name not in ("exact", "auto"))


def every_time(profile, grad_on_host):
    """The forward, step and steady time of all plans of GFGB, DHA and DFGB, within the window, in both orders."""
    places = [GradientPlace.HOST if on_host else GradientPlace.DEVICE for on_host in grad_on_host]
    for modes in itertools.product((Mode.GFGB, Mode.DHA, Mode.DFGB), repeat=len(profile.layers)):
        plan = with_modes(profile, modes, places)
        if Mode.DFGB not in modes or Oracle(profile, plan).keeps_window():
            for order in UpdateOrder:
                yield simulate(profile, dataclasses.replace(plan, update_order=order))


def brute_force(profile, grad_on_host):
    """The least of each."""
    found = list(every_time(profile, grad_on_host))
    return {objective: min(getattr(each, SECONDS[objective]) for each in found) for objective in Objective}


def objective_of(plan, objective):
    return getattr(plan.predicted, SECONDS[Objective(objective)])


def times_of_baselines(profile, factor, objective):
    """The times of plans whose loads or updates are in another order than that of any choice of modes."""
    for name in ("native-offload", "zero-offload"):
        plan = make_plan(profile, name, reserve_factor=factor)
        if Mode.RELOAD not in plan.modes:
            for order in UpdateOrder:
                yield getattr(
                    simulate(profile, dataclasses.replace(plan, update_order=order)), SECONDS[Objective(objective)]
                )


@pytest.mark.parametrize("size", [5, pytest.param(7, marks=pytest.mark.slow)])
@few
@given(st.data())
def test_forward_is_the_least_of_all_plans_by_the_oracle(size, data):
    profile = data.draw(profiles(max_layers=size))
    choices = itertools.product(GFGB_OR_DHA, repeat=len(profile.layers))
    least = min(Oracle(profile, with_modes(profile, modes)).forward_s() for modes in choices)
    assert least <= make_plan(profile, "exact", objective="forward").predicted.forward_s <= least * (1 + EQUAL_WITHIN)


@pytest.mark.parametrize("objective", ["step", "steady"])
@pytest.mark.parametrize("size", [3, pytest.param(4, marks=pytest.mark.slow)])
@few
@given(st.data())
def test_few_layers_are_optimal_and_say_so(size, objective, data):
    profile = data.draw(profiles(max_layers=size))
    for factor, factors in ((1.0, (1.0,)), (0.5, (0.5,)), (None, (1.0, 0.0))):
        plan = make_plan(profile, "exact", objective=objective, reserve_factor=factor)
        least = min(brute_force(profile, gradients_to_host(profile, x))[Objective(objective)] for x in factors)
        least = min([least, *(each for x in factors for each in times_of_baselines(profile, x, objective))])
        assert least * (1 - 1e-12) <= objective_of(plan, objective) <= least * (1 + EQUAL_WITHIN)
        assert plan.details["gap"] <= EQUAL_WITHIN
        assert plan.details["lower_bound_s"] == pytest.approx(least, rel=1e-12)


def test_a_faster_plan_whose_dfgb_load_ends_after_the_first_gradient_leaves_is_not_taken():
    """MemFerry's window: the first layer's load takes far longer than the second one computes."""
    times = {"load_s": 10.0, "forward_s": 0.125, "forward_dha_s": 0.125, "backward_s": 0.125, "backward_dha_s": 90.0}
    times |= {"backward_go_s": 0.125, "offload_s": 0.125, "update_s": 0.125}
    first = LayerProfile(name="first", param_bytes=1, grad_bytes=1, **times)
    others = times | {"load_s": 0.125, "forward_s": 2.0, "backward_s": 2.0}
    second = LayerProfile(name="second", param_bytes=1, grad_bytes=1, **others)
    profile = Profile({}, (first, second))
    breaks = simulate(profile, with_modes(profile, [Mode.DFGB, Mode.GFGB])).steady_step_s
    plan = make_plan(profile, "exact", reserve_factor=1.0)
    assert Mode.DFGB not in plan.modes
    assert breaks * (1 + EQUAL_WITHIN) < plan.predicted.steady_step_s


@pytest.mark.parametrize("factor", [0.0, 0.5, 1.0])
@few
@given(st.booleans().flatmap(lambda programs: profiles(max_layers=3, programs=programs)))
def test_bounds_are_below_every_plan_in_both_orders(factor, profile):
    grad_on_host = gradients_to_host(profile, factor)
    columns = Columns(profile, (), modes=(Mode.GFGB, Mode.DHA, Mode.DFGB), may_recompute=False, goes=grad_on_host)
    least = brute_force(profile, grad_on_host)
    for objective in Objective:
        assert solve(profile, None, columns, objective).bound_s <= least[objective] * (1 + 1e-12)


@pytest.mark.parametrize(
    ("objective", "given"), [("steady", None), *slow_cases(("step", 1.0), ("step", None), ("steady", 1.0))]
)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 5))])
def test_the_search_for_many_layers_is_near_the_optimum_and_honest_about_its_gap(objective, seed, given, monkeypatch):
    monkeypatch.setattr(search, "MOST_ENUMERATED", 0)
    profile = transformer(6, seed)
    plan = make_plan(profile, "exact", objective=objective, reserve_factor=given)
    factors = (1.0, 0.0) if given is None else (given,)
    least = min(brute_force(profile, gradients_to_host(profile, x))[Objective(objective)] for x in factors)
    found = objective_of(plan, objective)
    assert least * (1 - 1e-12) <= found <= least * (1 + 2 * EQUAL_WITHIN)
    assert found == pytest.approx(plan.details["lower_bound_s"] * (1 + plan.details["gap"]), rel=1e-12)
    assert plan.details["lower_bound_s"] <= least * (1 + 1e-12)


@pytest.mark.parametrize("objective", STEADY_OFTEN)
@pytest.mark.parametrize("factor", [None, 0.3, *(pytest.param(x, marks=pytest.mark.slow) for x in (0.0, 1.0))])
@pytest.mark.parametrize(
    "profile",
    [
        pytest.param(transformer(24, 3), id="24", marks=pytest.mark.slow),
        pytest.param(transformer(40, 4, tied=True), id="40-tied", marks=pytest.mark.slow),
        pytest.param(transformer(16, 4, tied=True), id="16-tied"),
        pytest.param(transformer(8, 5), id="8"),
    ],
)
def test_no_other_policy_wins_on_its_own_objective(objective, factor, profile):
    best = objective_of(make_plan(profile, "exact", objective=objective, reserve_factor=factor), objective)
    for other in RIVALS:
        assert best <= objective_of(make_plan(profile, other, reserve_factor=factor), objective) * (1 + EQUAL_WITHIN)


@pytest.mark.parametrize("objective", STEADY_OFTEN)
@few
@given(profiles(max_layers=4), st.sampled_from([None, 0.0, 0.5, 1.0]))
def test_no_other_policy_wins_on_few_layers(objective, profile, factor):
    best = objective_of(make_plan(profile, "exact", objective=objective, reserve_factor=factor), objective)
    for other in RIVALS:
        assert best <= objective_of(make_plan(profile, other, reserve_factor=factor), objective) * (1 + EQUAL_WITHIN)


@few
@given(profiles(max_layers=4), st.sampled_from([None, 0.0, 0.5, 1.0]))
def test_auto_is_faster_only_by_resident_layers_or_other_gradients(profile, factor):
    """What `auto` may do and `exact` may not: hold copies for good, and pick any gradients, not a policy's default.

    Both have the same room for gradients. Without a budget `auto` takes all there is, `exact` none beyond its peak.
    """
    best = make_plan(profile, "exact", reserve_factor=factor, memory_budget_bytes=UNLIMITED_BYTES)
    auto = make_plan(profile, "auto", reserve_factor=factor, memory_budget_bytes=UNLIMITED_BYTES)
    assert auto.predicted.steady_step_s <= best.predicted.steady_step_s * (1 + EQUAL_WITHIN)
    if auto.predicted.steady_step_s * (1 + EQUAL_WITHIN) < best.predicted.steady_step_s * (1 - 1e-12):
        choices = [gradients_to_host(profile, x) for x in ((1.0, 0.0) if factor is None else (factor,))]
        on_host = [place is GradientPlace.HOST for place in auto.gradients]
        own_gradients = not any(on_host == choice.tolist() for choice in choices)
        assert Mode.RESIDENT in auto.modes or own_gradients


def test_no_baseline_wins_where_direct_host_access_is_dear():
    """Updates in another order, or loads in theirs, can then be faster than any choice of modes."""
    kinds = set()
    for profile, _ in itertools.chain(*(drawn(1, seed=seed, programs=False) for seed in range(20))):
        layers = (dataclasses.replace(x, forward_dha_s=30.0, backward_dha_s=30.0) for x in profile.layers)
        profile = Profile({}, tuple(layers))
        best = make_plan(profile, "exact", reserve_factor=1.0)
        kinds.add((best.loads, best.updates, best.update_order))
        for other in ("zero-offload", "native-offload", "native-overlapped"):
            rival = make_plan(profile, other, reserve_factor=1.0)
            assert best.predicted.steady_step_s <= rival.predicted.steady_step_s * (1 + EQUAL_WITHIN)
    orders = {(loads, updates) for loads, updates, _ in kinds}
    assert orders == {("layerwise", "overlapped"), ("layerwise", "after-all"), ("bulk", "after-all")}
    assert {order for *_, order in kinds} == {"backward", "need"}


def test_the_defaults_of_all_policies_are_tried():
    assert set(reserve_factors(Request())) == {make_policy(name).default_reserve_factor for name in policies()}


def test_go_is_taken_only_where_it_is_faster():
    """With GO that costs nothing all gradients are GO; with GO that costs much none is, nor by any tie."""
    layers = transformer(8, 3).layers
    cheap = Profile({}, tuple(dataclasses.replace(x, backward_go_s=x.backward_s) for x in layers))
    dear = Profile({}, tuple(dataclasses.replace(x, backward_go_s=10 * x.backward_s + 1) for x in layers))
    alike = Profile({}, tuple(dataclasses.replace(x, backward_go_s=x.backward_s, offload_s=0) for x in layers))
    for objective in ("step", "steady"):
        factors = [make_plan(x, "exact", objective=objective).reserve_factor for x in (cheap, dear, alike)]
        assert factors == [0.0, 1.0, 1.0]
    assert make_plan(cheap, "exact", objective="forward").reserve_factor == 1.0
    assert make_plan(cheap, "exact", objective="steady", reserve_factor=1.0).reserve_factor == 1.0


def test_a_budget_too_small_for_gradients_on_the_device_is_met_without():
    profile = transformer(12)
    with pytest.raises(BudgetError):
        make_plan(profile, "exact", reserve_factor=1.0, memory_budget_bytes=smallest_peak_bytes(profile))
    plan = make_plan(profile, "exact", memory_budget_bytes=smallest_peak_bytes(profile))
    assert plan.reserve_factor == 0
    assert plan.predicted.peak_device_bytes == smallest_peak_bytes(profile)


@pytest.mark.slow
@pytest.mark.parametrize("objective", STEADY_OFTEN)
@few
@given(profiles(max_layers=5))
def test_a_larger_budget_is_never_slower(objective, profile):
    before = np.inf
    for budget in (0, 20, 60, 100, 200, 400, 10_000):
        try:
            plan = make_plan(profile, "exact", objective=objective, memory_budget_bytes=budget)
        except BudgetError:
            assert before == np.inf
            continue
        assert objective_of(plan, objective) <= before * (1 + EQUAL_WITHIN)
        before = objective_of(plan, objective)


def test_a_larger_budget_is_never_slower_on_a_long_model():
    profile = transformer(10, 1)
    free = make_plan(profile, "exact")
    before = np.inf
    for share in (0.8, 0.97, 1.0):
        budget = int(free.predicted.peak_device_bytes * share)
        plan = make_plan(profile, "exact", memory_budget_bytes=budget)
        assert plan.predicted.peak_device_bytes <= budget
        assert plan.predicted.steady_step_s <= before * (1 + EQUAL_WITHIN)
        before = plan.predicted.steady_step_s
    assert before <= free.predicted.steady_step_s * (1 + EQUAL_WITHIN)


def test_progress_names_the_parts_of_a_long_search():
    parts = []
    Exact().plan(transformer(8), Request(progress=parts.append))
    assert parts[-1] == "moves from the best plans"


def test_more_layers_than_are_proven_state_a_gap():
    """All plans of up to six layers are simulated."""
    gaps = [make_plan(transformer(7, seed), "exact").details["gap"] for seed in range(3)]
    assert max(gaps) > 0


@pytest.mark.parametrize("name", ["exact", "auto"])
def test_updates_follow_backward_order_where_by_need_is_no_faster(name):
    assert make_plan(transformer(1), name).update_order == "backward"
