"""The step program: facts of each instruction before the first step, and memory as a fold over the list."""

import collections
import itertools
import math
import random
import re

import jax
import pytest

import models
from jaxferry.engine import (
    ReadyTasks,
    TaskList,
    derivatives_of,
    footprints,
    lower,
    peak_bytes,
    with_program_facts,
    without_times,
)
from jaxferry.modes import GradientPlace, Mode
from jaxferry.partition import partition
from jaxferry.step import NO_JOINS, Joins, Lane, LayerPlan, Operation, Plan, ProgramKind, Source, Target


@pytest.fixture(scope="module")
def parts():
    task = models.mlp(depth=4)
    return partition(task.loss_fn, task.params, (task.batch,))


@pytest.fixture(scope="module")
def derivatives(parts):
    return derivatives_of(parts, "none")


def profile_of(parts, derivatives):
    return with_program_facts(without_times(parts), parts, derivatives)


def program_of(parts, derivatives, modes, places=(GradientPlace.DEVICE,), joins=NO_JOINS):
    layers = zip(parts.segments, itertools.cycle(modes), itertools.cycle(places), strict=False)
    plan = Plan("any", 1.0, tuple(LayerPlan(segment.name, mode, place) for segment, mode, place in layers))
    return lower(parts, derivatives, plan, profile_of(parts, derivatives), joins=joins)


@pytest.mark.parametrize("modes", [[mode] for mode in Mode] + [list(Mode)], ids=str)
@pytest.mark.parametrize("places", [[GradientPlace.DEVICE], list(GradientPlace)], ids=str)
def test_joined_programs_wait_for_each_load_once_before_it_is_read(parts, derivatives, modes, places):
    program = program_of(parts, derivatives, modes, places, Joins(arrives=True, stores=True))
    waiting = {i.task.copy for i in program.programs if i.key.arrives}
    arrived = set()
    for instruction in program.programs:
        copy = instruction.task.copy
        if instruction.key.arrives:
            assert copy not in arrived and instruction.key.reads == (Source.DEVICE,)
            arrived.add(copy)
        elif copy is not None and instruction.operation is not Operation.BACKWARD:
            assert copy in arrived
    # A launch of its own waits for what is loaded again for a backward.
    assert waiting <= {i.index for i in program.instructions if i.operation is Operation.LOAD}
    stored = [i for i in program.programs if i.key.stores]
    shared = collections.Counter(segment.group for segment in parts.segments)
    for instruction in program.programs:
        segment, key = parts.segments[instruction.segment], instruction.key
        leaves = key.kind is not ProgramKind.FORWARD and segment.trained and key.writes == (Target.DEVICE,)
        is_rows = derivatives[segment.program].has_rows
        assert (instruction in stored) == (leaves and shared[segment.group] == 1 and not is_rows)
    assert len(stored) < len(program.programs) and bool(stored) == (GradientPlace.DEVICE in places)


@pytest.mark.parametrize("modes", [[mode] for mode in Mode] + [list(Mode)], ids=str)
@pytest.mark.parametrize("places", [[GradientPlace.DEVICE], list(GradientPlace)], ids=str)
def test_one_thread_that_issues_for_the_device_always_has_a_task_to_issue(parts, derivatives, modes, places):
    """On an accelerator a task ends once it is issued."""
    program = program_of(parts, derivatives, modes, places)
    ready = ReadyTasks(TaskList(program.schedule), None)
    for _ in program.instructions:
        index = ready.take((Lane.H2D, Lane.D2H, Lane.GPU, Lane.HOST))
        assert index is not None
        ready.end(index)
    assert ready.is_over(tuple(Lane))


def test_a_program_awaits_the_offloads_whose_memory_it_needs(parts, derivatives):
    program = program_of(parts, derivatives, [Mode.GFGB])
    awaited = [offload for i in program.programs for offload in i.offloads_awaited]
    assert awaited
    for instruction in program.programs:
        waits = {i for i in instruction.task.after if program.instructions[i].operation is Operation.OFFLOAD}
        assert set(instruction.offloads_awaited) == waits


