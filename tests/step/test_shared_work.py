"""What programs take of the links, against figures computed by hand and against the same step without sharing."""

import dataclasses

import pytest
from hypothesis import given

from jaxferry.costs import Contention, Profile
from jaxferry.modes import GradientPlace, Mode
from jaxferry.planner import any_plan_lower_bound_s
from jaxferry.step import UpdateOrder, machine, schedule_chain, schedule_step, simulate
from profiles import deterministic, planned, with_modes
from profiles import unit_layer as layer

ALONE = dict.fromkeys(("forward_read_s", "backward_read_s", "backward_write_s"), 0.0)
HOST, DEVICE = GradientPlace.HOST, GradientPlace.DEVICE


def times(profile, plan):
    run = machine.run(schedule_step(profile, plan))
    tasks = zip(run.schedule.tasks, run.starts_s, run.ends_s, strict=True)
    return {task.name: (start, end) for task, start, end in tasks}


def test_loads_get_what_a_forward_by_dha_leaves_of_the_link():
    layers = (layer("a", forward_dha_s=4, forward_read_s=3), layer("b", load_s=5), layer("c"))
    plan = with_modes(Profile({}, layers), [Mode.DHA, Mode.GFGB, Mode.GFGB])
    found = times(Profile({}, layers), plan)
    assert found["forward a"] == (0, 4)  # programs go first
    assert found["load b"] == (3, 8) and found["load c"] == (8, 9)
    simulation = simulate(Profile({}, layers), plan)
    assert simulation.lanes["H2D"].busy_s == 3 + 5 + 1 and simulation.forward_s == 10


def test_a_gradient_that_a_backward_writes_delays_those_that_follow():
    layers = (layer("a"), layer("b", backward_go_s=3, backward_write_s=2), layer("c", offload_s=4))
    plan = with_modes(Profile({}, layers), [Mode.GFGB] * 3, [DEVICE, HOST, DEVICE])
    found = times(Profile({}, layers), plan)
    ends = found["backward c"][1]
    assert found["offload c"] == (ends, ends + 4)
    assert found["backward b"] == (ends, ends + 3)
    assert found["write b"] == (ends + 4, ends + 6)
    assert found["offload a"] == (ends + 6, ends + 7)
    assert found["update b"][0] == found["update c"][1] == ends + 5  # its gradient is there at ends + 3


def test_a_backward_that_runs_its_forward_again_reads_twice():
    layers = tuple(
        layer(name, forward_read_s=0.25, backward_read_s=0.5, recompute_s=1.0, recompute_activation_bytes=0)
        for name in "ab"
    )
    plan = with_modes(Profile({}, layers), [Mode.DHA] * 2)
    again = dataclasses.replace(plan, layers=tuple(dataclasses.replace(each, remat="full") for each in plan.layers))
    busy = [simulate(Profile({}, layers), each).lanes["H2D"].busy_s for each in (plan, again)]
    assert busy == [2 * 0.75, 2 * 1.0]
    reads = {"forward_dha_s": 4.0, "forward_read_s": 4.0, "backward_read_s": 6.0}
    of_link = Profile({}, (*(dataclasses.replace(each, **reads) for each in layers), layer("c")))
    again = dataclasses.replace(again, layers=(*again.layers, *with_modes(of_link, [Mode.GFGB] * 3).layers[2:]))
    assert simulate(of_link, again).steady_step_s == 2 * 14 + 1


FREE = dict.fromkeys(("load_s", "forward_s", "backward_s", "offload_s"), 0.0)


def host_bound(**of_first):
    """Three layers whose updates take 60 of the 63 seconds from a's load to the end of its update."""
    return (layer("a", update_s=20, offload_s=8, **of_first), layer("b", update_s=20), layer("c", update_s=20, **FREE))


def contended(layers, **shares):
    profile = Profile({}, layers, contention=Contention(shares))
    return profile, with_modes(profile, [Mode.GFGB] * len(layers))


def test_what_lanes_lose_in_a_step_delays_the_next_one_of_the_lane_that_sets_the_pace():
    profile, plan = contended(host_bound(), host={"H2D": 0.5, "D2H": 0.5}, H2D={"host": 0.125})
    alone, shared = simulate(Profile({}, profile.layers), plan), simulate(profile, plan)
    assert alone.steady_step_s == 63
    assert (shared.forward_s, shared.step_s) == (alone.forward_s, alone.step_s)
    assert shared.steady_step_s == 60 + 0.5 * 2 + 0.5 * 9  # the updates, and what loads and offloads take of the host
    assert shared.lanes["H2D"].busy_s == 2 + 60 * 0.125
    run = machine.run(schedule_chain(profile, plan, 4))
    updates = [start for task, start in zip(run.schedule.tasks, run.starts_s, strict=True) if task.name == "update c"]
    assert updates[3] - updates[2] == 65.5


def test_what_programs_read_and_write_in_host_memory_takes_the_host_s_time_as_well():
    reads = {"forward_dha_s": 1, "forward_read_s": 1, "backward_dha_s": 1, "backward_read_s": 0.5}
    layers = host_bound(**reads, backward_go_s=1, backward_write_s=6)
    profile, _ = contended(layers, host={"H2D": 1.0, "D2H": 0.5})
    plan = with_modes(profile, [Mode.DHA, Mode.GFGB, Mode.GFGB], [HOST, DEVICE, DEVICE])
    assert simulate(profile, plan).steady_step_s == 60 + 1.0 * (1 + 0.5 + 1) + 0.5 * (6 + 1)


@pytest.mark.parametrize("order", UpdateOrder)
def test_it_counts_in_both_orders_of_updates_and_for_many_plans_at_once(order):
    profile, plan = contended(host_bound(backward_go_s=9, backward_write_s=8), host={"H2D": 1.0, "D2H": 0.5})
    plan = dataclasses.replace(plan, update_order=order)
    assert simulate(profile, plan).steady_step_s == pytest.approx(60 + 2 + 4.5)
    alone = any_plan_lower_bound_s(Profile({}, profile.layers))
    assert alone < any_plan_lower_bound_s(profile) <= 66.5


@deterministic
@given(planned(plain=True, links=True))
def test_sharing_makes_no_step_faster_and_no_link_carries_more_than_it_can(case):
    profile, plan = case
    alone = Profile({}, tuple(dataclasses.replace(each, **ALONE) for each in profile.layers))
    shared, separate = simulate(profile, plan), simulate(alone, plan)
    assert shared.forward_s >= separate.forward_s and shared.step_s >= separate.step_s
    assert shared.steady_step_s >= separate.steady_step_s * (1 - 1e-12)
    assert all(shared.steady_step_s >= use.busy_s * (1 - 1e-12) for use in shared.lanes.values())
