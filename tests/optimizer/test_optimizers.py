"""Our optimizers are Optax's, and train as Optax's do."""

import copy
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxferry
import models
from jaxferry.native import StepRule
from jaxferry.optimizer import FusedTransformation, FusedUpdate, HostRule
from models import chain
from planned import assert_near, assert_same_bits, train

NAMES = ("adam", "adamw", "lion", "sgd")
SCHEDULE = optax.linear_schedule(1e-3, 1e-2, 4)

# eps is large beside the gradient of the keys' bias, which is zero but for rounding.
ARGUMENTS = {
    "adam": {"learning_rate": 1e-3, "eps": 1e-3},
    "adamw": {"learning_rate": SCHEDULE, "eps": 1e-3, "weight_decay": 0.1},
    "nadamw": {"learning_rate": 1e-3, "eps": 1e-3, "nesterov": True},
    "sgd": {"learning_rate": SCHEDULE},
    "momentum": {"learning_rate": 0.1, "momentum": 0.9},
    "nesterov": {"learning_rate": 0.1, "momentum": 0.9, "nesterov": True},
}
KINDS = {"nadamw": "adamw", "momentum": "sgd", "nesterov": "sgd"}


def pair(name, **changes):
    """Ours and Optax's."""
    function, arguments = KINDS.get(name, name), ARGUMENTS[name] | changes
    return getattr(jaxferry, function)(**arguments), getattr(optax, function)(**arguments)


def is_matrix(params):
    return jax.tree.map(lambda p: p.ndim > 1, params)


@pytest.fixture(scope="module")
def net():
    return models.nnx_net(depth=1)


def two_layers():
    """A model whose parameters are dictionaries."""
    layer = {"w": jnp.eye(4) + 0.1, "b": jnp.ones(4)}

    loss_fn = chain(("first", "second"))

    return models.Task(loss_fn, {"first": layer, "second": layer}, jnp.ones((2, 4)) / 3)


def is_fused(state):
    return all(isinstance(p, FusedUpdate) for unit in state.host.units for p in unit.programs.values())


@pytest.mark.parametrize("name", NAMES)
def test_arguments_and_their_defaults_are_those_of_optax(name):
    def described(function):
        parameters = inspect.signature(function).parameters.values()
        return [(p.name, p.kind, p.default) for p in parameters]

    own = ("moments", "masters") if name.startswith("adam") else ()
    more = [(keyword, inspect.Parameter.KEYWORD_ONLY, "float32") for keyword in own]
    assert described(getattr(jaxferry, name)) == described(getattr(optax, name)) + more


@pytest.mark.parametrize("name", ARGUMENTS)
def test_as_a_transformation_each_is_that_of_optax(net, name):
    ours, theirs = pair(name)
    gradients = jax.tree.map(jnp.cos, net.params)
    results = []
    for optimizer in (ours, theirs):
        state = optimizer.init(net.params)
        results.append(optimizer.update(gradients, optimizer.update(gradients, state, net.params)[1], net.params))
    assert jax.tree.structure(results[0]) == jax.tree.structure(results[1])
    assert_same_bits(*results)


def test_each_is_an_optax_transformation_that_describes_itself():
    ours = jaxferry.adamw(1e-3, mask=is_matrix)
    assert isinstance(ours, optax.GradientTransformation) and isinstance(ours, tuple) and len(ours) == 2
    expected = HostRule(StepRule("adam", 0.9, 0.999, 1e-8, 0.0), 1e-3, 1e-4, is_matrix)
    assert ours.rule == expected == copy.copy(ours).rule
    with pytest.raises(AttributeError):
        ours.rule.learning_rate = 1.0
    assert isinstance(copy.copy(ours), FusedTransformation)
    assert jaxferry.sgd(1e-2).rule.weight_decay is None
    assert ours._replace(init=optax.adamw(1e-3).init).rule is None


def test_hyperparameters_may_be_numbers_of_any_kind_but_not_traced():
    assert jaxferry.adamw(np.float32(0.5), b1=jnp.float32(0.75)).rule.step.b1 == 0.75
    traced = []
    jax.jit(lambda rate: traced.append(jaxferry.adamw(rate).rule))(1.0)
    jax.jit(lambda b1: traced.append(jaxferry.adam(1e-3, b1).rule))(1.0)
    assert traced == [None, None]


def test_a_mask_given_as_a_whole_tree_leaves_layers_of_dictionaries_apart(recwarn):
    task = two_layers()
    mask = is_matrix(task.params)
    state, losses = train(jaxferry.train_step(task.loss_fn, jaxferry.adamw(1e-3, mask=mask)), task, 3)
    assert not [warning for warning in recwarn if "overlap" in str(warning.message)]
    assert len(state.host.units) == 2 and is_fused(state)
    other, others = train(jaxferry.train_step(task.loss_fn, jaxferry.adamw(1e-3, mask=is_matrix)), task, 3)
    assert losses == others
    assert_same_bits(state.params, other.params)


@pytest.mark.parametrize("name", ["adamw", "momentum"])
@pytest.mark.parametrize("saves", [0, 1])
def test_checkpoints_are_interchangeable_with_those_of_optax(name, saves, tmp_path):
    optimizers, net = pair(name), two_layers()
    step = jaxferry.train_step(net.loss_fn, optimizers[saves])
    state, _ = train(step, net, 3)
    step.save(state, tmp_path / "saved")
    other = jaxferry.train_step(net.loss_fn, optimizers[1 - saves])
    restored = other.restore(tmp_path / "saved", params=net.params)
    assert_same_bits(restored.optimizer_state(), state.optimizer_state())
    state, metrics = step(state, net.batch)
    restored, again = other(restored, net.batch)
    assert float(metrics["loss"]) == float(again["loss"])
    assert_near(state.params, restored.params, rtol=1e-5, atol=1e-6)
    assert_same_bits(
        [c for c in state.optimizer_state().values() if c.dtype == np.int32],
        [c for c in restored.optimizer_state().values() if c.dtype == np.int32],
    )


@pytest.mark.parametrize("name", ["adamw", "adam", "lion", "sgd"])
def test_factors_are_32_bits_wide_where_64_are_enabled(name):
    with jax.enable_x64(True):
        transformation = getattr(jaxferry, name)(1e-2)
        factors = transformation.rule.factors(transformation.init({"w": np.ones(3, np.float32)}))
        assert {factor.dtype for factor in factors.values()} == {jnp.dtype("float32")}
