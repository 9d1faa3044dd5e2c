"""The order of updates: the shorter steady step, within the plan's memory, whatever the budget."""

import dataclasses

import pytest

from jaxferry.costs import LayerProfile, Profile
from jaxferry.modes import GradientPlace, Mode
from jaxferry.planner import with_update_order
from jaxferry.step import StepSchedules, UpdateOrder, Updates, needed_bytes, schedule_step, simulate, step_demand
from profiles import UNLIMITED_BYTES, drawn, transformer, with_modes

DEVICE, HOST = GradientPlace.DEVICE, GradientPlace.HOST


def profile_of(*rows):
    """Layers of the bytes of parameters and gradients, and the times below; forwards take 2 seconds by DHA."""
    keys = ("param_bytes", "grad_bytes", "load_s", "forward_s", "backward_s", "offload_s", "update_s")
    layers = []
    for number, row in enumerate(rows):
        times = dict(zip(keys, row, strict=True))
        fixed = {"forward_dha_s": 2.0, "backward_dha_s": 2.0, "backward_go_s": times["backward_s"] + 1.0}
        layers.append(LayerProfile(name=f"l{number}", **times, **fixed))
    return Profile({}, tuple(layers))


def in_order(plan, order):
    return dataclasses.replace(plan, update_order=order)


def test_the_faster_order_is_taken_and_backward_order_at_a_tie():
    taken = set()
    for profile, plan in drawn(60, seed=5, programs=False):
        plan = dataclasses.replace(plan, memory_bytes=None)
        backward, need = (simulate(profile, in_order(plan, order)).steady_step_s for order in UpdateOrder)
        found = with_update_order(profile, plan).update_order
        assert found == (UpdateOrder.NEED if need < backward * (1 - 1e-9) else UpdateOrder.BACKWARD)
        taken.add(found)
    assert taken == set(UpdateOrder)


@pytest.mark.parametrize("resident", [False, True])
def test_without_times_updates_go_by_need_unless_a_layer_is_resident(resident):
    free = {key: 0 for key, value in transformer(3).layers[0].to_json().items() if not isinstance(value, str)}
    profile = Profile({}, tuple(LayerProfile(name=f"l{number}", **free) for number in range(3)))
    plan = with_modes(profile, [Mode.GFGB, Mode.RESIDENT if resident else Mode.GFGB, Mode.GFGB])
    assert with_update_order(profile, plan).update_order == ("backward" if resident else "need")


def test_the_memory_that_a_plan_needs_covers_both_orders():
    """By need, layer 1 is updated and loaded while the gradient of layer 2 is still leaving."""
    profile = profile_of((20, 20, 2, 2, 2, 0, 2), (20, 10, 0, 2, 1, 2, 1), (10, 10, 2, 2, 3, 4, 0))
    plan = with_modes(profile, [Mode.DHA, Mode.RELOAD, Mode.GFGB], [DEVICE, HOST, DEVICE])
    backward, need = (simulate(profile, in_order(plan, order)) for order in UpdateOrder)
    assert need.steady_step_s < backward.steady_step_s
    assert (
        backward.peak_device_bytes < need.peak_device_bytes <= needed_bytes(profile, in_order(plan, UpdateOrder.NEED))
    )
    assert backward.peak_device_bytes <= needed_bytes(profile, plan)
    assert with_update_order(profile, plan).update_order is UpdateOrder.NEED


def test_more_memory_is_never_slower_although_updates_by_need_may_be():
    """By need this step takes 32 seconds with waits for room, but 33 with none."""
    profile = profile_of(
        (1, 10, 2, 2, 2, 6, 6), (1, 20, 3, 1, 2, 3, 1), (1, 10, 2, 2, 1, 5, 6), (10, 20, 4, 2, 2, 1, 5)
    )
    plan = with_modes(profile, [Mode.DHA, Mode.DHA, Mode.RESIDENT, Mode.RELOAD], [HOST, DEVICE, DEVICE, DEVICE])
    free = dataclasses.replace(in_order(plan, UpdateOrder.NEED), memory_bytes=UNLIMITED_BYTES)
    assert simulate(profile, free).steady_step_s == 33
    for memory_bytes in (None, 31, 41, 51, 61, UNLIMITED_BYTES):
        found = with_update_order(profile, dataclasses.replace(plan, memory_bytes=memory_bytes))
        assert simulate(profile, found).steady_step_s == 32


def test_by_need_no_backward_waits_for_room_that_a_budget_gives():
    """A greedy order may be slower with fewer waits, so a budget counts by need only if it ends all waits."""
    modes, num_seen = (Mode.GFGB, Mode.RELOAD, Mode.RESIDENT, Mode.DHA), 0
    for seed in (*range(20), 36, 50, 98, 148, 170):
        for profile, plan in drawn(2, seed=seed, programs=False, updates=[Updates.OVERLAPPED], modes=modes):
            more_bytes = max(layer.grad_bytes for layer in profile.layers)
            memory_bytes = step_demand(profile, plan)[1].natural + more_bytes
            found = with_update_order(profile, dataclasses.replace(plan, memory_bytes=memory_bytes))
            if found.update_order is UpdateOrder.NEED and found.memory_bytes is not None:
                unlimited = dataclasses.replace(found, memory_bytes=UNLIMITED_BYTES)
                assert schedule_step(profile, found).tasks == schedule_step(profile, unlimited).tasks
                num_seen += 1
    assert num_seen >= 5


def test_one_plan_has_the_tasks_of_each_room_for_gradients():
    for profile, plan in drawn(12, seed=5, programs=False):
        schedules, least = StepSchedules(profile, plan), needed_bytes(profile, plan)
        for memory_bytes in (None, least, least + profile.layers[0].grad_bytes, UNLIMITED_BYTES):
            alone = schedule_step(profile, dataclasses.replace(plan, memory_bytes=memory_bytes))
            assert schedules.within(memory_bytes) == alone
            unlimited = schedule_step(profile, dataclasses.replace(plan, memory_bytes=UNLIMITED_BYTES))
            assert schedules.waits_for_room(memory_bytes or 0) == (alone.tasks != unlimited.tasks)


def test_in_backward_order_an_update_waits_for_the_offloads_of_updates_before_it():
    """The gradient of layer 0 is written to the host, but the host updates layer 1 first, whose gradient leaves."""
    profile = profile_of((100, 100, 1, 1, 1, 3, 1), (200, 200, 1, 1, 1, 3, 1), (100, 100, 1, 1, 1, 3, 1))
    layers = (dataclasses.replace(x, forward_dha_s=1.0, backward_dha_s=1.0, backward_go_s=1.0) for x in profile.layers)
    profile = Profile({}, tuple(layers))
    plan = with_modes(profile, [Mode.GFGB, Mode.DHA, Mode.GFGB], [HOST, DEVICE, DEVICE])
    backward, need = (in_order(plan, order) for order in UpdateOrder)
    assert (needed_bytes(profile, backward), simulate(profile, backward).step_s) == (300, 14.0)
    assert (needed_bytes(profile, need), simulate(profile, need).step_s) == (400, 12.0)
    schedules = StepSchedules(profile, backward)
    assert schedules.in_order(UpdateOrder.NEED).needs.natural == 400 and schedules.needs.natural == 300
    in_room = dataclasses.replace(plan, memory_bytes=300)
    assert with_update_order(profile, in_room).update_order is UpdateOrder.BACKWARD
