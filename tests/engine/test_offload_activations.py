"""Values that cross segments and wait for their backward in host memory: bits, bytes, tasks and failures."""

import dataclasses
import functools

import jax
import numpy as np
import optax
import pytest

import jaxferry
import models
from jaxferry.modes import Mode
from jaxferry.step import (
    CROSSING_SLOTS,
    Kind,
    Lane,
    LayerPlan,
    Operation,
    Plan,
)
from models import random_streams
from planned import plan_of, prepared
from profiles import lowered, transformer, with_modes

MOVES = (Kind.SAVE, Kind.FETCH)


@functools.cache
def gpt():
    """A model whose activations are large relative to its layers."""
    task = models.mlp(depth=4)
    return dataclasses.replace(task, batch=jax.random.randint(jax.random.key(1), (8, 33), 0, 128))


@functools.cache
def plan(*modes):
    return plan_of(gpt(), modes)


def moves_of(program):
    """The values that SAVE instructions move, and those of FETCH, by place."""
    found = {Operation.SAVE: {}, Operation.FETCH: {}}
    for instruction in program.instructions:
        if instruction.operation in found:
            found[instruction.operation][instruction.place] = instruction.values
    return found[Operation.SAVE], found[Operation.FETCH]


# The bytes


def perceptron(depth, rows=64, width=16):
    """A perceptron whose activations are large relative to its layers."""
    params = {f"l{i:02}": {"w": np.full((width, width), 0.01, np.float32)} for i in range(depth)}
    return models.Task(models.chain(residual=True), params, np.ones((rows, width), np.float32))


def peak_of(depth, rows=64, **options):
    plan = Plan("test", 1.0, tuple(LayerPlan(f"l{i:02}", Mode.RELOAD) for i in range(depth)))
    return prepared(perceptron(depth, rows), optax.sgd(0.1), remat="full", plan=plan, **options).peak.total


@pytest.mark.cpu_device  # buffers of layers stay on an accelerator where no budget forbids it
def test_memory_does_not_grow_with_depth_and_a_budget_admits_larger_batches():
    value = 64 * 16 * 4
    with_it, without = [[peak_of(d, offload_activations=on) for d in (8, 16)] for on in (True, False)]
    assert with_it[1] - with_it[0] < value / 2
    assert without[1] - without[0] >= 8 * value
    assert with_it[1] < 0.6 * without[1]
    budget = without[1]
    assert peak_of(16, rows=96, offload_activations=True, memory_budget=budget) <= budget
    with pytest.raises(jaxferry.BudgetError):
        peak_of(16, rows=96, memory_budget=budget)


@pytest.mark.slow
def test_small_values_keys_and_what_is_read_soon_stay():
    task = random_streams.gpt_dropout()
    made = prepared(task, optax.adamw(1e-3), offload_activations=True)
    graph, (saves, fetches) = made.partition.graph, moves_of(made.program)
    moved = [(place, value) for place, values in saves.items() for value in values]
    back = {value: place for place, values in fetches.items() for value in values}
    assert moved and sorted(value for _, value in moved) == sorted(back)
    for place, value in moved:
        assert graph.num_bytes(value) >= 1024 and back[value] - place >= 2 * CROSSING_SLOTS
        assert not jax.dtypes.issubdtype(graph.avals[value].dtype, jax.dtypes.prng_key)


# The tasks


def moving(profile, plan, sizes=None):
    """The step's tasks if each layer's values are saved and fetched."""
    sizes = (0,) * len(profile.layers) if sizes is None else sizes
    return lowered(profile, plan, save_bytes=sizes, fetch_bytes=sizes)


def test_moves_are_further_tasks_and_waits_and_nothing_else():
    size = 8
    profile = transformer(size)
    for modes in ([Mode.GFGB] * size, [Mode.RELOAD] * size, [Mode.DFGB, Mode.RESIDENT] * (size // 2)):
        planned = with_modes(profile, modes)
        plain = moving(profile, planned)
        moved = moving(profile, planned, (10,) * 6 + (0, 0))
        names = [[task.name for task in each.tasks if task.kind not in MOVES] for each in (plain, moved)]
        assert names[0] == names[1]
        assert sum(task.kind in MOVES for task in moved.tasks) == 12
        for index, task in enumerate(moved.tasks):
            assert all(waited < index for waited in task.after)


def test_programs_wait_for_saves_two_before_them_and_fetches_for_the_program_two_before_theirs():
    size = 8
    profile = transformer(size)
    sizes = (100,) * 6 + (0, 0)
    tasks = moving(profile, with_modes(profile, [Mode.GFGB] * size), sizes).tasks
    index_of = {(task.kind, task.segment): index for index, task in enumerate(tasks)}
    for layer in range(6):
        save, fetch = index_of[Kind.SAVE, layer], index_of[Kind.FETCH, layer]
        assert tasks[save].lane is Lane.D2H and tasks[fetch].lane is Lane.H2D
        assert tasks[save].after == (index_of[Kind.FORWARD, layer],)
        assert save in tasks[index_of[Kind.FORWARD, layer + 2]].after
        assert tasks[fetch].after == (index_of[Kind.BACKWARD, layer + 2],)
        assert fetch < index_of[Kind.BACKWARD, layer + 1] and fetch in tasks[index_of[Kind.BACKWARD, layer]].after
        assert tasks[save].end_bytes == tasks[fetch].start_bytes == 100
