"""Steps keep what is compiled for the batch shapes used last."""

import gc
import warnings
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxferry
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
