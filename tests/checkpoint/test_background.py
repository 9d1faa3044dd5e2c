"""Saves while training goes on: what they save, their errors, and how a process ends."""

import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import jaxferry
from checkpoints import content, plain
from jaxferry import checkpoint
from planned import assert_same_bits, taken

X = jnp.ones((2, 4))


def loss_fn(params, x):
    return jnp.mean((x @ params["a"]["w"] @ params["b"]["w"]) ** 2)


def make(optimizer):
    step = jaxferry.train_step(loss_fn, optimizer)
    return step, step.init({name: {"w": np.eye(4, dtype=np.float32)} for name in "ab"})


class Gate:
    """Holds the writing of arrays until it is opened."""

    def __init__(self):
        self.began, self.opened, self.num_saves = threading.Event(), threading.Event(), 0


@pytest.fixture
def gate(monkeypatch):
    made, original = Gate(), ocp.Checkpointer.save

    def save(self, *args, **kwargs):
        made.num_saves += 1
        made.began.set()
        assert made.opened.wait(300)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(ocp.Checkpointer, "save", save)
    yield made
    made.opened.set()


def full(self, folder, *args, **kwargs):
    raise ValueError("RESOURCE_EXHAUSTED: no space left")


# The native update of `jaxferry.adamw` writes parameters and optimizer state in place.
@pytest.mark.parametrize("make_optimizer", [jaxferry.adamw, optax.adamw])
def test_training_goes_on_and_the_state_saved_is_that_of_the_call(tmp_path, gate, make_optimizer):
    step, state = make(make_optimizer(0.1))
    state, _ = step(state, X)
    memory = np.ones(3)
    params, moments = state.params, state.opt_state
    step.save(state, tmp_path / "saved", wait=False, extra={"memory": memory})
    state = taken(step, state, X, 3)
    state.block_until_ready()
    memory += 1
    assert gate.began.wait(300) and not (tmp_path / "saved").exists()
    assert state.checkpoint is None
    gate.opened.set()
    step.wait_for_saves()
    restored = step.restore(tmp_path / "saved")
    assert restored.step == 1 and state.step == 4 and state.checkpoint == str(tmp_path / "saved")
    assert_same_bits(restored.params, params)
    assert_same_bits(restored.opt_state, moments)
    np.testing.assert_array_equal(restored.extra["memory"], np.ones(3))


def test_one_save_is_in_progress_and_the_next_waits_for_it(tmp_path, gate):
    step, state = make(optax.sgd(0.1))
    step.save(state, tmp_path / "one", wait=False)
    assert gate.began.wait(300)
    other = threading.Thread(target=step.save, args=(state, tmp_path / "two"))
    other.start()
    other.join(0.3)
    assert other.is_alive() and gate.num_saves == 1
    gate.opened.set()
    other.join()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]


def test_a_restore_waits_for_the_save_in_progress(tmp_path, gate):
    step, state = make(optax.sgd(0.1))
    step.save(state, tmp_path / "saved", wait=False)
    assert gate.began.wait(300)
    threading.Timer(0.2, gate.opened.set).start()
    assert_same_bits(step.restore(tmp_path / "saved").params, state.params)


@pytest.mark.parametrize("asks", ["wait_for_saves", "save", "save_in_background"])
def test_the_error_of_a_save_is_raised_once_and_the_old_checkpoint_stays(tmp_path, monkeypatch, asks):
    step, state = make(optax.sgd(0.1))
    step.save(state, tmp_path / "saved")
    first = state.params
    state, _ = step(state, X)
    with monkeypatch.context() as patch:
        patch.setattr(ocp.Checkpointer, "save", full)
        step.save(state, tmp_path / "saved", wait=False)
        state, _ = step(state, X)
        # A restore waits for the save too, and leaves its error to the next save.
        assert_same_bits(step.restore(tmp_path / "saved").params, first)
    ask = step.wait_for_saves
    if asks != "wait_for_saves":

        def ask():
            step.save(state, tmp_path / "saved", wait=asks == "save")

    with pytest.raises(jaxferry.CheckpointError, match=f"cannot write to {tmp_path}/saved: .*RESOURCE_EXHAUSTED"):
        ask()
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    ask()
    step.wait_for_saves()
    assert_same_bits(step.restore(tmp_path / "saved").params, first if asks == "wait_for_saves" else state.params)


def test_a_path_that_cannot_be_written_is_told_by_the_call_itself(tmp_path):
    step, state = make(optax.sgd(0.1))
    (tmp_path / "mine").mkdir()
    for path in (tmp_path / "mine", "gs://bucket/saved"):
        with pytest.raises(jaxferry.CheckpointError):
            step.save(state, path, wait=False)
    step.wait_for_saves()


@pytest.mark.parametrize("trainable", [None, {"w": True, "frozen": False}])
def test_the_copy_of_a_state_has_memory_of_its_own(trainable):
    params = {"w": np.ones((64, 64), np.float32), "frozen": np.ones((64, 64), np.float32)}
    step = jaxferry.train_step(
        lambda p, x: ((x @ p["w"] @ p["frozen"]) ** 2).mean(), optax.adam(0.1), trainable=trainable
    )
    state, _ = step(step.init(params), np.ones((2, 64), np.float32))
    own, copied = state.stored(), state.stored(copied=True)
    pairs = list(zip(jax.tree.leaves(own), jax.tree.leaves(copied), strict=True))
    assert len(pairs) == len(jax.tree.leaves(copied)) > 3
    for array, copy in pairs:
        assert not np.shares_memory(np.asarray(array), np.asarray(copy))
        np.testing.assert_array_equal(array, copy)


ENDING = """
import concurrent.futures, os, signal, sys, time
sys.path[:0] = {path!r}
import orbax.checkpoint as ocp
from checkpoints import content
from jaxferry import checkpoint
from jaxferry.errors import CheckpointError
from jaxferry.training import BackgroundSaves

folder = sys.argv[1]
save = ocp.Checkpointer.save

def slow(self, *args, **kwargs):
    began.append(None)
    time.sleep(1)
    return save(self, *args, **kwargs)

def broken():
    time.sleep(1)
    raise CheckpointError("no such luck")

def error_after_an_interrupt(self, timeout=None):
    print("second interrupt", file=sys.stderr)
    signal.raise_signal(signal.SIGINT)
    return error(self, timeout)

ocp.Checkpointer.save, began = slow, []
error, concurrent.futures.Future.exception = concurrent.futures.Future.exception, error_after_an_interrupt
saves = [BackgroundSaves() for _ in range(2)]
saves[0].start(lambda: checkpoint.save(content(1), os.path.join(folder, "saved")))
saves[1].start(broken)
saves.clear()
while not began:
    time.sleep(0.01)
signal.raise_signal(signal.SIGINT)
"""


def test_the_end_of_a_process_waits_for_its_saves_and_tells_their_errors(tmp_path):
    script = tmp_path / "ending.py"
    script.write_text(ENDING.format(path=sys.path))
    (tmp_path / "folder").mkdir()
    command = [sys.executable, script, tmp_path / "folder"]
    lines = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False).stderr.splitlines()
    # The first interrupt ends the process; the second one comes while it waits for its saves.
    assert lines.count("KeyboardInterrupt") == 1 and "second interrupt" in lines
    assert "error: no such luck" in lines
    assert plain(checkpoint.load(tmp_path / "folder" / "saved")) == plain(content(1))
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["saved"]
