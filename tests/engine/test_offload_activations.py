"""Values that cross segments and wait for their backward in host memory: bits, bytes, tasks and failures."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxferry
import models
from jaxferry.modes import Mode
from jaxferry.partition import aval_bytes
from jaxferry.step import (
    CROSSING_SLOTS,
    Kind,
    Lane,
    LayerPlan,
    Operation,
    Plan,
    schedule_step,
)
from models import random_streams
from planned import assert_same_bits, plan_of, prepared, train
from profiles import fused, lowered, transformer, with_modes
from slowly import slow_but, slow_cases

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


def residuals_of(prepared, segment):
    saved = prepared.program.derivatives[prepared.partition.segments[segment].program].saved
    return [(segment, index) for index in range(len(saved))]


def aval_of(prepared, value):
    """The shape of a value, or of a residual."""
    if isinstance(value, int):
        return prepared.partition.graph.avals[value]
    segment, index = value
    return prepared.program.derivatives[prepared.partition.segments[segment].program].saved[index]


# The bytes


def perceptron(depth, rows=64, width=16):
    """A perceptron whose activations are large relative to its layers."""
    params = {f"l{i:02}": {"w": np.full((width, width), 0.01, np.float32)} for i in range(depth)}
    return models.Task(models.chain(residual=True), params, np.ones((rows, width), np.float32))


def peak_of(depth, rows=64, **options):
    plan = Plan("test", 1.0, tuple(LayerPlan(f"l{i:02}", Mode.RELOAD) for i in range(depth)))
    return prepared(perceptron(depth, rows), optax.sgd(0.1), plan=plan, **{"remat": "full", **options}).peak.total


@pytest.mark.cpu_device  # buffers of layers stay on an accelerator where no budget forbids it
@pytest.mark.parametrize("remat", ["full", "none"])
def test_memory_does_not_grow_with_depth_whatever_segments_keep(remat):
    with_it, without = [[peak_of(d, remat=remat, offload_activations=on) for d in (8, 16)] for on in (True, False)]
    value = 64 * 16 * 4
    assert with_it[1] - with_it[0] < value / 2
    assert without[1] - without[0] >= 8 * value * (2 if remat == "none" else 1)


@pytest.mark.cpu_device
def test_a_budget_admits_larger_batches():
    with_it, budget = (peak_of(16, offload_activations=on) for on in (True, False))
    assert with_it < 0.6 * budget
    assert peak_of(16, rows=96, offload_activations=True, memory_budget=budget) <= budget
    with pytest.raises(jaxferry.BudgetError):
        peak_of(16, rows=96, memory_budget=budget)


@pytest.mark.slow
def test_small_values_keys_and_what_is_read_soon_stay():
    task = random_streams.gpt_dropout()
    made = prepared(task, optax.adamw(1e-3), offload_activations=True)
    saves, fetches = moves_of(made.program)
    moved = {value: place for place, values in saves.items() for value in values}
    back = {value: place for place, values in fetches.items() for value in values}
    assert moved and set(moved) == set(back)
    for value, place in moved.items():
        assert aval_bytes(aval_of(made, value)) >= 1024 and back[value] - place >= 2 * CROSSING_SLOTS
        assert not jax.dtypes.issubdtype(aval_of(made, value).dtype, jax.dtypes.prng_key)


KEPT = {"none": "none", "products": jax.checkpoint_policies.dots_saveable, "inputs": "full"}


@pytest.mark.parametrize(
    ("kept", "tiles"),
    slow_but([("none", 1), ("products", 1), ("products", 3), ("inputs", 3)], list(itertools.product(KEPT, (1, 3)))),
)
def test_what_segments_keep_waits_in_host_memory_and_no_bit_changes(kept, tiles):
    options = {"remat": KEPT[kept], "tiles": tiles, "plan": plan(Mode.RELOAD)}
    step, other = (
        jaxferry.train_step(gpt().loss_fn, optax.adamw(1e-3), offload_activations=on, **options) for on in (True, False)
    )
    (state, losses), (others, expected) = (train(each, gpt(), 3) for each in (step, other))
    assert losses == expected
    assert_same_bits(state.params, others.params)
    made = step.prepare(gpt().batch)
    saves, fetches = moves_of(made.program)
    moved = [value for values in saves.values() for value in values]
    assert sorted(map(str, moved)) == sorted(str(value) for values in fetches.values() for value in values)
    residuals = {value for value in moved if not isinstance(value, int)}
    early = range(len(made.partition.segments) - CROSSING_SLOTS)
    held = {value: aval_of(made, value) for number in early for value in residuals_of(made, number)}
    assert residuals == {value for value, aval in held.items() if aval_bytes(aval) >= 1024}
    assert bool(residuals) == (kept != "inputs")
    assert made.saved_bytes == sum(aval_bytes(aval_of(made, value)) for value in moved)


def waiting(made, remat, waits):
    """The plan whose blocks keep this, some of them in host memory: `waits` says which, in turn."""
    layers = [
        dataclasses.replace(
            layer, activations=waits[number % len(waits)], **({"remat": remat} if layer.name.startswith("h_") else {})
        )
        for number, layer in enumerate(made.layers)
    ]
    return dataclasses.replace(made, layers=tuple(layers))


@functools.cache
def deep():
    return dataclasses.replace(models.gpt(depth=5), batch=jax.random.randint(jax.random.key(1), (8, 33), 0, 128))


PATTERNS = {"all": ["host"], "every second": ["host", "device"], "two of three": ["device", "host", "host"]}


@pytest.mark.parametrize(
    ("remat", "pattern"),
    [("products", "every second"), *slow_cases(*itertools.product(("none", "products", "full"), PATTERNS))],
)
def test_what_a_plan_names_waits_in_host_memory_and_no_bit_changes(remat, pattern):
    made = plan_of(deep(), [Mode.RELOAD, Mode.GFGB])
    steps = [
        jaxferry.train_step(deep().loss_fn, optax.adamw(1e-3), plan=waiting(made, remat, waits))
        for waits in (PATTERNS[pattern], ["device"])
    ]
    (state, losses), (others, expected) = (train(each, deep(), 3) for each in steps)
    assert losses == expected
    assert_same_bits(state.params, others.params)
    prepared, other = (step.prepare(deep().batch) for step in steps)
    saves, fetches = moves_of(prepared.program)
    moved = [value for values in saves.values() for value in values]
    assert sorted(map(str, moved)) == sorted(str(value) for values in fetches.values() for value in values)
    assert prepared.saved_bytes == sum(aval_bytes(aval_of(prepared, value)) for value in moved) > 0
    assert set(saves) <= {n for n, layer in enumerate(prepared.plan.layers) if layer.activations == "host"}
    assert other.saved_bytes == 0 and prepared.peak.counted <= other.peak.counted


def test_what_a_later_segment_reads_again_leaves_after_that_one():
    """All layers read the first one's result, and the last of them lets it leave."""
    params = {f"l{i}": {"w": np.full((16, 16), 0.1 + i / 50, np.float32)} for i in range(8)}

    def loss_fn(params, x):
        x = first = jnp.tanh(x @ params["l0"]["w"])
        for i in range(1, 8):
            x = jnp.tanh(x @ params[f"l{i}"]["w"] + (first if i < 5 else 0))
        return jnp.mean(x**2)

    task = models.Task(loss_fn, params, np.ones((64, 16), np.float32))
    layers = tuple(LayerPlan(f"l{i}", Mode.RELOAD, remat="full", activations="host") for i in range(8))
    (_, losses), (_, expected) = (
        train(jaxferry.train_step(loss_fn, optax.sgd(0.1), plan=Plan("any", 1.0, own)), task, 3)
        for own in (layers, [dataclasses.replace(layer, activations="device") for layer in layers])
    )
    assert losses == expected
    made = prepared(task, optax.sgd(0.1), plan=Plan("any", 1.0, layers))
    saves, fetches = moves_of(made.program)
    moved = [value for values in saves.values() for value in values]
    assert len(moved) == len(set(moved)) == sum(map(len, fetches.values()))
    assert made.saved_bytes == sum(aval_bytes(aval_of(made, value)) for value in moved)
    assert len(saves[4]) == 2 and all(len(saves[number]) == 1 for number in (2, 3, 5))


