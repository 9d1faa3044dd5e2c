"""Losses and gradients that are not finite: reported, or their steps skipped."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxferry
from planned import assert_same_bits


class _Breaks(nn.Module):
    """Three dense layers; the second divides by what the batch says."""

    @nn.compact
    def __call__(self, x, divisor):
        x = nn.Dense(8, name="first")(x)
        x = nn.Dense(8, name="second")(x) / divisor
        return nn.Dense(1, name="third")(nn.tanh(x) * divisor).mean()


def _breaking():
    model = _Breaks()
    x = jnp.ones((2, 4))
    params = model.init(jax.random.key(0), x, 1.0)["params"]
    return params, x, lambda p, batch: model.apply({"params": p}, batch[0], batch[1])


def test_a_nan_loss_is_reported_with_step_and_layer_and_leaves_the_state(tmp_path):
    params, x, loss_fn = _breaking()
    step = jaxferry.train_step(loss_fn, optax.adam(0.1))
    state, _ = step(step.init(params), (x, jnp.float32(1)))
    before = state.params
    with pytest.raises(jaxferry.NonFiniteError, match=r"loss of step 1 is nan.*'second'") as caught:
        step(state, (x, jnp.float32(jnp.nan)))
    assert (caught.value.step, caught.value.layer) == (1, "second")
    assert state.step == 1
    assert_same_bits(state.params, before)
    step.save(state, tmp_path / "saved")


def test_skip_nonfinite_leaves_parameters_and_optimizer_as_they_were():
    params, x, loss_fn = _breaking()
    step = jaxferry.train_step(loss_fn, optax.adam(0.1), skip_nonfinite=True)
    state, metrics = step(step.init(params), (x, jnp.float32(1)))
    assert not metrics["skipped"]
    before, moments = state.params, {name: np.array(leaf) for name, leaf in state.optimizer_state().items()}
    state, metrics = step(state, (x, jnp.float32(jnp.nan)))
    assert metrics["skipped"] and np.isnan(metrics["loss"])
    assert_same_bits(state.params, before)
    assert_same_bits(state.optimizer_state(), moments)
    state, metrics = step(state, (x, jnp.float32(1)))
    assert not metrics["skipped"]


def test_skip_nonfinite_skips_a_step_with_a_finite_loss_and_an_infinite_gradient():
    def loss_fn(params, batch):
        return jnp.sqrt(params["w"] - batch).sum()

    step = jaxferry.train_step(loss_fn, optax.sgd(0.1), skip_nonfinite=True)
    state = step.init({"w": np.ones(3, np.float32)})
    state, metrics = step(state, jnp.ones(3))
    assert metrics["skipped"] and np.isfinite(metrics["loss"]) and np.isinf(metrics["grad_norm"])
    np.testing.assert_array_equal(state.params["w"], np.ones(3))
