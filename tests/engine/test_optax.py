"""Optimizers as users write them, run layer by layer or jointly with a warning: the results are the same."""

import functools
import itertools
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxferry
import models
from jaxferry.optimizer import FusedUpdate
from jaxferry.step import Updates
from planned import assert_near, assert_same_bits, step_of, take_steps, train
from slowly import slow, slow_but
from tolerances import LOSS_RTOL

NUM_STEPS = 10
TASK = models.adapters(depth=2)
SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 3, NUM_STEPS)


def each(function):
    """Maps a function of path and shape over a tree of parameters."""
    return jax.tree_util.tree_map_with_path(lambda path, leaf: function(path[0].key, leaf.ndim), TASK.params)


class AverageState(NamedTuple):
    average: Any


def average_of_params(decay):
    """Keeps an exponential moving average of the parameters at the end of a chain; leaves updates unchanged."""

    def init(params):
        return AverageState(jax.tree.map(jnp.asarray, params))

    def update(updates, state, params):
        new = optax.apply_updates(params, updates)
        return updates, AverageState(optax.incremental_update(new, state.average, 1 - decay))

    return optax.GradientTransformation(init, update)


def changing(start, update):
    """A transformation whose state begins as `start`; `update(updates, state)` returns updates and another state."""
    return optax.GradientTransformation(
        lambda params: start, lambda updates, state, params=None: update(updates, state)
    )


class Counted(NamedTuple):
    counts: dict[str, Any]


def count_later(updates, state):
    num = state.counts.get("num", jnp.int32(0)) + 1
    return jax.tree.map(lambda leaf: leaf / num, updates), Counted({"num": num})


def add_last(updates, last):
    made = updates if last is None else jax.tree.map(lambda new, old: new + 0.5 * old, updates, last)
    return made, made


def average_norm(updates, mean):
    mean = (mean + optax.tree.norm(updates)) / 2
    return jax.tree.map(lambda leaf: leaf * mean, updates), mean


def halve_first(updates, state):
    """Changes the structure of its state alone, which has no leaf."""
    return jax.tree.map(lambda leaf: leaf if state else leaf / 2, updates), {"later": ()}


CHANGING = {
    "monitored": optax.chain(
        optax.adam(1e-2, eps=1e-3),
        optax.monitor({"norm": optax.tree.norm, "ema": optax.measure_with_ema(optax.tree.norm, 0.9)}),
    ),
    "counts in updates": optax.chain(optax.sgd(0.1, momentum=0.9), changing(Counted({}), count_later)),
    "last updates": optax.chain(changing(None, add_last), optax.sgd(0.1)),
    "first of updates": optax.chain(changing({}, halve_first), optax.sgd(0.1)),
    "dtype of updates": optax.chain(changing(jnp.int32(1), average_norm), optax.sgd(0.1)),
}


def of_all(params):
    """A state each of whose leaves depends on all parameters."""
    return jax.tree.map(lambda leaf: leaf * optax.tree.sum(params), params)


def by_layer(label_of):
    rates = {"block_0": 1e-3, "block_1": 3e-3, "norm": 1e-2, "table": 3e-2}
    return optax.multi_transform({name: optax.adam(rate, eps=1e-3) for name, rate in rates.items()}, label_of)


def layer_names(params):
    return {name: jax.tree.map(lambda _, name=name: name, layer) for name, layer in params.items()}


