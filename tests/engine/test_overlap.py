"""Overlapping steps are bit-identical to sequential tasks under any plan, sizes and delays."""

import itertools
import random
import signal
import threading
import time

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxferry
from accelerator import emulate
from jaxferry.modes import GradientPlace, Mode
from jaxferry.partition import partition
from jaxferry.step import LayerPlan, Operation, Plan
from jaxferry.transport import HostGradient
from models import chain
from planned import assert_same_bits, taken
from python_runs import run_python
from slowly import slow, slow_cases
from steps import Serial, delay, transport_of, wrap


def network(draw):
    """A multi-layer perceptron of random sizes that uses its first table again at the end."""
    widths = [draw.randint(3, 40) for _ in range(draw.randint(2, 5))]
    generator = np.random.default_rng(draw.randint(0, 99))
    sizes = [*itertools.pairwise([8, *widths]), (widths[-1], 8)]
    params = {f"l{i}": {"w": generator.normal(size=size).astype(np.float32) * 0.3} for i, size in enumerate(sizes)}
    params["table"] = {"w": generator.normal(size=(11, 8)).astype(np.float32)}

    def loss_fn(params, tokens):
        x = params["table"]["w"][tokens]
        for i in range(len(sizes)):
            x = jnp.tanh(x @ params[f"l{i}"]["w"])
        return jnp.mean((x @ params["table"]["w"].T) ** 2)

    return loss_fn, params, np.arange(6) % 11


def names_of(loss_fn, params, batch):
    return [segment.name for segment in partition(loss_fn, params, (batch,)).segments]


def random_plan(draw, loss_fn, params, batch, modes):
    names = names_of(loss_fn, params, batch)
    places = tuple(GradientPlace)
    return Plan("any", 1.0, tuple(LayerPlan(name, draw.choice(modes), draw.choice(places)) for name in names))


