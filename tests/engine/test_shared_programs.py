"""Training steps of one model compile each program once, and free it with the last step that holds it."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxferry
from jaxferry.engine.shared_programs import compile_shared, shared_function
from jaxferry.modes import Mode
from jaxferry.plan.records import LayerPlan, Plan

NAMES = ("a", "b", "c")
BATCH = np.ones((4, 8), np.float32)
PARAMS = {name: {"w": np.random.default_rng(i).normal(size=(8, 8), scale=0.3)} for i, name in enumerate(NAMES)}
PARAMS = jax.tree.map(lambda leaf: leaf.astype(np.float32), PARAMS)


def network(factor):
    def loss_fn(params, x):
        for name in NAMES:
            x = jnp.tanh(factor * x @ params[name]["w"])
        return jnp.mean(x**2)

    return loss_fn


def plan_of(mode):
    return Plan("test", 1.0, tuple(LayerPlan(name, mode) for name in NAMES))


@pytest.fixture
def compiled(monkeypatch):
    """The names of the functions that XLA compiles."""
    names = []
    original = jax.stages.Lowered.compile

    def compile_(lowered, *args, **kwargs):
        names.append(lowered.as_text().split("module @", 1)[1].split(" ", 1)[0])
        return original(lowered, *args, **kwargs)

    monkeypatch.setattr(jax.stages.Lowered, "compile", compile_)
    return names


def trained(loss_fn, optimizer, **options):
    step = jaxferry.train_step(loss_fn, optimizer, **options)
    state, metrics = step(step.init(PARAMS), BATCH)
    return step, float(metrics["loss"]), state.params


def test_a_step_with_another_plan_compiles_nothing(compiled):
    first = trained(network(1.0), optax.adamw(1e-3), plan=plan_of(Mode.GFGB))
    assert compiled
    compiled.clear()
    # The loss function and the optimizer are other objects, of equal content.
    second = trained(network(1.0), optax.adamw(1e-3), plan=plan_of(Mode.RELOAD))
    assert compiled == []
    assert first[1] == second[1]
    np.testing.assert_array_equal(first[2]["a"]["w"], second[2]["a"]["w"])


@pytest.mark.parametrize(
    ("loss_fn", "optimizer", "options"),
    [
        (network(2.0), optax.sgd(0.1), {}),
        (network(1.0), optax.sgd(0.2), {}),
        (network(1.0), optax.sgd(0.1), {"clip_norm": 1e-3}),
        (network(1.0), optax.sgd(0.1), {"compute_dtype": jnp.bfloat16}),
        (network(1.0), optax.sgd(0.1), {"accumulate": 2, "remat": "full"}),
    ],
    ids=["function", "optimizer", "clipping", "dtype", "accumulation"],
)
def test_a_step_that_differs_computes_what_it_computes_alone(loss_fn, optimizer, options):
    expected = trained(loss_fn, optimizer, plan=plan_of(Mode.GFGB), **options)[1:]
    gc.collect()
    beside = trained(network(1.0), optax.sgd(0.1), plan=plan_of(Mode.GFGB))
    found = trained(loss_fn, optimizer, plan=plan_of(Mode.GFGB), **options)[1:]
    assert found[0] == expected[0]
    np.testing.assert_array_equal(found[1]["b"]["w"], expected[1]["b"]["w"])
    assert not np.array_equal(found[1]["b"]["w"], beside[2]["b"]["w"])


def test_a_program_is_freed_with_its_last_holder():
    lowered = jax.jit(lambda x: x + 1).trace(jax.ShapeDtypeStruct((2,), jnp.float32)).lower()
    calls = []

    def lower(key):
        calls.append(key)
        return lowered

    one = compile_shared({"k": "content"}, lower)
    other = compile_shared({"l": "content"}, lower)
    assert isinstance(one["k"], jax.stages.Compiled) and one["k"] is other["l"] and calls == ["k"]
    del one, other
    gc.collect()
    compile_shared({"k": "content"}, lower)
    assert calls == ["k", "k"]


def test_a_program_without_comparable_content_is_not_shared():
    lowered = jax.jit(lambda x: x + 1).trace(jax.ShapeDtypeStruct((2,), jnp.float32)).lower()
    made = [compile_shared({"k": None}, lambda key: lowered)["k"] for _ in range(2)]
    assert made[0] is not made[1]


def test_a_function_is_shared_while_somebody_holds_it():
    one = shared_function("content", lambda: jax.jit(lambda x: x))
    assert shared_function("content", lambda: jax.jit(lambda x: x)) is one
    assert shared_function("other", lambda: jax.jit(lambda x: x)) is not one


def test_callbacks_are_told_apart():
    def with_callback(seen):
        def loss_fn(params, x):
            for name in NAMES:
                x = jnp.tanh(x @ params[name]["w"])
            jax.debug.callback(seen.append, jnp.sum(x))
            return jnp.mean(x**2)

        return loss_fn

    one, other = [], []
    first = trained(with_callback(one), optax.sgd(0.1))
    second = trained(with_callback(other), optax.sgd(0.1))
    jax.effects_barrier()
    assert len(one) == len(other) == 1 and first[1] == second[1]
