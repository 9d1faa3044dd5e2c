"""Layers finer than the segments that read them: each is loaded, read in place, written and updated by itself."""

import dataclasses
import random

import numpy as np
import optax
import pytest

import jaxferry
import models
from jaxferry.modes import BLOCK, MODULE, GradientPlace, Mode
from jaxferry.partition import host_stores, partition
from jaxferry.step import LayerPlan, Plan, Source, Target, UpdateOrder
from planned import plan_of, prepared, take_steps
from slowly import slow

STEPS, ADAMW = 3, optax.adamw(1e-3)


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


def train(task, steps=STEPS, optimizer=ADAMW, **options):
    step = jaxferry.train_step(task.loss_fn, optimizer, **options)
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


def test_products_that_go_to_the_host_by_panels_are_within_rounding(monkeypatch, task):
    monkeypatch.setattr(host_stores, "FUSED_BYTES", 0)
    plan = plan_of(task, [Mode.GFGB], [GradientPlace.HOST])
    options = {"steps": 6, "optimizer": optax.sgd(0.1, momentum=0.9), "clip_norm": 0.5}
    losses, *_ = train(task, transport="device_put", **options)
    written = []
    by_panels = host_stores.operations.dha_matmul_gradient
    monkeypatch.setattr(
        host_stores.operations, "dha_matmul_gradient", lambda *a, **k: (written.append(1), by_panels(*a, **k))[1]
    )
    others, *_ = train(task, plan=plan, **options)
    assert written
    # OpenBLAS sums products in another order than XLA.
    np.testing.assert_allclose(others, losses, rtol=1e-5)
