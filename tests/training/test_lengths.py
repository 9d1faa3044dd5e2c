"""Batches of several sizes: which of them share a plan."""

import itertools

import numpy as np
import optax
import pytest

import jaxferry
from jaxferry.modes import Mode
from jaxferry.step import LayerPlan, Plan
from models import chain

WIDTH, DEPTH = 64, 6
MANY, FEW, FEWEST = (np.full((rows, WIDTH), 0.5, np.float32) for rows in (64, 40, 8))


@pytest.fixture(scope="module")
def params():
    generator = np.random.default_rng(0)
    return {f"l{i}": {"w": generator.normal(size=(WIDTH, WIDTH)).astype(np.float32) * 0.1} for i in range(DEPTH)}


def training(params, **options):
    """A step and a state; beside fewer rows more copies fit."""
    given = {"policy": "auto", "profile": "estimate", "memory_budget": 200_000, "compute_dtype": np.float32, **options}
    step = jaxferry.train_step(chain(), optax.adamw(1e-2), **given)
    return step, step.init(params)


def plans(params, *batches, **options):
    step, _ = training(params, **options)
    return [step.prepare(batch).plan.layers for batch in batches]


def test_a_batch_takes_the_latest_plan_of_a_similar_one_that_fits(params):
    alone = [plans(params, batch)[0] for batch in (MANY, FEW, FEWEST, MANY[:50])]
    assert alone[0] not in alone[1:]
    assert plans(params, MANY, FEW, FEWEST) == [alone[0], alone[0], alone[2]]  # an eighth of the rows is not similar
    assert plans(params, FEW, MANY, MANY[:50]) == [alone[1], alone[0], alone[0]]  # few rows' plan does not fit


def test_a_plan_that_is_taken_over_reaches_no_further(params):
    """Each batch has more than half of the rows before it, the last one less than half of those planned for."""
    [alone] = plans(params, MANY[:30])
    assert plans(params, MANY, FEW, MANY[:30])[2] == alone != plans(params, MANY)[0]


def test_what_no_policy_chooses_stays_as_it_is(params):
    layers = tuple(map(LayerPlan, params, itertools.cycle([Mode.DHA, Mode.GFGB])))
    given = {"policy": None, "profile": None, "memory_budget": None}
    assert plans(params, MANY, FEW, plan=Plan("own", 1.0, layers), **given) == [layers, layers]
    assert {layer.mode for layers in plans(params, MANY, FEW, **given) for layer in layers} == {Mode.GFGB}


def test_a_plan_that_is_taken_over_predicts_its_own_batch(params):
    step, _ = training(params)
    many, few = (step.prepare(batch).plan for batch in (MANY, FEW))
    assert few.predicted.peak_device_bytes < many.predicted.peak_device_bytes
    assert many.details and not few.details  # they tell of the search
