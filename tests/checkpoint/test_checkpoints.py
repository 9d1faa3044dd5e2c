"""Checkpoints of training steps: resumed runs, checkpoints of other models, and interrupts during writes."""

import signal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import jaxferry
import models
from planned import assert_same_bits, step_of

ADAMW = optax.adamw(1e-2)
X = jnp.ones((2, 4))


def loss_fn(params, x):
    return jnp.mean((x @ params["a"]["w"] @ params["b"]["w"]) ** 2) + jnp.sum(params["a"]["none"])


def make(optimizer=None):
    params = {name: {"w": np.eye(4, dtype=np.float32)} for name in "ab"}
    params["a"]["none"] = np.zeros((0, 3), np.float32)
    step = jaxferry.train_step(loss_fn, optax.adam(0.1) if optimizer is None else optimizer)
    return step, step.init(params)


def test_an_interrupt_while_a_checkpoint_is_written_comes_after_it_and_leaves_nothing_beside(tmp_path, monkeypatch):
    step, state = make()
    step.save(state, tmp_path / "saved")
    state, _ = step(state, X)
    save = ocp.Checkpointer.save

    def interrupted(self, *args, **kwargs):
        signal.raise_signal(signal.SIGINT)
        return save(self, *args, **kwargs)

    monkeypatch.setattr(ocp.Checkpointer, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        step.save(state, tmp_path / "saved")
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    assert_same_bits(step.restore(tmp_path / "saved").params, state.params)


def test_a_restore_that_fails_leaves_the_step_as_it_was(tmp_path):
    step, state = make()
    step.save(state, tmp_path / "saved")
    other = {"c": {"w": np.eye(3, dtype=np.float32)}}
    with pytest.raises(jaxferry.CheckpointError, match="does not match the model"):
        step.restore(tmp_path / "saved", params=other)
    state, metrics = step(state, X)
    assert np.isfinite(metrics["loss"]) and state.step == 1


def test_an_optimizer_that_keeps_a_key_trains_and_resumes_bit_by_bit(tmp_path):
    optimizer = optax.chain(optax.add_noise(0.1, 0.5, key=jax.random.key(0)), optax.sgd(0.1))
    step, state = make(optimizer)
    state, _ = step(state, X)
    step.save(state, tmp_path / "saved")
    state, _ = step(state, X)
    resumed, _ = step(step.restore(tmp_path / "saved"), X)
    assert_same_bits(resumed.params, state.params)


def test_a_checkpoint_of_another_model_or_optimizer_is_refused(gpt, tmp_path):
    step = step_of(gpt, ADAMW)
    step.save(step.init(gpt.params), tmp_path / "saved")
    wider = models.mlp(depth=2, width=64)
    other = jaxferry.train_step(wider.loss_fn, optax.adamw(1e-2))
    with pytest.raises(jaxferry.CheckpointError, match=r"does not match the model: .* has shape"):
        other.restore(tmp_path / "saved", params=wider.params)
    with pytest.raises(jaxferry.CheckpointError, match="does not match the model: it has no"):
        other.restore(tmp_path / "saved", params=models.mlp(depth=5).params)
    with pytest.raises(jaxferry.CheckpointError, match="does not match the optimizer"):
        jaxferry.train_step(gpt.loss_fn, optax.sgd(0.1, 0.9)).restore(tmp_path / "saved")
    with pytest.raises(jaxferry.CheckpointError, match="is not a JaxFerry checkpoint"):
        step.restore(tmp_path / "nothing")
    (tmp_path / "precious").mkdir()
    with pytest.raises(jaxferry.CheckpointError, match="exists and is not a JaxFerry checkpoint"):
        step.save(step.init(gpt.params), tmp_path / "precious")


def test_a_checkpoint_with_other_dtypes_of_the_optimizer_is_refused(gpt, tmp_path):
    step = jaxferry.train_step(gpt.loss_fn, optax.adam(1e-3, mu_dtype=jnp.bfloat16))
    step.save(step.init(gpt.params), tmp_path / "saved")
    with pytest.raises(jaxferry.CheckpointError, match="is bfloat16 in the checkpoint and float32 in the optimizer"):
        jaxferry.train_step(gpt.loss_fn, optax.adam(1e-3)).restore(tmp_path / "saved", gpt.params)


PARAMS = {"inner": {"mu": np.ones((4, 4), np.float32)}, "w": np.ones((4, 4), np.float32)}


def nested_loss(params, x):
    return jnp.mean((x @ params["w"] @ params["inner"]["mu"]) ** 2)


@pytest.fixture(scope="module")
def saved_adamw(tmp_path_factory):
    path = tmp_path_factory.mktemp("transformations") / "adamw"
    step = jaxferry.train_step(nested_loss, optax.adamw(1e-3))
    step.save(step.init(PARAMS), path)
    return path


SAVED = r"saved with scale_by_adam.* \(count, mu, nu\) at \[0\], and this optimizer has "


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        (optax.sgd(0.1, momentum=0.9), SAVED + r"trace \(trace\) at \[0\]"),
        (optax.lion(1e-3), SAVED + r"scale_by_lion \(count, mu\) at \[0\]"),
        (optax.sgd(0.1), SAVED + r"nothing at \[0\]"),
        (optax.chain(optax.clip(1.0), optax.adam(1e-3)), SAVED + r"scale_by_adam.* \(count, mu, nu\) at \[1\]\[0\]"),
        (optax.adam(optax.linear_schedule(1, 0, 9)), r"nothing at \[1\], .* scale_by_schedule \(count\) at \[1\]"),
    ],
    ids=["sgd", "lion", "without state", "chain", "schedule"],
)  # fmt: skip
def test_the_transformations_of_both_are_named(saved_adamw, optimizer, expected):
    with pytest.raises(jaxferry.CheckpointError, match=expected) as caught:
        jaxferry.train_step(nested_loss, optimizer).restore(saved_adamw)
    assert "the checkpoint does not match the optimizer" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("optimizer", [optax.adam(1e-3), optax.adamw(0.1), jaxferry.adamw(1e-3)])
def test_the_same_transformations_are_restored(saved_adamw, optimizer):
    assert jaxferry.train_step(nested_loss, optimizer).restore(saved_adamw).step == 0
