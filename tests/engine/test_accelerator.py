"""The emulated accelerator is strict, and the thread that issues for it never waits."""

import gc
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxferry
import models
from accelerator import CLIENT_BYTES_PER_S, Misuse
from jaxferry.engine import executor
from jaxferry.modes import Mode
from jaxferry.native import library
from planned import plan_of
from slowly import slow
from steps import link

NUM_PRODUCTS, MATRIX = 300, np.full((128, 128), 0.01, np.float32)
SIZE = 1 << 16


def pinned(accelerator, value=1.0):
    return jax.block_until_ready(jax.device_put(np.full(SIZE, value, np.float32), accelerator.placement.pinned))


def late(accelerator):
    """A number on the device that exists only after some time."""
    slow = jax.jit(lambda x: x + 0 * jax.lax.fori_loop(0, NUM_PRODUCTS, lambda _, y: jnp.tanh(y @ y), MATRIX * x).sum())
    return slow(jax.device_put(np.float32(1), accelerator.placement.device))


def is_misuse(call, message):
    try:
        call()
    except Misuse as error:
        return message in str(error)
    return False


def provoke(attempt):
    """Repeats an attempt until it returns true: the device may have been done before the thread went on."""
    assert any(attempt() for _ in range(50))


def test_copies_between_clients_are_slow(accelerator, monkeypatch):
    array, slept = pinned(accelerator), []
    monkeypatch.setattr("accelerator.time.sleep", slept.append)
    jax.device_put(array, accelerator.placement.host)
    jax.device_put(array, accelerator.placement.device)
    assert slept == [array.nbytes / CLIENT_BYTES_PER_S]


def test_deleted_pinned_memory_is_overwritten(accelerator):
    array = pinned(accelerator)
    view = np.asarray(array)
    array.delete()
    assert np.isnan(view).all()


def test_pinned_memory_that_the_device_still_writes_must_not_be_deleted(accelerator):
    def attempt():
        written = jax.device_put(jnp.full(SIZE, late(accelerator)), accelerator.placement.pinned)
        return is_misuse(written.delete, "still writes")

    provoke(attempt)


@pytest.mark.skipif("jax.config.jax_debug_nans", reason="jax_debug_nans waits for the results of each program")
def test_pinned_memory_that_the_device_still_reads_must_not_be_dropped(accelerator):
    read = jax.jit(lambda x, y: jax.device_put(x, jax.memory.Space.Device).sum() * y)

    def attempt():
        array, number = pinned(accelerator), late(accelerator)
        found = read(array, number)
        del array
        was_found = is_misuse(accelerator.check, "still reads")
        jax.block_until_ready(found)
        return was_found

    provoke(attempt)


def test_the_library_waits_only_at_addresses_of_pinned_arrays(accelerator):
    native, array = library("cpu"), pinned(accelerator)
    address = array.unsafe_buffer_pointer()
    native.wait_for([address], [array.nbytes])
    for wrong, size in ((address - 4096, 4096), (address, array.nbytes + 64)):
        with pytest.raises(Misuse, match="no pinned array"):
            native.wait_for([wrong], [size])


@pytest.fixture(scope="module")
def gpt():
    return models.mlp(depth=3)


@pytest.mark.parametrize(
    "wait",
    [
        pytest.param(jax.block_until_ready, id="block_until_ready"),
        pytest.param(lambda array: np.asarray(array), id="asarray"),
        pytest.param(lambda array: jax.device_get(array), id="device_get"),
        pytest.param(lambda array: array.unsafe_buffer_pointer(), id="unsafe_buffer_pointer"),
        pytest.param(bool, id="bool"),
    ],
)
def test_a_wait_of_the_issuing_thread_is_noted(accelerator, gpt, monkeypatch, wait):
    keep = executor._keep_outputs

    def waits(step, call, outputs, nondiff_outputs, finite):
        wait(finite)
        keep(step, call, outputs, nondiff_outputs, finite)

    monkeypatch.setattr(executor, "_keep_outputs", waits)
    step = jaxferry.train_step(gpt.loss_fn, optax.adamw(1e-3), plan=plan_of(gpt, [Mode.GFGB]), transport="ferry")
    state = step.init(gpt.params)

    def attempt():
        nonlocal state
        state, _ = step(state, gpt.batch)
        return any("in waits" in stack for stack in accelerator.waits)

    provoke(attempt)
    state.block_until_ready()


def dense_chain(depth):
    return models.chain(), {f"layer_{number}": np.eye(8, dtype=np.float32) for number in range(depth)}


def test_a_further_layer_takes_three_further_launches(accelerator, monkeypatch):
    """Its load, a forward that waits for that, and a backward that queues the copy of the gradient."""
    launched, launch = [], accelerator.launch

    def counted(*args, **kwargs):
        launched.append(threading.current_thread().name.startswith("jaxferry H2D"))
        return launch(*args, **kwargs)

    monkeypatch.setattr(accelerator, "launch", counted)
    numbers = []
    for depth in (3, 9):
        loss_fn, params = dense_chain(depth)
        step = jaxferry.train_step(loss_fn, jaxferry.sgd(0.1), transport="ferry")
        state = step.init(params)
        for _ in range(3):
            state, _ = step(state, np.ones((2, 8), np.float32))
        state.block_until_ready()
        launched.clear()
        for _ in range(8):
            state, _ = step(state, np.ones((2, 8), np.float32))
        state.block_until_ready()
        assert len(step.prepare(np.ones((2, 8), np.float32)).partition.segments) == depth
        numbers.append(sum(launched))
    # One more launch a step waits for the copies of all gradients, unless the host has seen them arrive.
    assert round((numbers[1] - numbers[0]) / (8 * 6)) == 3, numbers


@pytest.mark.parametrize("mode", [*slow(Mode.RESIDENT), Mode.DHA])
def test_a_state_may_be_forgotten_while_the_device_reads_its_parameters(accelerator, gpt, mode):
    step = jaxferry.train_step(gpt.loss_fn, optax.adamw(1e-3), plan=plan_of(gpt, [mode]))
    with link(delay_s=0.01, seed=5):
        for _ in range(3):
            state, _ = step(step.init(gpt.params), gpt.batch)
            value = step.evaluate(state, gpt.batch)
            del state
            gc.collect()
            assert np.isfinite(float(value))
            accelerator.check()
