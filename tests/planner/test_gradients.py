"""GO-MemFerry's choice of gradients: optimal, within the budget to the byte, and only where it gains."""

import dataclasses
import itertools
import random

import hypothesis.strategies as st
import pytest
from hypothesis import given

from jaxferry.costs import Profile
from jaxferry.planner import base as gradients
from jaxferry.planner import capacity_bytes, choose_gradients, gradients_to_host
from profiles import deterministic, profiles, transformer

items = st.lists(st.tuples(st.integers(0, 30), st.integers(-3, 20)), min_size=1, max_size=9)


def best_gain(sizes, gains, capacity):
    sets = itertools.chain.from_iterable(itertools.combinations(range(len(sizes)), k) for k in range(len(sizes) + 1))
    return max(sum(gains[i] for i in chosen) for chosen in sets if sum(sizes[i] for i in chosen) <= capacity)


@deterministic
@given(items, st.integers(0, 120))
def test_the_choice_is_the_best_of_all_sets_that_fit(pairs, capacity):
    sizes, gains = [size for size, _ in pairs], [gain / 8 for _, gain in pairs]
    chosen = choose_gradients(sizes, gains, capacity)
    assert sum(sizes[i] for i in chosen) <= capacity
    assert all(gains[i] > 0 for i in chosen)
    assert sum(gains[i] for i in chosen) == best_gain(sizes, gains, capacity)


@deterministic
@given(profiles(), st.integers(0, 100))
def test_what_stays_takes_at_most_the_factor_s_share(profile, percent):
    grad_on_host = gradients_to_host(profile, percent / 100)
    stays = sum(x.grad_bytes for x, host in zip(profile.layers, grad_on_host, strict=True) if not host)
    assert 100 * stays <= percent * sum(x.grad_bytes for x in profile.layers)


def test_the_factor_is_read_as_a_decimal():
    layer = transformer(3).layers[1].to_json() | {"grad_bytes": 100}
    profile = Profile.from_json({"format": "jaxferry.profile/1", "machine": {}, "layers": [layer]})
    assert capacity_bytes(profile, 0.29) == 29
    assert [capacity_bytes(profile, percent / 100) for percent in range(101)] == list(range(101))


def test_factor_1_means_that_no_gradient_is_go():
    assert not gradients_to_host(transformer(9), 1.0).any()
    assert gradients_to_host(transformer(9), 0.0).all()


@pytest.mark.parametrize("size", [40, 200])
def test_instances_too_wide_for_the_frontier_stay_within_the_budget_and_near_the_best(size, monkeypatch):
    draw = random.Random(size)
    sizes = [draw.randint(10**6, 10**9) for _ in range(size)]
    gains = [x * 1e-10 for x in sizes]
    capacity = sum(sizes) // 3
    monkeypatch.setattr(gradients, "MOST_STATES", 64)
    chosen = choose_gradients(sizes, gains, capacity)
    used = sum(sizes[i] for i in chosen)
    assert used <= capacity
    assert used >= capacity * (1 - size / 32768)


@deterministic
@given(profiles(max_layers=5), st.integers(0, 99))
def test_backwards_and_what_they_do_not_hide_take_the_least_time_of_all_choices_that_fit(profile, percent):
    def seconds(grad_on_host):
        total_s = 0.0
        for index, (layer, host) in enumerate(zip(profile.layers, grad_on_host, strict=True)):
            later_s = sum(below.inter_backward_s + below.backward_s for below in profile.layers[:index])
            kept_s = layer.backward_s + max(layer.offload_s - later_s, 0)
            total_s += layer.backward_go_s if host else kept_s
        return total_s

    def fits(grad_on_host):
        stays = sum(x.grad_bytes for x, host in zip(profile.layers, grad_on_host, strict=True) if not host)
        return 100 * stays <= percent * sum(x.grad_bytes for x in profile.layers)

    choices = filter(fits, itertools.product((False, True), repeat=len(profile.layers)))
    assert seconds(gradients_to_host(profile, percent / 100)) == min(seconds(choice) for choice in choices)


def test_a_transfer_that_nothing_hides_keeps_no_gradient_on_the_device():
    """The first layer's backward is the last: its gradient would be transferred after all work of the GPU."""
    first, *others = transformer(9).layers
    first = dataclasses.replace(first, backward_go_s=first.backward_s + 0.5 * first.offload_s)
    grad_on_host = gradients_to_host(Profile({}, (first, *others)), 0.9)
    assert grad_on_host[0] and not grad_on_host[1:].all()


def test_gradients_without_bytes_stay_where_others_take_all_room():
    assert choose_gradients([0, 5, 5], [1.0, 1.0, 2.0], 5) == {0, 2}


@pytest.mark.parametrize("seed", range(3))
def test_a_set_that_fills_the_capacity_to_the_byte_is_found_among_large_sizes(seed):
    """Rounded to 32768 units, it would not fit."""
    draw = random.Random(seed)
    sizes = [draw.randint(10**6, 10**7) for _ in range(12)]
    capacity = sum(draw.sample(sizes, 6))
    chosen = choose_gradients(sizes, [size * 1e-6 for size in sizes], capacity)
    assert sum(sizes[i] for i in chosen) == capacity


def test_what_is_rounded_stays_within_the_capacity_and_takes_dense_gradients_first(monkeypatch):
    """Sizes of 1 unit and a byte round up to 2 units."""
    monkeypatch.setattr(gradients, "MOST_STATES", 0)
    unit = 1000
    capacity = 32768 * unit
    assert len(choose_gradients([16384 * unit] * 3, [1.0] * 3, capacity)) == 2
    assert len(choose_gradients([16384 * unit + 1, 16384 * unit + 1, 5 * unit], [1.0, 2.0, 1e-9], capacity)) == 2
    assert choose_gradients([16385 * unit, 16384 * unit, 16384 * unit], [3.0, 1.0, 1.0], capacity) == {0}


def test_a_small_gradient_with_most_of_the_gain_rules_out_no_other_set():
    """Least dense first, a greedy choice takes items 0 and 4 and would bound away the best set."""
    assert choose_gradients([9, 6, 6, 3, 1], [9.0, 7.0, 8.0, 4.5, 100.0], 10) == {2, 3, 4}
