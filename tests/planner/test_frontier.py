"""The forward optimum where parameter groups have several layers: exact where it says so, bounded in any case."""

import dataclasses
import itertools
import random

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from jaxferry.costs import LayerProfile, Profile
from jaxferry.planner import PlanEvaluator, SharedCopies, forward_s, frontier, holds_as_much, make_plan, optimal_forward
from profiles import examples, profiles

some = examples(40)

ORDERS = {
    "adjacent": lambda groups: [group for group in groups for _ in range(2)],
    "nested": lambda groups: [*groups, *reversed(groups)],
    "parallel": lambda groups: [*groups, *groups],
}
orders = pytest.mark.parametrize("order", ORDERS)


def pairs(num_groups, order, seed=0):
    """A profile of groups of two layers each, with random sizes."""
    draw = random.Random(seed)
    sizes = [draw.randint(10, 1000) * 1000 for _ in range(num_groups)]
    layers = []
    for index, group in enumerate(ORDERS[order](range(num_groups))):
        load_s = sizes[group] * 1e-6
        compute_s = draw.uniform(0.2, 1) * load_s
        dha_s = compute_s + draw.uniform(0.3, 1.5) * load_s
        layers.append(
            LayerProfile(
                name=f"l{index}",
                parameters=f"g{group}",
                param_bytes=sizes[group],
                grad_bytes=sizes[group],
                load_s=load_s,
                forward_s=compute_s,
                forward_dha_s=dha_s,
                backward_s=2 * compute_s,
                backward_dha_s=compute_s + dha_s,
                backward_go_s=2 * compute_s + 0.3 * load_s,
                offload_s=load_s,
                update_s=load_s / 2,
            )
        )
    return Profile({}, tuple(layers))


def grouped(profile, groups):
    """The profile with its layers in these groups."""
    size = {}
    layers = []
    for layer, group in zip(profile.layers, groups, strict=False):
        param_bytes = size.setdefault(group, layer.param_bytes)
        layers.append(dataclasses.replace(layer, parameters=f"g{group}", param_bytes=param_bytes))
    return Profile({}, tuple(layers))


def least_forward_s(profile):
    modes = np.array(list(itertools.product(range(2), repeat=len(profile.layers))))
    return PlanEvaluator(profile)(
        modes, np.zeros(len(profile.layers), dtype=bool), steady=False, memory=False
    ).forward_s.min()


@some
@given(profiles(min_layers=6, max_layers=9, tied=False), st.lists(st.integers(0, 4), min_size=9, max_size=9))
def test_groups_of_any_shape_have_their_exact_optimum(profile, groups):
    profile = grouped(profile, groups)
    found = optimal_forward(profile)
    assert found.forward_s == found.bound_s == least_forward_s(profile)
    assert forward_s(profile, found.modes) == found.forward_s


@orders
@pytest.mark.parametrize("num_groups", [1, 3, 5])
def test_pairs_of_any_order_have_their_exact_optimum(order, num_groups):
    for seed in range(4):
        profile = pairs(num_groups, order, seed)
        found = optimal_forward(profile)
        assert found.forward_s == found.bound_s == pytest.approx(least_forward_s(profile), rel=1e-12)


@orders
@pytest.mark.parametrize("seed", range(6))
def test_what_is_merged_still_bounds_the_optimum(order, seed, monkeypatch):
    monkeypatch.setattr(frontier, "MOST_OPEN", 0)
    monkeypatch.setattr(frontier, "MOST_STATES", 4)
    monkeypatch.setattr(frontier, "BUCKETS", 2)
    monkeypatch.setattr(frontier, "KEPT_IN_BUCKET", 1)
    profile = pairs(6, order, seed)
    found, least = optimal_forward(profile), least_forward_s(profile)
    assert found.bound_s <= least * (1 + 1e-12)
    assert least * (1 - 1e-12) <= found.forward_s == forward_s(profile, found.modes)


def test_bounds_of_merged_states_are_not_always_the_optimum(monkeypatch):
    """Else the test above would not test merging."""
    monkeypatch.setattr(frontier, "MOST_OPEN", 0)
    monkeypatch.setattr(frontier, "MOST_STATES", 4)
    monkeypatch.setattr(frontier, "BUCKETS", 2)
    monkeypatch.setattr(frontier, "KEPT_IN_BUCKET", 1)
    found = [optimal_forward(pairs(6, "nested", seed)) for seed in range(6)]
    assert any(optimum.bound_s < optimum.forward_s * (1 - 1e-6) for optimum in found)


@orders
@pytest.mark.parametrize(
    ("num_groups", "objective"),
    [
        (33, "forward"),
        pytest.param(65, "forward", marks=pytest.mark.slow),
        *(pytest.param(number, "steady", marks=pytest.mark.slow) for number in (65, 200)),
    ],
)
def test_many_groups_state_their_gap(order, num_groups, objective):
    """Adjacent pairs are exact, however many. Enumerating the states of the others would never end."""
    plan = make_plan(pairs(num_groups, order), "exact", objective=objective, reserve_factor=1.0)
    assert 0 <= plan.details["gap"] < 0.1
    if order == "adjacent" and objective == "forward":
        assert plan.details["gap"] == 0


def test_spans_that_do_not_overlap_share_a_bit():
    assert SharedCopies(pairs(200, "adjacent")).num_words == 1
    assert SharedCopies(pairs(200, "nested")).num_words == 4
    assert SharedCopies(pairs(64, "nested")).num_words == 1
    assert max(SharedCopies(pairs(200, "adjacent")).num_open) == 1


def test_copies_are_held_from_the_layer_that_loads_them_to_the_group_s_last():
    copies = SharedCopies(grouped(pairs(3, "adjacent"), [0, 1, 0, 1, 0, 2]))
    rows = copies.none()
    rows = copies.after(rows, 0, loaded=False)
    assert not copies.held(rows, 2)[0]
    without = copies.after(rows, 1, loaded=False)
    rows = copies.after(rows, 1, loaded=True)
    assert copies.held(rows, 3)[0] and not copies.held(rows, 2)[0] and not copies.held(rows, 5)[0]
    both = np.concatenate([without, rows])
    assert holds_as_much(both).tolist() == [[True, False], [True, True]]
    rows = copies.after(rows, 2, loaded=True)
    rows = copies.after(copies.after(rows, 3, loaded=True), 4, loaded=False)
    assert not rows.any()