SEPARABLE = {
    "schedule": optax.adamw(SCHEDULE, eps=1e-3),
    "joined schedules": optax.sgd(
        optax.join_schedules([optax.constant_schedule(0.1), optax.linear_schedule(0.1, 0, 5)], [4])
    ),
    "labels": by_layer(layer_names),
    "tree of labels": by_layer(each(lambda name, _: name)),
    "prefix tree of labels": by_layer({name: name for name in TASK.params}),
    "hyperparameters": optax.inject_hyperparams(optax.adamw)(learning_rate=SCHEDULE, eps=1e-3, weight_decay=0.1),
    "masked decay": optax.adamw(1e-2, eps=1e-3, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p)),
    "tree of masked decay": optax.adamw(1e-2, eps=1e-3, mask=each(lambda _, ndim: ndim > 1)),
    "masked": optax.chain(optax.masked(optax.scale(0.1), each(lambda name, _: name == "table")), optax.sgd(0.1)),
    "ema of updates": optax.chain(optax.ema(0.9), optax.sgd(0.1)),
    "ema of parameters": optax.chain(optax.adam(1e-2, eps=1e-3), average_of_params(0.9)),
    "schedule-free": optax.contrib.schedule_free_adamw(1e-2, warmup_steps=3, eps=1e-3),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=8),
    "lamb": optax.lamb(1e-2),
    "lars": optax.lars(1e-1),
    "muon": optax.contrib.muon(1e-2),
    "adaptive clipping": optax.chain(optax.adaptive_grad_clip(0.01), optax.sgd(0.1)),
    "by value": optax.chain(optax.clip(0.01), optax.zero_nans(), optax.sgd(0.1)),
    "noise": optax.chain(optax.add_noise(0.01, 0.55, 0), optax.sgd(0.1)),
    "plateau": optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(0.5, patience=2, rtol=0.2)),
    "one pass": jaxferry.adamw(SCHEDULE, eps=1e-3, mask=each(lambda _, ndim: ndim > 1)),
    "rmsprop": optax.rmsprop(1e-2, eps=1e-3),
    "lion": optax.lion(1e-3),
    "nesterov": optax.sgd(0.1, momentum=0.9, nesterov=True),
}
OFTEN = ("tree of labels", "adafactor", "muon", "plateau")
JOINT = {
    "global norm": optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2, eps=1e-3)),
    "global norm of a part": optax.multi_transform(
        {"block": optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1)), "other": optax.sgd(0.1)},
        each(lambda name, _: "block" if "block" in name else "other"),
    ),
    "accumulation": optax.MultiSteps(optax.sgd(0.1), 2),
    "finite": optax.apply_if_finite(optax.sgd(0.1), 3),
    "prodigy": optax.contrib.prodigy(0.1, eps=1e-3),
    "polyak": optax.polyak_sgd(0.5),
    "momo": optax.contrib.momo(0.5),
    "snapshot": optax.chain(optax.sgd(0.1), optax.snapshot("norm", optax.tree.norm)),
    "initial state": optax.chain(optax.sgd(0.1), optax.GradientTransformation(of_all, lambda u, s, p=None: (u, s))),
    **CHANGING,
    "injected polyak": optax.inject_hyperparams(optax.polyak_sgd)(max_learning_rate=0.5),
}


@pytest.mark.parametrize("name", slow_but(OFTEN, SEPARABLE))
def test_a_separable_optimizer_is_overlapped_and_agrees_with_plain_optax(name):
    expected = models.plain_loop(TASK, SEPARABLE[name], NUM_STEPS)[1]
    step = jaxferry.train_step(TASK.loss_fn, SEPARABLE[name])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state, losses = train(step, TASK, NUM_STEPS)
    np.testing.assert_allclose(losses, expected, rtol=LOSS_RTOL)
    assert len(state.host.units) == len(state.host.layers) == 4
    # Who looks for a NaN has all gradients checked before any update.
    expected_updates = Updates.AFTER_ALL if jax.config.jax_debug_nans else Updates.OVERLAPPED
    assert step.prepare(TASK.batch).plan.updates is expected_updates


@pytest.mark.parametrize("name", slow_but(("global norm", "accumulation", "polyak", "initial state"), JOINT))
def test_a_joint_optimizer_is_warned_about_and_agrees_with_plain_optax(name):
    expected = models.plain_loop(TASK, JOINT[name], NUM_STEPS)[1]
    step = jaxferry.train_step(TASK.loss_fn, JOINT[name])
    with pytest.warns(UserWarning, match="updates do not overlap the backward"):
        state, losses = train(step, TASK, NUM_STEPS)
    np.testing.assert_allclose(losses, expected, rtol=LOSS_RTOL)
    assert len(state.host.units) == 1
    assert step.prepare(TASK.batch).plan.updates is Updates.AFTER_ALL


