"""Updates on the device: what they move, when they run, how much memory they need."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxferry.costs import Profile
from jaxferry.errors import InputError
from jaxferry.modes import GradientPlace, Mode, UpdatePlace
from jaxferry.planner import (
    EQUAL_WITHIN,
    AutoSearch,
    Request,
    any_plan_lower_bound_s,
    as_run,
    make_plan,
)
from jaxferry.step import Kind, Lane, LayerPlan, Plan, Updates, needed_bytes, schedule_step, simulate
from profiles import deterministic, examples, profiles, transformer, with_programs


def with_state(profile):
    """The profile with an update on the device that takes an eighth of that on the host."""
    layers = [
        dataclasses.replace(layer, update_gpu_s=layer.update_s / 8, state_bytes=6 * layer.param_bytes)
        for layer in profile.layers
    ]
    return dataclasses.replace(profile, layers=tuple(layers))


def plan_with(profile, on_device, mode=Mode.GFGB, updates=Updates.OVERLAPPED, gradient=GradientPlace.DEVICE):
    """A plan that updates these groups, by index, on the device."""
    layers = [
        LayerPlan(layer.name, Mode.RESIDENT, update=UpdatePlace.RESIDENT)
        if profile.group_of[index] in on_device
        else LayerPlan(layer.name, mode, gradient)
        for index, layer in enumerate(profile.layers)
    ]
    return Plan("test", 1.0, tuple(layers), updates=updates)


@pytest.mark.parametrize("updates", list(Updates))
def test_with_all_on_the_device_a_step_is_plain_training(updates):
    profile = with_state(transformer(6))
    plan = plan_with(profile, range(len(profile.groups)), updates=updates)
    computing_s = sum(x.forward_s + x.backward_s + x.inter_forward_s + x.inter_backward_s for x in profile.layers)
    updating_s = sum(profile.layers[members[0]].update_gpu_s for members in profile.groups)
    found = simulate(profile, plan)
    assert found.step_s == found.steady_step_s == pytest.approx(computing_s + updating_s)
    assert found.link_bytes == 0
    assert {task.lane for task in schedule_step(profile, plan).tasks} == {Lane.GPU}


def test_the_search_updates_layers_that_share_parameters_in_one_place():
    profile = with_state(transformer(12, tied=True))
    search = AutoSearch(profile, Request())
    budgets = np.linspace(search.smallest_bytes, 1.2 * search.fastest(None).needed_bytes, 3).astype(int).tolist()
    places = [
        {layer.update for layer in (search.plan(budget).layers[0], search.plan(budget).layers[-1])}
        for budget in budgets
    ]
    assert all(len(each) == 1 for each in places)
    assert {*places[0], *places[-1]} == {UpdatePlace.HOST, UpdatePlace.RESIDENT}


@deterministic
@given(st.data())
def test_nothing_of_such_a_group_moves_and_its_update_follows_its_last_backward(data):
    profile = with_state(data.draw(profiles(max_layers=4)))
    on_device = data.draw(st.sets(st.sampled_from(range(len(profile.groups)))))
    updates = data.draw(st.sampled_from(list(Updates)))
    tasks = schedule_step(profile, plan_with(profile, on_device, updates=updates)).tasks
    for group, members in enumerate(profile.groups):
        own = [task for task in tasks if task.segment in members]
        places = {task.kind: task.lane for task in own}
        (update,) = (task for task in own if task.kind is Kind.UPDATE)
        assert (update.lane is Lane.GPU) == (group in on_device)
        assert (places.keys() & {Kind.LOAD, Kind.OFFLOAD, Kind.REFRESH} == set()) == (group in on_device)
        if group in on_device and updates is Updates.OVERLAPPED:
            before = tasks[tasks.index(update) - 1]
            assert (before.kind, before.segment) == (Kind.BACKWARD, members[0])
    assert sum(task.start_bytes - task.end_bytes for task in tasks) == 0


@deterministic
@given(st.data())
def test_the_need_of_memory_is_never_below_what_a_chain_holds(data):
    profile = with_state(data.draw(profiles(max_layers=4)))
    profile = with_programs(profile, lambda: data.draw(st.booleans()))
    on_device = data.draw(st.sets(st.sampled_from(range(len(profile.groups))), min_size=1))
    mode, gradient = data.draw(st.sampled_from(list(Mode))), data.draw(st.sampled_from(list(GradientPlace)))
    updates = data.draw(st.sampled_from(list(Updates)))
    plan = plan_with(profile, on_device, mode, updates, gradient)
    assert simulate(profile, plan).peak_device_bytes <= needed_bytes(profile, plan)


def test_plans_and_profiles_keep_it_in_their_files():
    profile = with_state(transformer(2))
    plan = plan_with(profile, {1})
    assert Profile.from_json(profile.to_json()) == profile and Plan.from_json(plan.to_json()) == plan
    assert [layer.get("update") for layer in plan.to_json()["layers"]].count("resident") == len(profile.groups[1])


def test_it_needs_a_resident_copy_and_a_gradient_on_the_device():
    for fields in ({"mode": "GFGB"}, {"mode": "RESIDENT", "gradient": "host"}):
        with pytest.raises(InputError, match='update "resident" needs mode "RESIDENT" and gradient "device"'):
            LayerPlan("a", **{"gradient": "device", **fields}, update="resident")
    with pytest.raises(InputError, match="update must be one of host, gpu, resident"):
        LayerPlan("a", Mode.RESIDENT, update="cpu")


def test_layers_of_one_group_agree():
    profile = with_state(transformer(2, tied=True))
    layers = [LayerPlan(layer.name, Mode.RESIDENT) for layer in profile.layers]
    layers[-1] = dataclasses.replace(layers[-1], update=UpdatePlace.RESIDENT)
    with pytest.raises(InputError, match="update must be"):
        schedule_step(profile, Plan("test", 1.0, tuple(layers)))


def without_state(profile):
    layers = [dataclasses.replace(layer, update_gpu_s=None, state_bytes=0) for layer in profile.layers]
    return dataclasses.replace(profile, layers=tuple(layers))


@pytest.mark.parametrize("after_all", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_auto_is_one_knob_from_everything_offloaded_to_plain_training(after_all):
    """Each budget is asked for on its own. The host is the bottleneck: it takes twice the GPU's time."""
    layers = [dataclasses.replace(x, update_s=2.5 * (x.forward_s + x.backward_s)) for x in transformer(5).layers]
    profile = with_state(dataclasses.replace(transformer(5), layers=tuple(layers), updates_after_all=after_all))
    everything = needed_bytes(profile, plan_with(profile, range(len(profile.groups))))
    smallest = AutoSearch(profile, Request()).smallest_bytes
    before_s, seen = float("inf"), set()
    for budget in [int(smallest + (everything - smallest) * share) for share in (0, 0.5, 1)]:
        plan = make_plan(profile, "auto", memory_budget_bytes=budget)
        host_s = make_plan(without_state(profile), "auto", memory_budget_bytes=budget).predicted.steady_step_s
        step_s = plan.predicted.steady_step_s
        assert plan.predicted.peak_device_bytes <= needed_bytes(profile, plan) <= budget
        bound_s = any_plan_lower_bound_s(profile, budget)
        assert plan.details["lower_bound_s"] == min(bound_s, step_s)
        assert plan.details["gap"] == pytest.approx(step_s / min(bound_s, step_s) - 1)
        assert bound_s * (1 - 1e-9) <= step_s
        assert step_s <= min(host_s, before_s) * (1 + EQUAL_WITHIN)
        before_s = step_s
        seen.add(sum(plan.updates_on_device))
    # If everything fits, the host may still update a layer in time.
    assert min(seen) == 0 and max(seen) >= len(profile.layers) - 1 and len(seen) >= 3
    plain = plan_with(profile, range(len(profile.groups)))
    assert plan.details["binding"] == "GPU" and before_s <= simulate(profile, plain).steady_step_s * (1 + 1e-9)
    unlimited_s = make_plan(profile, "auto").predicted.steady_step_s
    assert unlimited_s <= plan.predicted.steady_step_s * (1 + EQUAL_WITHIN)


