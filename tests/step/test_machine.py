"""The simulator agrees with a second one written from the model's text, and with figures computed by hand."""

import bisect
import dataclasses
import itertools

import pytest
from hypothesis import given

from jaxferry.costs import Profile
from jaxferry.errors import InputError
from jaxferry.modes import GradientPlace, Mode
from jaxferry.step import (
    Kind,
    Lane,
    device_bytes,
    device_bytes_by_kind,
    machine,
    repeat,
    run,
    schedule_chain,
    schedule_step,
    simulate,
)
from oracle import Oracle
from profiles import deterministic, examples, planned, transformer, with_modes
from profiles import unit_layer as layer

PAPER_MODES = (Mode.GFGB, Mode.DHA, Mode.DFGB)


@deterministic
@given(planned(PAPER_MODES, plain=True))
def test_times_are_those_of_the_model_s_text(case):
    profile, plan = case
    simulation, oracle = simulate(profile, plan), Oracle(profile, plan)
    assert simulation.forward_s == oracle.forward_s()
    assert simulation.step_s == oracle.step_s()
    assert simulation.steady_step_s == pytest.approx(oracle.steady_step_s(), rel=1e-12)


@deterministic
@given(planned())
def test_steady_time_is_the_growth_of_a_long_chain(case):
    profile, plan = case
    step = schedule_step(profile, dataclasses.replace(plan, update_order="backward"))
    run = machine.run(repeat(step, 49))
    ends = [0.0] * 49
    for task, end in zip(run.schedule.tasks, run.ends_s, strict=True):
        if task.kind is Kind.UPDATE:
            ends[task.step] = max(ends[task.step], end)
    assert machine.steady_step_s(step) == pytest.approx((ends[48] - ends[24]) / 24, rel=1e-9, abs=1e-12)


@deterministic
@given(planned())
def test_no_step_is_shorter_than_a_lane_s_load_or_its_critical_path(case):
    simulation = simulate(*case)
    run = simulation.run
    for lane in (Lane.GPU, Lane.D2H, Lane.HOST):
        assert simulation.step_s >= simulation.lanes[lane].busy_s - 1e-9
    for use in simulation.lanes.values():
        assert simulation.steady_step_s >= use.busy_s - 1e-9
    path = machine.critical_path(run)
    durations = [run.schedule.tasks[index].duration_s for index in path]
    assert sum(durations) == simulation.step_s
    assert run.starts_s[path[0]] == 0
    for before, after in itertools.pairwise(path):
        assert run.ends_s[before] == run.starts_s[after]


@deterministic
@given(planned())
def test_a_critical_path_has_no_gap_where_the_host_updates_by_need(case):
    schedule = dataclasses.replace(schedule_step(*case), updates_by_need=True)
    run = machine.run(repeat(schedule, 3))
    path = machine.critical_path(run)
    assert run.starts_s[path[0]] == 0
    for before, after in itertools.pairwise(path):
        assert run.ends_s[before] == run.starts_s[after]


@deterministic
@given(planned())
def test_memory_is_never_negative_and_all_but_residents_is_given_back(case):
    timeline = simulate(*case).device_bytes
    resident = timeline[0][1]
    assert min(held for _, held in timeline) >= 0
    assert timeline[-1][1] == resident
    assert [time for time, _ in timeline] == sorted(time for time, _ in timeline)


def test_a_workspace_takes_memory_while_its_program_runs():
    profiles = [Profile({}, (layer("a", forward_workspace_bytes=size), layer("b"))) for size in (0, 50)]
    before, after = (dict(simulate(each, with_modes(each, [Mode.GFGB] * 2)).device_bytes) for each in profiles)
    more = {time: held - before[time] for time, held in after.items() if time in before}
    assert [time for time, held in more.items() if held == 50] == [1.0] and set(more.values()) == {0, 50}


def test_loads_for_the_next_step_hide_in_the_last_updates():
    profile = Profile({}, (layer("a", update_s=5), layer("b", load_s=6)))
    simulation = simulate(profile, with_modes(profile, [Mode.DHA, Mode.GFGB]))
    # alone: load of b ends at 6, b's forward at 7, backwards at 8 and 9, a's gradient at 10, its update at 15
    assert simulation.step_s == 15
    # in a chain b is updated at 10 and loaded until 16, a second after the step's end; its forward ends at 17
    assert simulation.steady_step_s == 10


def test_zero_offload_uploads_each_layer_once_it_is_updated():
    """Independent: in its chain all loads precede all programs, and all gradients precede all updates."""
    profile = transformer(12)
    plan = with_modes(profile, [Mode.GFGB] * 12, loads="bulk", updates="after-all", memory_bytes=2**53)
    gpu_s = sum(layer.forward_s + layer.inter_forward_s for layer in profile.layers)
    link_s = 0.0
    for each in reversed(profile.layers):
        gpu_s += each.inter_backward_s + each.backward_s
        link_s = max(link_s, gpu_s) + each.offload_s
    host_s = uploaded_s = link_s
    for each in reversed(profile.layers):
        host_s += each.update_s
        uploaded_s = max(uploaded_s, host_s) + each.load_s
    simulation = simulate(profile, plan)
    assert simulation.steady_step_s == pytest.approx(uploaded_s, rel=1e-12)
    assert simulation.steady_step_s < simulation.step_s
    assert simulation.step_s == pytest.approx(sum(each.load_s for each in profile.layers) + host_s, rel=1e-12)


def test_link_bytes_count_every_way_over_the_link():
    profile = Profile({}, (layer("a"), layer("b"), layer("c")))
    places = [GradientPlace.DEVICE, GradientPlace.HOST, GradientPlace.DEVICE]
    plan = with_modes(profile, [Mode.DHA, Mode.RELOAD, Mode.RESIDENT], places)
    assert simulate(profile, plan).link_bytes == (10 + 10 + 1) + (10 + 10 + 1) + (10 + 1)


def test_a_plan_for_another_profile_is_refused():
    profile, other = transformer(6), transformer(7)
    with pytest.raises(InputError, match=r"another profile.*6 layers.*7"):
        simulate(other, with_modes(profile, [Mode.DHA] * 6))


def test_by_need_the_host_sees_all_gradients_that_arrive_at_an_instant():
    """Both gradients arrive with the end of the only backward that takes time, by transfers that take none."""
    profile = Profile({}, (layer("a", backward_s=0, offload_s=0), layer("b", offload_s=0)))
    run = machine.run(schedule_step(profile, with_modes(profile, [Mode.GFGB] * 2, update_order="need")))
    starts = {task.name: start for task, start in zip(run.schedule.tasks, run.starts_s, strict=True)}
    assert starts["update a"] < starts["update b"]


def held_at(changes, time):
    return changes[bisect.bisect_right([moment for moment, _ in changes], time) - 1][1]


@examples(25)
@given(planned(recomputing=True, programs=True, offloading=True))
def test_the_kinds_add_up_to_the_memory_of_the_schedule(case):
    profile, plan = case
    of = run(schedule_chain(profile, plan, 2))
    kinds = device_bytes_by_kind(of, profile, plan).values()
    for time, held in device_bytes(of)[1:]:
        assert sum(held_at(changes, time) for changes in kinds) == held
