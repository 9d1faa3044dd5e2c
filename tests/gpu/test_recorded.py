"""`step.recorded()` on a real GPU; needs the package's own libraries (`jaxferry build-native`)."""

import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxferry
from jaxferry.step import Kind
from recorded import check_times

NUM_LAYERS, WIDTH, ROWS = 8, 4096, 16384
MOST_COST = 1.01
# A profile times each task alone; in a step they share the device's memory.
FACTOR = 1.5


def loss_fn(params, x):
    for name in params:
        x = jnp.tanh(x @ params[name]["w"])
    return jnp.mean(x.astype(jnp.float32) ** 2)


def make(record_steps, transport="ferry"):
    params = {f"l{i}": {"w": np.full((WIDTH, WIDTH), 1e-3, np.float32)} for i in range(NUM_LAYERS)}
    step = jaxferry.train_step(loss_fn, optax.sgd(1e-3), transport=transport, record_steps=record_steps)
    state, batch = step.init(params), jax.device_put(np.ones((ROWS, WIDTH), jnp.bfloat16))
    for _ in range(3):
        state, _ = step(state, batch)
    state.block_until_ready()
    return step, state, batch, params


@pytest.mark.parametrize("transport", ["ferry", "device_put"])
def test_recorded_times_fit_the_tasks_and_the_steps(transport):
    step, state, batch, _ = make(4, transport)
    begin_s = time.perf_counter()
    # A step's first loads run while the step before it ends, so that one is within the measured time too.
    for _ in range(5):
        state, _ = step(state, batch)
    state.block_until_ready()
    run = step.recorded()
    check_times(run)
    assert max(run.ends_s) <= time.perf_counter() - begin_s


def test_tasks_take_as_long_as_they_take_alone():
    step, state, batch, params = make(4)
    for _ in range(4):
        state, _ = step(state, batch)
    state.block_until_ready()
    run, layer = step.recorded(), step.measure(params, batch).layers[1]
    for kind, alone_s in (
        (Kind.LOAD, layer.load_s),
        (Kind.FORWARD, layer.forward_s),
        (Kind.BACKWARD, layer.backward_s),
        (Kind.OFFLOAD, layer.offload_s),
    ):
        found = [
            end - start
            for task, start, end in zip(run.schedule.tasks, run.starts_s, run.ends_s, strict=True)
            if task.kind is kind and 0 < task.segment < NUM_LAYERS - 1
        ]
        assert alone_s / FACTOR <= statistics.median(found) <= alone_s * FACTOR, kind


def test_recording_costs_less_than_a_hundredth_of_a_step():
    contenders = [make(0), make(8)]
    ratios = []
    for _ in range(50):
        seconds = []
        for step, state, batch, _ in contenders:
            begin_s = time.perf_counter()
            step(state, batch)
            state.block_until_ready()
            seconds.append(time.perf_counter() - begin_s)
        ratios.append(seconds[1] / seconds[0])
    assert statistics.median(ratios) <= MOST_COST
