"""Room for gradients: which transfers a backward waits for, and how much a chain of steps can hold at most."""

import dataclasses
import itertools

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from jaxferry.modes import GradientPlace, Mode
from jaxferry.planner import make_plan, policies
from jaxferry.step import (
    Kind,
    Lane,
    Loads,
    Spans,
    UpdateOrder,
    Updates,
    copy_bytes,
    effective,
    machine,
    repeat,
    schedule_step,
    step_demand,
)
from profiles import UNLIMITED_BYTES, deterministic, drawn, examples, fused, planned, transformer, with_modes

many = examples(100)


def any_durations(step, seed):
    """The same tasks with random durations; some take no time."""
    draw = np.random.default_rng(seed)
    seconds = draw.choice([0.0, 0.01, 1.0, 100.0], size=len(step.tasks))
    tasks = [dataclasses.replace(task, duration_s=float(x)) for task, x in zip(step.tasks, seconds, strict=True)]
    return dataclasses.replace(step, tasks=tuple(tasks))


def peak_bytes(step, steps=4):
    return max(held for _, held in machine.device_bytes(machine.run(repeat(step, steps))))


@many
@given(st.booleans().flatmap(lambda moves: planned(programs=True, recomputing=moves, offloading=moves)))
def test_a_chain_never_holds_more_than_the_limit_however_long_tasks_take(case):
    profile, plan = case
    _, needs = step_demand(profile, plan)
    limit = max(needs.natural, plan.memory_bytes or 0)
    step = schedule_step(profile, plan)
    assert peak_bytes(step) <= limit
    for seed in range(4):
        assert peak_bytes(any_durations(step, seed)) <= limit


@pytest.mark.parametrize("number", [1, 2, 3])
def test_of_activations_that_leave_those_of_two_programs_are_on_the_device_however_long_tasks_take(number):
    """Of each `number` of layers, the first one's leave; what is kept is far larger than anything else."""
    size, kept = 14, 10**12
    sizes = {"activation_bytes": kept, "offloadable_bytes": {"none": kept}}
    profile = fused(transformer(size)).with_layers([sizes] * (size - 2) + [{"activation_bytes": 0}] * 2)
    plan = with_modes(profile, [Mode.RELOAD] * size)
    leave = [layer % number == 0 for layer in range(size - 2)] + [False] * 2
    layers = [
        dataclasses.replace(own, activations="host" if each else "device")
        for own, each in zip(plan.layers, leave, strict=True)
    ]
    plan = dataclasses.replace(plan, layers=tuple(layers))
    natural, stay = step_demand(profile, plan)[1].natural, (size - 2 - sum(leave)) * kept
    assert stay + kept <= natural < stay + 2.5 * kept
    step = schedule_step(profile, plan)
    assert max(peak_bytes(any_durations(step, seed)) for seed in range(20)) <= natural


def program_ancestors(step):
    """Per task of two steps: the number of programs that must have ended before it, from dependencies alone."""
    chain = repeat(step, 2)
    latest, ready = {}, []
    for task in chain.tasks:
        before = [*task.after, *(() if task.lane not in latest or task.lane is Lane.HOST else (latest[task.lane],))]
        number = max((ready[i] + (chain.tasks[i].kind in (Kind.FORWARD, Kind.BACKWARD)) for i in before), default=0)
        ready.append(number)
        latest[task.lane] = len(ready) - 1
    return chain, ready


def end_of(task, profile):
    """The last place of a task's program."""
    first, last = profile.program_ends[task.segment]
    return last if task.kind is Kind.FORWARD else 2 * len(profile.layers) - 1 - first


def check_copies(profile, plan):
    """Counts copies a second time from the task list alone."""
    plan = effective(profile, plan)
    chain, ready = program_ancestors(schedule_step(profile, plan))
    size, tasks = len(profile.layers), chain.tasks
    counted = np.zeros((2, 2 * size + 1), dtype=int)
    programs = [i for i, task in enumerate(tasks) if task.kind in (Kind.FORWARD, Kind.BACKWARD)]
    for index, task in enumerate(tasks):
        if task.kind in (Kind.LOAD, Kind.RELOAD):
            users = [tasks[i] for i in programs if tasks[i].copy == index]
            last = max(end_of(user, profile) + 2 * size * user.step for user in users)
            counted[task.step, ready[index] : last + 1] += task.start_bytes
    held, _ = step_demand(profile, plan)
    now, _, following = copy_bytes(held, Spans.of(held))
    assert now.tolist() == counted[0].tolist()
    assert following.tolist() == counted[1].tolist()


@deterministic
@given(planned())
def test_copies_may_be_there_once_the_programs_have_ended_that_their_loads_wait_for(case):
    """On profiles where every layer has a backward."""
    check_copies(*case)


def test_a_fused_program_keeps_its_slot_until_it_has_ended():
    """The last layer's forward and backward are the program of place 4, then layer 1 is loaded in its slot."""
    profile = fused(transformer(4))
    layers = tuple(dataclasses.replace(x, parameters=x.name) for x in profile.layers)
    plan = with_modes(dataclasses.replace(profile, layers=layers), [Mode.RELOAD] * 4)
    held, _ = step_demand(profile, plan)
    assert Spans.of(held).second_start[:3] == [6, 5, 3]


every_kind = pytest.mark.parametrize(("loads", "updates"), list(itertools.product(Loads, Updates)))


