"""Steps keep what is compiled for the batch shapes used last. Batches of similar sizes share a plan."""

import gc
import itertools
import warnings
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxferry
from jaxferry.modes import Mode
from jaxferry.step import LayerPlan, Plan
from models import chain

PARAMS = {"a": {"w": np.full((4, 4), 0.1, np.float32)}, "b": {"w": np.full((4, 4), 0.2, np.float32)}}


def batch(rows):
    return jnp.ones((rows, 4))


@pytest.fixture
def loss_fn():
    return chain()


def programs_of(prepared):
    return weakref.ref(prepared.runner.runnable.programs)


def test_older_shapes_are_freed_with_a_warning_and_compiled_again_with_the_same_bits(loss_fn):
    def train(**options):
        step = jaxferry.train_step(loss_fn, optax.adam(1e-2), **options)
        state = step.init(PARAMS)
        for rows in (1, 2, 3, 1, 4, 2, 1):
            state, _ = step(state, batch(rows))
        return state.params

    with pytest.warns(UserWarning, match=r"more than 2 shapes of batches .* pad batches .* cached_shapes=") as caught:
        few = train(cached_shapes=2)
    assert len(caught) == 1 and caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        many = train()
    jax.tree.map(np.testing.assert_array_equal, few, many)


@pytest.mark.filterwarnings("ignore:more than")
@pytest.mark.parametrize("first", ["taken", "prepared"])
def test_programs_of_a_shape_are_freed_once_it_is_not_among_the_last(loss_fn, first):
    step = jaxferry.train_step(loss_fn, optax.sgd(0.1), cached_shapes=2)
    state = step.init(PARAMS)
    if first == "taken":
        state, _ = step(state, batch(1))
    kept = [programs_of(step.prepare(batch(1)))]
    for rows in (2, 3):
        state, _ = step(state, batch(rows))
        kept.append(programs_of(step.prepare(batch(rows))))
    state.block_until_ready()
    gc.collect()
    assert [program() is not None for program in kept] == [False, True, True]
    state, _ = step(state, batch(2))  # now 3 is the oldest
    state, _ = step(state, batch(4))
    state.block_until_ready()
    gc.collect()
    assert [program() is not None for program in kept] == [False, True, False]


@pytest.mark.filterwarnings("ignore:more than")
def test_evaluations_of_many_shapes_are_freed_too(loss_fn):
    step = jaxferry.train_step(loss_fn, optax.sgd(0.1), cached_shapes=2)
    state = step.init(PARAMS)
    seen = []

    def function(params, x):
        seen.append(x.shape)
        return loss_fn(params, x)

    found = [float(step.apply(state, function, batch(rows))) for rows in (1, 2, 1, 3, 1, 2)]
    assert found[0] == found[2] == found[4] and found[1] == found[5]
    assert [step.evaluate(state, batch(rows)) == found[rows - 1] for rows in (1, 2, 1)] == [True] * 3


WIDTH, DEPTH = 64, 6
MANY, FEW, FEWEST = (np.full((rows, WIDTH), 0.5, np.float32) for rows in (64, 40, 8))


@pytest.fixture(scope="module")
def wide_params():
    generator = np.random.default_rng(0)
    return {f"l{i}": {"w": generator.normal(size=(WIDTH, WIDTH)).astype(np.float32) * 0.1} for i in range(DEPTH)}


def training(wide_params, **options):
    """A step and a state; beside fewer rows more copies fit."""
    given = {"policy": "auto", "profile": "estimate", "memory_budget": 200_000, "compute_dtype": np.float32, **options}
    step = jaxferry.train_step(chain(), optax.adamw(1e-2), **given)
    return step, step.init(wide_params)


def plans(wide_params, *batches, **options):
    step, _ = training(wide_params, **options)
    return [step.prepare(batch).plan.layers for batch in batches]


def test_a_batch_takes_the_latest_plan_of_a_similar_one_that_fits(wide_params):
    alone = [plans(wide_params, batch)[0] for batch in (MANY, FEW, FEWEST, MANY[:50])]
    assert alone[0] not in alone[1:]
    assert plans(wide_params, MANY, FEW, FEWEST) == [
        alone[0],
        alone[0],
        alone[2],
    ]  # an eighth of the rows is not similar
    assert plans(wide_params, FEW, MANY, MANY[:50]) == [alone[1], alone[0], alone[0]]  # few rows' plan does not fit


def test_a_plan_that_is_taken_over_reaches_no_further(wide_params):
    """Each batch has more than half of the rows before it, the last one less than half of those planned for."""
    [alone] = plans(wide_params, MANY[:30])
    assert plans(wide_params, MANY, FEW, MANY[:30])[2] == alone != plans(wide_params, MANY)[0]


def test_what_no_policy_chooses_stays_as_it_is(wide_params):
    layers = tuple(map(LayerPlan, wide_params, itertools.cycle([Mode.DHA, Mode.GFGB])))
    given = {"policy": None, "profile": None, "memory_budget": None}
    assert plans(wide_params, MANY, FEW, plan=Plan("own", 1.0, layers), **given) == [layers, layers]
    assert {layer.mode for layers in plans(wide_params, MANY, FEW, **given) for layer in layers} == {Mode.GFGB}


def test_a_plan_that_is_taken_over_predicts_its_own_batch(wide_params):
    step, _ = training(wide_params)
    many, few = (step.prepare(batch).plan for batch in (MANY, FEW))
    assert few.predicted.peak_device_bytes < many.predicted.peak_device_bytes
    assert many.details and not few.details  # they tell of the search