def test_lookahead_is_trained_on_its_pair_of_parameters():
    """Lookahead's update takes gradients of the fast parameters only, so a loop over one tree needs a wrapper."""
    ahead = optax.lookahead(optax.sgd(0.1), sync_period=3, slow_step_size=0.5)
    optimizer = optax.GradientTransformation(
        ahead.init, lambda gradients, state, params: ahead.update(gradients.fast, state, params)
    )

    def loss_fn(params, batch):
        return TASK.loss_fn(params.fast, batch)

    task = models.Task(loss_fn, optax.LookaheadParams.init_synced(TASK.params), TASK.batch)
    expected, expected_losses = models.plain_loop(task, optimizer, NUM_STEPS)
    with pytest.warns(UserWarning, match=r"looks at all parameters at once|never reads"):
        state, losses = train(jaxferry.train_step(loss_fn, optimizer), task, NUM_STEPS)
    np.testing.assert_allclose(losses, expected_losses, rtol=LOSS_RTOL)
    assert isinstance(state.params, optax.LookaheadParams)
    assert_near(state.params.slow, expected.slow, rtol=1e-4, atol=1e-6)


@functools.cache
def plain_state(optimizer, num_steps, task=TASK):
    """The optimizer's state of a plain loop, and its parameters."""
    *_, (params, state, _) = itertools.islice(models.plain_steps(task, optimizer), num_steps)
    return params, state


def assert_same_state(ours, theirs, rtol=1e-3, atol=1e-6):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for own, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert isinstance(own, np.ndarray) and (own.shape, own.dtype) == (other.shape, other.dtype)
        rough = {"rtol": 2**-7, "atol": 2**-12} if own.dtype == jnp.bfloat16 else {"rtol": rtol, "atol": atol}
        np.testing.assert_allclose(own.astype(np.float32), np.float32(other), **rough)


@pytest.mark.parametrize(
    "name", ["tree of labels", "plateau", "ema of parameters", "schedule-free", *slow("hyperparameters")]
)
def test_the_state_is_handed_back_as_optax_makes_it(name):
    optimizer = SEPARABLE[name]
    params, expected = plain_state(optimizer, 4)
    state, _ = train(step_of(TASK, optimizer), TASK, 4)
    assert_same_state(state.opt_state, expected)
    assert_near(state.params, params, rtol=1e-3, atol=1e-6)


LENGTH = 3


def stacked_loss(params, x):
    """Scans over parameters that are stacked along their first or their last axis."""

    def block(x, own):
        return x + jnp.tanh(x @ own["kernel"]) * own["scale"], None

    layers = params["layers"] | {"scale": jnp.moveaxis(params["layers"]["scale"], -1, 0)}
    return jnp.mean(jax.lax.scan(block, x @ params["head"]["w"], layers)[0] ** 2)


def stacked_task():
    shapes = {"head": {"w": (5, 5)}, "layers": {"kernel": (LENGTH, 5, 5), "scale": (5, LENGTH)}}
    draw = np.random.default_rng(0)
    params = jax.tree.map(
        lambda s: draw.normal(size=s).astype(np.float32), shapes, is_leaf=lambda x: isinstance(x, tuple)
    )
    return models.Task(stacked_loss, params, draw.normal(size=(4, 5)).astype(np.float32))


STACKED = stacked_task()


def is_large(params):
    return jax.tree.map(lambda leaf: leaf.size > 30, params)


def labels(params):
    return jax.tree.map(lambda is_so: "large" if is_so else "small", is_large(params))


BY_PART = {
    "adamw": optax.adamw(optax.cosine_decay_schedule(1e-2, 10), eps=1e-3),
    "decay by ndim": optax.adamw(1e-2, eps=1e-3, mask=lambda p: jax.tree.map(lambda x: x.ndim > 2, p)),
    "decay by size": optax.adamw(1e-2, eps=1e-3, weight_decay=0.1, mask=is_large),
    "by label": optax.multi_transform({"large": optax.adam(1e-2, eps=1e-3), "small": optax.sgd(0.1, 0.9)}, labels),
    "hyperparameters": SEPARABLE["hyperparameters"],
    "lion": optax.lion(1e-3),
    "16-bit moments": optax.adam(1e-2, eps=1e-3, mu_dtype=jnp.bfloat16),
    "by value": optax.chain(optax.clip(0.01), optax.sgd(0.1, momentum=0.9, nesterov=True)),
    "schedule-free": SEPARABLE["schedule-free"],
    "fused": jaxferry.adamw(1e-2, eps=1e-3, weight_decay=0.1, mask=is_large),
}
NOT_BY_PART = {
    "lamb": (optax.lamb(1e-2), "'reduce_sum' is not element-wise"),
    "adafactor": (optax.adafactor(1e-2, min_dim_size_to_factor=4), "its state has another shape"),
    "block norm": (optax.chain(optax.clip_by_block_rms(0.1), optax.sgd(0.1)), "'reduce_sum' is not element-wise"),
}


