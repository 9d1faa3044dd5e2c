import importlib
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxferry
import models
from jaxferry.modes import Mode
from jaxferry.transport import Placement
from planned import assert_same_bits, plan_of, step_of, train
from slowly import slow
from tolerances import LOSS_RTOL, PARAMS_RTOL

SGD = optax.sgd(0.1)


def test_the_module_is_imported_as_users_write_it():
    importlib.import_module("jaxferry.train_step")
    assert callable(jaxferry.train_step)
    assert isinstance(jaxferry.train_step(lambda p, b: p, optax.sgd(1)), jaxferry.TrainStep)


def test_dropout_keys_travel_as_a_keyword_or_in_the_batch():
    task = models.mlp(depth=1, dropout=0.2)
    key = jax.random.key(7)
    _, losses = train(jaxferry.train_step(task.loss_fn, SGD), task, 3, rng=key)
    in_batch = jaxferry.train_step(lambda params, batch: task.loss_fn(params, batch[0], batch[1]), SGD)
    state, others = in_batch.init(task.params), []
    for _ in range(3):
        state, metrics = in_batch(state, (task.batch, key))
        others.append(float(metrics["loss"]))
    _, expected = models.plain_loop(task, SGD, 3, rng=key)
    assert losses == others
    np.testing.assert_allclose(losses, expected, rtol=LOSS_RTOL)


def test_aux_outputs_come_back_in_their_own_tree(gpt):
    def loss_fn(params, batch):
        loss = gpt.loss_fn(params, batch)
        aux = {"double": 2 * loss, "tokens": batch.sum(), "table": params["wte"]["embedding"].mean()}
        more = [loss, jnp.zeros(2), params["ln_f"]["scale"] * 1]
        return loss, {**aux, "batch": batch, "none": None, "number": 1.5, "more": more}

    step = jaxferry.train_step(loss_fn, optax.sgd(0.1))
    state, metrics = step(step.init(gpt.params), gpt.batch)
    assert metrics["aux"].keys() == {"double", "tokens", "table", "batch", "none", "number", "more"}
    np.testing.assert_allclose(metrics["aux"]["double"], 2 * metrics["loss"], rtol=1e-6)
    assert metrics["aux"]["tokens"] == gpt.batch.sum()
    np.testing.assert_allclose(metrics["aux"]["table"], gpt.params["wte"]["embedding"].mean(), rtol=1e-5)
    loss, aux = step.evaluate(state, gpt.batch)
    assert float(loss) < float(metrics["loss"]) and aux.keys() == metrics["aux"].keys()
    for each in (aux, metrics["aux"]):
        np.testing.assert_array_equal(each["batch"], gpt.batch)
        assert each["none"] is None and each["number"] == 1.5
        np.testing.assert_array_equal(each["more"][1], np.zeros(2))
        assert each["more"][2].shape == (32,)


@pytest.mark.parametrize(
    "options", [{"policy": "l2l", "clip_norm": 0.1}, *slow({}, {"remat": "full", "accumulate": 2})], ids=str
)
def test_aux_may_run_the_model_again_after_the_loss(options):
    def apply(params, x):
        for name in ("first", "second", "third"):
            x = jnp.tanh(x @ params[name]["w"] + params[name]["b"])
        return x

    def loss_fn(params, batch):
        loss = jnp.square(apply(params, batch)).mean()
        return loss, {"loss": loss, "after": apply(params, batch * (1 + loss))}

    params = {
        name: {"w": np.random.default_rng(n).normal(size=(6, 6)).astype(np.float32), "b": np.full(6, 0.1, np.float32)}
        for n, name in enumerate(("first", "second", "third"))
    }
    batch = np.ones((2, 6), np.float32)
    alone = jaxferry.train_step(lambda p, b: loss_fn(p, b)[0], SGD, **options)
    step = jaxferry.train_step(loss_fn, SGD, **options)
    expected, state = alone.init(params), step.init(params)
    for _ in range(4):
        loss, aux = loss_fn(state.params, batch)
        expected, metrics = alone(expected, batch)
        state, others = step(state, batch)
        np.testing.assert_allclose(others["loss"], metrics["loss"], rtol=LOSS_RTOL)
        np.testing.assert_allclose(others["aux"]["after"], aux["after"], rtol=LOSS_RTOL)
        np.testing.assert_allclose(others["aux"]["loss"], loss, rtol=LOSS_RTOL)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=PARAMS_RTOL, atol=1e-6), state.params, expected.params
    )
    loss, aux = step.evaluate(state, batch)
    np.testing.assert_allclose(aux["after"], apply(state.params, batch * (1 + loss)), rtol=LOSS_RTOL)


