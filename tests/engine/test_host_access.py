"""Training with parameters read and gradients written in host memory: every mode, reserve factor and transport."""

import numpy as np
import optax
import pytest

import jaxferry
import models
from jaxferry.engine import derivatives_of
from jaxferry.modes import GradientPlace, Mode
from jaxferry.native import is_available
from jaxferry.partition import host_stores, partition
from jaxferry.step import LayerPlan, Plan, ProgramKind, Source, Target, program_keys
from planned import plan_of, prepared, train

STEPS = 6
ADAMW, MOMENTUM = optax.adamw(1e-3), optax.sgd(0.1, momentum=0.9)


@pytest.fixture(scope="module", autouse=True)
def native():
    assert is_available("cpu")


@pytest.fixture(scope="module")
def task():
    return models.mlp(depth=2)


def run(task, plan=None, optimizer=ADAMW, **options):
    step = jaxferry.train_step(task.loss_fn, optimizer, plan=plan, **options)
    return train(step, task, STEPS)


# OpenBLAS sums the products of these plans in another order than XLA. Over 20 steps of SGD with momentum losses stay
# within this of the loaded product's.
TOLERANCE = 1e-5


def test_the_reserve_factor_decides_which_gradients_are_written_by_the_backward(task):
    uses = {}
    for factor in (0, 1):
        keys = prepared(task, optax.sgd(0.1), reserve_factor=factor).program.keys
        uses[factor] = [key.writes for key in keys]
    assert set(uses[1]) == {(Target.DEVICE,)}
    assert (Target.HOST,) in uses[0]


def test_products_that_go_to_the_host_by_panels_are_within_rounding(monkeypatch, task):
    monkeypatch.setattr(host_stores, "FUSED_BYTES", 0)
    plan = plan_of(task, [Mode.GFGB], [GradientPlace.HOST])
    _, losses = run(task, optimizer=MOMENTUM, transport="device_put", clip_norm=0.5)
    written = []
    by_panels = host_stores.operations.dha_matmul_gradient
    monkeypatch.setattr(
        host_stores.operations, "dha_matmul_gradient", lambda *a, **k: (written.append(1), by_panels(*a, **k))[1]
    )
    _, others = run(task, plan, MOMENTUM, clip_norm=0.5)
    assert written
    np.testing.assert_allclose(others, losses, rtol=TOLERANCE)


def test_program_keys_name_one_place_for_each_read_and_write(task):
    parts = partition(task.loss_fn, task.params, (task.batch,))
    derivatives = derivatives_of(parts, "none")
    names = [segment.name for segment in parts.segments]
    block = names.index("h_0")
    modes = [Mode.DFGB if name == "h_0" else Mode.GFGB for name in names]
    modes[0] = Mode.DHA
    places = [GradientPlace.HOST] * len(names)
    layers = zip(names, modes, places, strict=True)
    uses = program_keys(parts, derivatives, Plan("any", 1.0, tuple(LayerPlan(*layer) for layer in layers)))
    last = len(names) - 1
    # The lookup reads host memory, the head reads its copy of the same table; the lookup stores only rows.
    assert (names[0], names[last]) == ("wte", "wte#2")
    assert (uses[0].reads, uses[last].reads) == ((Source.HOST,), (Source.DEVICE,))
    assert (uses[last].kind, uses[last].writes) == (ProgramKind.LOSS, (Target.HOST,))
    assert uses[2 * last].writes == (Target.DEVICE,)
    # DFGB reads host memory in the forward and its copy in the backward.
    assert (uses[block].reads, uses[2 * last - block].reads) == ((Source.HOST,), (Source.DEVICE,))
    assert uses[2 * last - block].writes == (Target.HOST,)
