"""Training with parameters read and gradients written in host memory: every mode, reserve factor and transport."""

import numpy as np
import optax
import pytest

import jaxferry
import models
from jaxferry.modes import GradientPlace, Mode
from jaxferry.native import is_available
from jaxferry.partition import host_stores
from planned import plan_of, train

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