def test_init_copies_numpy_and_jax_arrays(gpt):
    params = jax.tree.map(np.array, gpt.params)
    step = step_of(gpt, SGD)
    from_numpy, losses = train(step, models.Task(gpt.loss_fn, params, gpt.batch), 3)
    from_jax, others = train(step, gpt, 3)
    assert losses == others
    assert_same_bits(params, gpt.params)
    assert_same_bits(from_numpy.params, from_jax.params)


def aligned(array):
    """A copy whose memory begins where JAX takes NumPy's as it is."""
    memory = np.empty(array.nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    own = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    own[...] = array
    return own


@pytest.mark.parametrize("options", [{}, {"trainable": lambda path: "l1" in path, "compute_dtype": jnp.bfloat16}])
def test_what_the_caller_does_with_its_arrays_changes_nothing(options):
    def loss_fn(params, x):
        for name in ("l0", "l1"):
            x = jnp.tanh(x @ params[name]["w"])
        return jnp.mean(x**2), x

    given = {name: {"w": aligned(np.eye(32, dtype=np.float32) / 2)} for name in ("l0", "l1")}
    batch = aligned(np.linspace(-1, 1, 64, dtype=np.float32).reshape(2, 32))
    same = jax.tree.map(np.array, (given, batch))
    step = jaxferry.train_step(loss_fn, optax.sgd(0.1), **options)
    state = step.init(given)
    jax.tree.map(lambda leaf: leaf.fill(7), given)
    state, metrics = step(state, batch)
    batch.fill(7)
    expected, others = step(step.init(same[0]), same[1])
    assert_same_bits(state.params, expected.params)
    assert_same_bits(metrics["aux"], others["aux"])


@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (lambda p, b: p["w"] * b, r"its loss is float32\[3\]"),
        (lambda p, b: (p["w"] * b).sum().astype(jnp.int32), "its loss is int32"),
        (lambda p, b: {"loss": (p["w"] * b).sum()}, r"must return a scalar, or \(scalar, aux\); it returns a dict"),
        (lambda p, b: None, r"it returns None: is a `return` missing\?"),
        (lambda p, b: 3 * ((p["w"] * b).sum(),), "it returns a tuple of 3"),
        (lambda p, b: ([(p["w"] * b).sum()], b), "it returns a list of 1 and aux"),
        (lambda p, b: b.sum(), "reads? no parameter|no parameter"),
    ],
)
def test_a_loss_that_is_no_scalar_of_the_parameters_is_refused(loss_fn, message):
    step = jaxferry.train_step(loss_fn, optax.sgd(0.1))
    state = step.init({"w": np.ones(3, np.float32)})
    with pytest.raises(jaxferry.PartitionError, match=message):
        step(state, jnp.ones(3))