@pytest.mark.parametrize("seed", [0, *slow(*range(1, 8))])
def test_random_plans_sizes_and_delays_have_the_bits_of_the_serial_order(seed, monkeypatch):
    """Every second network clips and has Optax's updates, one thread for the device, or plain copies.

    The first one takes 40 steps.
    """
    num_steps = 25 if seed else 40
    draw = random.Random(seed)
    loss_fn, params, batch = network(draw)
    clip_norm, adam = [(None, jaxferry.adam), (0.1, optax.adam)][seed % 2]
    transport, is_issued = ["ferry", "device_put"][seed // 2 % 2], seed // 4 % 2

    def make(plan):
        return jaxferry.train_step(loss_fn, adam(1e-2), plan=plan, clip_norm=clip_norm, transport=transport)

    plan = random_plan(draw, loss_fn, params, batch, list(Mode))
    other = make(plan)
    with monkeypatch.context() as patch:
        if is_issued:
            emulate(patch)
        step = make(plan)
        state, serial = step.init(params), other.init(params)
        step.prepare(batch)
        delay(patch, draw, 2e-3)
        losses = [step(state, batch)[1]["loss"] for _ in range(num_steps)]
        state.block_until_ready()
    one_by_one = Serial(other, serial, batch)
    assert [float(loss) for loss in losses] == [one_by_one.step() for _ in range(num_steps)]
    assert_same_bits(state.params, serial.params)
    assert_same_bits(list(state.optimizer_state().values()), list(serial.optimizer_state().values()))


def test_an_update_runs_into_the_next_step_and_everything_that_reads_it_waits(tmp_path, monkeypatch):
    draw = random.Random(3)
    loss_fn, params, batch = network(draw)
    step = jaxferry.train_step(loss_fn, optax.sgd(0.1))
    state = step.init(params)
    state, _ = step(state, batch)
    expected_params, expected_loss = state.params, step.evaluate(state, batch)

    def slow(update, *args):
        time.sleep(0.02)
        return update(*args)

    wrap(monkeypatch, Operation.UPDATE, slow)
    for read in ("params", "save", "evaluate", "optimizer_state"):
        state = step.init(params)
        state, _ = step(state, batch)
        assert not state.pending.work.is_over()
        if read == "params":
            assert_same_bits(state.params, expected_params)
        elif read == "save":
            step.save(state, tmp_path / "saved")
            assert_same_bits(step.restore(tmp_path / "saved").params, expected_params)
        elif read == "evaluate":
            assert float(step.evaluate(state, batch)) == float(expected_loss)
        else:
            state.optimizer_state()
        assert state.pending is None or state.pending.work.is_over()


@pytest.mark.parametrize("transport", ["ferry", "device_put"])
def test_the_host_updates_what_has_arrived_while_the_rest_is_on_its_way(transport, monkeypatch):
    """Offloads end for the issuing thread once they are issued, long before the device has done them."""
    emulate(monkeypatch)
    params = {f"l{i}": {"w": np.eye(8, dtype=np.float32)} for i in range(5)}
    step = jaxferry.train_step(chain(), jaxferry.adam(1e-2), transport=transport, merge_small=False)
    state, batch, updated, waited = step.init(params), np.ones((4, 8), np.float32), [], []
    state, _ = step(state, batch)  # updates of the first step wait for all gradients
    state.block_until_ready()
    arrive, is_over = HostGradient.wait, threading.Event()

    def arrival(gradient):
        waited.append(gradient)
        arrive(gradient)
        if len(waited) > 1:
            is_over.wait(60)

    def update(action, context, call):
        updated.append(call.group)
        action(context, call)
        is_over.set()

    monkeypatch.setattr(HostGradient, "wait", arrival)
    wrap(monkeypatch, Operation.UPDATE, update)
    state, _ = step(state, batch)
    state.block_until_ready()
    assert len(waited) == len(params) and sorted(updated) == [*range(5)]
    assert updated[0] == 4  # the last layer's gradient comes first


LEAVING = """
import time, jax.numpy as jnp, numpy as np, optax, jaxferry
from jaxferry.engine import executor
from jaxferry.step import Operation
loss = lambda params, x: jnp.mean((x @ params["a"]["w"] @ params["b"]["w"]) ** 2)
params = {name: {"w": np.eye(4, dtype=np.float32)} for name in "ab"}
step = jaxferry.train_step(loss, optax.sgd(0.1))
state = step.init(params)
update = executor.OPERATIONS[Operation.UPDATE]
def slow(*args):
    time.sleep(0.3)
    done = update(*args)
    print("updated", flush=True)
    return done
executor.OPERATIONS[Operation.UPDATE] = slow
step(state, jnp.ones((2, 4)))
print("leaving", flush=True)
"""


def test_leaving_the_process_waits_for_updates_that_are_under_way():
    printed = run_python("-c", LEAVING).split()
    assert printed.count("updated") == 2 and printed[-1] == "updated"


@pytest.mark.parametrize(
    ("seed", "options"),
    [
        (0, {}),
        *(pytest.param(seed, {}, marks=pytest.mark.slow) for seed in (1, 2)),
        *slow_cases((0, {"offload_activations": True})),
    ],
)
def test_interrupts_at_any_moment_lose_no_step_no_buffer_and_no_bit(seed, options, tmp_path):
    draw = random.Random(seed)
    loss_fn, params, batch = network(draw)
    plan = random_plan(draw, loss_fn, params, batch, list(Mode))
    other = jaxferry.train_step(loss_fn, optax.adam(1e-2), plan=plan)
    step = jaxferry.train_step(loss_fn, optax.adam(1e-2), plan=plan, **options)
    state, expected = step.init(params), other.init(params)
    state, _ = step(state, batch)
    num_interrupts, patch = 0, pytest.MonkeyPatch()
    delay(patch, draw, 4e-3)
    while num_interrupts < 12:
        try:
            timer = threading.Timer(draw.random() * 0.06, signal.raise_signal, [signal.SIGINT])
            timer.start()
            state = taken(step, state, batch, 3)
            timer.join()
        except KeyboardInterrupt:
            num_interrupts += 1
            step.save(state, tmp_path / "saved")
    assert_same_bits(step.restore(tmp_path / "saved").params, state.params)
    timer.join()
    patch.undo()
    expected = taken(other, expected, batch, state.step)
    assert_same_bits(state.params, expected.params)
    step.prepare(batch).runner.runnable.resources.prefetch.take(None)
    resident, transport = state.resident.values(), transport_of(step, batch)
    assert transport.loaded_bytes.now == sum(held.num_bytes for held in resident)
    assert transport.in_flight.keys() <= set(map(id, resident))  # the next step reads these first
