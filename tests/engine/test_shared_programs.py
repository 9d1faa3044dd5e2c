"""Training steps of one model compile each program once, and free it with the last step that holds it."""

import dataclasses
import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxferry
from jaxferry.modes import Mode
from jaxferry.step import LayerPlan, Plan
from slowly import slow_cases
from watched import becomes

NAMES = ("a", "b", "c")
OF_COPIES = {"jit_load", "jit_load_onto", "jit_arrived", "jit_store", "jit_ferry_wait", "jit_ferry_vacate"}
OWN = {*OF_COPIES, "jit_stack", "jit_prelude"}
"""What copies run, what collects the norms there, and what each step has of its own."""
BATCH = np.ones((4, 8), np.float32)
PARAMS = {name: {"w": np.random.default_rng(i).normal(size=(8, 8), scale=0.3)} for i, name in enumerate(NAMES)}
PARAMS = jax.tree.map(lambda leaf: leaf.astype(np.float32), PARAMS)


def network(factor):
    def loss_fn(params, x):
        for name in NAMES:
            x = jnp.tanh(factor * x @ params[name]["w"])
        return jnp.mean(x**2)

    return loss_fn


def plan_of(mode):
    return Plan("test", 1.0, tuple(LayerPlan(name, mode) for name in NAMES))


@pytest.fixture
def compiled(monkeypatch):
    """The names of the functions that XLA compiles."""
    names = []
    original = jax.stages.Lowered.compile

    def compile_(lowered, *args, **kwargs):
        names.append(lowered.as_text().split("module @", 1)[1].split(" ", 1)[0])
        return original(lowered, *args, **kwargs)

    monkeypatch.setattr(jax.stages.Lowered, "compile", compile_)
    return names


def trained(loss_fn, optimizer, **options):
    step = jaxferry.train_step(loss_fn, optimizer, **options)
    state, metrics = step(step.init(PARAMS), BATCH)
    return step, float(metrics["loss"]), state.params


def test_a_step_with_another_plan_compiles_nothing(compiled):
    first = trained(network(1.25), optax.adamw(1.25e-3), plan=plan_of(Mode.GFGB))
    assert compiled
    compiled.clear()
    # The loss function and the optimizer are other objects, of equal content.
    second = trained(network(1.25), optax.adamw(1.25e-3), plan=plan_of(Mode.RELOAD))
    assert OWN.issuperset(compiled)  # other modes load into other buffers
    assert first[1] == second[1]
    np.testing.assert_array_equal(first[2]["a"]["w"], second[2]["a"]["w"])


@pytest.mark.parametrize(
    ("loss_fn", "optimizer", "options"),
    [
        (network(2.0), optax.sgd(0.1), {}),
        *slow_cases((network(1.0), optax.sgd(0.2), {})),
        (network(1.0), optax.sgd(0.1), {"clip_norm": 1e-3}),
        *slow_cases((network(1.0), optax.sgd(0.1), {"compute_dtype": jnp.bfloat16})),
        (network(1.0), optax.sgd(0.1), {"accumulate": 2, "remat": "full"}),
    ],
    ids=["function", "optimizer", "clipping", "dtype", "accumulation"],
)
def test_a_step_that_differs_computes_what_it_computes_alone(loss_fn, optimizer, options):
    expected = trained(loss_fn, optimizer, plan=plan_of(Mode.GFGB), **options)[1:]
    gc.collect()
    beside = trained(network(1.0), optax.sgd(0.1), plan=plan_of(Mode.GFGB))
    found = trained(loss_fn, optimizer, plan=plan_of(Mode.GFGB), **options)[1:]
    assert found[0] == expected[0]
    np.testing.assert_array_equal(found[1]["b"]["w"], expected[1]["b"]["w"])
    assert not np.array_equal(found[1]["b"]["w"], beside[2]["b"]["w"])


@pytest.fixture
def counted():
    """A loss function, and the settings under which it was traced."""
    traced = []
    plain = network(1.0)

    def loss_fn(params, x, scale=1.0, squared=True):
        traced.append((jax.config.jax_default_matmul_precision, squared))
        return plain(params, scale * x) if squared else jnp.sqrt(plain(params, x))

    return loss_fn, traced


