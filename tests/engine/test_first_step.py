"""What a first step needs in pinned memory is made while the step is compiled, and in a thread."""

import gc
import threading

import jax
import numpy as np
import optax
import pytest

import jaxferry
from jaxferry.errors import JaxFerryError
from jaxferry.modes import GradientPlace, Mode
from jaxferry.optimizer import arrays
from jaxferry.step import LayerPlan, Plan
from jaxferry.transport import base
from models import chain
from planned import taken
from steps import transport_of
from watched import compiled

WIDTH, DEPTH = 64, 4
BATCH = np.ones((4, WIDTH), np.float32)


loss_fn = chain()


def parameters(width=WIDTH):
    generator = np.random.default_rng(0)
    return {f"l{i}": {"w": generator.normal(size=(width, width)).astype(np.float32) * 0.1} for i in range(DEPTH)}


def plan(gradient=GradientPlace.DEVICE):
    return Plan("any", 1.0, tuple(LayerPlan(f"l{i}", Mode.GFGB, gradient) for i in range(DEPTH)))


def made(**options):
    return jaxferry.train_step(
        loss_fn, optax.sgd(0.1), **{"plan": plan(), "compute_dtype": np.float32, "transport": "ferry", **options}
    )


@pytest.fixture
def makers(monkeypatch, accelerator):
    """The name of the thread that has made each vector, by what it is for."""
    found = {"gradient": [], "compute copy": []}

    def noted(what, function, counts=lambda options: True):
        def make(*args, **options):
            if counts(options):
                found[what].append(threading.current_thread().name.split("_")[0])
            return function(*args, **options)

        return make

    monkeypatch.setattr(base, "empty", noted("gradient", base.empty))
    pinned = noted("compute copy", arrays.unwritten, lambda options: options.get("is_pinned", False))
    monkeypatch.setattr(arrays, "unwritten", pinned)
    return found


OPTIONS = {
    "DEVICE": {},
    "GO": {"plan": plan(GradientPlace.HOST)},
    "GO by copies": {"transport": "device_put", "plan": plan(GradientPlace.HOST)},
    "wide sums": {"accumulate": 2, "compute_dtype": jax.numpy.bfloat16},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_first_step_makes_no_vectors_itself(makers, options):
    step = made(**options)
    state = step.init(parameters())
    step.compile_updates(state, BATCH)
    state = taken(step, state, BATCH, 2 * options.get("accumulate", 1))
    state.block_until_ready()
    num = {name: len(threads) for name, threads in makers.items()}
    assert num["compute copy"] == DEPTH and num["gradient"] >= DEPTH
    assert {*makers["gradient"], *makers["compute copy"]} == {"jaxferry memory"}
    assert not transport_of(step, BATCH).made_ahead


def test_nothing_is_made_for_a_plan_alone(makers):
    step = made()
    step.declare(parameters())
    step.prepare(BATCH)
    state = step.init(parameters())
    del state
    gc.collect()
    step.prepare(np.ones((8, WIDTH), np.float32))
    assert not makers["gradient"] and not makers["compute copy"]


def test_a_thread_that_finds_no_memory_leaves_the_error_to_the_step(monkeypatch, accelerator):
    original, fails = base.empty, [True]

    def empty(*args):
        if fails[0]:
            raise RuntimeError("RESOURCE_EXHAUSTED: no pinned memory")
        return original(*args)

    monkeypatch.setattr(base, "empty", empty)
    step = made()
    state = step.init(parameters())
    step.compile_updates(state, BATCH)
    with pytest.raises(JaxFerryError, match="no pinned memory"):
        step(state, BATCH)
    fails[0] = False
    state, metrics = step(state, BATCH)
    assert np.isfinite(metrics["loss"])


def test_changed_parameters_are_those_that_train(accelerator):
    step, other = made(), made()
    state = step.init(parameters())
    step.prepare(BATCH)
    doubled = jax.tree.map(lambda leaf: 2 * leaf, parameters())
    state.params = doubled
    _, metrics = step(state, BATCH)
    _, expected = other(other.init(doubled), BATCH)
    assert metrics["loss"] == expected["loss"]


@pytest.mark.parametrize("record_steps", [0, 2])
def test_loads_and_stores_are_compiled_before_the_step(accelerator, caplog, record_steps):
    step = made(record_steps=record_steps)
    state = step.init(parameters())
    step.compile_updates(state, BATCH)
    with compiled(caplog) as names:
        for _ in range(3):
            state, _ = step(state, BATCH)
            state.block_until_ready()
    assert not {"load", "load_onto", "arrived", "store", "stack"} & {*names}


@pytest.mark.cpu_device
@pytest.mark.parametrize(
    ("transport", "width", "copies"),
    [("ferry", 40, {"load": 1, "arrived": 1, "store": 1}), ("device_put", 48, {"unpack": 1, "store": 1})],
)
def test_on_a_cpu_only_what_computes_or_copies_is_compiled(caplog, transport, width, copies):
    # No other test holds programs of this width.
    with compiled(caplog) as names:
        step = jaxferry.train_step(loss_fn, optax.adamw(0.1), plan=plan(), transport=transport)
        _, metrics = step(step.init(parameters(width)), np.ones((4, width), np.float32))
        assert np.isfinite(metrics["grad_norm"])
    assert names == {"forward": 2, "returned": 3, "flat_update": 1} | copies


@pytest.mark.parametrize("has_state", [True, False])
def test_preparation_begins_to_compile_the_updates_of_a_state_that_exists(caplog, has_state):
    width = 32 + 4 * has_state  # no other test holds programs of these widths
    step, batch = jaxferry.train_step(loss_fn, optax.adamw(0.1), plan=plan()), np.ones((4, width), np.float32)
    if has_state:
        state = step.init(parameters(width))
    else:
        step.declare(parameters(width))
    with compiled(caplog) as names:
        step.prepare(batch)
        step.compiler.model.optimizer.updates.settle()
    assert names["flat_update"] == has_state
    with compiled(caplog) as names:
        step(state if has_state else step.init(parameters(width)), batch)
    assert names["flat_update"] == (not has_state)
