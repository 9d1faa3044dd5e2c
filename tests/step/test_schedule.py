"""The rules of the task list, one by one."""

import dataclasses

import pytest
from hypothesis import given

from jaxferry.costs import Profile
from jaxferry.errors import InputError
from jaxferry.modes import GradientPlace, Mode, Remat
from jaxferry.step import Kind, Lane, machine, repeat, schedule_chain, schedule_step
from profiles import deterministic, planned, profiles, recomputing, transformer, unit_layer, with_modes


def tasks_of(schedule, *kinds):
    return [task for task in schedule.tasks if task.kind in kinds]


@deterministic
@given(planned())
def test_every_task_follows_what_it_waits_for(case):
    for index, task in enumerate(repeat(schedule_step(*case), 2).tasks):
        assert all(waited < index for waited in task.after)


@deterministic
@given(planned())
def test_the_gpu_runs_every_forward_up_and_every_backward_down(case):
    profile, plan = case
    order = [(task.kind, task.segment) for task in schedule_step(profile, plan).tasks if task.lane is Lane.GPU]
    size = len(profile.layers)
    assert [layer for kind, layer in order if kind is Kind.FORWARD] == list(range(size))
    assert [layer for kind, layer in order if kind is Kind.BACKWARD] == list(reversed(range(size)))
    assert order.index((Kind.FORWARD, size - 1)) < order.index((Kind.BACKWARD, size - 1))


@deterministic
@given(planned())
def test_each_gradient_leaves_once_and_each_group_is_updated_once(case):
    profile, plan = case
    schedule = schedule_step(profile, plan)
    leaving = [task.segment for task in tasks_of(schedule, Kind.OFFLOAD)]
    places = plan.gradients
    assert leaving == [i for i in reversed(range(len(places))) if places[i] is GradientPlace.DEVICE]
    assert len(tasks_of(schedule, Kind.UPDATE)) == len(profile.groups)


@deterministic
@given(profiles(tied=False))
def test_reload_layers_never_have_more_than_two_copies_on_the_device(profile):
    plan = with_modes(profile, [Mode.RELOAD] * len(profile.layers))
    run = machine.run(schedule_chain(profile, plan, 2))
    copies = []
    for index, task in enumerate(run.schedule.tasks):
        if task.kind in (Kind.LOAD, Kind.RELOAD):
            users = [i for i, other in enumerate(run.schedule.tasks) if index in other.after and other.lane is Lane.GPU]
            copies.append((run.starts_s[index], run.ends_s[users[0]]))
    assert len(copies) == 4 * len(profile.layers)
    for instant, _ in copies:
        assert sum(start <= instant < end for start, end in copies) <= 2


def test_dfgb_loads_follow_the_last_gfgb_load_in_layer_order():
    profile = transformer(8)
    modes = [Mode.DFGB, Mode.GFGB, Mode.DFGB, Mode.GFGB, Mode.DHA, Mode.DFGB, Mode.GFGB, Mode.DHA]
    loads = tasks_of(schedule_step(profile, with_modes(profile, modes)), Kind.LOAD)
    assert [task.segment for task in loads] == [1, 3, 6, 0, 2, 5]


def test_resident_layers_load_nothing_but_their_refresh_after_the_update():
    profile = transformer(6)
    schedule = schedule_step(profile, with_modes(profile, [Mode.RESIDENT] * 6))
    assert schedule.resident_bytes == sum(layer.param_bytes for layer in profile.layers)
    link = [task for task in schedule.tasks if task.lane is Lane.H2D]
    assert [task.kind for task in link] == [Kind.REFRESH] * 6
    for task in link:
        (update,) = task.after
        assert schedule.tasks[update].kind is Kind.UPDATE and schedule.tasks[update].segment == task.segment
    forwards = tasks_of(schedule, Kind.FORWARD)
    assert [schedule.tasks[task.after_previous[0]].kind for task in forwards] == [Kind.REFRESH] * 6


def test_a_tied_table_that_both_entries_hold_is_loaded_once_and_updated_once_at_the_end():
    profile = transformer(6, tied=True)
    schedule = schedule_step(profile, with_modes(profile, [Mode.GFGB] * 6))
    assert [task.segment for task in tasks_of(schedule, Kind.LOAD)] == [0, 1, 2, 3, 4]
    updates = tasks_of(schedule, Kind.UPDATE)
    assert [task.segment for task in updates] == [4, 3, 2, 1, 0]
    arrivals = [schedule.tasks[index].segment for index in updates[-1].after]
    assert arrivals == [5, 0]


@pytest.mark.parametrize("lookup", [Mode.DHA, Mode.DFGB])
def test_a_tied_table_held_for_the_head_alone_is_loaded_at_the_head(lookup):
    profile = transformer(6, tied=True)
    schedule = schedule_step(profile, with_modes(profile, [lookup, *[Mode.DHA] * 4, Mode.GFGB]))
    (load,) = tasks_of(schedule, Kind.LOAD)
    assert load.segment == 5
    last = [task for task in tasks_of(schedule, Kind.BACKWARD) if task.end_bytes >= load.start_bytes]
    assert [task.segment for task in last] == [5 if lookup is Mode.DHA else 0]


def test_a_tied_table_reloaded_by_both_entries_is_loaded_four_times():
    profile = transformer(6, tied=True)
    schedule = schedule_step(profile, with_modes(profile, [Mode.RELOAD, *[Mode.DHA] * 4, Mode.RELOAD]))
    assert [task.segment for task in tasks_of(schedule, Kind.LOAD, Kind.RELOAD)] == [0, 5, 5, 0]