def check_stacked(optimizer):
    """Trains stacked parameters beside plain Optax; returns the units."""
    state, _ = train(jaxferry.train_step(STACKED.loss_fn, optimizer), STACKED, 4)
    params, expected = plain_state(optimizer, 4, STACKED)
    assert_near(state.params, params, rtol=1e-5, atol=1e-6)
    assert_same_state(state.opt_state, expected)
    return state.host.units


@pytest.mark.parametrize("name", slow_but(("decay by size", "by label", "schedule-free", "fused"), BY_PART))
def test_stacked_parameters_are_updated_part_by_part_by_one_program_as_optax_updates_them_whole(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, *units = check_stacked(BY_PART[name])
    programs = {id(program): program for unit in units for program in unit.programs.values()}
    assert len(units) == LENGTH and len(programs) == 1
    assert all(isinstance(program, FusedUpdate) == (name == "fused") for program in programs.values())


@pytest.mark.parametrize("name", NOT_BY_PART)
def test_stacked_parameters_whose_update_is_not_element_wise_are_updated_at_once_with_a_warning(name):
    optimizer, reason = NOT_BY_PART[name]
    with pytest.warns(UserWarning, match=reason):
        assert [len(unit.layers) for unit in check_stacked(optimizer)] == [1, LENGTH]


@pytest.mark.parametrize(
    "name", ["tree of labels", "plateau", "one pass", *slow("tree of masked decay", "ema of parameters")]
)
def test_a_state_of_such_an_optimizer_is_resumed(name, tmp_path):
    step = step_of(TASK, SEPARABLE[name])
    whole, losses = train(step, TASK, 6)
    state, _ = train(step, TASK, 3)
    step.save(state, tmp_path / "saved")
    fresh = jaxferry.train_step(TASK.loss_fn, SEPARABLE[name])
    resumed, more = take_steps(fresh, fresh.restore(tmp_path / "saved"), [TASK.batch] * 3)
    assert more == losses[3:]
    assert_same_bits(resumed.opt_state, whole.opt_state)


def tempered():
    """Multiplies updates by an argument of the step, and by a second one that is a tree."""

    def update(updates, state, params=None, *, temperature, offsets, **extra_args):
        return jax.tree.map(lambda leaf: leaf * temperature * offsets["more"][1], updates), state

    return optax.chain(optax.sgd(0.1), optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), update))


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"clip_norm": 0.1}], ids=str)
def test_a_step_hands_on_the_arguments_of_its_own_to_the_optimizer(options):
    """A temperature of each step is a learning rate of each step."""
    extra = {"temperature": 1.0, "offsets": {"more": np.ones(2, np.float32)}}
    step = jaxferry.train_step(TASK.loss_fn, tempered(), extra_args=extra, **options)
    rates = optax.join_schedules([optax.constant_schedule(rate) for rate in (0.3, 0.05, 0.1)], [1, 2])
    plain = jaxferry.train_step(TASK.loss_fn, optax.sgd(rates), **options)
    state, expected = step.init(TASK.params), plain.init(TASK.params)
    offsets = {"more": np.zeros(2, np.float32)}
    for given in ({"temperature": 1.5, "offsets": offsets}, {"temperature": jnp.float32(0.5)}, {}):
        for _ in range(options.get("accumulate", 1)):
            offsets["more"][1] = 2
            state, metrics = step(state, TASK.batch, extra_args=given) if given else step(state, TASK.batch)
            offsets["more"][1] = np.nan  # a late update reads what it was given
            expected, others = plain(expected, TASK.batch)
            np.testing.assert_allclose(metrics["loss"], others["loss"], rtol=LOSS_RTOL)
    assert_near(state.params, expected.params, rtol=1e-5, atol=1e-6)


