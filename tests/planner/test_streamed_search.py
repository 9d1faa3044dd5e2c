"""Where updates run, as planners choose it: on the host, through the GPU or on the device; and what is proven of it."""

import dataclasses
import itertools

import numpy as np
import pytest
import scipy.optimize
from hypothesis import given
from hypothesis import strategies as st

from jaxferry.costs import LayerProfile, Profile
from jaxferry.errors import BudgetError, InputError
from jaxferry.modes import GradientPlace, Mode, Subgroups, UpdatePlace
from jaxferry.planner import (
    BYTES,
    EQUAL_WITHIN,
    NUM_LANES,
    AutoSearch,
    Request,
    TwinFlow,
    any_plan_lower_bound_s,
    group_options,
    make_plan,
    make_policy,
    place_bound,
)
from jaxferry.step import LayerPlan, Loads, Plan, Updates, needed_bytes, simulate, streaming
from profiles import UNLIMITED_BYTES, examples, profiles, transformer

NEARLY = 1 + 1e-9


def with_slow_host(profile, factor=3.0, link=1.0):
    """The profile with host updates of a multiple of the GPU's time, and state of six bytes a byte of parameters.

    Each layer has 40 times the bytes, so that its state takes far more than the subgroups on the device.
    """
    layers = [
        dataclasses.replace(
            layer,
            update_s=factor * (layer.forward_s + layer.backward_s),
            update_gpu_s=layer.update_s / 20,
            param_bytes=40 * layer.param_bytes,
            grad_bytes=40 * layer.grad_bytes,
            state_bytes=240 * layer.param_bytes,
            state_up_s=6 * layer.load_s / link,
            state_down_s=7 * layer.offload_s / link,
        )
        for layer in profile.layers
    ]
    return dataclasses.replace(profile, layers=tuple(layers))


def with_places(profile, places, modes):
    layers = []
    for index, layer in enumerate(profile.layers):
        place = places[profile.group_of[index]]
        mode = Mode.RESIDENT if place is UpdatePlace.RESIDENT else modes[index]
        layers.append(LayerPlan(layer.name, mode, GradientPlace.DEVICE, update=place))
    return Plan("any", 1.0, tuple(layers))


