"""Models that scan over their layers train like plain Optax, layer by layer, under every plan."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxferry
import scanned
from models import Task, plain_loop
from planned import assert_same_bits, take_steps, train
from tolerances import LOSS_RTOL


@pytest.fixture(scope="module")
def lax():
    return scanned.plain()


def whole(task):
    """The same loss in a form that cannot be cut by layer."""

    def loss_fn(params, batch):
        return task.loss_fn(params, batch) + 0.0 * sum(jnp.max(leaf) for leaf in jax.tree.leaves(params["blocks"]))

    return Task(loss_fn, task.params, task.batch)


@pytest.mark.filterwarnings("ignore:not cut by layer")
def test_checkpoints_are_those_of_the_stacked_model_whether_it_was_cut_or_not(lax, tmp_path):
    optimizer, apart = jaxferry.adam(1e-2), whole(lax)
    expected = plain_loop(lax, optimizer, 6)[1]
    cut, kept = (jaxferry.train_step(task.loss_fn, optimizer) for task in (lax, apart))
    for first, second in ((cut, kept), (kept, cut)):
        state, losses = take_steps(first, first.init(lax.params), [lax.batch] * 3)
        first.save(state, tmp_path / "saved")
        restored = second.restore(tmp_path / "saved", params=lax.params)
        assert_same_bits(restored.params, state.params)
        assert_same_bits(restored.optimizer_state(), state.optimizer_state())
        for _ in range(3):
            restored, metrics = second(restored, lax.batch)
            losses.append(float(metrics["loss"]))
        np.testing.assert_allclose(losses, expected, rtol=LOSS_RTOL)
    assert {leaf.shape for leaf in jax.tree.leaves(state.params)} == {
        leaf.shape for leaf in jax.tree.leaves(lax.params)
    }


@pytest.mark.filterwarnings("ignore:not cut by layer")
def test_a_state_moves_between_layers_whole_and_in_parts_without_losing_a_bit(lax):
    step = jaxferry.train_step(lax.loss_fn, optax.adamw(1e-2))
    state = step.init(lax.params)
    first = state.host.layers
    state, _ = step(state, lax.batch)
    params, moments = state.params, {name: np.array(leaf) for name, leaf in state.optimizer_state().items()}
    by_layer = state.host.layers
    for layers in (first, by_layer, tuple(reversed(by_layer)), first):
        state.arrange(layers)
        assert_same_bits(state.params, params)
        assert_same_bits(state.optimizer_state(), moments)
    twice, losses = train(step, lax, 2)
    assert twice.host.layers == by_layer, "a new state is arranged by layer from the start"
    state, metrics = step(state, lax.batch)
    assert float(metrics["loss"]) == losses[1]
    assert_same_bits(state.params, twice.params)


def test_what_is_not_cut_is_said_once_and_trains_all_the_same(lax):
    apart = whole(lax)
    expected = plain_loop(apart, optax.sgd(0.1), 2)[1]
    step = jaxferry.train_step(apart.loss_fn, optax.sgd(0.1))
    with pytest.warns(
        UserWarning, match="not cut by layer though scanned over: 'blocks/b', 'blocks/w': 'reduce_max'"
    ) as seen:
        _, losses = train(step, apart, 2)
    assert len(seen) == 1
    np.testing.assert_allclose(losses, expected, rtol=LOSS_RTOL)
