"""Models that scan over their layers train layer by layer. Losses: tests/test_bits.py, tests/test_models.py."""

import gc
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxferry
import scanned
from jaxferry.modes import Mode
from models import Task, plain_loop
from planned import assert_near, assert_same_bits, plan_of, take_steps, train
from scanned import DEPTH
from tolerances import LOSS_RTOL
from watched import live_arrays


def test_with_reload_two_layers_are_on_the_device_at_most_and_the_compute_dtype_is_kept():
    task = scanned.linen(depth=6)
    step = jaxferry.train_step(
        task.loss_fn, jaxferry.adamw(1e-2), plan=plan_of(task, (Mode.RELOAD,)), compute_dtype=jnp.bfloat16
    )
    state, metrics = step(step.init(task.params), task.batch)
    sizes = sorted(layer.num_bytes for layer in state.host.layers)
    assert metrics["device_param_bytes_peak"] <= sizes[-1] + sizes[-2] < sum(sizes) / 2
    assert step.prepare(task.batch).partition.num_programs == 3
    assert {vector.dtype for vectors in state.host.vectors for vector in vectors} == {jnp.dtype(jnp.bfloat16)}


@pytest.fixture(scope="module")
def lax():
    return scanned.plain()


def whole(task):
    """The same loss in a form that cannot be cut by layer."""

    def loss_fn(params, batch):
        return task.loss_fn(params, batch) + 0.0 * sum(jnp.max(leaf) for leaf in jax.tree.leaves(params["blocks"]))

    return Task(loss_fn, task.params, task.batch)


@pytest.mark.filterwarnings("ignore:not cut by layer")
def test_checkpoints_are_those_of_the_stacked_model_whether_it_was_cut_or_not(lax, tmp_path):
    optimizer, apart = jaxferry.adam(1e-2), whole(lax)
    expected = plain_loop(lax, optimizer, 6)[1]
    cut, kept = (jaxferry.train_step(task.loss_fn, optimizer) for task in (lax, apart))
    for first, second in ((cut, kept), (kept, cut)):
        state, losses = take_steps(first, first.init(lax.params), [lax.batch] * 3)
        first.save(state, tmp_path / "saved")
        restored = second.restore(tmp_path / "saved", params=lax.params)
        assert_same_bits(restored.params, state.params)
        assert_same_bits(restored.optimizer_state(), state.optimizer_state())
        for _ in range(3):
            restored, metrics = second(restored, lax.batch)
            losses.append(float(metrics["loss"]))
        np.testing.assert_allclose(losses, expected, rtol=LOSS_RTOL)
    assert {leaf.shape for leaf in jax.tree.leaves(state.params)} == {
        leaf.shape for leaf in jax.tree.leaves(lax.params)
    }


@pytest.mark.filterwarnings("ignore:not cut by layer")
def test_a_state_moves_between_layers_whole_and_in_parts_without_losing_a_bit(lax):
    step = jaxferry.train_step(lax.loss_fn, optax.adamw(1e-2))
    state = step.init(lax.params)
    first = state.host.layers
    state, _ = step(state, lax.batch)
    params, moments = state.params, {name: np.array(leaf) for name, leaf in state.optimizer_state().items()}
    by_layer = state.host.layers
    for layers in (first, by_layer, tuple(reversed(by_layer)), first):
        state.arrange(layers)
        assert_same_bits(state.params, params)
        assert_same_bits(state.optimizer_state(), moments)
    twice, losses = train(step, lax, 2)
    assert twice.host.layers == by_layer, "a new state is arranged by layer from the start"
    state, metrics = step(state, lax.batch)
    assert float(metrics["loss"]) == losses[1]
    assert_same_bits(state.params, twice.params)


def test_what_is_not_cut_is_said_once_and_trains_all_the_same(lax):
    apart = whole(lax)
    expected = plain_loop(apart, optax.sgd(0.1), 2)[1]
    step = jaxferry.train_step(apart.loss_fn, optax.sgd(0.1))
    with pytest.warns(
        UserWarning, match="not cut by layer though scanned over: 'blocks/b', 'blocks/w': 'reduce_max'"
    ) as seen:
        _, losses = train(step, apart, 2)
    assert len(seen) == 1
    np.testing.assert_allclose(losses, expected, rtol=LOSS_RTOL)


@pytest.mark.parametrize("name", ["lamb", "joint", "fused, clipped and accumulated"])
def test_other_updates_of_stacked_parameters_are_those_of_plain_optax(lax, name):
    optimizers = {"lamb": optax.lamb(1e-2), "joint": optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2))}
    if name in optimizers:
        plain, step = optimizers[name], jaxferry.train_step(lax.loss_fn, optimizers[name])
    else:
        plain = optax.MultiSteps(optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2)), 2)
        step = jaxferry.train_step(lax.loss_fn, jaxferry.adamw(1e-2), clip_norm=0.5, accumulate=2)
    _, expected = plain_loop(lax, plain, 4)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        state, losses = train(step, lax, 4)
    assert sum("overlap" in str(warning.message) for warning in seen) == (name in optimizers)
    np.testing.assert_allclose(losses, expected, rtol=LOSS_RTOL)
    assert len(state.host.units) == {"lamb": 2, "joint": 1}.get(name, DEPTH + 1)