@every_kind
@pytest.mark.parametrize("modes", [tuple(Mode), pytest.param((Mode.GFGB, Mode.RELOAD), marks=pytest.mark.slow)])
def test_a_chain_of_any_kind_never_holds_more_than_the_limit(loads, updates, modes):
    cases = {"loads": [loads], "updates": [updates], "modes": modes}
    for profile, plan in itertools.chain(drawn(80, seed=4, **cases), drawn(80, seed=5, together=True, **cases)):
        limit = max(step_demand(profile, plan)[1].natural, plan.memory_bytes or 0)
        step = schedule_step(profile, plan)
        for seed in range(3):
            assert peak_bytes(any_durations(step, seed)) <= limit


@pytest.mark.parametrize("name", policies())
@pytest.mark.parametrize("activation_bytes", [pytest.param(0, marks=pytest.mark.slow), 8_000_000])
def test_dependencies_grow_linearly_with_the_layers(name, activation_bytes):
    """Without activations every backward waits for room. The searches' modes are those of a short model, stretched."""
    short = make_plan(transformer(9), name)
    counts = []
    for size in (33, 65, 129):
        layers = [dataclasses.replace(layer, activation_bytes=activation_bytes) for layer in transformer(size).layers]
        profile = dataclasses.replace(transformer(size), layers=tuple(layers))
        chosen = [short.layers[index * 9 // size] for index in range(size)]
        stretched = with_modes(profile, [x.mode for x in chosen], [x.gradient for x in chosen])
        plan = dataclasses.replace(short, layers=stretched.layers, memory_bytes=None, predicted=None)
        tasks = schedule_step(profile, plan).tasks
        counts.append(sum(len(task.after) for task in tasks))
        assert max(len(task.after) for task in tasks) <= 4
    by_layer = [count / size for count, size in zip(counts, (33, 65, 129), strict=True)]
    assert max(by_layer) <= 1.1 * min(by_layer)


def test_gradients_take_the_place_of_activations():
    """Once a backward has freed its activations, a gradient of that size may stay; no slot limits their number."""
    profile = transformer(6)
    layers = [
        dataclasses.replace(layer, activation_bytes=100, grad_bytes=100, param_bytes=0, offload_s=100.0)
        for layer in profile.layers
    ]
    profile = dataclasses.replace(profile, layers=tuple(layers))
    step = schedule_step(profile, with_modes(profile, [Mode.GFGB] * 6))
    assert not any(
        step.tasks[i].kind is Kind.OFFLOAD for task in step.tasks if task.kind is Kind.BACKWARD for i in task.after
    )
    full = [dataclasses.replace(layer, activation_bytes=0) for layer in layers]
    profile = dataclasses.replace(profile, layers=tuple(full))
    step = schedule_step(profile, with_modes(profile, [Mode.GFGB] * 6))
    offload_of = {task.segment: i for i, task in enumerate(step.tasks) if task.kind is Kind.OFFLOAD}
    for task in step.tasks:
        if task.kind is Kind.BACKWARD and task.segment < 5:
            assert offload_of[task.segment + 1] in task.after


def test_a_backward_that_adds_to_a_gradient_in_host_memory_waits_for_that():
    profile = transformer(5, tied=True)
    places = [GradientPlace.HOST, *[GradientPlace.DEVICE] * 4]
    plan = dataclasses.replace(with_modes(profile, [Mode.GFGB] * 5, places), memory_bytes=UNLIMITED_BYTES)
    step = schedule_step(profile, plan)
    (lookup,) = [task for task in step.tasks if task.kind is Kind.BACKWARD and task.segment == 0]
    assert [step.tasks[i].segment for i in lookup.after if step.tasks[i].kind is Kind.OFFLOAD] == [4]


def test_after_all_no_next_forward_runs_beside_gradients():
    """Layer 0 needs 100 bytes in its forward, layer 1 leaves 50 bytes of gradient; only overlapped updates let both."""
    first, second, *_ = transformer(4).layers
    nothing = {"param_bytes": 1, "activation_bytes": 0}
    first = dataclasses.replace(first, grad_bytes=1, forward_workspace_bytes=100, **nothing)
    second = dataclasses.replace(second, grad_bytes=50, **nothing)
    profile = dataclasses.replace(transformer(4), layers=(first, second))
    for updates, expected in ((Updates.OVERLAPPED, 150), (Updates.AFTER_ALL, 100)):
        plan = with_modes(profile, [Mode.DHA] * 2, [GradientPlace.HOST, GradientPlace.DEVICE], updates=updates)
        plan = dataclasses.replace(plan, update_order=UpdateOrder.NEED)
        assert step_demand(profile, plan)[1].natural == expected


def test_bulk_loads_for_the_next_step_start_before_the_last_backward():
    """Layer 1 is updated first and loaded first: its next copy of 100 bytes comes beside layer 0's gradient of 5."""
    first, second, *_ = transformer(4).layers
    first = dataclasses.replace(first, param_bytes=10, grad_bytes=5, activation_bytes=0)
    second = dataclasses.replace(second, param_bytes=100, grad_bytes=1, activation_bytes=0)
    profile = dataclasses.replace(transformer(4), layers=(first, second))
    for loads, expected in ((Loads.LAYERWISE, 110), (Loads.BULK, 115)):
        plan = with_modes(profile, [Mode.GFGB] * 2, [GradientPlace.DEVICE, GradientPlace.HOST], loads=loads)
        assert step_demand(profile, plan)[1].natural == expected