def test_bulk_and_after_all_are_waits():
    profile = transformer(5)
    plan = with_modes(profile, [Mode.GFGB] * 5, loads="bulk", updates="after-all")
    schedule = schedule_step(profile, plan)
    loads = [index for index, task in enumerate(schedule.tasks) if task.kind is Kind.LOAD]
    offloads = [index for index, task in enumerate(schedule.tasks) if task.kind is Kind.OFFLOAD]
    assert all(loads[-1] in task.after for task in tasks_of(schedule, Kind.FORWARD))
    assert all(task.after == (offloads[-1],) for task in tasks_of(schedule, Kind.UPDATE))
    assert [schedule.tasks[index].segment for index in loads] == [4, 3, 2, 1, 0]


@deterministic
@given(planned())
def test_in_a_chain_nothing_reads_parameters_before_their_update(case):
    profile, plan = case
    run = machine.run(schedule_chain(profile, plan, 3))
    updated = {}
    for task, end in zip(run.schedule.tasks, run.ends_s, strict=True):
        if task.kind is Kind.UPDATE:
            updated[task.step, profile.group_of[task.segment]] = end
    for task, start in zip(run.schedule.tasks, run.starts_s, strict=True):
        if task.step and task.kind in (Kind.LOAD, Kind.FORWARD):
            assert start >= updated[task.step - 1, profile.group_of[task.segment]]


@deterministic
@given(planned())
def test_host_gradients_are_given_back_once_updated(case):
    tasks = schedule_step(*case).tasks
    assert sum(task.host_start_bytes for task in tasks) == sum(task.host_end_bytes for task in tasks)


def test_a_profile_of_one_layer_is_a_schedule_too():
    profile = Profile({}, transformer(3).layers[:1])
    assert len(schedule_step(profile, with_modes(profile, [Mode.GFGB])).tasks) == 7


def test_a_layer_that_recomputes_has_a_longer_backward_and_holds_less_until_then():
    profile = recomputing(transformer(4), share=0.25)
    plain = with_modes(profile, [Mode.GFGB, Mode.DHA, Mode.GFGB, Mode.GFGB])
    layers = [dataclasses.replace(layer, remat=Remat.FULL) for layer in plain.layers[:2]]
    again = dataclasses.replace(plain, layers=(*layers, *plain.layers[2:]))
    for before, after in zip(schedule_step(profile, plain).tasks, schedule_step(profile, again).tasks, strict=True):
        layer = profile.layers[before.segment]
        changes = before.segment < 2 and before.kind in (Kind.FORWARD, Kind.BACKWARD)
        saved = layer.activation_bytes - layer.recompute_activation_bytes if changes else 0
        more_s = 0.0
        if changes and before.kind is Kind.BACKWARD:
            more_s = layer.recompute_s + (layer.forward_dha_s - layer.forward_s if before.segment == 1 else 0.0)
        assert after.duration_s == pytest.approx(before.duration_s + more_s, rel=1e-12)
        assert before.start_bytes - after.start_bytes == (saved if before.kind is Kind.FORWARD else 0)
        assert before.end_bytes - after.end_bytes == (saved if before.kind is Kind.BACKWARD else 0)


def test_a_program_of_two_layers_waits_for_both_and_both_gradients_leave_once_it_has_ended():
    """Loads take 1 s each, so the program starts at 2 s; both layers compute 1 s forward and 1 s back."""
    layers = unit_layer("a"), unit_layer("b", shares_program=True)
    profile = Profile({}, layers)
    run = machine.run(schedule_step(profile, with_modes(profile, [Mode.GFGB] * 2)))
    spans = {
        task.name: (start, end) for task, start, end in zip(run.schedule.tasks, run.starts_s, run.ends_s, strict=True)
    }
    assert [spans[f"forward {name}"] for name in "ab"] == [(2, 3), (3, 4)]
    assert [spans[f"backward {name}"] for name in "ba"] == [(4, 5), (5, 6)]
    assert [spans[f"offload {name}"] for name in "ba"] == [(6, 7), (7, 8)]


def test_a_program_loads_one_of_its_layers_while_it_reads_the_other_in_place():
    """The forward by DHA waits for the other layer's load as well, and the copy stays until the program has ended."""
    layers = unit_layer("norm", forward_dha_s=1.5), unit_layer("matrix", shares_program=True, load_s=2.0)
    profile = Profile({}, layers)
    tasks = schedule_step(profile, with_modes(profile, [Mode.DHA, Mode.RELOAD])).tasks
    names = [task.name for task in tasks]
    first, last = names.index("forward norm"), names.index("forward matrix")
    assert tasks[first].after == (names.index("load matrix"),)
    assert tasks[last].end_bytes == 10
    ends = dict(
        zip(
            names, machine.run(schedule_step(profile, with_modes(profile, [Mode.DHA, Mode.RELOAD]))).ends_s, strict=True
        )
    )
    assert (ends["forward norm"], ends["forward matrix"]) == (3.5, 4.5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([{"shares_program": True}, {}], "no layer before it has a program"),
        ([{"has_backward": False, "has_gradient": False}, {"shares_program": True}], "has_backward must be False"),
        (
            [{}, {"shares_program": True, "recompute_s": 1.0, "recompute_activation_bytes": 0}],
            "belong to the first layer",
        ),
        ([{"parameters": "x"}, {"parameters": "x", "shares_program": True}], "must have different parameters"),
    ],
)
def test_layers_that_cannot_share_a_program_are_named(changes, message):
    with pytest.raises(InputError, match=message):
        Profile({}, tuple(unit_layer(name, **values) for name, values in zip("ab", changes, strict=True)))