def test_init_from_runs_a_stacked_initialiser_once_and_makes_what_it_makes(lax):
    calls = []

    def init_fn(key):
        def one(key):
            jax.debug.callback(lambda: calls.append(None))
            return {"w": jax.random.normal(key, (scanned.WIDTH, scanned.WIDTH)) / 4, "b": jnp.zeros(scanned.WIDTH)}

        _, blocks = jax.lax.scan(lambda _, key: (None, one(key)), None, jax.random.split(key, DEPTH))
        return {"blocks": blocks, "first": {"w": jax.random.normal(key, (scanned.WIDTH, scanned.WIDTH))}}

    key = jax.random.key(0)
    step = jaxferry.train_step(lax.loss_fn, optax.sgd(0.1))
    expected = init_fn(key)
    jax.effects_barrier()
    for _ in range(2):  # before the batch has shown the layers, and after
        calls.clear()
        state = step.init_from(init_fn, key)
        jax.effects_barrier()
        assert len(calls) <= 2 * DEPTH  # effects run with each of the two layers of the initialiser
        assert_same_bits(state.params, expected)
        state, _ = step(state, lax.batch)


def test_evaluating_and_measuring_work_by_layer(lax):
    step = jaxferry.train_step(lax.loss_fn, jaxferry.adamw(1e-2))
    state, _ = step(step.init(lax.params), lax.batch)
    expected = lax.loss_fn(jax.tree.map(jnp.asarray, state.params), lax.batch)
    np.testing.assert_allclose(step.evaluate(state, lax.batch), expected, rtol=LOSS_RTOL)
    profile = step.measure(lax.params, lax.batch)
    assert [layer.name for layer in profile.layers] == [s.name for s in step.prepare(lax.batch).partition.segments]
    assert all(layer.update_s > 0 for layer in profile.layers)


def test_a_stacked_parameter_that_no_iteration_reads_trains_with_a_zero_gradient(lax):
    params = {**lax.params, "blocks": {**lax.params["blocks"], "unread": jnp.ones((DEPTH, 2))}}
    optimizer = optax.adamw(1e-1, weight_decay=0.1)
    step = jaxferry.train_step(
        lambda p, x: lax.loss_fn({"blocks": {k: p["blocks"][k] for k in "wb"}, "first": p["first"]}, x), optimizer
    )
    with pytest.warns(UserWarning, match="the loss never reads 'blocks/unread'"):
        state, _ = step(step.init(params), lax.batch)
    np.testing.assert_allclose(state.params["blocks"]["unread"], 0.99, rtol=1e-6)


@pytest.mark.parametrize("compute_dtype", [None, jnp.bfloat16])
def test_frozen_stacked_parameters_beside_trained_ones_are_kept_to_the_bit(lax, compute_dtype, tmp_path):
    """Low-rank adapters that are scanned over together with the frozen weights that they add to."""
    keys = jax.random.split(jax.random.key(5), 2)
    adapters = {
        "a": jax.random.normal(keys[0], (DEPTH, scanned.WIDTH, 2)),
        "b": jax.random.normal(keys[1], (DEPTH, 2, scanned.WIDTH)) / 9,
    }
    params = {**lax.params, "adapters": adapters}

    def loss_fn(params, x):
        def block(x, own):
            base, adapter = own
            return x + jnp.tanh(x @ base["w"] + base["b"] + x @ adapter["a"] @ adapter["b"]), None

        x = jax.lax.scan(block, x @ params["first"]["w"], (params["blocks"], params["adapters"]))[0]
        return jnp.mean(x.astype(jnp.float32) ** 2)

    task = Task(loss_fn, params, lax.batch.astype(compute_dtype or jnp.float32))
    optimizer = jaxferry.adamw(1e-2, eps=1e-3)  # a smaller one makes rounding of the least gradients visible
    step = jaxferry.train_step(
        loss_fn, optimizer, trainable=lambda path: "adapters" in path, compute_dtype=compute_dtype
    )
    state, losses = train(step, task, 4)
    assert [s.name for s in step.prepare(task.batch).partition.segments] == [
        "first",
        *(f"scan/{i}" for i in range(DEPTH)),
    ]
    assert len(state.host.units) == DEPTH and losses[-1] < losses[0]
    for name in ("blocks", "first"):
        assert_same_bits(state.params[name], params[name])
    step.save(state, tmp_path / "saved")
    assert_same_bits(step.restore(tmp_path / "saved").params, state.params)
    if compute_dtype is None:
        labels = {name: "train" if name == "adapters" else "freeze" for name in params}
        plain = optax.multi_transform({"train": optax.adamw(1e-2, eps=1e-3), "freeze": optax.set_to_zero()}, labels)
        expected, plain_losses = plain_loop(task, plain, 4)
        np.testing.assert_allclose(losses, plain_losses, rtol=LOSS_RTOL)
        assert_near(state.params, expected, rtol=2e-4, atol=1e-6)
        by_label = jaxferry.train_step(loss_fn, plain)
        assert train(by_label, task, 4)[1] == pytest.approx(losses, rel=LOSS_RTOL)


def test_host_memory_holds_stacked_parameters_once():
    """They are cut at the first step; nothing keeps the whole ones."""
    shape = (5, 12, 12)

    def loss_fn(params, x):
        return jnp.mean(jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x @ params["e"], params["l"])[0] ** 2)

    def whole():
        return sum(array.shape == shape and not array.is_deleted() for array in live_arrays())

    gc.collect()
    before = whole()
    step = jaxferry.train_step(loss_fn, optax.adamw(1e-3))
    state = step.init({"e": np.ones((12, 12), np.float32), "l": np.full(shape, 0.01, np.float32)})
    for _ in range(2):
        state, _ = step(state, jnp.ones((2, 12)))
    state.block_until_ready()
    gc.collect()
    assert whole() == before