@pytest.mark.parametrize("adamw", [optax.adamw, jaxferry.adamw], ids=["optax", "fused"])
def test_a_parameter_that_is_never_read_trains_with_a_zero_gradient_and_says_so_once(gpt, adamw):
    params = {**gpt.params, "spare": {"w": np.ones(3, np.float32)}}
    step = jaxferry.train_step(gpt.loss_fn, adamw(0.1, weight_decay=0.5))
    state = step.init(params)
    with pytest.warns(UserWarning, match="never reads 'spare/w'"):
        state, _ = step(state, gpt.batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state, _ = step(state, gpt.batch)
        state, _ = step(state, gpt.batch[:1])
    np.testing.assert_allclose(state.params["spare"]["w"], 0.95**3 * np.ones(3), rtol=1e-6)


def test_a_device_that_is_too_small_names_the_variable_that_limits_it(gpt, monkeypatch):
    monkeypatch.setattr(Placement, "memory_facts", lambda self: {"memory_limit_bytes": 1000})
    step = jaxferry.train_step(gpt.loss_fn, optax.sgd(0.1))
    with pytest.raises(jaxferry.BudgetError, match="of a card, JAX takes the share XLA_PYTHON_CLIENT_MEM_FRACTION"):
        step(step.init(gpt.params), gpt.batch)


def test_a_budget_that_is_too_small_names_the_smallest_possible(gpt):
    step = jaxferry.train_step(gpt.loss_fn, optax.sgd(0.1), memory_budget=1000)
    with pytest.raises(jaxferry.BudgetError, match="the smallest possible is") as caught:
        step(step.init(gpt.params), gpt.batch)
    smallest = caught.value.smallest_bytes
    assert str(smallest) in str(caught.value) and "XLA_PYTHON_CLIENT_MEM_FRACTION" not in str(caught.value)
    fits = jaxferry.train_step(gpt.loss_fn, optax.sgd(0.1), memory_budget=smallest)
    fits(fits.init(gpt.params), gpt.batch)
    short = jaxferry.train_step(gpt.loss_fn, optax.sgd(0.1), memory_budget=smallest - 1)
    with pytest.raises(jaxferry.BudgetError):
        short(short.init(gpt.params), gpt.batch)


def test_a_state_of_another_step_is_refused(gpt):
    one, other = (jaxferry.train_step(gpt.loss_fn, optax.sgd(0.1)) for _ in range(2))
    one.init(gpt.params)
    with pytest.raises(jaxferry.StateError, match="belongs to another"):
        one(other.init(gpt.params), gpt.batch)
    with pytest.raises(jaxferry.StateError, match="must come from this step's init"):
        one(gpt.params, gpt.batch)


def test_a_plan_for_another_model_is_refused(gpt):
    step = jaxferry.train_step(gpt.loss_fn, optax.sgd(0.1), plan=plan_of(models.mlp(depth=3), [Mode.GFGB]))
    with pytest.raises(jaxferry.InputError, match="the plan is for another model"):
        step(step.init(gpt.params), gpt.batch)


def test_layers_with_different_derivative_rules_share_no_program():
    def scaled(factor):
        function = jax.custom_jvp(jnp.tanh)
        function.defjvp(lambda primals, tangents: (jnp.tanh(primals[0]), factor * tangents[0]))
        return function

    rules = [scaled(factor) for factor in (1.0, 2.0, 3.0, 3.0)]
    params = {f"l_{i}": {"d": {"w": np.eye(4, dtype=np.float32) * 0.5}} for i in range(4)}

    def loss_fn(params, x):
        for i, rule in enumerate(rules):
            x = rule(x @ params[f"l_{i}"]["d"]["w"])
        return jnp.mean(x**2)

    x = jnp.ones((2, 4))
    step = jaxferry.train_step(loss_fn, optax.sgd(1.0))
    state, _ = step(step.init(params), x)
    for name, gradient in jax.grad(loss_fn)(params, x).items():
        actual = params[name]["d"]["w"] - state.params[name]["d"]["w"]
        np.testing.assert_allclose(actual, gradient["d"]["w"], rtol=1e-5, atol=1e-6)


def test_a_python_number_and_an_array_of_its_dtype_are_different_arguments():
    params = {"a": {"w": np.ones((4, 4), jnp.bfloat16)}}

    def loss_fn(params, x, scale):
        return jnp.mean(((x @ params["a"]["w"]) * scale).astype(jnp.float32) ** 2)

    x = jnp.full((2, 4), 1.1, jnp.bfloat16)
    step = jaxferry.train_step(loss_fn, optax.sgd(0.0))
    state = step.init(params)
    for scale in (0.3, np.float32(0.3), 0.3):
        state, metrics = step(state, x, scale)
        assert float(metrics["loss"]) == float(jax.jit(loss_fn)(params, x, scale))


def test_flags_are_handed_through_and_python_numbers_are_traced():
    def loss_fn(params, batch, scale, train=False, kind="sum"):
        assert isinstance(train, bool) and isinstance(kind, str)
        y = (params["w"] * batch).sum() if kind == "sum" else (params["w"] * batch).mean()
        return y * scale * (2 if train else 1)

    step = jaxferry.train_step(loss_fn, optax.sgd(0.0))
    state = step.init({"w": np.ones(4, np.float32)})
    state, metrics = step(state, jnp.ones(4), 3.0, train=True)
    assert metrics["loss"] == 24
    state, metrics = step(state, jnp.ones(4), 5.0, train=True, kind="mean")
    assert metrics["loss"] == 10
    assert step.evaluate(state, jnp.ones(4), 2) == 8


def test_evaluating_first_does_not_make_the_state_change_its_layers_back_and_forth():
    table = {"word": {"embedding": np.ones((50, 4), np.float32)}, "norm": {"scale": np.ones(4, np.float32)}}
    params = {"embeddings": table, "head": {"kernel": np.ones((4, 50), np.float32) / 50}}

    def loss_fn(params, tokens):
        x = jnp.take(params["embeddings"]["word"]["embedding"], tokens, axis=0) * params["embeddings"]["norm"]["scale"]
        return (x @ params["head"]["kernel"]).var()

    step = jaxferry.train_step(loss_fn, optax.sgd(0.1))
    state = step.init(params)
    step.evaluate(state, jnp.arange(6))
    layers = state.host.layers
    assert [layer.name for layer in layers] == ["embeddings/word", "embeddings", "head"]
    state, _ = step(state, jnp.arange(9))
    step.evaluate(state, jnp.arange(6))
    assert state.host.layers is layers


@pytest.mark.parametrize("params", [jnp.ones((8, 2)), [jnp.ones((8, 2)), jnp.ones((8, 3))], {"w": jnp.float32(1)}])
def test_parameters_may_be_any_tree_down_to_a_single_array(params):
    task = models.Task(
        lambda p, b: sum(jnp.tanh(b.sum() * w).sum() for w in jax.tree.leaves(p)), params, jnp.ones(8) / 9
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state, losses = train(jaxferry.train_step(task.loss_fn, optax.adam(0.01)), task, 3)
    np.testing.assert_allclose(losses, models.plain_loop(task, optax.adam(0.01), 3)[1], rtol=LOSS_RTOL)
    assert jax.tree.structure(state.params) == jax.tree.structure(params)


def test_effects_run_once_a_step(gpt):
    seen = []

    def loss_fn(params, batch):
        jax.debug.callback(lambda total: seen.append(int(total)), batch.sum())
        return gpt.loss_fn(params, batch)

    step = jaxferry.train_step(loss_fn, optax.sgd(0.1))
    state = step.init(gpt.params)
    for _ in range(2):
        state, _ = step(state, gpt.batch)
    jax.effects_barrier()
    assert seen == [int(gpt.batch.sum())] * 2


def test_shapes_are_refused_where_values_are_needed(gpt):
    step = jaxferry.train_step(gpt.loss_fn, optax.adamw(1e-3))
    shapes = jax.eval_shape(lambda: gpt.params)
    with pytest.raises(jaxferry.InputError, match="needs the parameters' values, got shapes alone: pass arrays, or to"):
        step.init(shapes)
    state = step.init(gpt.params)
    for name in ("params", "opt_state"):
        shapes = jax.eval_shape(lambda tree: tree, getattr(state, name))
        with pytest.raises(
            jaxferry.InputError, match=rf"state\.{name}, leaf .* must be an array .*, got a shape alone"
        ):
            setattr(state, name, shapes)
    batch = jax.ShapeDtypeStruct(gpt.batch.shape, gpt.batch.dtype)
    for call in (step, step.evaluate):
        with pytest.raises(jaxferry.InputError, match=r"got shapes alone: step\.prepare takes shapes"):
            call(state, batch)
    assert np.isfinite(step(state, gpt.batch)[1]["loss"])