@pytest.mark.slow
@pytest.mark.cpu_device
def test_auto_lets_activations_wait_where_a_budget_asks_for_it_and_recomputes_where_it_must():
    step_of = functools.partial(jaxferry.train_step, deep().loss_fn, optax.adamw(1e-3), policy="auto", remat="auto")
    options = {"profile": "estimate", "offload_activations": "auto"}
    with pytest.raises(jaxferry.BudgetError) as caught:
        prepared(deep(), optax.adamw(1e-3), policy="auto", remat="auto", memory_budget=1, **options)
    budget = int(1.02 * caught.value.smallest_bytes)
    step = step_of(memory_budget=budget, **options)
    _, losses = train(step, deep(), 2)
    made = step.prepare(deep().batch)
    assert made.plan.offloads_activations and made.saved_bytes > 0 and made.peak.total <= budget
    roomy = step_of(memory_budget=2**31, **options)
    np.testing.assert_allclose(losses, train(roomy, deep(), 2)[1], rtol=1e-5)
    assert not roomy.prepare(deep().batch).plan.offloads_activations


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


def test_between_activations_that_a_plan_lets_leave_the_links_have_the_time_of_the_programs_that_keep_theirs():
    size, moving_layers = 10, (1, 2, 5)
    profile = fused(transformer(size)).with_layers([{"offloadable_bytes": {"none": 100}}] * (size - 2) + [{}] * 2)
    made = with_modes(profile, [Mode.GFGB] * size)
    places = ["host" if layer in moving_layers else "device" for layer in range(size)]
    layers = (dataclasses.replace(x, activations=place) for x, place in zip(made.layers, places, strict=True))
    tasks = schedule_step(profile, dataclasses.replace(made, layers=tuple(layers))).tasks
    index_of = {(task.kind, task.segment): index for index, task in enumerate(tasks)}
    assert [task.segment for task in tasks if task.kind is Kind.SAVE] == list(moving_layers)
    waits = {
        task.segment: [tasks[i].segment for i in task.after if tasks[i].kind is Kind.SAVE]
        for task in tasks[::-1]
        if task.kind is Kind.FORWARD
    }
    # Every program waits for the last but one of the saves before it.
    assert waits == {0: [], 1: [], 2: [], 3: [1], 4: [1], 5: [1], 6: [2], 7: [2], 8: [2], 9: [2]}
    for layer, after in ((5, 7), (2, 6), (1, 3)):
        # It returns beside the backward of the layer that returns before it, and never before it has left.
        fetch = tasks[index_of[Kind.FETCH, layer]]
        assert set(fetch.after) == {index_of[Kind.BACKWARD, after], index_of[Kind.SAVE, layer]}
        assert index_of[Kind.FETCH, layer] in tasks[index_of[Kind.BACKWARD, layer]].after
