import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import models
from jaxferry.optimizer import TreeUpdate, path_names

SEPARABLE = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adamw": optax.adamw(optax.cosine_decay_schedule(1e-2, 10), eps=1e-3),
    "masked decay": optax.adamw(1e-2, eps=1e-3, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p)),
    "lion": optax.lion(1e-3),
    "lamb": optax.lamb(1e-2),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=16),
    "muon": optax.contrib.muon(1e-2),
    "ema": optax.chain(optax.ema(0.9), optax.sgd(0.1)),
    "rmsprop": optax.rmsprop(1e-2),
    "by value": optax.chain(optax.clip(0.01), optax.sgd(0.1)),
    "hyperparameters": optax.inject_hyperparams(optax.adam)(learning_rate=1e-2, eps=1e-3),
    "by label": optax.multi_transform(
        {"w": optax.adam(1e-2, eps=1e-3), "b": optax.sgd(1e-1)},
        lambda p: jax.tree.map(lambda x: "w" if x.ndim > 1 else "b", p),
    ),
}
NOISE = {"noise": optax.chain(optax.add_noise(0.01, 0.55, 0), optax.sgd(0.1))}


@pytest.fixture(scope="module")
def net():
    """Faster to trace than a transformer, but also has matrices, vectors and a table."""
    return models.adapters(depth=2)


def shapes(task):
    leaves, tree = jax.tree.flatten(task.params)
    return tree, [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]


@pytest.mark.parametrize(
    "name", [x if n % 2 else pytest.param(x, marks=pytest.mark.slow) for n, x in enumerate([*SEPARABLE, "noise"])]
)
def test_the_update_of_a_layer_is_its_part_of_the_whole_update(net, name):
    optimizer, (tree, avals) = {**SEPARABLE, **NOISE}[name], shapes(net)
    replayed = TreeUpdate(optimizer, tree, avals)
    assert not replayed.mixes
    params, gradients = net.params, jax.tree.map(jnp.sin, net.params)
    before = optimizer.init(params)

    @jax.jit
    def whole(gradients, state, params):
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    stepped, after = whole(gradients, before, params)
    expected = jax.tree.leaves(stepped)
    states = [dict(zip(path_names(state), jax.tree.leaves(state), strict=True)) for state in (before, after)]
    masters, grads = jax.tree.leaves(params), jax.tree.leaves(gradients)
    for leaves in ([0], [1, 2, 3], list(range(len(avals)))):
        held = [(leaf, None) for leaf in leaves]
        names = [name for name, _ in replayed.state_keys(held)]
        own = [[array[leaf] for leaf in leaves] for array in (grads, masters)]
        assert_near(replayed.init(held, own[1]), [states[0][name] for name in names])
        made, state = jax.jit(functools.partial(replayed.update, held))(*own, [states[0][name] for name in names])
        assert_near(made, [expected[leaf] for leaf in leaves])
        assert_near(state, [states[1][name] for name in names])


def assert_near(ours, theirs):
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine.shape, mine.dtype) == (other.shape, other.dtype)
        if jax.dtypes.issubdtype(mine.dtype, jax.dtypes.prng_key):
            mine, other = jax.random.key_data(mine), jax.random.key_data(other)
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-7)


def test_an_initial_state_that_depends_on_other_parameters_makes_the_optimizer_joint(net):
    def init(params):
        return jax.tree.map(lambda p: p * sum(x.sum() for x in jax.tree.leaves(params)), params)

    optimizer = optax.GradientTransformation(init, lambda updates, state, params=None: (updates, state))
    assert TreeUpdate(optimizer, *shapes(net)).mixes


def test_equal_layers_have_the_same_update_and_others_have_not(gpt):
    tree, avals = shapes(gpt)
    names = path_names(gpt.params)
    block = [[i for i, name in enumerate(names) if f"h_{b}" in name] for b in (0, 1)]

    def contents(optimizer):
        replayed = TreeUpdate(optimizer, tree, avals)
        return [replayed.content(leaves) for leaves in block]

    adamw = contents(SEPARABLE["adamw"])
    assert adamw[0] == adamw[1] is not None
    assert adamw[0] != contents(SEPARABLE["lion"])[0]

    def only_first(params):
        return jax.tree_util.tree_map_with_path(lambda path, _: "h_0" in str(path[0]), params)

    masked = contents(optax.adamw(1e-2, mask=only_first))
    assert masked[0] != masked[1]