@pytest.mark.parametrize("after_all", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_auto_may_stream_and_is_never_slower_than_without_or_with_less_memory(after_all):
    profile = dataclasses.replace(with_slow_host(transformer(6), link=8.0), updates_after_all=after_all)
    everything = needed_bytes(profile, with_places(profile, [UpdatePlace.RESIDENT] * 6, [Mode.RESIDENT] * 6))
    search, without = (AutoSearch(x, Request()) for x in (profile, profile.without_streaming()))
    before_s, streams = np.inf, False
    for share in (0.1, 0.3):
        budget = int(everything * share)
        plan = search.plan(budget)
        step_s, without_s = (simulate(profile, x).steady_step_s for x in (plan, without.plan(budget)))
        assert needed_bytes(profile, plan) <= budget
        assert any_plan_lower_bound_s(profile, budget) <= step_s * NEARLY
        assert step_s <= min(before_s, without_s) * (1 + EQUAL_WITHIN)
        if any(plan.updates_streamed):
            assert after_all or step_s < 0.98 * without_s
        before_s, streams = step_s, streams or any(plan.updates_streamed)
    assert streams or after_all


@pytest.mark.parametrize("share", [0.3, 0.7])
def test_auto_keeps_compute_copies_where_there_is_memory_for_them(share):
    """That saves their loads, their transfers down, and the wait of the next forward for both."""
    profile = with_slow_host(transformer(6), link=8.0)
    everything = needed_bytes(profile, with_places(profile, [UpdatePlace.RESIDENT] * 6, [Mode.RESIDENT] * 6))
    plan = AutoSearch(profile, Request()).fastest(int(share * everything)).plan
    assert any(plan.copies_stay) and plan.copies_stay == plan.updates_streamed
    layers = [x.with_mode(Mode.GFGB) if stays else x for x, stays in zip(plan.layers, plan.copies_stay, strict=True)]
    loaded = dataclasses.replace(plan, layers=tuple(layers))
    assert simulate(profile, plan).steady_step_s < 0.9 * simulate(profile, loaded).steady_step_s


def test_the_bound_knows_copies_that_stay_while_their_updates_stream(monkeypatch):
    """The links are slow, host and DHA far slower, and the state of few layers would fit."""
    monkeypatch.setattr(streaming, "SUBGROUP_BYTES", 100)
    times = dict.fromkeys(("forward_s", "backward_s", "update_gpu_s", "inter_forward_s", "inter_backward_s"), 0.0)
    times |= dict.fromkeys(("forward_dha_s", "backward_dha_s", "backward_go_s", "update_s"), 100.0)
    times |= {"load_s": 3.0, "offload_s": 3.0, "state_up_s": 6.0, "state_down_s": 7.0}
    sizes = {"param_bytes": 100, "grad_bytes": 10, "activation_bytes": 1, "state_bytes": 600}
    layers = tuple(dataclasses.replace(layer, **times, **sizes) for layer in transformer(12).layers)
    profile = dataclasses.replace(transformer(12), layers=layers)
    plan = with_places(profile, [UpdatePlace.GPU] * 12, [Mode.RESIDENT] * 12)
    bound_s, step_s = (
        any_plan_lower_bound_s(profile, needed_bytes(profile, plan)),
        simulate(profile, plan).steady_step_s,
    )
    assert 0.7 * step_s < bound_s <= step_s * NEARLY


@pytest.mark.parametrize("subgroup_bytes", [20, streaming.SUBGROUP_BYTES])
@examples(4)
@given(st.data())
def test_no_plan_of_few_layers_is_below_the_bound_wherever_it_updates(subgroup_bytes, data):
    profile = data.draw(profiles(max_layers=2))
    times = st.integers(0, 24).map(lambda eighths: eighths / 8)
    layers = [
        dataclasses.replace(
            *(layer,),
            update_gpu_s=data.draw(times),
            update_streamed_s=data.draw(st.none() | times),
            state_up_s=data.draw(times),
            state_down_s=data.draw(times),
            state_bytes=6 * layer.param_bytes,
        )
        for layer in profile.layers
    ]
    profile = dataclasses.replace(profile, layers=tuple(layers))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streaming, "SUBGROUP_BYTES", subgroup_bytes)
        for places in itertools.product(UpdatePlace, repeat=len(profile.groups)):
            for mode, size in itertools.product((Mode.GFGB, Mode.DHA, Mode.RELOAD, Mode.RESIDENT), Subgroups):
                plan = dataclasses.replace(with_places(profile, places, [mode] * len(layers)), subgroups=size)
                bound_s = any_plan_lower_bound_s(profile, needed_bytes(profile, plan))
                assert bound_s <= simulate(profile, plan).steady_step_s * NEARLY


def test_groups_larger_than_the_room_stream_in_small_subgroups():
    """The host sets the pace; four large subgroups take more than twice the memory of all else."""
    link, host, size = 25e9, 30e9, 160_000_000
    programs = {"forward_s": 0.01, "backward_s": 0.02, "forward_dha_s": 0.2, "backward_dha_s": 0.4}
    state = {"state_bytes": 6 * size, "state_up_s": 6 * size / link, "state_down_s": 7 * size / link}
    layer = LayerProfile(
        name="block0",
        param_bytes=size,
        grad_bytes=size,
        activation_bytes=1_000_000,
        load_s=size / link,
        offload_s=size / link,
        backward_go_s=0.2,
        update_s=14 * size / host,
        update_gpu_s=14 * size / 2e12,
        **programs,
        **state,
    )
    names = [f"block{number}" for number in range(8)]
    profile = Profile({}, tuple(dataclasses.replace(layer, name=name, parameters=name) for name in names))
    search, budget = AutoSearch(profile, Request()), 1_000_000_000
    plan, on_host = search.plan(budget), AutoSearch(profile, Request(), ()).plan(budget)
    assert plan.subgroups is Subgroups.SMALL and any(plan.updates_streamed)
    assert simulate(profile, plan).steady_step_s < 0.7 * simulate(profile, on_host).steady_step_s
    assert simulate(profile, plan).peak_device_bytes <= budget
    assert Plan.from_json(plan.to_json()) == plan
    budgets = (int(share * budget) for share in (0.5, 0.8, 1, 1.7, 4))
    steps_s = [simulate(profile, search.plan(each)).steady_step_s for each in budgets]
    assert all(more <= less * (1 + EQUAL_WITHIN) for less, more in itertools.pairwise(steps_s))


