"""What programs take of the links, against figures computed by hand and against the same step without sharing."""

import dataclasses

from hypothesis import given

from jaxferry.modes import GradientPlace, Mode
from jaxferry.profiling.records import Profile
from jaxferry.schedule import schedule_step
from jaxferry.simulate import machine
from jaxferry.simulate.report import simulate
from profiles import deterministic, planned, profiles, with_modes
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


@deterministic
@given(planned(plain=True, links=True))
def test_sharing_makes_no_step_faster_and_no_link_carries_more_than_it_can(case):
    profile, plan = case
    alone = Profile({}, tuple(dataclasses.replace(each, **ALONE) for each in profile.layers))
    shared, separate = simulate(profile, plan), simulate(alone, plan)
    assert shared.forward_s >= separate.forward_s and shared.step_s >= separate.step_s
    assert shared.steady_step_s >= separate.steady_step_s * (1 - 1e-12)
    assert all(shared.steady_step_s >= use.busy_s * (1 - 1e-12) for use in shared.lanes.values())


@deterministic
@given(profiles(links=True))
def test_loaded_layers_whose_gradients_stay_take_nothing_more(profile):
    alone = Profile({}, tuple(dataclasses.replace(each, **ALONE) for each in profile.layers))
    plan = with_modes(profile, [Mode.GFGB] * len(profile.layers))
    assert simulate(profile, plan) == simulate(alone, plan)
