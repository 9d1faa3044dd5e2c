"""Frozen parameters: loaded or read like others, but without gradient, optimizer state and update."""

import contextlib
import functools
import gc

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxferry
import models
from jaxferry.modes import Mode
from jaxferry.step import Kind
from planned import assert_near, assert_same_bits, plan_of, train
from slowly import slow
from tolerances import LOSS_RTOL, PARAMS_RTOL
from watched import live_arrays

WIDTH, RANK, DEPTH = 16, 2, 4
ADAMW, CLIPPED = optax.adamw(1e-2, eps=1e-3), optax.chain(optax.clip_by_global_norm(0.05), optax.adamw(1e-2))


def is_trained(path):
    """The adapters of two blocks, and the norm after all of them."""
    return ("lora" in path and path.startswith(("block_1", "block_2"))) or path.startswith("norm")


def labels(params):
    return jax.tree_util.tree_map_with_path(
        lambda path, _: "adapter" if is_trained("/".join(key.key for key in path)) else "frozen", params
    )


@pytest.mark.parametrize(
    ("trainable", "match"),
    [
        (nnx.PathContains("lora"), "must be a function of a parameter's path, .* got PathContains$"),
        (nnx.Param, "must say True or False for every parameter, got 'a Param' for 'w'$"),
        (lambda path: path, "must say True or False for every parameter, got 'w' for 'w'$"),
    ],
)
def test_what_is_no_function_of_a_path_is_refused_in_a_line(trainable, match):
    step = jaxferry.train_step(lambda params, x: (params["w"] * x).sum(), optax.sgd(0.1), trainable=trainable)
    with pytest.raises(jaxferry.InputError, match=match):
        step.init({"w": np.ones(3, np.float32)})


def by_label(inner, spoken=labels):
    return optax.multi_transform({"adapter": inner, "frozen": optax.set_to_zero()}, spoken)


@pytest.fixture(scope="module")
def task():
    return models.adapters(DEPTH, WIDTH, RANK)


@functools.cache
def plain(task, inner, num_steps):
    """Parameters and losses of plain Optax that trains by `inner` and freezes by label."""
    return models.plain_loop(task, by_label(inner), num_steps)


def tasks_of(step, task, kind):
    return [t.name.split()[-1] for t in step.prepare(task.batch).schedule.tasks if t.kind is kind]


def masters_beside(state, known):
    """Arrays in host memory that are not `known`, and no masters or moments of trained parameters."""
    state.settle()  # an update donates its arrays
    gc.collect()
    trained = {place(array) for unit in state.host.units for array in jax.tree.leaves((unit.masters, unit.state))}
    found = {where: array for where, array in host_arrays().items() if array.size >= WIDTH}
    return [array for where, array in found.items() if where not in known | trained]


def place(array):
    """Where an array lies: JAX has several objects for one."""
    return array.unsafe_buffer_pointer()


def host_arrays():
    """Arrays in host memory by where they lie, but for those that an update of an earlier test deletes meanwhile."""
    found = {}
    for array in live_arrays():
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            if array.sharding.memory_kind == "unpinned_host":
                found[place(array)] = array
    return found


def frozen_copies(state):
    """Where each vector of frozen parameters lies."""
    return [
        vector.unsafe_buffer_pointer()
        for layer, vectors in zip(state.host.layers, state.host.vectors, strict=True)
        for vector in vectors[len(layer.trained.vectors) :]
    ]


