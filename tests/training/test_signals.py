"""Signals whose handlers raise: a step, and the first one's arrangement of the state, end between two steps."""

import itertools
import os
import signal

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxferry
import scanned
from jaxferry.optimizer import pieces
from jaxferry.transport import Terminated, deferred_interrupts, raising_terminated
from planned import assert_same_bits

ADAM = optax.adam(1e-2)
BATCH = np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)
PARAMS = {name: {"w": np.eye(4, dtype=np.float32) * scale} for name, scale in (("first", 0.5), ("second", 0.7))}


def loss_fn(params, batch):
    return jnp.square(batch @ params["first"]["w"] @ params["second"]["w"]).mean()


def leave(number, frame):
    raise SystemExit(number)


@pytest.fixture
def leaving(request):
    """A signal whose handler calls sys.exit."""
    before = signal.signal(request.param, leave)
    yield request.param
    signal.signal(request.param, before)


def whole_steps(step, num_steps):
    state = step.init(PARAMS)
    for _ in range(num_steps):
        step(state, BATCH)
    return state.params


@pytest.mark.parametrize("leaving", [signal.SIGTERM, signal.SIGHUP, signal.SIGALRM], indirect=True)
def test_a_handler_that_exits_in_the_first_step_loses_nothing(leaving, monkeypatch):
    step = jaxferry.train_step(loss_fn, ADAM)
    expected = [PARAMS, *(whole_steps(step, n) for n in (1, 2))]
    take, count, num_ended = pieces.Pieces.take, itertools.count(), 0
    for after in range(8):
        state = step.init(PARAMS)
        count = itertools.count()

        def taken(self, *key):
            if next(count) == after:  # noqa: B023 - called in this iteration only
                signal.raise_signal(leaving)
            return take(self, *key)

        with monkeypatch.context() as patch:
            patch.setattr(pieces.Pieces, "take", taken)
            try:
                step(state, BATCH)
            except SystemExit:
                num_ended += 1
        assert_same_bits(state.params, expected[state.step])
        while state.step < 2:
            step(state, BATCH)
        assert_same_bits(state.params, expected[2])
    assert num_ended > 2


def test_memory_that_is_short_while_a_state_is_arranged_loses_nothing(monkeypatch):
    task = scanned.plain()
    step = jaxferry.train_step(task.loss_fn, ADAM)
    state = step.init(task.params)
    before, on_host, count = (state.params, state.opt_state), pieces.on_host, itertools.count()

    def short(*args):
        if next(count) == 5:
            raise MemoryError("host memory is short")
        return on_host(*args)

    with monkeypatch.context() as patch:
        patch.setattr(pieces, "on_host", short)
        with pytest.raises(MemoryError):
            step(state, task.batch)
    assert_same_bits((state.params, state.opt_state), before)
    step(state, task.batch)
    other = step.init(task.params)
    step(other, task.batch)
    assert_same_bits(state.params, other.params)


@pytest.mark.parametrize("leaving", [signal.SIGUSR1, signal.SIGTERM], indirect=True)
def test_every_handler_runs_at_the_end_of_the_block(leaving):
    reached = []
    with pytest.raises(SystemExit, match=str(int(leaving))), deferred_interrupts():
        os.kill(os.getpid(), leaving)
        reached.append("the end")
    assert reached == ["the end"] and signal.getsignal(leaving) is leave


def test_a_handler_that_a_handler_sets_stays():
    def once(number, frame):
        signal.signal(number, signal.SIG_IGN)

    before = signal.signal(signal.SIGUSR1, once)
    try:
        with deferred_interrupts() as interrupts:
            signal.raise_signal(signal.SIGUSR1)
            assert not interrupts.are_raised()
        assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_termination_is_raised_once_and_leaves_a_handler_of_the_users_alone():
    with pytest.raises(Terminated), raising_terminated():
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    before = signal.signal(signal.SIGTERM, leave)
    try:
        with pytest.raises(SystemExit), raising_terminated():
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