def test_more_memory_is_never_slower_if_updates_wait_for_all_gradients():
    """An update on the host waits for gradients that stay on the device, too."""
    times = {"load_s": 0.0, "inter_forward_s": 0.0, "inter_backward_s": 0.0, "offload_s": 0.1}
    times |= {f"{way}_dha_s": 3.0 for way in ("forward", "backward")} | {"backward_go_s": 3.0}
    own = [
        {"forward_s": 0.0, "backward_s": 0.8, "update_s": 0.0, "update_gpu_s": 0.0, "state_bytes": 6000},
        {"forward_s": 0.0, "backward_s": 1.2, "update_s": 0.6, "update_gpu_s": 0.15, "state_bytes": 100},
        {"forward_s": 0.2, "backward_s": 0.7, "update_s": 1.5, "update_gpu_s": 0.01, "state_bytes": 60},
    ]
    known = transformer(4).layers[:3]
    layers = tuple(
        dataclasses.replace(layer, param_bytes=size, grad_bytes=size, activation_bytes=10, **times, **more)
        for layer, size, more in zip(known, (1000, 100, 10), own, strict=True)
    )
    profile = Profile({}, layers, updates_after_all=True)
    plain = plan_with(profile, range(len(profile.groups)))
    search, before_s = AutoSearch(profile, Request()), np.inf
    smallest = search.smallest_bytes
    for budget in [*np.linspace(smallest, 1.2 * needed_bytes(profile, plain), 8).astype(int).tolist(), None]:
        step_s = simulate(profile, as_run(profile, search.plan(budget))).steady_step_s
        assert step_s <= before_s * (1 + EQUAL_WITHIN)
        before_s = step_s
    assert before_s <= simulate(profile, plain).steady_step_s * (1 + EQUAL_WITHIN)


