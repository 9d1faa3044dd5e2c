"""Losses and gradients that are not finite: reported, or their steps skipped."""

import warnings

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


def _rooted(params, batch):
    """A finite loss; the gradient is infinite where the batch equals the parameters."""
    return jnp.sqrt(params["w"] - batch).sum()


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
    step = jaxferry.train_step(_rooted, optax.sgd(0.1), skip_nonfinite=True)
    state = step.init({"w": np.ones(3, np.float32)})
    state, metrics = step(state, jnp.ones(3))
    assert metrics["skipped"] and np.isfinite(metrics["loss"]) and np.isinf(metrics["grad_norm"])
    np.testing.assert_array_equal(state.params["w"], np.ones(3))


@pytest.mark.parametrize("options", [{"clip_norm": 1.0}, {"check_gradients": True}, {"accumulate": 2}], ids=str)
def test_a_gradient_that_is_not_finite_is_refused_and_the_state_stays(options):
    step = jaxferry.train_step(_rooted, optax.sgd(0.1), **options)
    state, good, bad = step.init({"w": np.ones(3, np.float32)}), np.zeros(3, np.float32), np.ones(3, np.float32)
    for _ in range(2):
        step(state, good)
    before = state.params
    with pytest.raises(
        jaxferry.NonFiniteError, match=r"the loss of step \d is 0.0, but the gradient of layer 'w'"
    ) as caught:
        for _ in range(2):
            step(state, bad * before["w"])
    assert caught.value.layer == "w" and state.step == 2
    assert_same_bits(state.params, before)
    step(state, good)
    assert state.step == 3


@pytest.mark.skipif(
    "jax.config.jax_debug_nans", reason="under jax_debug_nans all gradients are checked before any update"
)
def test_a_gradient_that_is_not_finite_is_applied_with_a_warning_where_the_update_does_not_wait_for_it():
    bad = np.ones(3, np.float32)
    step = jaxferry.train_step(_rooted, optax.sgd(0.1))
    with pytest.warns(
        UserWarning, match="step 0 has applied gradients that are not finite .layer 'w'.: check_gradients"
    ):
        state, _ = step(step.init({"w": bad}), bad)
    assert not np.isfinite(state.params["w"]).all()


def test_an_optimizer_may_handle_gradients_that_are_not_finite():
    optimizer, ones = optax.chain(optax.zero_nans(), optax.sgd(0.1)), np.ones(3, np.float32)
    # The root's gradient at 0 is infinite, and times 0 it is NaN.
    step = jaxferry.train_step(lambda p, b: jnp.sqrt(p["w"] * b).sum(), optimizer, check_gradients=False)
    state = step.init({"w": ones})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state, metrics = step(state, 0 * ones)
    assert np.isnan(metrics["grad_norm"]) and state.step == 1
    np.testing.assert_array_equal(state.params["w"], ones)