def lanes_and_bytes_s(tables, budgets):
    """The least period if only the lanes' work and bytes count and groups may be split among choices, by SciPy."""
    choices = np.concatenate([table[:, :NUM_LANES] for table in tables]).T
    num_bytes = np.concatenate([table[:, BYTES:] for table in tables]).T / budgets[:, None]
    lanes = np.hstack([choices, -np.ones((NUM_LANES, 1))])
    memory = np.hstack([num_bytes, np.zeros((len(budgets), 1))])
    sizes = [len(table) for table in tables]
    one_each = np.zeros((len(tables), sum(sizes) + 1))
    one_each[np.repeat(np.arange(len(tables)), sizes), np.arange(sum(sizes))] = 1.0
    cost, above = np.append(np.zeros(sum(sizes)), 1.0), np.array([0.0] * NUM_LANES + [1.0] * len(budgets))
    return scipy.optimize.linprog(cost, np.vstack([lanes, memory]), above, one_each, np.ones(len(tables))).fun


@pytest.mark.parametrize("share", [0.01, 0.3, 1.0])
def test_the_bound_counts_loops_and_slots_besides_lanes_and_bytes(share, monkeypatch):
    profile = with_slow_host(transformer(12))
    budget = int(share * sum(7 * layer.param_bytes for layer in profile.layers))
    places = place_bound._places(profile)
    budgets = np.array([place_bound._left_bytes(profile, place, budget) for place in places])
    least_s = lanes_and_bytes_s([each.table for each in group_options(profile, places)], budgets)
    bound_s = any_plan_lower_bound_s(profile, budget)
    assert bound_s >= 0.9999 * least_s
    solved = scipy.optimize.linprog
    monkeypatch.setattr(scipy.optimize, "linprog", lambda *args, **more: failed(solved(*args, **more)))
    assert 0 < any_plan_lower_bound_s(profile, budget) <= bound_s * NEARLY


def failed(result):
    result.status = 4  # numerical difficulties
    return result


def test_a_bound_without_streaming_does_not_hold_with_it():
    profile = with_slow_host(transformer(6), factor=10.0, link=8.0)
    plan = with_places(profile, [UpdatePlace.GPU] * 6, [Mode.GFGB] * 6)
    budget, step_s = needed_bytes(profile, plan), simulate(profile, plan).steady_step_s
    assert any_plan_lower_bound_s(profile, budget) <= step_s < any_plan_lower_bound_s(profile.without_streaming(), 1)


def test_twin_flow_is_zero_offload_with_a_fixed_share_of_updates_on_the_device():
    profile = with_slow_host(transformer(8))
    total = sum(layer.param_bytes for layer in profile.layers)
    for ratio in (0.0, 0.5, 1.0):
        plan = TwinFlow(ratio).plan(profile)
        chosen = zip(profile.layers, plan.updates_on_device, strict=True)
        assert sum(layer.param_bytes for layer, on_device in chosen if on_device) <= ratio * total
        assert sorted(plan.updates_on_device) == list(plan.updates_on_device)
        assert (plan.loads, plan.updates) == (Loads.BULK, Updates.AFTER_ALL)
    assert all(plan.updates_on_device)
    host = make_policy("zero-offload").plan(profile)
    assert [layer.mode for layer in TwinFlow(0.0).plan(profile).layers] == [layer.mode for layer in host.layers]
    with pytest.raises(InputError, match="ratio"):
        TwinFlow(1.5)


def test_twin_flow_takes_the_best_ratio_that_fits():
    profile = with_slow_host(transformer(8))
    least = needed_bytes(profile, TwinFlow(0.0).plan(profile))
    most = needed_bytes(profile, TwinFlow(1.0).plan(profile))
    steps_s = []
    for budget in (least, (least + most) // 2, UNLIMITED_BYTES):
        plan = make_plan(profile, "twin-flow", memory_budget_bytes=budget)
        assert needed_bytes(profile, plan) <= budget
        steps_s.append(plan.predicted.steady_step_s)
    assert steps_s[0] > steps_s[1] > steps_s[2]
    with pytest.raises(BudgetError):
        make_policy("twin-flow").plan(profile, Request(memory_budget_bytes=least - 1))