def starts_of_loads(program):
    """For each load, the last program that has ended when it can start, if transfers take no time; -1 before any."""
    queue = [i for i in program.instructions if i.task.lane is Lane.H2D]
    ended, starts, place = set(), {}, -1
    for instruction in [None, *(i for i in program.instructions if i.task.lane is Lane.GPU)]:
        if instruction is not None:
            ended.add(instruction.index)
            place = place if instruction.key is None else instruction.place
        while queue and all(i in ended or program.instructions[i].task.lane is Lane.D2H for i in queue[0].task.after):
            starts[queue[0].index] = place
            ended.add(queue.pop(0).index)
    return starts


def test_buffers_are_kept_only_for_a_load_that_starts_where_they_are_dropped(parts, derivatives):
    layouts, draw, num_kept = [layer.layout for layer in parts.layers], random.Random(0), 0
    for _ in range(60):
        modes = [draw.choice((Mode.RELOAD, Mode.RELOAD, Mode.GFGB, Mode.DFGB, Mode.DHA)) for _ in parts.segments]
        program = program_of(parts, derivatives, modes)
        starts = starts_of_loads(program)
        started = {(place, layouts[program.instructions[load].group]) for load, place in starts.items()}
        for instruction in program.programs:
            for drop in instruction.drops:
                layout = layouts[program.instructions[drop.load].group]
                assert drop.is_reused == ((instruction.place, layout) in started)
                num_kept += drop.is_reused
    assert num_kept > 60


def lowered_backward(parts, derivative):
    """A backward as JAX lowers it, with its gradients on the device and its residuals and cotangents donated."""
    arguments = derivative.backward_arguments(parts.graph)
    return jax.jit(derivative.backward, donate_argnums=(4, 5), keep_unused=True).lower(*arguments)


def row_gradient_bytes(parts, derivative):
    gradients = jax.eval_shape(derivative.backward, *derivative.backward_arguments(parts.graph))[0]
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(gradients))


def reused_bytes(parts, derivative):
    """Bytes of the results that JAX gives the memory of donated arguments."""
    text = lowered_backward(parts, derivative).as_text()
    header = text[text.index("@main(") : text.index(") -> ")]
    shapes = re.findall(r"tensor<([^>]*)> \{[^}]*tf\.aliasing_output", header)
    sizes = {"f32": 4, "i32": 4}
    return sum(math.prod(map(int, lengths)) * sizes[dtype] for *lengths, dtype in (s.split("x") for s in shapes))


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.usefixtures("engine_settings")
def test_memory_is_a_fold_that_an_independent_walk_over_values_confirms(parts, derivatives):
    """DHA and GO do not change values, residuals or cotangents; this counts them one by one from the partition."""
    program = program_of(parts, derivatives, [Mode.DHA], [GradientPlace.HOST])
    size, last = parts.graph.num_bytes, len(parts.segments) - 1
    alive = {v: size(v) for v in (*parts.graph.batch, *parts.graph.constants, *parts.prelude_outputs)}
    residuals, cotangents, found = {}, {}, footprints(program, {})
    num_reused = rows = 0
    for place, instruction in enumerate(program.programs):
        segment = parts.segments[instruction.segment]
        derivative = derivatives[segment.program]
        if place <= last:
            alive |= {v: size(v) for v in (*segment.outputs, *segment.nondiff_outputs)}
        if place < last:
            residuals[instruction.segment] = derivative.saved_bytes
        added = 0
        if place >= last:
            added = sum(2 * size(v) for v in segment.inputs if v in cotangents)
            cotangents |= {v: size(v) for v in segment.inputs}
        # Of each program a flag that its outputs are finite, a byte, or its gradient's norm; of the loss both.
        scalars = min(place, last) + (place >= last) * (5 + 4 * (place - last)) + (place < last)
        scalars += bool(parts.prelude_outputs)  # a flag of what runs before them
        values = sum(alive.values()) + sum(residuals.values()) + sum(cotangents.values()) + added + scalars
        if place > last:
            values -= reused_bytes(parts, derivative)
            num_reused += reused_bytes(parts, derivative) > 0
        own = row_gradient_bytes(parts, derivative) if place >= last and derivative.has_rows else 0
        rows += own
        assert found[place].values == values
        assert own <= found[place].gradients <= rows
        alive = {v: n for v, n in alive.items() if v not in instruction.frees}
        if place > last:
            del residuals[instruction.segment]
            cotangents = {v: n for v, n in cotangents.items() if v not in segment.outputs}
    assert num_reused == last
    assert peak_bytes(program, {}).array_bytes == max(footprint.array_bytes for footprint in found)
