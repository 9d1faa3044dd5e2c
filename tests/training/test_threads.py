"""One thread at a time uses a training step and its states: another one is told so at once."""

import threading

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxferry
from planned import assert_same_bits

BATCH = np.linspace(-1, 1, 4 * 32, dtype=np.float32).reshape(4, 32)
LONGEST_S = 120


def loss_fn(params, batch):
    for name in sorted(params):
        batch = batch + jnp.tanh(batch @ params[name])
    return (batch**2).mean()


def made():
    step = jaxferry.train_step(loss_fn, optax.adam(1e-2), record_steps=1)
    params = {f"w{i}": np.full((32, 32), 0.01 * (i + 1), np.float32) for i in range(4)}
    return step, step.init(params), params


@pytest.fixture(scope="module")
def training(tmp_path_factory):
    step, state, params = made()
    step(state, BATCH)
    path = tmp_path_factory.mktemp("threads") / "saved"
    step.save(state, path)
    return step, state, params, path


ENTRIES = {
    "call": lambda step, state, params, path: step(state, BATCH),
    "call with another shape": lambda step, state, params, path: step(state, BATCH[:2]),
    "init": lambda step, state, params, path: step.init(params),
    "init_from": lambda step, state, params, path: step.init_from(lambda rng: params, np.zeros(2, np.uint32)),
    "declare": lambda step, state, params, path: step.declare(params),
    "restore": lambda step, state, params, path: step.restore(path),
    "prepare": lambda step, state, params, path: step.prepare(BATCH),
    "measure": lambda step, state, params, path: step.measure(params, BATCH),
    "compile_updates": lambda step, state, params, path: step.compile_updates(state, BATCH),
    "evaluate": lambda step, state, params, path: step.evaluate(state, BATCH),
    "apply": lambda step, state, params, path: step.apply(state, loss_fn, BATCH),
    "save": lambda step, state, params, path: step.save(state, path),
    "save in the background": lambda step, state, params, path: step.save(state, path, wait=False),
    "recorded": lambda step, state, params, path: step.recorded(),
    "params": lambda step, state, params, path: state.params,
    "lazy_params": lambda step, state, params, path: state.lazy_params,
    "params=": lambda step, state, params, path: setattr(state, "params", params),
    "opt_state": lambda step, state, params, path: state.opt_state,
    "opt_state=": lambda step, state, params, path: setattr(state, "opt_state", None),
    "set_hyperparams": lambda step, state, params, path: state.set_hyperparams(learning_rate=0.1),
    "copy": lambda step, state, params, path: state.copy(),
    "masters": lambda step, state, params, path: state.masters(),
    "optimizer_state": lambda step, state, params, path: state.optimizer_state(),
    "stored": lambda step, state, params, path: state.stored(),
    "settle": lambda step, state, params, path: state.settle(),
    "block_until_ready": lambda step, state, params, path: state.block_until_ready(),
}


def in_thread(function, name="other"):
    """Runs a function in a thread; returns its result or its error, or fails if it hangs."""
    found = []

    def run():
        try:
            found.append(function())
        except BaseException as error:  # noqa: BLE001 - the caller looks at it
            found.append(error)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    thread.join(LONGEST_S)
    assert found, "the thread hangs"
    return found[0]


@pytest.mark.parametrize("entry", ENTRIES)
def test_every_entry_is_refused_while_another_thread_is_in_one(training, entry):
    step, state, _, _ = training
    number = state.step
    with step.owner.using("TrainStep.__call__"):
        error = in_thread(lambda: ENTRIES[entry](*training))
    assert isinstance(error, jaxferry.StateError)
    assert "thread 'other' called Train" in str(error) and len(str(error).splitlines()) == 1
    assert f"while thread '{threading.current_thread().name}' was in TrainStep.__call__" in str(error)
    assert state.step == number and state.damage is None


def test_a_lazy_parameter_is_not_read_while_another_thread_is_in_an_entry(training):
    step, state, _, _ = training
    leaf = state.lazy_params["w0"]
    with step.owner.using("TrainStep.__call__"):
        assert isinstance(in_thread(lambda: np.asarray(leaf)), jaxferry.StateError)


def test_threads_that_take_turns_may_use_a_step(training):
    step, state, _, _ = training
    number = state.step
    for _ in range(2):
        assert not isinstance(in_thread(lambda: step(state, BATCH)), BaseException)
        step(state, BATCH)
    assert state.step == number + 4


def test_entries_within_an_entry_of_the_same_thread_are_allowed(training):
    step, state, _, _ = training
    with step.owner.using("TrainStep.__call__"):
        assert_same_bits(state.copy().params, state.params)


def test_two_threads_that_call_one_step_neither_hang_nor_harm_the_state():
    step, state, _ = made()
    start, told = threading.Barrier(2), []

    def train():
        start.wait(LONGEST_S)
        num = 0
        for _ in range(30):
            try:
                step(state, BATCH)
                num += 1
            except jaxferry.StateError as error:
                assert "one thread at a time" in str(error)
                told.append(error)
        return num

    found = []
    threads = [threading.Thread(target=lambda: found.append(train()), daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONGEST_S)
    assert len(found) == 2, "a thread hangs or has failed"
    assert state.step == sum(found) == 60 - len(told) and state.damage is None
    expected_step, expected, _ = made()
    for _ in range(sum(found)):
        expected_step(expected, BATCH)
    assert_same_bits(state.params, expected.params)


def test_reading_a_state_beside_steps_is_right_or_refused():
    step, state, _ = made()
    step(state, BATCH)
    is_over = threading.Event()

    def read():
        while not is_over.is_set():
            for entry in ("params", "copy", "evaluate", "opt_state"):
                try:
                    ENTRIES[entry](step, state, None, None)
                except jaxferry.StateError as error:
                    assert "one thread at a time" in str(error)
        return "read"

    found = []
    reader = threading.Thread(target=lambda: found.append(in_thread(read)), daemon=True)
    reader.start()
    taken = 1
    while taken < 30:
        try:
            step(state, BATCH)
            taken += 1
        except jaxferry.StateError as error:
            assert "one thread at a time" in str(error)
    is_over.set()
    reader.join(LONGEST_S)
    assert found == ["read"]
    expected_step, expected, _ = made()
    for _ in range(30):
        expected_step(expected, BATCH)
    assert_same_bits(state.params, expected.params)


def test_a_save_in_the_background_writes_beside_steps_and_another_step_runs_beside_it(tmp_path):
    step, state, _ = made()
    step(state, BATCH)
    before = state.params
    step.save(state, tmp_path / "saved", wait=False)

    def other():
        own_step, own, _ = made()
        for _ in range(5):
            own_step(own, BATCH)
        return own.params

    found = []
    thread = threading.Thread(target=lambda: found.append(other()), daemon=True)
    thread.start()
    for _ in range(4):
        step(state, BATCH)
    assert not isinstance(in_thread(step.wait_for_saves), BaseException)
    thread.join(LONGEST_S)
    assert_same_bits(step.restore(tmp_path / "saved").params, before)
    assert_same_bits(found[0], state.params)
