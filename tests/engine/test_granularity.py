"""Layers finer than the segments that read them: each is loaded, read in place, written and updated by itself."""

import dataclasses
import random

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxferry
import models
from jaxferry.modes import BLOCK, MODULE, GradientPlace, Mode
from jaxferry.partition import partition
from jaxferry.step import LayerPlan, Plan, Source, Target, UpdateOrder
from planned import prepared, take_steps
from slowly import slow

STEPS = 3


def parts_of(task, granularity=MODULE):
    return partition(task.loss_fn, task.params, (task.batch,), granularity=granularity)


def mixed_plan(parts, seed):
    """A plan with any mode and gradient place for each layer; all of these occur."""
    draw, last = random.Random(seed), parts.uses_of[-1]
    layers = []
    for number, use in enumerate(parts.uses):
        modes = [mode for mode in Mode if mode is not Mode.DFGB or number not in last]
        layers.append(LayerPlan(use.name, draw.choice(modes), list(GradientPlace)[(number + seed) % 2]))
    return Plan("mixed", 0.5, tuple(layers), update_order=UpdateOrder.NEED)


def train(task, steps=STEPS, **options):
    step = jaxferry.train_step(task.loss_fn, optax.adamw(1e-3), **options)
    state, losses = take_steps(step, step.init(task.params), [task.batch] * steps)
    return losses, state.params, step.prepare(task.batch)


@pytest.fixture(scope="module")
def task():
    return models.mlp(depth=2)


@pytest.fixture(scope="module")
def loaded(task):
    return train(task, granularity=MODULE)


def test_layers_are_the_matrices_of_each_module_and_the_vectors_of_a_block():
    parts = parts_of(models.mlp(depth=2))
    [block] = [segment for segment in parts.segments if segment.name == "h_0"]
    names = {parts.layers[group].name for group in block.groups}
    assert {"h_0/vectors"} < names and len(names) == 3
    for group in block.groups:
        layer = parts.layers[group]
        ranks = {len(leaf.shape) > 1 for leaf in layer.leaves}
        assert ranks == {not layer.name.endswith("/vectors")} and layer.block == "h_0"
    whole = parts_of(models.mlp(depth=2), BLOCK)
    assert [segment.name for segment in parts.segments] == [segment.name for segment in whole.segments]
    assert sorted(leaf.path for layer in parts.layers for leaf in layer.leaves) == sorted(
        leaf.path for layer in whole.layers for leaf in layer.leaves
    )


@pytest.mark.parametrize("seed", [0, *slow(1)])
def test_layers_of_a_segment_read_in_place_beside_loaded_ones(task, loaded, seed):
    """The products of the native library round otherwise, so losses are equal within fp32."""
    plan = mixed_plan(parts_of(task), seed)
    losses, _, prepared = train(task, granularity=MODULE, plan=plan)
    kinds = {(Source.HOST in key.reads, Source.DEVICE in key.reads) for key in prepared.program.keys}
    assert (True, True) in kinds
    assert any(Target.HOST in key.writes and Target.DEVICE in key.writes for key in prepared.program.keys)
    np.testing.assert_allclose(losses, loaded[0], rtol=1e-4)


def test_a_program_waits_for_the_loads_of_the_layers_that_it_reads():
    """Vectors are read in place, and one matrix of a block is loaded twice: its backward waits for that load alone."""
    task = models.mlp(depth=2)
    parts = parts_of(task)
    block = next(number for number, segment in enumerate(parts.segments) if segment.name == "h_0")
    of_block = [parts.uses[number].name for number in parts.uses_of[block]]
    reloaded = next(name for name in of_block if not name.endswith("/vectors"))
    modes = {use.name: Mode.DHA if use.name.endswith("/vectors") else Mode.GFGB for use in parts.uses}
    layers = tuple(LayerPlan(name, mode) for name, mode in (modes | {reloaded: Mode.RELOAD}).items())
    found = prepared(task, optax.adamw(1e-3), granularity=MODULE, plan=Plan("any", 1.0, layers))
    instructions = found.program.instructions
    forward, backward = [i for i in instructions if i.key is not None and i.segment == block]
    for program in (forward, backward):
        read = dict(zip(of_block, zip(program.copies, program.key.reads, strict=True), strict=True))
        assert read["h_0/vectors"] == (None, Source.HOST)
        for name, (copy, source) in read.items():
            if source is Source.DEVICE:
                assert instructions[copy].task.name in (f"load {name}", f"reload {name}")
    first, again = (i.copies[of_block.index(reloaded)] for i in (forward, backward))
    assert first != again
    kept = [i.copies for i in (forward, backward)]
    assert [pair for pair in zip(*kept, strict=True) if pair[0] != pair[1]] == [(first, again)]