def prepared_by(loss_fn, *args, params=PARAMS, **kwargs):
    options = {key: kwargs.pop(key) for key in ("remat", "compute_dtype", "trainable") if key in kwargs}
    step = jaxferry.train_step(loss_fn, optax.sgd(0.1), **options)
    step.init(params)
    return step.prepare(*(args or (BATCH,)), **kwargs)


def test_a_loss_function_is_traced_and_cut_once_for_all_steps(counted):
    loss_fn, traced = counted
    first, second = (prepared_by(loss_fn, plan) for plan in (BATCH, BATCH + 1))
    assert len(traced) == 1
    assert first.partition.graph is second.partition.graph
    assert prepared_by(loss_fn, remat="full").partition.graph is first.partition.graph
    assert len(traced) == 1


def test_what_changes_the_trace_is_traced_again(counted):
    loss_fn, traced = counted
    prepared_by(loss_fn)
    with jax.default_matmul_precision("highest"):
        prepared_by(loss_fn)
    prepared_by(loss_fn, np.ones((2, 8), np.float32))
    prepared_by(loss_fn, BATCH, squared=False)
    prepared_by(loss_fn, compute_dtype=jnp.bfloat16)
    assert traced == [(None, True), ("highest", True), (None, True), (None, False), (None, True)]
    prepared_by(loss_fn, BATCH, squared=False)
    assert len(traced) == 5


@dataclasses.dataclass(eq=False)
class Printed:
    """A callback that prints alike whatever it computes."""

    factor: float = dataclasses.field(repr=False)

    def __call__(self, x):
        return np.asarray(self.factor * x, np.float32)


def test_callbacks_that_print_alike_are_different_programs():
    callbacks = [Printed(1.0), Printed(5.0)]

    def loss_fn(params, x):
        for name, callback in zip(NAMES, (*callbacks, callbacks[0]), strict=True):
            x = jnp.tanh(x @ params[name]["w"])
            x = x + jax.pure_callback(callback, jax.ShapeDtypeStruct(x.shape, x.dtype), jax.lax.stop_gradient(x))
        return jnp.mean(x**2)

    assert trained(loss_fn, optax.sgd(0.1))[1] == pytest.approx(float(loss_fn(PARAMS, BATCH)), rel=1e-5)


def test_parameters_of_another_dtype_have_layers_of_their_own(counted):
    """A frozen parameter is stored in its own dtype, although the loss function sees the compute dtype."""
    frozen = {"compute_dtype": jnp.bfloat16, "trainable": lambda path: not path.startswith("a")}
    halves = {**PARAMS, "a": jax.tree.map(lambda leaf: leaf.astype(jnp.float16), PARAMS["a"])}
    first, second = (prepared_by(counted[0], params=params, **frozen) for params in (PARAMS, halves))
    found = [[leaf.master_dtype for layer in x.partition.layers for leaf in layer.leaves] for x in (first, second)]
    assert found == [[np.float32] * 3, [np.float16, np.float32, np.float32]]


def test_a_partition_is_freed_with_its_loss_function(counted):
    loss_fn = functools.partial(counted[0])
    graph = weakref.ref(prepared_by(loss_fn).partition.graph)
    gc.collect()
    assert graph() is not None  # the fixture holds the function

    def local(params, x):
        return loss_fn(params, x)

    graph = weakref.ref(prepared_by(local).partition.graph)
    del local
    assert becomes(lambda: graph() is None)


@pytest.mark.parametrize("kind", ["method", "callable object", "partial with an array"])
def test_loss_functions_of_every_kind_can_be_shared_or_not(kind):
    class Model:
        __hash__ = None

        def loss(self, params, x):
            return network(1.0)(params, x)

        def __call__(self, params, x):
            return self.loss(params, x)

    def with_array(scale, params, x):
        return network(1.0)(params, scale * x)

    functions = {
        "method": Model().loss,
        "callable object": Model(),
        "partial with an array": functools.partial(with_array, np.ones(8, np.float32)),
    }
    expected = trained(network(1.0), optax.sgd(0.1))[1]
    for _ in range(2):
        assert trained(functions[kind], optax.sgd(0.1))[1] == pytest.approx(expected, rel=1e-6)
