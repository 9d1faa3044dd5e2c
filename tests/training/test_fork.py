"""A forked child has none of its parent's threads: it is told so at once."""

import os
import signal
import threading
import time
import warnings

import numpy as np
import optax
import pytest

import jaxferry
from jaxferry.training import BackgroundSaves, finish

BATCH = np.ones((2, 4), np.float32)
LONGEST_S = 60


def in_child(function):
    """Runs a function in a forked child; returns whether it raised StateError, or None if it hangs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX and Python warn of forks of processes with threads
        child = os.fork()
    if child == 0:
        status = 1
        try:
            function()
        except jaxferry.StateError as error:
            status = 0 if "parent process" in str(error) and "spawn" in str(error) else 2
        finally:
            os._exit(status)
    for _ in range(LONGEST_S * 20):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


@pytest.fixture(scope="module")
def training():
    def loss_fn(params, batch):
        return (batch @ params["w"]).mean()

    step = jaxferry.train_step(loss_fn, optax.adam(0.1))
    state = step.init({"w": np.ones((4, 4), np.float32)})
    for _ in range(2):
        step(state, BATCH)
    return step, state


@pytest.mark.parametrize(
    "use",
    [
        lambda step, state: step(state, BATCH),
        lambda step, state: step(state, BATCH[:1]),
        lambda step, state: step.evaluate(state, BATCH),
        lambda step, state: step.init({"w": np.ones((4, 4), np.float32)}),
        lambda step, state: state.params,
        lambda step, state: step.restore("nowhere"),
        lambda step, state: step.wait_for_saves(),
    ],
    ids=["step", "another batch", "evaluate", "init", "params", "restore", "saves"],
)
def test_a_forked_child_is_refused_at_once_and_its_parent_goes_on(training, use):
    step, state = training
    assert in_child(lambda: use(step, state)) is True
    number = state.step
    step(state, BATCH)
    assert state.step == number + 1


def test_a_child_ends_while_its_parent_saves_in_the_background():
    saves, may_end = BackgroundSaves(), threading.Event()
    saves.start(lambda: may_end.wait(LONGEST_S))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        child = os.fork()
    if child == 0:
        finish()
        os._exit(0)
    try:
        for _ in range(LONGEST_S * 10):
            ended, _ = os.waitpid(child, os.WNOHANG)
            if ended:
                break
            time.sleep(0.05)
        assert ended and not may_end.is_set()
    finally:
        if not ended:
            os.kill(child, signal.SIGKILL)
        may_end.set()
        saves.wait()
