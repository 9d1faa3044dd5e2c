"""The rules of the task list, one by one."""

import dataclasses

import pytest
from hypothesis import given

from jaxferry.costs import Profile
from jaxferry.errors import InputError
from jaxferry.modes import Mode
from jaxferry.step import Kind, Lane, machine, repeat, schedule_chain, schedule_step
from profiles import deterministic, planned, profiles, transformer, unit_layer, with_modes


def tasks_of(schedule, *kinds):
    return [task for task in schedule.tasks if task.kind in kinds]


@deterministic
@given(planned())
def test_every_task_follows_what_it_waits_for(case):
    for index, task in enumerate(repeat(schedule_step(*case), 2).tasks):
        assert all(waited < index for waited in task.after)


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


def test_the_second_load_of_the_next_backward_does_not_queue_behind_what_returns_for_a_later_one():
    """Of every second layer activations leave; their way back takes 1.5 of a backward, a load takes a quarter."""
    size, times = 12, {"forward_s": 2.0, "backward_s": 2.0, "load_s": 0.5, "offload_s": 0.5, "update_s": 0.0}
    bytes_of = {"param_bytes": 2, "activation_bytes": 12, "offloadable_bytes": {"none": 12}}
    profile = transformer(size).with_layers([times | bytes_of] * size)
    plan = with_modes(profile, [Mode.RELOAD] * size)
    waits = [
        dataclasses.replace(own, activations="host" if layer % 2 and layer < size - 1 else "device")
        for layer, own in enumerate(plan.layers)
    ]
    step = schedule_step(profile, dataclasses.replace(plan, layers=tuple(waits)))
    on_link = [(task.kind, task.segment) for task in step.tasks if task.kind in (Kind.RELOAD, Kind.FETCH)]
    for layer in range(1, size - 3, 2):
        assert on_link.index((Kind.RELOAD, layer + 1)) < on_link.index((Kind.FETCH, layer))
    one, backwards = machine.run(step), [x for x, task in enumerate(step.tasks) if task.kind is Kind.BACKWARD]
    assert one.ends_s[backwards[-1]] - one.starts_s[backwards[2]] <= (size - 2) * 2.0 + 0.6