def test_finer_layers_fit_into_less_memory():
    """All layers RELOAD with gradients on the host hold two layers at a time, of modules or of blocks."""
    task = models.mlp(depth=2)
    peaks = {}
    for granularity in (BLOCK, MODULE):
        names = [use.name for use in parts_of(task, granularity).uses]
        plan = Plan("dha", 0.0, tuple(LayerPlan(name, Mode.RELOAD, GradientPlace.HOST) for name in names))
        vectors = [layer.with_mode(Mode.DHA) if "vectors" not in layer.name else layer for layer in plan.layers]
        plan = dataclasses.replace(plan, layers=tuple(vectors)) if granularity == MODULE else plan
        peaks[granularity] = train(task, granularity=granularity, plan=plan)[2].peak.parameters
    assert peaks[MODULE] < peaks[BLOCK] / 4


@pytest.mark.parametrize(
    "options",
    # Temporaries of other devices decide which layers need least.
    ["a plan of modules", pytest.param("a budget that blocks exceed", marks=pytest.mark.cpu_device)],
)
def test_an_evaluation_before_the_first_step_does_not_decide_how_fine_layers_are(task, options):
    parts = parts_of(task)
    if options == "a plan of modules":
        options = {"plan": Plan("any", 1.0, tuple(LayerPlan(use.name, Mode.GFGB) for use in parts.uses))}
    else:
        with pytest.raises(jaxferry.BudgetError) as error:
            prepared(task, optax.adamw(1e-3), granularity="auto", memory_budget=1)
        options = {"memory_budget": error.value.smallest_bytes}
    losses = []
    for evaluates in (False, True):
        step = jaxferry.train_step(task.loss_fn, optax.adamw(1e-3), granularity="auto", **options)
        state = step.init(task.params)
        before = float(step.evaluate(state, task.batch)) if evaluates else None
        state, metrics = step(state, task.batch)
        assert [layer.name for layer in step.prepare(task.batch).plan.layers] == [use.name for use in parts.uses]
        losses.append((float(metrics["loss"]), float(step(state, task.batch)[1]["loss"])))
    assert losses[0] == losses[1]
    assert before == pytest.approx(losses[0][0], rel=1e-6)


def test_a_module_with_a_lookup_table_beside_a_matrix_has_layers_of_different_names():
    draw = np.random.default_rng(0)

    def block():
        shapes = {"embed": {"table": (11, 8), "project": (8, 8)}, "dense": {"kernel": (8, 8), "bias": (8,)}}
        return {
            module: {name: draw.normal(scale=0.3, size=shape).astype(np.float32) for name, shape in leaves.items()}
            for module, leaves in shapes.items()
        }

    def loss_fn(params, batch):
        x = batch["x"]
        for part in (params["h_0"], params["h_1"]):
            x = x + part["embed"]["table"][batch["words"]] @ part["embed"]["project"]
            x = x + jnp.tanh(x @ part["dense"]["kernel"] + part["dense"]["bias"])
        return jnp.mean(x**2)

    batch = {"x": draw.normal(size=(4, 8)).astype(np.float32), "words": np.array([1, 2, 3, 1])}
    params = {"h_0": block(), "h_1": block()}
    for granularity in (BLOCK, MODULE):
        step = jaxferry.train_step(loss_fn, optax.sgd(1e-2), granularity=granularity, policy="auto", profile="estimate")
        _, metrics = step(step.init(params), batch)
        np.testing.assert_allclose(float(metrics["loss"]), loss_fn(jax.tree.map(jnp.asarray, params), batch), rtol=1e-6)
        names = [layer.name for layer in step.prepare(batch).plan.layers]
        assert len(set(names)) == len(names)
        assert ("h_0/embed/project" in names) == (granularity == MODULE)
