"""Parameters of several dtypes in one tree: the loss sees each in its own; updates are in fp32."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxferry
import models
from jaxferry.modes import GradientPlace, Mode
from planned import plan_of, train

DTYPES = {"w": jnp.bfloat16, "scale": jnp.float32, "b": jnp.float16}
HALF_RTOL = 1e-2


def make_task():
    """Layers of a matrix in bf16, a scale in fp32, a bias in fp16; products in bf16."""
    generator = np.random.default_rng(0)

    def layer():
        shapes = {"w": (12, 12), "scale": (12,), "b": (12,)}
        return {name: jnp.asarray(0.3 * generator.normal(size=shapes[name]), DTYPES[name]) for name in shapes}

    def loss_fn(params, x):
        seen = {leaf.dtype for leaf in jax.tree.leaves(params)}
        assert seen == {jnp.dtype(dtype) for dtype in DTYPES.values()}
        for i in range(3):
            layer = params[f"layer_{i}"]
            y = (x.astype(jnp.bfloat16) @ layer["w"]).astype(jnp.float32)
            x = x + jnp.tanh(y * (1 + layer["scale"]) + layer["b"])
        return jnp.mean((x - 1) ** 2)

    params = {f"layer_{i}": layer() for i in range(3)}
    return models.Task(loss_fn, params, jnp.asarray(generator.normal(size=(4, 12)), jnp.float32))


@pytest.fixture(scope="module")
def task():
    return make_task()


def plain_loop(task, optimizer, num_steps):
    """Plain Optax on fp32 masters; the loss receives a copy in the model's dtypes."""
    dtypes = jax.tree.map(lambda leaf: leaf.dtype, task.params)

    @jax.jit
    def step(masters, state):
        params = jax.tree.map(lambda master, dtype: master.astype(dtype), masters, dtypes)
        loss, gradients = jax.value_and_grad(task.loss_fn)(params, task.batch)
        gradients = jax.tree.map(lambda gradient: gradient.astype(jnp.float32), gradients)
        updates, state = optimizer.update(gradients, state, masters)
        return optax.apply_updates(masters, updates), state, loss

    masters = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), task.params)
    state, losses = optimizer.init(masters), []
    for _ in range(num_steps):
        masters, state, loss = step(masters, state)
        losses.append(float(loss))
    return masters, losses


@pytest.mark.parametrize(
    "optimizer", [optax.adamw(1e-2, eps=1e-3), jaxferry.adamw(1e-2, eps=1e-3)], ids=["optax", "one pass"]
)
def test_losses_are_those_of_plain_optax_on_fp32_masters(task, optimizer):
    expected, expected_losses = plain_loop(task, optimizer, 10)
    state, losses = train(jaxferry.train_step(task.loss_fn, optimizer), task, 10)
    np.testing.assert_allclose(losses, expected_losses, rtol=HALF_RTOL)
    assert losses[-1] < 0.9 * losses[0]
    for ours, theirs in zip(jax.tree.leaves(state.params), jax.tree.leaves(expected), strict=True):
        assert ours.dtype == np.float32
        np.testing.assert_allclose(ours, theirs, rtol=HALF_RTOL, atol=1e-2)
    for layer, vectors in zip(state.host.layers, state.host.vectors, strict=True):
        assert [vector.dtype for vector in vectors] == [vector.dtype for vector in layer.vectors]
        assert {vector.dtype for vector in vectors} == {jnp.dtype(dtype) for dtype in DTYPES.values()}
        for leaf in layer.leaves:
            master = state.params[layer.name][leaf.path.split("/")[-1]]
            copy = np.asarray(vectors[leaf.vector])[leaf.offset : leaf.offset + leaf.size]
            assert copy.tobytes() == master.astype(leaf.dtype).ravel().tobytes()


@pytest.mark.parametrize("mode", [Mode.DHA, Mode.DFGB])
def test_parameters_of_all_dtypes_are_read_in_host_memory(task, mode):
    expected = plain_loop(task, optax.adamw(1e-2), 5)[1]
    plan = plan_of(task, [mode], [GradientPlace.HOST])
    losses = train(jaxferry.train_step(task.loss_fn, optax.adamw(1e-2), plan=plan), task, 5)[1]
    np.testing.assert_allclose(losses, expected, rtol=HALF_RTOL)


def test_a_compute_dtype_is_that_of_all():
    def loss_fn(params, x):
        assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(jnp.bfloat16)}
        return jnp.mean((x @ params["a"]["w"] * params["a"]["scale"]) ** 2)

    params = {"a": {"w": jnp.ones((4, 4), jnp.float16), "scale": jnp.ones(4, jnp.float32)}}
    step = jaxferry.train_step(loss_fn, optax.sgd(0.1), compute_dtype=jnp.bfloat16)
    state, _ = step(step.init(params), jnp.ones((2, 4), jnp.bfloat16))
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {np.dtype("float32")}
    assert [vector.dtype for vector in state.host.vectors[0]] == [jnp.bfloat16]
