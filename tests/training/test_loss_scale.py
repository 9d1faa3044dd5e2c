"""Scaling of the loss for 16-bit floats."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxferry
from jaxferry.engine import LossScale
from jaxferry.engine import pending as loss_scale
from planned import assert_same_bits

X = np.linspace(-1, 1, 24, dtype=np.float32).reshape(4, 6)
PARAMS = {f"l{i}": {"w": np.random.default_rng(i).normal(size=(6, 6)).astype(np.float32) * 0.5} for i in range(3)}


def loss_fn(params, x):
    for layer in params.values():
        w = layer["w"]
        x = jnp.tanh(x.astype(w.dtype) @ w)
    return jnp.mean(x.astype(jnp.float32) ** 2)


def train(num_steps, scale=None, x=X, **options):
    step = jaxferry.train_step(loss_fn, optax.adam(1e-2), **options)
    state = step.init(PARAMS)
    if scale is not None:
        state.loss_scale = scale
    rows = []
    for _ in range(num_steps):
        state, metrics = step(state, x)
        rows.append({name: float(value) for name, value in metrics.items()})
    return state, rows


@pytest.mark.parametrize("options", [{}, {"clip_norm": 0.01, "accumulate": 2}])
def test_a_fixed_power_of_two_changes_no_bit(options):
    state, rows = train(6, **options)
    scaled, others = train(6, loss_scale=1024, **options)
    assert [row["loss"] for row in rows] == [row["loss"] for row in others]
    assert [row.get("grad_norm") for row in rows] == [row.get("grad_norm") for row in others]
    assert_same_bits(scaled.params, state.params)
    assert others[0]["loss_scale"] == 1024


def test_half_precision_is_scaled_by_itself_and_keeps_small_gradients():
    tiny = X * 1e-4
    with_scale, rows = train(1, compute_dtype=jnp.float16, x=tiny)
    without, _ = train(1, compute_dtype=jnp.float16, x=tiny, loss_scale=1)
    exact = jax.grad(loss_fn)(jax.tree.map(jnp.asarray, PARAMS), tiny)
    assert rows[0]["loss_scale"] == 2.0**16 and not rows[0]["skipped"]

    def moved(state, name):
        return np.mean(state.params[name]["w"] != PARAMS[name]["w"])

    assert np.all(np.asarray(exact["l0"]["w"]) != 0)
    assert moved(with_scale, "l0") == 1.0 > moved(without, "l0")


def test_an_overflow_leaves_the_update_out_exactly_and_halves_the_scale():
    state, rows = train(12, LossScale(2.0**24), compute_dtype=jnp.float16)
    skipped = [row["skipped"] for row in rows]
    num_skipped = int(sum(skipped))
    assert 0 < num_skipped < 12 and skipped == [1.0] * num_skipped + [0.0] * (12 - num_skipped)
    assert [row["loss_scale"] for row in rows] == [2.0 ** (24 - min(i, num_skipped)) for i in range(12)]
    assert all(np.isfinite(row["loss"]) for row in rows)
    assert len({row["loss"] for row in rows[: num_skipped + 1]}) == 1
    expected, _ = train(12 - num_skipped, LossScale(2.0 ** (24 - num_skipped)), compute_dtype=jnp.float16)
    assert_same_bits(state.params, expected.params)
    assert_same_bits(list(state.optimizer_state().values()), list(expected.optimizer_state().values()))
    assert state.step == 12


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_scale_doubles_after_many_finite_updates(accumulate, monkeypatch):
    monkeypatch.setattr(loss_scale, "GROWTH_STEPS", 3)
    options = {"compute_dtype": jnp.float16, "loss_scale": "dynamic", "accumulate": accumulate}
    _, rows = train(8 * accumulate, LossScale(4.0), **options)
    scales = np.repeat([4, 4, 4, 8, 8, 8, 16, 16], accumulate)  # the same for all micro-batches of an update
    assert [row["loss_scale"] for row in rows] == scales.tolist()


def test_a_loss_that_no_scale_helps_is_an_error_in_the_end():
    step = jaxferry.train_step(loss_fn, optax.sgd(0.1), compute_dtype=jnp.float16)
    state = step.init(PARAMS)
    state.loss_scale = LossScale(4.0)
    bad = X * np.nan
    for scale in (4.0, 2.0):
        state, metrics = step(state, bad)
        assert metrics["skipped"] and metrics["loss_scale"] == scale
    with pytest.raises(jaxferry.NonFiniteError):
        step(state, bad)
    assert_same_bits(state.params, PARAMS)
    state, metrics = step(state, X)
    assert not metrics["skipped"]


def test_the_scale_is_saved_and_restored(tmp_path):
    step = jaxferry.train_step(loss_fn, optax.sgd(0.1), compute_dtype=jnp.float16)
    state = step.init(PARAMS)
    state.loss_scale = LossScale(2.0**30)
    for _ in range(3):
        state, _ = step(state, X)
    step.save(state, tmp_path / "saved")
    restored = step.restore(tmp_path / "saved")
    assert restored.loss_scale == state.loss_scale == LossScale(2.0**27)
