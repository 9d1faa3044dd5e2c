"""PRNG keys as frozen parameters: data like any other leaf, for every implementation that JAX has."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.extend.random import define_prng_impl

import jaxferry
from jaxferry.modes import GradientPlace, Mode
from jaxferry.step import LayerPlan, Plan
from models import Task, plain_loop
from slowly import slow_but

KINDS = ["threefry2x32", "rbg", "unsafe_rbg"]
NAMES = ["a", "b", "c"]
X = np.linspace(-1, 1, 8 * 16, dtype=np.float32).reshape(8, 16)


def make_params(kind, seed=3):
    keys = {"one": jax.random.key(seed, impl=kind), "several": jax.random.split(jax.random.key(5, impl=kind), (2, 3))}
    return {"rng": keys, **{name: {"w": np.eye(16, dtype=np.float32)} for name in NAMES}}


def loss_fn(params, x):
    key = params["rng"]["one"]
    for name in NAMES:
        key, own = jax.random.split(key)
        x = jnp.tanh(x @ params[name]["w"]) * jax.random.bernoulli(own, 0.9, x.shape)
    return jnp.mean((x + jax.random.normal(params["rng"]["several"][1, 0], x.shape)) ** 2)


def make(kind, **options):
    step = jaxferry.train_step(loss_fn, optax.adam(1e-2), trainable=lambda path: "rng" not in path, **options)
    return step, step.init(make_params(kind))


def losses(step, state, num=3):
    return [float(step(state, X)[1]["loss"]) for _ in range(num)]


def plain_losses(kind, num=3):
    trained = make_params(kind)
    keys = trained.pop("rng")
    task = Task(lambda trained, x: loss_fn({**trained, "rng": keys}, x), trained, X)
    return plain_loop(task, optax.adam(1e-2), num)[1]


def bits(keys):
    return {name: jax.random.key_data(key).tolist() for name, key in keys.items()}


MODES = [Mode.GFGB, Mode.DHA, Mode.RESIDENT]


@pytest.mark.parametrize(
    ("kind", "mode"), slow_but(zip(KINDS, MODES, strict=True), list(itertools.product(KINDS, MODES)))
)
def test_losses_are_plain_optax_s_and_the_keys_stay(kind, mode):
    names = [layer.name for layer in make(kind)[0].prepare(X).partition.layers]
    plan = Plan("any", 1.0, tuple(LayerPlan(name, mode, GradientPlace.HOST) for name in names))
    step, state = make(kind, plan=plan)
    np.testing.assert_allclose(losses(step, state), plain_losses(kind), rtol=1e-5)
    kept = state.params["rng"]
    assert bits(kept) == bits(make_params(kind)["rng"])
    assert kept["one"].dtype == jax.random.key(0, impl=kind).dtype and kept["several"].shape == (2, 3)


@pytest.mark.parametrize("kind", KINDS)
def test_keys_are_saved_restored_assigned_copied_and_read_as_data(kind, tmp_path):
    step, state = make(kind)
    before, keys = losses(step, state, 1), bits(make_params(kind)["rng"])
    step.save(state, tmp_path / "saved")
    expected = losses(step, state)
    restored = [step.restore(tmp_path / "saved"), step.restore(tmp_path / "saved", make_params(kind))]
    for each in restored:
        assert bits(each.params["rng"]) == keys
        assert losses(step, each) == expected
    assert bits(state.copy().params["rng"]) == keys
    lazy = step.init(state.lazy_params)
    assert bits(lazy.params["rng"]) == keys
    assert before == losses(step, step.init_from(lambda _: make_params(kind), jax.random.key(0)), 1)
    other = make_params(kind, seed=4)
    lazy.params = other
    assert bits(lazy.params["rng"]) == bits(other["rng"])
    assert losses(step, lazy) == losses(step, step.init(other))


@pytest.mark.parametrize("kind", KINDS)
def test_a_lazy_leaf_of_keys_is_what_jax_takes_for_keys_and_numpy_refuses_it_in_a_sentence(kind):
    _, state = make(kind)
    for name, given in make_params(kind)["rng"].items():
        leaf, expected = state.lazy_params["rng"][name], jax.random.key_data(given)
        for keys in (leaf, jnp.asarray(leaf), leaf[...]):
            assert keys.dtype == given.dtype and keys.shape == given.shape
            np.testing.assert_array_equal(jax.random.key_data(keys), expected)
        with pytest.raises(TypeError, match="PRNGKey dtype cannot be converted to a NumPy array"):
            np.asarray(leaf)


def test_keys_of_another_implementation_do_not_restore(tmp_path):
    step, state = make("rbg")
    step.save(state, tmp_path / "saved")
    with pytest.raises(jaxferry.CheckpointError, match=re.escape("key<rbg> in the checkpoint and key<fry>")):
        step.restore(tmp_path / "saved", make_params("threefry2x32"))


@pytest.mark.parametrize("kind", KINDS)
def test_devices_that_share_a_batch_have_the_same_keys(kind):
    if jax.device_count("cpu") < 2:
        pytest.skip("one CPU device")
    mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:2]), ("data",))
    step, state = make(kind, mesh=mesh)
    np.testing.assert_allclose(losses(step, state), plain_losses(kind), rtol=1e-5)
    assert bits(state.params["rng"]) == bits(make_params(kind)["rng"])


@pytest.mark.parametrize("kind", KINDS)
def test_keys_that_a_scan_reads_layer_by_layer_are_cut_with_the_layers(kind):
    def loss(params, x):
        def body(x, layer):
            return jnp.tanh(x @ layer["w"]) * jax.random.bernoulli(layer["k"], 0.9, x.shape), None

        return jnp.mean(jax.lax.scan(body, x, params["layers"])[0] ** 2)

    params = {"layers": {"w": np.stack([np.eye(16)] * 4).astype(np.float32)}}
    params["layers"]["k"] = jax.random.split(jax.random.key(1, impl=kind), 4)
    step = jaxferry.train_step(loss, optax.sgd(0.0), trainable=lambda path: not path.endswith("k"))
    state = step.init(params)
    assert float(step(state, X)[1]["loss"]) == pytest.approx(float(jax.jit(loss)(params, X)), rel=1e-6)
    assert len(step.prepare(X).partition.layers) == 4
    assert bits(state.params["layers"] | {"w": jax.random.key(0)})["k"] == bits({"k": params["layers"]["k"]})["k"]


def test_the_random_state_of_an_nnx_model_is_a_frozen_parameter():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.inner, self.outer = nnx.Linear(16, 16, rngs=rngs), nnx.Linear(16, 1, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.outer(self.dropout(nnx.relu(self.inner(x))))

    graph, params = nnx.split(Model(nnx.Rngs(0)))
    step = jaxferry.train_step(
        lambda params, x: jnp.mean(nnx.merge(graph, params)(x) ** 2),
        optax.sgd(0.0),
        trainable=lambda path: "rngs" not in path,
    )
    _, metrics = step(step.init(params), X)
    expected = jax.jit(lambda params: jnp.mean(nnx.merge(graph, params)(X) ** 2))(params)
    assert float(metrics["loss"]) == pytest.approx(float(expected), rel=1e-5)


def test_keys_of_an_implementation_of_the_user_s_are_refused():
    own = define_prng_impl(
        key_shape=(2,),
        seed=lambda seed: jnp.zeros(2, jnp.uint32),
        split=lambda key, shape: jnp.zeros((*shape, 2), jnp.uint32),
        random_bits=lambda key, width, shape: jnp.zeros(shape, jnp.uint32),
        fold_in=lambda key, data: key,
        name="own",
        tag="own",
    )
    params = make_params("rbg") | {"rng": {"one": jax.random.key(0, impl=own)}}
    step = jaxferry.train_step(loss_fn, optax.adam(1e-2), trainable=lambda path: "rng" not in path)
    with pytest.raises(jaxferry.InputError, match="'rng/one' has dtype key<own>, PRNG keys of an implementation that"):
        step.init(params)
