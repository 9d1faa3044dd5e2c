"""A small model with a tied table, trained by plans that update some of its parameter groups on the device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxferry
from jaxferry.modes import Mode, UpdatePlace
from jaxferry.partition import partition
from jaxferry.step import LayerPlan, Plan
from steps import wrap

WIDTH, WORDS = 8, 12
RNG = np.random.default_rng(0)
PARAMS = {
    "embed": {"table": RNG.normal(size=(WORDS, WIDTH)).astype(np.float32)},
    **{
        f"layer_{i}": {"w": (RNG.normal(size=(WIDTH, WIDTH)) / 3).astype(np.float32), "b": np.zeros(WIDTH, np.float32)}
        for i in range(3)
    },
}


def loss_fn(params, words):
    x = params["embed"]["table"][words]
    for i in range(3):
        layer = params[f"layer_{i}"]
        x = x + jnp.tanh(x @ layer["w"] + layer["b"])
    return jnp.mean(jnp.square(x @ params["embed"]["table"].T))


def batch(number):
    return jnp.asarray(np.random.default_rng(number).integers(0, WORDS, (2, 5)))


NAMES = [segment.name for segment in partition(loss_fn, PARAMS, (batch(0),)).segments]
GROUPS = {name: name.partition("#")[0] for name in NAMES}


ALL = [*PARAMS]


def plan_with(groups=(), mode=Mode.GFGB, streamed=()):
    """A plan that updates these groups on the device; those of `streamed` come there for the update only."""

    def layer(name):
        if GROUPS[name] in groups:
            return LayerPlan(name, Mode.RESIDENT, update=UpdatePlace.RESIDENT)
        return LayerPlan(name, mode, update=UpdatePlace.GPU if GROUPS[name] in streamed else UpdatePlace.HOST)

    return Plan("test", 1.0, tuple(map(layer, NAMES)))


def make(groups=(), optimizer=None, mode=Mode.GFGB, streamed=(), **options):
    plan = plan_with(groups, mode, streamed)
    return jaxferry.train_step(loss_fn, optimizer or jaxferry.adamw(1e-2), plan=plan, **options)


def train(step, state, num_steps=4, first=0):
    losses = []
    for number in range(first, first + num_steps):
        state, metrics = step(state, batch(number))
        losses.append(float(metrics["loss"]))
    return state, losses


def assert_close(tree, other, rtol=1e-5):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-6), tree, other)


def on_device(state):
    return {state.host.layers[group].name for group in state.host.on_device}


def streaming(state):
    """The groups whose updates stream, with their numbers of subgroups."""
    return {state.host.layers[group].name: number for group, number in state.host.streamed.items()}


def check_failure(step, state, monkeypatch, operation, number, match, is_rolled_back):
    """Lets an operation's call with this number fail in a step, which is rolled back or damages the state.

    Where either is right, since the call may come before or after the first update, `is_rolled_back` is None, and the
    state is as the error says.
    """
    before, calls = state.params, []

    def broken(function, *args):
        calls.append(args)
        if len(calls) == number + 1:
            raise RuntimeError("no memory")
        return function(*args)

    with monkeypatch.context() as patch:
        wrap(patch, operation, broken)
        with pytest.raises(jaxferry.JaxFerryError, match=match) as caught:
            step(state, batch(2))
            state.settle()
    if is_rolled_back is None:
        is_rolled_back = "the state is that before the step" in str(caught.value)
    if is_rolled_back:
        jax.tree.map(np.testing.assert_array_equal, state.params, before)
        train(step, state, 1)
    else:
        with pytest.raises(jaxferry.StateError, match="two steps"):
            step(state, batch(2))
