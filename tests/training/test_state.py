"""A training state in users' hands: printed, copied, and changed between steps."""

import copy
import gc
import pickle
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxferry
import models
from jaxferry.modes import Mode
from planned import assert_same_bits, plan_of
from tolerances import LOSS_RTOL

ADAM = optax.inject_hyperparams(optax.adam)(learning_rate=1e-2)
FROZEN, BATCH = np.linspace(0.5, 1, 4, dtype=np.float32), np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)


def loss_fn(params, batch):
    x = jnp.tanh(batch @ params["first"]["w"])
    return jnp.square(x @ params["second"]["w"] * params["scale"]["frozen"] - 1).mean()


def params_of(seed=0):
    first, second = np.random.default_rng(seed).normal(size=(2, 4, 4)).astype(np.float32)
    return {"first": {"w": first}, "second": {"w": second}, "scale": {"frozen": FROZEN}}


def step_with(modes):
    plan = plan_of(models.Task(loss_fn, params_of(), BATCH), modes)
    return jaxferry.train_step(loss_fn, ADAM, trainable=lambda path: "frozen" not in path, plan=plan)


@pytest.fixture(scope="module")
def step():
    return step_with([Mode.GFGB])


def after(step, state, num_steps):
    losses = []
    for _ in range(num_steps):
        state, metrics = step(state, BATCH)
        losses.append(float(metrics["loss"]))
    return losses


def plain(params, opt_state, learning_rates):
    """Losses of plain Optax with these learning rates."""
    losses = []
    for rate in learning_rates:
        loss, gradients = jax.value_and_grad(loss_fn)(params, BATCH)
        gradients["scale"] = jax.tree.map(jnp.zeros_like, gradients["scale"])
        opt_state.hyperparams["learning_rate"] = jnp.float32(rate)
        updates, opt_state = ADAM.update(gradients, opt_state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(loss))
    return losses


def test_hyperparameters_hold_from_the_next_update_on(step):
    state = step.init(params_of())
    losses = after(step, state, 2)
    state.set_hyperparams(learning_rate=0.1)
    losses += after(step, state, 2)
    assert state.opt_state.hyperparams["learning_rate"] == np.float32(0.1)
    expected = plain(params_of(), ADAM.init(params_of()), [1e-2, 1e-2, 0.1, 0.1])
    np.testing.assert_allclose(losses, expected, rtol=LOSS_RTOL)
    before = state.params
    opt_state = state.opt_state
    opt_state.hyperparams["learning_rate"] = 0
    state.opt_state = opt_state
    after(step, state, 1)
    assert_same_bits(state.params, before)


@pytest.mark.parametrize("modes", [[Mode.GFGB], [Mode.GFGB, Mode.RESIDENT]])
def test_assigned_parameters_are_trained_on_and_are_copies(modes):
    step = step_with(modes)
    state, other = step.init(params_of()), step.init(params_of(1))
    after(step, state, 2)
    given = params_of(1)
    given["scale"]["frozen"] = 2 * FROZEN
    state.params = given
    given["first"]["w"][:] = 0
    state.opt_state = other.opt_state
    other.params = {**params_of(1), "scale": {"frozen": jnp.asarray(2 * FROZEN)}}
    assert state.params["scale"]["frozen"][0] == 1 and state.step == 2
    assert after(step, state, 3) == after(step, other, 3)
    assert float(step.evaluate(state, BATCH)) == float(step.evaluate(other, BATCH))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_copies_of_python_are_copies_of_the_state_and_pickles_are_refused(copied, step):
    state = step.init(params_of())
    kept, before = copied(state), state.params
    after(step, state, 1)
    assert_same_bits(kept.params, before)
    with pytest.raises(TypeError, match=r"step\.save\(state, path\)"):
        pickle.dumps(state)


def test_a_state_is_described(step):
    state = step.init(params_of())
    after(step, state, 1)
    assert repr(state).startswith("<TrainState: step 1, 36 parameters in 3 layers, masters and optimizer state ")