@pytest.mark.parametrize("say", [*("tree of labels", "one pass"), *slow("function", "prefix tree", "labels", "masks")])
def test_however_it_is_said_it_is_what_plain_optax_does(task, say):
    inner = ADAMW
    expected, expected_losses = plain(task, inner, 10)
    off = {"kernel": False, "lora": False, "bias": False}
    prefix = {"table": False, "norm": True, "block_0": False, "block_3": off}
    prefix |= dict.fromkeys(("block_1", "block_2"), off | {"lora": True})
    trained = jax.tree.map(lambda label: label == "adapter", labels(task.params))
    frozen = jax.tree.map(lambda value: not value, trained)
    optimizer, options = {
        "function": (inner, {"trainable": is_trained}),
        "prefix tree": (inner, {"trainable": prefix}),
        "labels": (by_label(inner), {}),
        "tree of labels": (by_label(inner, labels(task.params)), {}),
        "masks": (optax.chain(optax.masked(inner, trained), optax.masked(optax.set_to_zero(), frozen)), {}),
        "one pass": (jaxferry.adamw(1e-2, eps=1e-3), {"trainable": is_trained}),
    }[say]
    state, losses = train(jaxferry.train_step(task.loss_fn, optimizer, **options), task, 10)
    np.testing.assert_allclose(losses, expected_losses, rtol=LOSS_RTOL)
    assert losses[-1] < losses[0]
    assert [state.host.layers[layer].name for unit in state.host.units for layer in unit.layers] == [
        "block_1",
        "block_2",
        "norm",
    ]
    assert sum(leaf.size for leaf in jax.tree.leaves(state.opt_state)) < 3 * (4 * WIDTH * RANK + WIDTH)
    for label, ours, theirs, given in zip(
        *map(jax.tree.leaves, (labels(task.params), state.params, expected, task.params)), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=PARAMS_RTOL, atol=1e-6)
        assert (label == "frozen") == (ours.tobytes() == given.tobytes())


def test_only_what_training_needs_is_scheduled_and_computed(task):
    step = jaxferry.train_step(task.loss_fn, optax.adamw(1e-2), trainable=is_trained)
    state = step.init(task.params)
    state, _ = step(state, task.batch)
    # The head, the norm, a frozen block that a derivative passes through, and the two with adapters.
    assert tasks_of(step, task, Kind.BACKWARD) == ["table#2", "norm", "block_3", "block_2", "block_1"]
    assert tasks_of(step, task, Kind.OFFLOAD) == ["norm", "block_2", "block_1"]
    assert tasks_of(step, task, Kind.UPDATE) == ["norm", "block_2", "block_1"]
    segments = {segment.name: segment for segment in step.prepare(task.batch).partition.segments}
    assert not segments["block_0"].outputs and not segments["block_1"].inputs
    assert segments["block_1"].program != segments["block_0"].program != segments["block_3"].program
    block = next(layer for layer in state.host.layers if layer.name == "block_1")
    assert block.num_parameters == WIDTH * (WIDTH + 2 * RANK + 1)
    assert [leaf.path for leaf in block.trained.leaves] == ["block_1/lora/a", "block_1/lora/b"]
    assert [vector.shape for vector in block.vectors] == [(2 * WIDTH * RANK,), (WIDTH * WIDTH + WIDTH,)]


def test_the_copy_of_a_frozen_parameter_is_never_written_again_and_the_only_one(task):
    known = set(host_arrays())
    step = jaxferry.train_step(task.loss_fn, optax.adamw(1e-2), trainable=is_trained)
    state, _ = train(step, task, 1)
    before = frozen_copies(state)
    for _ in range(3):
        state, _ = step(state, task.batch)
    state.settle()
    assert frozen_copies(state) == before and len(before) == 1 + DEPTH
    assert not masters_beside(state, known)
    assert sum(len(unit.masters) for unit in state.host.units) == 5
    # Another arrangement of the layers takes them along.
    state.arrange(tuple(reversed(state.host.layers)))
    assert_same_bits(state.params["block_0"], task.params["block_0"])
    state, _ = step(state, task.batch)
    state.settle()
    assert not masters_beside(state, known)