@pytest.mark.parametrize("share", [0.9, 1.1])
def test_where_everything_fits_auto_is_plain_training_unless_another_plan_is_faster_by_the_margin(share):
    """The host and the links have nothing to do; so updates there save what those on the device would take."""
    times = {"update_s": 0.0, "load_s": 0.0, "offload_s": 0.0, "forward_s": 1.0, "backward_s": 2.0}
    times |= {"forward_dha_s": 1.0, "backward_dha_s": 2.0, "backward_go_s": 2.0}
    times |= {"update_gpu_s": share * EQUAL_WITHIN * 3.0, "inter_forward_s": 0.0, "inter_backward_s": 0.0}
    layers = tuple(dataclasses.replace(layer, **times) for layer in with_state(transformer(4)).layers)
    profile = dataclasses.replace(transformer(4), layers=layers)
    everything = needed_bytes(profile, plan_with(profile, range(len(profile.groups))))
    for budget in (None, everything):
        assert all(make_plan(profile, "auto", memory_budget_bytes=budget).updates_on_device) == (share < 1)
    assert not all(make_plan(profile, "auto", memory_budget_bytes=everything - 1).updates_on_device)


@examples(10)
@given(st.data())
def test_a_plan_in_place_of_plain_training_is_faster_by_more_than_the_margin(data):
    profile = with_state(data.draw(profiles(max_layers=3)))
    plan, plain = make_plan(profile, "auto"), plan_with(profile, range(len(profile.groups)))
    if not all(plan.updates_on_device):
        assert plan.predicted.steady_step_s * (1 + EQUAL_WITHIN) < simulate(profile, plain).steady_step_s
    else:
        assert set(plan.modes) == {Mode.RESIDENT}


def test_with_frozen_layers_too_everything_stays():
    layers = with_state(transformer(4)).layers
    frozen = dataclasses.replace(layers[1], has_gradient=False, update_gpu_s=None, state_bytes=0, update_s=0.0)
    profile = dataclasses.replace(transformer(4), layers=(layers[0], frozen, *layers[2:]))
    plan = make_plan(profile, "auto")
    trained = [layer for layer, costs in zip(plan.layers, profile.layers, strict=True) if costs.has_gradient]
    assert set(plan.modes) == {Mode.RESIDENT}
    assert {layer.update for layer in trained} == {UpdatePlace.RESIDENT}
    assert {task.lane for task in schedule_step(profile, plan).tasks} == {Lane.GPU}


def test_one_update_of_all_groups_has_one_place():
    profile = dataclasses.replace(with_state(transformer(4)), updates_after_all=True, updates_together=True)
    everything = make_plan(profile, "auto")
    assert all(everything.updates_on_device)
    needed = needed_bytes(profile, everything)
    assert make_plan(profile, "auto", memory_budget_bytes=needed).layers == everything.layers
    assert not any(make_plan(profile, "auto", memory_budget_bytes=needed - 1).updates_on_device)
    assert not any(make_plan(profile, "twin-flow", memory_budget_bytes=needed).updates_on_device)


def test_a_reserve_factor_below_one_keeps_updates_on_the_host():
    plan = make_plan(with_state(transformer(3)), "auto", reserve_factor=0.5)
    assert not any(plan.updates_on_device)


@examples(20)
@given(st.data())
def test_no_plan_within_a_budget_is_below_the_bound(data):
    profile = with_state(data.draw(profiles(max_layers=4)))
    on_device = data.draw(st.sets(st.sampled_from(range(len(profile.groups)))))
    mode, gradient = data.draw(st.sampled_from(list(Mode))), data.draw(st.sampled_from(list(GradientPlace)))
    plan = plan_with(profile, on_device, mode, gradient=gradient)
    bound_s = any_plan_lower_bound_s(profile, needed_bytes(profile, plan))
    assert bound_s <= simulate(profile, plan).steady_step_s * (1 + 1e-9)
