"""Recomputation under a memory budget: `auto` chooses which layers run their forward again."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from every_plan import every_plan
from jaxferry.costs import LayerProfile, Profile
from jaxferry.errors import BudgetError
from jaxferry.modes import ActivationPlace, GradientPlace, Mode
from jaxferry.planner import EQUAL_WITHIN, AutoSearch, Request, any_plan_lower_bound_s, make_plan
from jaxferry.step import predict
from profiles import examples, profiles, recomputing, smallest_peak_bytes, transformer

few = examples(12)
NEARLY = 1 + 1e-9


@few
@given(profiles(max_layers=2, recomputing=True), st.integers(0, 160))
def test_no_plan_of_few_layers_that_fits_is_faster(profile, budget):
    found = list(every_plan(profile, modes=[mode for mode in Mode if mode is not Mode.DFGB]))
    least_s = min((step_s for _, step_s, needed in found if needed <= budget), default=np.inf)
    smallest_bytes = min(needed for *_, needed in found)
    if least_s == np.inf:
        with pytest.raises(BudgetError) as caught:
            make_plan(profile, "auto", memory_budget_bytes=budget)
        assert caught.value.smallest_bytes == smallest_bytes
    else:
        plan = make_plan(profile, "auto", memory_budget_bytes=budget)
        assert AutoSearch(profile, Request()).fastest(budget).objective_s <= least_s * NEARLY
        assert plan.predicted.steady_step_s <= least_s * (1 + EQUAL_WITHIN)
        assert plan.predicted.peak_device_bytes <= budget


def plans_within(profile, budgets, factor=None):
    search = AutoSearch(profile, Request(reserve_factor=factor))
    for budget in budgets:
        try:
            yield predict(profile, search.plan(budget))
        except BudgetError:
            yield None


@pytest.mark.parametrize("factor", [None, pytest.param(1.0, marks=pytest.mark.slow)])
def test_the_choice_makes_no_plan_slower_and_more_budgets_feasible(factor):
    profile = recomputing(transformer(9, 3), share=0.1)
    bare = profile.only_recomputing([False] * len(profile.layers))
    num = 5 if factor is None else 16  # gradients that stay leave few budgets in which only recomputation fits
    budgets = np.geomspace(smallest_peak_bytes(profile), 3e9, num).astype(int).tolist()
    before = np.inf
    pairs = list(zip(plans_within(bare, budgets, factor), plans_within(profile, budgets, factor), strict=True))
    for budget, (without, chosen) in zip(budgets, pairs, strict=True):
        if chosen is None:
            assert without is None
            continue
        assert chosen.predicted.peak_device_bytes <= budget
        assert chosen.predicted.steady_step_s <= before * (1 + EQUAL_WITHIN)
        before = chosen.predicted.steady_step_s
        if without is not None:
            assert chosen.predicted.steady_step_s <= without.predicted.steady_step_s * (1 + EQUAL_WITHIN)
    assert sum(without is None for without, _ in pairs) > sum(chosen is None for _, chosen in pairs)
    assert any(chosen is not None and any(chosen.recomputes) for _, chosen in pairs)


@pytest.mark.slow
def test_nothing_is_recomputed_where_memory_is_no_matter():
    profile = recomputing(transformer(9, 3), seconds_of_forward=0.0)
    assert not any(make_plan(profile, "auto").recomputes)
    assert not any(make_plan(profile, "auto", memory_budget_bytes=10**12).recomputes)


def test_an_infeasible_budget_names_the_smallest_one_and_that_it_takes_recomputation():
    profile = recomputing(transformer(6))
    smallest = smallest_peak_bytes(profile)
    with pytest.raises(BudgetError, match=rf"\({smallest} bytes\), with 5 layers that recompute") as caught:
        make_plan(profile, "auto", memory_budget_bytes=smallest - 1)
    assert caught.value.smallest_bytes == smallest
    plan = make_plan(profile, "auto", memory_budget_bytes=smallest)
    assert plan.predicted.peak_device_bytes == smallest
    assert plan.recomputes == (True,) * 5 + (False,)


def test_other_policies_never_recompute():
    profile = recomputing(transformer(6))
    for policy in ("exact", "memferry", "native-overlapped", "l2l"):
        assert not any(make_plan(profile, policy).recomputes)


def computing(size=6, **more):
    """Equal layers whose programs take far longer than anything else, and keep far more than they have parameters."""
    names = ("load_s", "offload_s", "update_s")
    times = dict.fromkeys(names, 1 / 64) | {"forward_s": 1.0, "forward_dha_s": 1.5, "backward_s": 2.0}
    times |= {"backward_dha_s": 2.5, "backward_go_s": 2.5, "recompute_s": 1.0, "products_recompute_s": 0.125}
    kept = {"activation_bytes": 1000, "recompute_activation_bytes": 100, "products_activation_bytes": 400}
    costs = times | kept | {"param_bytes": 1, "grad_bytes": 1} | more
    return Profile({}, tuple(LayerProfile(name=f"layer{index}", **costs) for index in range(size)))


@pytest.mark.parametrize(("bytes_a_layer", "kept"), [(1000, "none"), (400, "products"), (100, "full")])
def test_plans_keep_what_the_budget_allows_and_recompute_no_more(bytes_a_layer, kept):
    profile = computing()
    plan = make_plan(profile, "auto", memory_budget_bytes=6 * bytes_a_layer + 20)
    assert {layer.remat for layer in plan.layers} == {kept}


def test_some_layers_keep_products_and_others_all_or_nothing_where_that_is_the_fastest():
    profile = computing()
    for extra in (0, 900, 3000):
        budget = 600 + extra + 20
        plan = make_plan(profile, "auto", memory_budget_bytes=budget)
        least_s = AutoSearch(profile, Request()).fastest(budget).objective_s
        # By hand: each layer's products for 300 bytes save 7 eighths of a second, all for 600 more an eighth.
        whole = min(extra, 1800) // 300
        by_hand_s = 6 * 4.0 - whole * 0.875 - max(extra - 1800, 0) // 600 * 0.125
        assert least_s == pytest.approx(by_hand_s, rel=0.02)
        assert by_hand_s * 0.99 <= plan.predicted.steady_step_s <= least_s * (1 + EQUAL_WITHIN)


@pytest.mark.parametrize(("link_s", "has_time"), [(0.125, True), (4.0, False)])
def test_activations_wait_in_host_memory_where_the_links_have_time_and_are_recomputed_where_not(link_s, has_time):
    """A layer's activations are a thousand times its parameters, so they take `link_s`."""
    costs = {"load_s": link_s / 1000, "offload_s": link_s / 1000}
    costs |= {"products_recompute_s": None, "products_activation_bytes": None}
    profile = computing(size=8, **costs)
    profile = profile.with_layers([{"offloadable_bytes": {"none": 1000, "full": 100}}] * 6 + [{}] * 2)
    budget = 2000 + 3 * 1000 + 60
    plan = make_plan(profile, "auto", memory_budget_bytes=budget)
    stays = make_plan(profile.offloading_at_most(0), "auto", memory_budget_bytes=budget)
    assert stays.predicted.steady_step_s > 8 * 3.0 * 1.05 and any(stays.recomputes)
    number = sum(layer.activations is ActivationPlace.HOST for layer in plan.layers)
    assert number >= 3 if has_time else number <= 2
    assert (plan.predicted.steady_step_s < 8 * 3.0 * 1.05, any(plan.recomputes)) == (has_time, not has_time)
    assert any_plan_lower_bound_s(profile, budget) <= plan.predicted.steady_step_s


