"""Unusual and damaged checkpoints, and interrupts during writes."""

import json
import pathlib
import signal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import jaxferry
from planned import assert_same_bits

X = jnp.ones((2, 4))


def loss_fn(params, x):
    return jnp.mean((x @ params["a"]["w"] @ params["b"]["w"]) ** 2) + jnp.sum(params["a"]["none"])


def make(optimizer=None):
    params = {name: {"w": np.eye(4, dtype=np.float32)} for name in "ab"}
    params["a"]["none"] = np.zeros((0, 3), np.float32)
    step = jaxferry.train_step(loss_fn, optax.adam(0.1) if optimizer is None else optimizer)
    return step, step.init(params)


def test_a_parameter_without_elements_is_saved_and_restored(tmp_path):
    step, state = make()
    state, _ = step(state, X)
    step.save(state, tmp_path / "saved")
    restored = step.restore(tmp_path / "saved")
    assert_same_bits(restored.params, state.params)
    assert restored.params["a"]["none"].shape == (0, 3)


def test_an_interrupt_between_the_renames_leaves_the_new_checkpoint(tmp_path, monkeypatch):
    step, state = make()
    step.save(state, tmp_path / "saved")
    state, _ = step(state, X)
    rename = pathlib.Path.rename

    def interrupted(self, target):
        result = rename(self, target)
        signal.raise_signal(signal.SIGINT)
        return result

    monkeypatch.setattr(pathlib.Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        step.save(state, tmp_path / "saved")
    monkeypatch.undo()
    assert_same_bits(step.restore(tmp_path / "saved").params, state.params)


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


@pytest.mark.parametrize("failing", ["write", "rename"])
def test_a_save_that_fails_leaves_the_old_checkpoint_and_nothing_beside(tmp_path, monkeypatch, failing):
    step, state = make()
    step.save(state, tmp_path / "saved")
    before = state.params
    state, _ = step(state, X)
    rename = pathlib.Path.rename

    def full(self, folder, *args, **kwargs):
        folder.with_name(f"{folder.name}.orbax-checkpoint-tmp").mkdir()
        raise OSError("disk full")

    def stopped(self, target):
        if self.name == "fresh":
            raise OSError("disk full")
        return rename(self, target)

    with monkeypatch.context() as patch:
        if failing == "write":
            patch.setattr(ocp.Checkpointer, "save", full)
        else:
            patch.setattr(pathlib.Path, "rename", stopped)
        with pytest.raises(OSError, match="disk full"):
            step.save(state, tmp_path / "saved")
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    assert_same_bits(step.restore(tmp_path / "saved").params, before)


def test_a_restore_that_fails_leaves_the_step_as_it_was(tmp_path):
    step, state = make()
    step.save(state, tmp_path / "saved")
    other = {"c": {"w": np.eye(3, dtype=np.float32)}}
    with pytest.raises(jaxferry.CheckpointError, match="does not match the model"):
        step.restore(tmp_path / "saved", params=other)
    state, metrics = step(state, X)
    assert np.isfinite(metrics["loss"]) and state.step == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda about: about.pop("optimizer_keys"), "cannot be read: KeyError"),
        (lambda about: about.update(format="jaxferry.checkpoint/9"), "has format 'jaxferry.checkpoint/9'"),
        (lambda about: about.update(params="none"), "cannot be read"),
        (lambda about: about["params"].append(dict(about["params"][-1])), "cannot be read"),
    ],
)
def test_damaged_facts_of_a_checkpoint_are_one_clear_line(tmp_path, change, message):
    step, state = make()
    step.save(state, tmp_path / "saved")
    (file,) = [
        path for path in (tmp_path / "saved" / "about").rglob("*") if path.is_file() and "format" in path.read_text()
    ]
    about = json.loads(file.read_text())
    change(about)
    file.write_text(json.dumps(about))
    with pytest.raises(jaxferry.CheckpointError, match=message) as caught:
        step.restore(tmp_path / "saved")
    assert len(str(caught.value).splitlines()) == 1


def test_an_optimizer_that_keeps_a_key_trains_and_resumes_bit_by_bit(tmp_path):
    optimizer = optax.chain(optax.add_noise(0.1, 0.5, key=jax.random.key(0)), optax.sgd(0.1))
    with pytest.warns(UserWarning, match="looks at all parameters at once"):
        step, state = make(optimizer)
    state, _ = step(state, X)
    step.save(state, tmp_path / "saved")
    state, _ = step(state, X)
    resumed, _ = step(step.restore(tmp_path / "saved"), X)
    assert_same_bits(resumed.params, state.params)
