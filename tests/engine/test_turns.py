"""Steps of batches of two sizes in turns overlap like steps of one size."""

import itertools
import threading

import jax  # noqa: F401 - a condition of skipif reads it
import numpy as np
import pytest

import jaxferry
from jaxferry.engine import DeviceCopies, StepContext, StepRunner
from jaxferry.modes import GradientPlace, Mode, UpdatePlace
from jaxferry.step import LayerPlan, Operation, Plan
from models import chain
from planned import assert_same_bits, take_steps
from slowly import slow
from steps import wrap

WIDTH = 16
PARAMS = {f"l{i}": {"w": np.random.default_rng(i).normal(size=(WIDTH, WIDTH)).astype(np.float32)} for i in range(6)}
MANY, FEW = (np.full((rows, WIDTH), 0.5, np.float32) for rows in (12, 8))
MODES = (Mode.GFGB, Mode.RELOAD, Mode.RESIDENT, Mode.GFGB, Mode.DHA, Mode.RESIDENT)
PLACES = (GradientPlace.DEVICE, GradientPlace.HOST)


def training(updates=(UpdatePlace.HOST,), modes=MODES, **options):
    layers = map(LayerPlan, PARAMS, modes, itertools.cycle(PLACES))
    layers = (
        layer if place is UpdatePlace.HOST else LayerPlan(layer.name, layer.mode, update=place)
        for layer, place in zip(layers, itertools.cycle(updates))
    )
    plan = Plan("any", 1.0, tuple(layers))
    step = jaxferry.train_step(chain(), jaxferry.adamw(1e-2), plan=plan, compute_dtype=np.float32, **options)
    return step, step.init(PARAMS)


@pytest.mark.parametrize("transport", ["ferry", *slow("device_put")])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"clip_norm": 0.1},
        {"accumulate": 2},
        {"updates": (UpdatePlace.HOST, UpdatePlace.GPU, UpdatePlace.RESIDENT)},
    ],
    ids=["by layer", "clipped", "accumulated", "on the device"],
)
def test_turns_have_the_bits_of_steps_that_wait_for_each_other(transport, options):
    batches = list(itertools.islice(itertools.cycle([MANY, FEW, FEW]), 20))
    step, state = training(transport=transport, **options)
    state, losses = take_steps(step, state, batches)
    step, one_by_one = training(transport=transport, **options)
    expected = []
    for batch in batches:
        one_by_one, metrics = step(one_by_one, batch)
        one_by_one.block_until_ready()
        expected.append(float(metrics["loss"]))
    assert losses == expected
    assert_same_bits(state.params, one_by_one.params)
    assert_same_bits(state.opt_state, one_by_one.opt_state)


@pytest.mark.parametrize("transport", ["ferry", *slow("device_put")])
def test_what_is_loaded_before_the_size_of_the_next_batch_is_known_serves_both(transport, monkeypatch):
    step, state = training(transport=transport)
    state, _ = take_steps(step, state, [MANY, FEW] * 2)
    taken, thrown = [], []
    take, discard = DeviceCopies.take_over, StepRunner._discard_prefetch

    def take_over(copies, earlier, loads):
        number = len(earlier)
        take(copies, earlier, loads)
        assert len(copies) == number and not earlier
        taken.append(number)

    monkeypatch.setattr(DeviceCopies, "take_over", take_over)
    monkeypatch.setattr(StepRunner, "_discard_prefetch", lambda *args: thrown.append(args) or discard(*args))
    for batch in [MANY, FEW] * 3:
        state, _ = step(state, batch)
        state.block_until_ready()
        state.prefetch.work.wait_ahead()
    assert taken[1:] == [3] * 5 and not thrown


@pytest.mark.skipif(
    "jax.config.jax_debug_nans", reason="under jax_debug_nans all gradients are checked before any update"
)
@pytest.mark.parametrize("transport", ["ferry", *slow("device_put")])
def test_a_step_begins_while_updates_of_the_other_size_are_running(transport, monkeypatch):
    """The first layer is frozen, so its forward waits for no update; RESIDENT copies would be loaded before it."""
    modes = (Mode.GFGB,) * len(PARAMS)
    step, state = training(modes=modes, transport=transport, trainable=lambda path: not path.startswith("l0"))
    state, _ = take_steps(step, state, [MANY, FEW] * 2)
    state.block_until_ready()
    many, has_begun = step.prepare(MANY).runner.runnable, threading.Event()

    def update(action, context: StepContext, *args):
        assert context.runnable is not many or has_begun.wait(60)
        return action(context, *args)

    def forward(action, context: StepContext, *args):
        if context.runnable is not many:
            has_begun.set()
        return action(context, *args)

    wrap(monkeypatch, Operation.UPDATE, update)
    wrap(monkeypatch, Operation.FORWARD, forward)
    state, _ = take_steps(step, state, [MANY, FEW])
    state.block_until_ready()
    assert has_begun.is_set()
