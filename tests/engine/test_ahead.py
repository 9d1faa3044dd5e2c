"""Prefetched loads: when they begin, what they need, and when they are freed."""

import collections
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxferry
from accelerator import emulate
from jaxferry.engine import peak_bytes
from jaxferry.modes import GradientPlace, Mode
from jaxferry.step import Kind, Lane, LayerPlan, Plan
from jaxferry.transport import Ferry, Placement
from models import chain
from planned import assert_same_bits, state_after, taken
from slowly import slow
from steps import link, transport_of

WIDTH, DEPTH = 64, 6
BATCH = np.ones((4, WIDTH), np.float32)
LOADED_BYTES = DEPTH // 2 * 4 * WIDTH**2


def perceptron():
    generator = np.random.default_rng(0)
    params = {f"l{i}": {"w": generator.normal(size=(WIDTH, WIDTH)).astype(np.float32) * 0.1} for i in range(DEPTH)}
    return chain(), params


def made(modes=(Mode.DHA,) * (DEPTH // 2) + (Mode.GFGB,) * (DEPTH // 2), gradient=GradientPlace.DEVICE, **options):
    loss_fn, params = perceptron()
    layers = (LayerPlan(name, mode, gradient) for name, mode in zip(params, modes, strict=True))
    step = jaxferry.train_step(loss_fn, optax.sgd(0.1), plan=Plan("any", 1.0, tuple(layers)), **options)
    return step, params


# CI runs the engine's tests once more on the emulated accelerator, where one thread issues for the device.
@pytest.fixture(params=[False, *slow(True)], ids=["a thread a lane", "one for the device"])
def threads(request, monkeypatch):
    if request.param:
        emulate(monkeypatch)


# The emulated accelerator runs programs in a few threads, and those that wait for offloads may take all of them.
@pytest.mark.cpu_device
@pytest.mark.skipif(
    "jax.config.jax_debug_nans", reason="under jax_debug_nans all gradients are checked before any update"
)
def test_loads_begin_while_the_step_before_is_in_its_backward():
    step, params = made(record_steps=4)
    with link(store=4 * WIDTH**2 / 0.04):
        state = state_after(step, params, BATCH, 5)
    run = step.recorded()
    tasks = list(zip(run.schedule.tasks, run.starts_s, run.ends_s, strict=True))
    earlier_s = []
    for number in range(run.schedule.steps - 1):
        last_offload = max(end for task, _, end in tasks if task.step == number and task.lane is Lane.D2H)
        loads = [start for task, start, _ in tasks if task.step == number + 1 and task.kind is Kind.LOAD]
        earlier_s.append(last_offload - min(loads))
    assert max(earlier_s) > 0  # else a step's loads would begin after the step before has returned
    assert len(state.prefetch.copies) == DEPTH // 2


@pytest.mark.usefixtures("threads")
def test_what_is_loaded_ahead_is_used_and_changes_no_bit(monkeypatch):
    step, params = made()
    step.init(params)
    transport, loaded = transport_of(step, BATCH), []
    load = transport.load
    monkeypatch.setattr(transport, "load", lambda layer, *args: loaded.append(layer) or load(layer, *args))
    state = state_after(step, params, BATCH, 5)
    assert len(loaded) == 6 * DEPTH // 2
    assert transport.loaded_bytes.now == LOADED_BYTES
    other, _ = made((Mode.DHA,) * (DEPTH // 2) + (Mode.RESIDENT,) * (DEPTH // 2))
    assert_same_bits(state.params, state_after(other, params, BATCH, 5).params)


@pytest.mark.usefixtures("threads")
def test_an_evaluation_has_the_device_for_itself_and_the_next_step_goes_on():
    step, params = made()
    state, expected = state_after(step, params, BATCH, 2), state_after(made()[0], params, BATCH, 3)
    assert transport_of(step, BATCH).loaded_bytes.now == LOADED_BYTES
    step.evaluate(state, BATCH)
    assert transport_of(step, BATCH).loaded_bytes.now == 0
    state, metrics = step(state, BATCH)
    assert metrics["device_param_bytes_peak"] == LOADED_BYTES
    assert_same_bits(state.params, expected.params)


@pytest.mark.usefixtures("threads")
def test_of_two_states_in_turn_only_one_has_layers_on_the_device():
    step, params = made()
    first, second = step.init(params), step.init(params)
    for _ in range(3):
        first, _ = step(first, BATCH)
        second, metrics = step(second, BATCH)
        first.block_until_ready()
        second.block_until_ready()
        assert transport_of(step, BATCH).loaded_bytes.now == metrics["device_param_bytes_peak"] == LOADED_BYTES
    assert_same_bits(first.params, second.params)


@pytest.mark.usefixtures("threads")
@pytest.mark.skipif(
    "jax.config.jax_debug_nans",
    reason="under jax_debug_nans the first step loads ahead too, so other loads are the fifth",
)
def test_a_load_that_fails_ahead_is_tried_again_when_its_step_is_called(monkeypatch):
    step, params = made()
    expected = state_after(made()[0], params, BATCH, 5)
    state = state_after(step, params, BATCH, 1)
    transport, count = transport_of(step, BATCH), []
    load = transport.load

    def failing(*args):
        count.append(args)
        if len(count) == 5:  # of the second step, while the first is running
            raise MemoryError("no room")
        return load(*args)

    monkeypatch.setattr(transport, "load", failing)
    for number in range(4):
        state, _ = step(state, BATCH)
        if number == 0:
            state.block_until_ready()
            assert state.prefetch.work.has_broken_off
    assert_same_bits(state.params, expected.params)
    state.block_until_ready()
    assert transport.loaded_bytes.now == LOADED_BYTES


def test_what_is_loaded_ahead_takes_the_place_of_gradients_so_the_least_budget_has_room_for_it(monkeypatch):
    """A load waits for its update, so its group's gradient has left before."""
    monkeypatch.setattr(Placement, "allocator", None)  # what XLA's takes beyond buffers varies with their number
    free, params = made()
    free.init(params)
    prepared = free.prepare(BATCH)
    assert prepared.peak.array_bytes == peak_bytes(prepared.program, {}).array_bytes
    for budget in (prepared.peak.total, prepared.peak.total + LOADED_BYTES):
        step, _ = made(memory_budget=budget)
        step.init(params)
        found = step.prepare(BATCH)
        assert len(found.runner.runnable.loads_ahead) == DEPTH // 2
        assert found.peak.total <= budget and found.modes == prepared.modes


@pytest.mark.parametrize("num_short", [0, 2])
def test_loads_ahead_wait_for_no_other_program_where_the_budget_has_room_for_their_buffers(num_short, monkeypatch):
    """In new memory a load waits for all that was issued before; the buffers of the same layer are vacant."""
    emulate(monkeypatch)
    modes = (Mode.RESIDENT,) * (DEPTH // 2) + (Mode.GFGB,) * (DEPTH // 2)
    ample, params = made(modes)
    ample.init(params)
    budget = ample.prepare(BATCH).peak.total - num_short * 4 * WIDTH**2
    step, _ = made(modes, memory_budget=budget)
    state, program, called = step.init(params), Ferry.program, []
    prepared = step.prepare(BATCH)
    assert prepared.modes == modes and prepared.peak.total <= budget
    state = taken(step, state, BATCH, 3)
    state.block_until_ready()
    monkeypatch.setattr(Ferry, "program", lambda *args: called.append(args[1:3]) or program(*args))
    for _ in range(4):
        state, _ = step(state, BATCH)
        state.block_until_ready()
    new = collections.Counter(layer for name, layer in called if name == "load")
    assert len(new) == num_short and all(count == 4 for count in new.values())
    assert_same_bits(state.params, state_after(made(modes)[0], params, BATCH, 7).params)


@pytest.mark.parametrize("kinds", [("head", "other head"), ("forth", "back")], ids=["heads", "orders"])
@pytest.mark.parametrize("options", [{}, *slow({"gradient_buffers": 1}, {"transport": "device_put"})])
def test_batches_of_two_structures_load_their_own_layers(kinds, options):
    """Two batches whose tasks are alike, but for the layers that they read: loads run ahead for the one before."""
    names = ("a", "b", "c", "d")

    def loss_fn(params, batch):
        order = {"head": "abc", "other head": "abd", "forth": "abcd", "back": "dcba"}
        [kind] = batch.keys() & order.keys()
        x = batch["x"]
        for name in order[kind]:
            x = jnp.tanh(x @ params[name] + x)
        return jnp.mean(x**2)

    generator = np.random.default_rng(0)
    params = {name: generator.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 8 for name in names}
    optimizer, batches = optax.sgd(0.5), [{"x": BATCH, kind: BATCH} for kind in kinds] * 3
    step = jaxferry.train_step(loss_fn, optimizer, **options)
    state, plain, plain_state = step.init(params), params, optimizer.init(params)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a batch does not read the other one's head
        for batch in batches:
            state, metrics = step(state, batch)
            state.block_until_ready()  # and all loads ahead
            loss, gradients = jax.value_and_grad(loss_fn)(plain, batch)
            updates, plain_state = optimizer.update(gradients, plain_state, plain)
            plain = optax.apply_updates(plain, updates)
            np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-4)
    jax.tree.map(lambda own, other: np.testing.assert_allclose(own, other, rtol=1e-3, atol=1e-5), state.params, plain)