def swapped(array):
    return array.astype(array.dtype.newbyteorder())


@pytest.mark.parametrize(
    ("assign", "message"),
    [
        (lambda s: setattr(s, "params", {"first": {"w": 0}}), "state.params must be a tree like .* lacks"),
        (lambda s: setattr(s, "params", "abc"), "state.params must be a tree like .* lacks .*; a bare leaf is new"),
        (lambda s: setattr(s, "params", {**params_of(), "scale": {"frozen": FROZEN[:2]}}), r"shape \(4,\), got \(2,\)"),
        (lambda s: setattr(s, "params", {**params_of(), "scale": {"frozen": 1j * FROZEN}}), "float32 can hold, got c"),
        (lambda s: setattr(s, "params", jax.tree.map(swapped, params_of())), "leaf .'first'.*has byte-swapped"),
        (lambda s: setattr(s, "opt_state", optax.sgd(1).init({})), "state.opt_state must be a tree like"),
        (lambda s: s.set_hyperparams(momentum=1), "no hyperparameter 'momentum': it has b1, b2, .*learning_rate"),
        (lambda s: s.set_hyperparams(learning_rate="fast"), "'learning_rate' must have a dtype"),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(step, assign, message):
    state = step.init(params_of())
    before = state.params, state.opt_state
    with pytest.raises(jaxferry.InputError, match=message):
        assign(state)
    assert_same_bits((state.params, state.opt_state), before)


def test_a_rate_that_a_schedule_sets_is_not_set_in_vain():
    optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=optax.linear_schedule(1, 0, 9))
    state = jaxferry.train_step(loss_fn, optimizer).init(params_of())
    with pytest.raises(jaxferry.InputError, match="'learning_rate' follows a schedule"):
        state.set_hyperparams(learning_rate=0.1)


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        (({"x": BATCH, "name": "hello"},), {}, r"argument 1 after the state, leaf \['name'\], must be .* got a str"),
        ((BATCH, [BATCH, np.array(["a", None])]), {}, r"argument 2 .* leaf \[1\].* ndarray of dtype object"),
        ((BATCH,), {"rows": {"y": swapped(BATCH)}}, r"keyword argument 'rows', leaf \['y'\], has byte-swapped"),
        ((swapped(BATCH),), {}, r"argument 1 after the state has byte-swapped elements \(>f4\): pass array.astype"),
    ],
)
def test_what_no_array_can_hold_is_named(step, args, kwargs, message):
    state = step.init(params_of())
    for use in (step, step.evaluate):
        with pytest.raises(jaxferry.InputError, match=message):
            use(state, *args, **kwargs)


def test_a_parameter_that_is_no_array_is_named_also_beside_a_model_in_training(step):
    state = step.init(params_of())
    with pytest.raises(jaxferry.InputError, match="parameter 'first/w' is a str, not an array"):
        step.init({**params_of(), "first": {"w": "text"}})
    assert step(state, BATCH)[0].step == 1


def test_parameters_with_swapped_bytes_are_named():
    with pytest.raises(jaxferry.InputError, match="parameter 'first/w' has byte-swapped elements"):
        jaxferry.train_step(loss_fn, ADAM).init(jax.tree.map(swapped, params_of()))


def test_a_dropped_training_step_and_its_state_are_freed_without_a_garbage_collection():
    def build():
        step = jaxferry.train_step(lambda params, batch: loss_fn(params, batch), ADAM)
        state = step.init(params_of())
        after(step, state, 2)
        state.block_until_ready()
        arrays = [weakref.ref(array) for unit in state.host.units for array in (*unit.masters, *unit.state)]
        return [weakref.ref(step), weakref.ref(state), *arrays]

    gc.disable()
    try:
        left = build()
        assert len(left) > 10 and all(reference() is None for reference in left)
    finally:
        gc.enable()