def test_where_activations_take_the_link_two_forwards_every_second_layer_lets_its_own_leave():
    """No forward or backward waits: 34 layers take 3 s each, and what the budget has no room for is recomputed."""
    costs = {"load_s": 0.002, "offload_s": 0.002, "products_recompute_s": None, "products_activation_bytes": None}
    profile = computing(size=34, **costs)
    profile = profile.with_layers([{"offloadable_bytes": {"none": 1000, "full": 100}}] * 32 + [{}] * 2)
    for budget, least_s in ((15_000, 107.1), (20_000, 102.1)):
        assert AutoSearch(profile, Request()).fastest(budget).objective_s <= least_s


def test_no_more_may_leave_than_host_memory_has_room_for():
    profile = computing(size=5).with_layers([{"offloadable_bytes": {"none": 1000, "full": 100}}] * 3 + [{}] * 2)
    for num_bytes, layers in ((999, 0), (1000, 1), (2500, 2), (3000, 3)):
        limited = profile.offloading_at_most(num_bytes)
        assert [bool(layer.offloadable_bytes) for layer in limited.layers] == [True] * layers + [False] * (5 - layers)


@examples(6)
@given(profiles(min_layers=3, max_layers=3, recomputing=True, offloading=True), st.integers(20, 160))
def test_no_plan_that_lets_activations_leave_is_faster_than_what_counts_as_equal_or_below_the_bound(profile, budget):
    loaded = [Mode.GFGB, Mode.RELOAD]
    found = list(every_plan(profile, loaded, [GradientPlace.DEVICE], activations=tuple(ActivationPlace)))
    least_s = min((step_s for _, step_s, needed in found if needed <= budget), default=np.inf)
    assert any_plan_lower_bound_s(profile, budget) <= least_s * NEARLY
    if least_s < np.inf:
        assert AutoSearch(profile, Request()).fastest(budget).objective_s <= least_s * (1 + EQUAL_WITHIN)