def test_the_user_may_hand_on_another_value_than_the_loss():
    optimizer = optax.polyak_sgd(0.5)
    step = jaxferry.train_step(TASK.loss_fn, optimizer, extra_args={"value": 0.0})
    with pytest.warns(UserWarning, match="updates do not overlap"):
        state = step.init(TASK.params)
    state, _ = step(state, TASK.batch)
    assert_same_bits(state.params, TASK.params)
    state, _ = step(state, TASK.batch, extra_args={"value": 1e-3})
    updates, _ = optimizer.update(
        jax.grad(TASK.loss_fn)(TASK.params, TASK.batch), optimizer.init(TASK.params), TASK.params, value=1e-3
    )
    for ours, theirs in zip(
        jax.tree.leaves(state.params), jax.tree.leaves(optax.apply_updates(TASK.params, updates)), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"temperatur": 1.0}, r"extra_args must be a tree like its current value: .*'temperatur'.* is new"),
        ({1: 2.0}, r"extra_args must map names to numbers, arrays or trees of them, got \{1: 2.0\}"),
        (None, "extra_args must map names to numbers, arrays or trees of them, got None"),
        ({"temperature": np.ones(2)}, r"extra_args, leaf \['temperature'\], must have shape \(\), got \(2,\)"),
    ],
)
def test_arguments_of_a_step_that_the_optimizer_was_not_made_for_are_refused(given, message):
    step = jaxferry.train_step(TASK.loss_fn, tempered(), extra_args={"temperature": 1.0, "offsets": {"more": [1, 1]}})
    state = step.init(TASK.params)
    with pytest.raises(jaxferry.InputError, match=message):
        step(state, TASK.batch, extra_args=given)


@pytest.mark.parametrize("name", slow_but(("monitored", "counts in updates", "dtype of updates"), CHANGING))
@pytest.mark.filterwarnings("ignore:the optimizer looks at")
def test_a_state_whose_structure_the_first_update_changes_is_shown_saved_and_assigned_as_optax_has_it(name, tmp_path):
    optimizer = CHANGING[name]
    step, params, own = jaxferry.train_step(TASK.loss_fn, optimizer), TASK.params, optimizer.init(TASK.params)
    state = step.init(TASK.params)
    for number in range(3):
        assert_same_state(state.opt_state, own)
        step.save(state, tmp_path / str(number))
        copied, restored = state.copy(), step.restore(tmp_path / str(number))
        assigned = step.init(state.params)
        assigned.opt_state = state.opt_state
        for other in (copied, restored, assigned):
            assert_same_bits(other.opt_state, state.opt_state)
        state, _ = step(state, TASK.batch)
        for other in (copied, restored, assigned):
            step(other, TASK.batch)
            assert_same_bits((other.params, other.opt_state), (state.params, state.opt_state))
        updates, own = optimizer.update(jax.grad(TASK.loss_fn)(params, TASK.batch), own, params)
        params = optax.apply_updates(params, updates)


@pytest.mark.parametrize("added", [(), jnp.ones(())], ids=["without leaves", "with leaves"])
def test_a_state_that_changes_its_structure_in_every_update_is_refused_by_name(added):
    growing = changing(Counted({}), lambda u, state: (u, Counted({**state.counts, f"n{len(state.counts)}": added})))
    step = jaxferry.train_step(TASK.loss_fn, optax.chain(optax.adam(1e-2), growing))
    with pytest.raises(
        jaxferry.InputError, match="the optimizer's Counted has another structure, shape or dtype after"
    ):
        step.init(TASK.params)


def test_an_assigned_state_of_another_structure_is_refused():
    step = jaxferry.train_step(TASK.loss_fn, CHANGING["counts in updates"])
    with pytest.warns(UserWarning, match="updates do not overlap"):
        state = step.init(TASK.params)
    with pytest.raises(jaxferry.InputError, match=r"state\.opt_state must be a tree like its current value"):
        state.opt_state = (state.opt_state[0], Counted({"others": np.int32(1)}))