@pytest.mark.parametrize("given", [*slow(jnp.float32), jnp.bfloat16])
def test_a_frozen_parameter_keeps_its_dtype_and_bits_whatever_the_compute_dtype(task, given, tmp_path):
    params = jax.tree.map(
        lambda x, label: x if label == "adapter" else x.astype(given), task.params, labels(task.params)
    )
    step = jaxferry.train_step(
        task.loss_fn, optax.adamw(1e-2), trainable=is_trained, compute_dtype=jnp.bfloat16, clip_norm=0.5
    )
    known = set(host_arrays())
    state, losses = train(step, models.Task(task.loss_fn, params, task.batch), 3)
    assert losses[-1] < losses[0]
    assert {str(v.dtype) for vectors in state.host.vectors for v in vectors} == {"bfloat16"}
    state.settle()
    assert len(masters_beside(state, known)) == (0 if given == jnp.bfloat16 else 1 + DEPTH * 4 - 4)
    for label, ours, theirs in zip(*map(jax.tree.leaves, (labels(params), state.params, params)), strict=True):
        assert ours.dtype == (jnp.float32 if label == "adapter" else given)
        assert (label == "frozen") == (ours.tobytes() == np.asarray(theirs).tobytes())
    step.save(state, tmp_path / "saved")
    assert_same_bits(step.restore(tmp_path / "saved").params, state.params)


def test_a_layer_that_is_frozen_and_resident_is_loaded_once(task):
    plan = plan_of(task, [Mode.RESIDENT])
    step = jaxferry.train_step(task.loss_fn, optax.adamw(1e-2), trainable=is_trained, plan=plan)
    state, _ = train(step, task, 2)
    assert tasks_of(step, task, Kind.REFRESH) == ["norm", "block_2", "block_1"]
    names = [state.host.layers[layer].name for layer in state.resident]
    held = {name: state.resident[layer] for name, layer in zip(names, state.resident, strict=True)}
    state, _ = step(state, task.batch)
    now = {state.host.layers[layer].name: copy for layer, copy in state.resident.items()}
    state.settle()
    assert now["block_0"] is held["block_0"] and now["table"] is held["table"]


@pytest.mark.parametrize("spoken", ["tree", *slow("function", "argument")])
def test_a_joint_optimizer_of_the_trained_parameters_leaves_the_others_frozen(task, spoken):
    inner = CLIPPED
    expected = plain(task, inner, 5)[1]
    optimizer = {"function": by_label(inner), "tree": by_label(inner, labels(task.params)), "argument": inner}[spoken]
    step = jaxferry.train_step(task.loss_fn, optimizer, trainable=is_trained if spoken == "argument" else None)
    with pytest.warns(UserWarning, match="looks at all parameters at once"):
        state, losses = train(step, task, 5)
    np.testing.assert_allclose(losses, expected, rtol=LOSS_RTOL)
    assert len(state.host.units) == 1 and len(state.host.units[0].leaves) == 5
    assert tasks_of(step, task, Kind.OFFLOAD) == ["norm", "block_2", "block_1"]


def test_a_parameter_whose_gradient_others_depend_on_is_not_frozen(task):
    optimizer = optax.chain(optax.clip_by_global_norm(0.05), by_label(optax.sgd(1.0)))
    expected = models.plain_loop(task, optimizer, 5)[1]
    step = jaxferry.train_step(task.loss_fn, optimizer)
    with pytest.warns(UserWarning, match="looks at all parameters at once"):
        state, losses = train(step, task, 5)
    np.testing.assert_allclose(losses, expected, rtol=LOSS_RTOL)
    assert len(state.host.units[0].leaves) == len(jax.tree.leaves(task.params))


@pytest.mark.parametrize("where", ["before", "after"])
def test_a_parameter_with_state_or_decay_is_not_frozen(task, where):
    zero = optax.masked(optax.set_to_zero(), jax.tree.map(lambda label: label == "frozen", labels(task.params)))
    chain = [optax.trace(0.9), zero] if where == "before" else [zero, optax.add_decayed_weights(0.1)]
    optimizer = optax.chain(*chain, optax.scale(-0.1))
    expected, losses = models.plain_loop(task, optimizer, 3)
    state, ours = train(jaxferry.train_step(task.loss_fn, optimizer), task, 3)
    np.testing.assert_allclose(ours, losses, rtol=LOSS_RTOL)
    assert len(state.host.units) == len(state.host.layers)
    assert_near(state.params, expected, rtol=PARAMS_RTOL, atol=1e-6)


@pytest.mark.slow
def test_a_profile_knows_what_frozen_layers_do_not_cost_and_policies_plan_with_it(task):
    def make(**more):
        return jaxferry.train_step(task.loss_fn, optax.adamw(1e-2), trainable=is_trained, **more)

    layers = {layer.name: layer for layer in make().measure(task.params, task.batch).layers}
    for name in ("table", "block_0", "block_3", "table#2"):
        assert layers[name].grad_bytes == 0 == layers[name].offload_s == layers[name].update_s
    assert layers["block_0"].backward_s == layers["block_0"].backward_dha_s == 0 < layers["block_3"].backward_s
    assert layers["block_1"].grad_bytes == 8 * WIDTH * RANK < layers["block_1"].param_bytes
    assert layers["block_1"].update_s > 0 < layers["block_1"].offload_s
    expected = train(make(), task, 3)[1]
    for policy in ("exact", "memferry", "go-memferry", "auto", "l2l", "zero-offload"):
        _, losses = train(make(policy=policy, profile="estimate"), task, 3)
        np.testing.assert_allclose(losses, expected, rtol=LOSS_RTOL)


@pytest.mark.cpu_device  # temporaries of another device may leave room for all copies
def test_evaluation_and_budgets_know_frozen_layers(task):
    free = jaxferry.train_step(task.loss_fn, optax.adamw(1e-2), trainable=is_trained)
    state, losses = train(free, task, 3)
    plain = task.loss_fn(jax.tree.map(jnp.asarray, state.params), task.batch)
    np.testing.assert_allclose(free.evaluate(state, task.batch), plain, rtol=LOSS_RTOL)
    whole = jaxferry.train_step(task.loss_fn, optax.adamw(1e-2))
    whole.init(task.params)
    peak = free.prepare(task.batch).peak.total
    assert peak < whole.prepare(task.batch).peak.total
    tight = jaxferry.train_step(task.loss_fn, optax.adamw(1e-2), trainable=is_trained, memory_budget=peak - 1)
    assert train(tight, task, 3)[1] == losses
    assert Mode.RELOAD in tight.prepare(task.batch).modes


def test_what_cannot_be_trained_must_be_frozen():
    params = {"h_0": {"q": np.ones((2, 2), np.int8), "scale": np.ones(2, np.float32)}}
    with pytest.raises(jaxferry.InputError, match=r"'h_0/q' has dtype int8; .* freeze it by trainable="):
        jaxferry.train_step(lambda params, batch: jnp.sum(params["h_0"]["scale"]), ADAMW).init(params)


@pytest.mark.parametrize(
    ("trainable", "match"),
    [
        (lambda path: "nothing" in path, "trainable leaves no parameter to train"),
        (False, "trainable leaves no parameter to train"),
        (lambda path: None, "must say True or False for every parameter, got None for 'block_0/bias/b'"),
        ({"table": True}, "not a tree of booleans that matches the parameters"),
        ("lora", "must say True or False"),
    ],
)
def test_what_is_trainable_must_be_said_for_every_parameter(task, trainable, match):
    with pytest.raises(jaxferry.InputError, match=match):
        jaxferry.train_step(task.loss_fn, optax.sgd(0.1), trainable=trainable).init(task.params)


def test_a_loss_of_frozen_parameters_alone_is_refused(task):
    for optimizer, trainable in ((optax.set_to_zero(), None), (optax.sgd(0.1), lambda path: path == "block_0/bias/b")):
        step = jaxferry.train_step(
            lambda params, batch: params["table"]["w"][batch].mean(), optimizer, trainable=trainable
        )
        state = step.init(task.params)
        with pytest.raises(jaxferry.InputError, match="the loss depends on frozen parameters alone"):
            step(state, task.batch)
