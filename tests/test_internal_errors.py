"""An internal error says so, keeps the state, and is never called an error of the user's; theirs name file and line."""

import re
from pathlib import Path
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxferry
from jaxferry import errors
from jaxferry.engine import executor
from jaxferry.step import Operation
from jaxferry.training import TrainedShapes
from models import chain

DEPTH = 3
X = np.ones((8, 16), np.float32)
STAGES = {
    "tracing": "jaxferry.partition.tracing.find_scans",
    "partition": "jaxferry.partition.build.check_outputs",
    "costs": "jaxferry.costs.estimate._estimate_layer",
    "planning": "jaxferry.planner.planning.as_run",
    "compilation": "jaxferry.engine.lowering.last_readers",
    "step": "jaxferry.engine.runner.DeviceCopies",
    "transfer": "jaxferry.transport.placement.spread",
    "checkpoint": "jaxferry.checkpoint.write_arrays",
}
"""A function that each stage calls."""

REPORT = r"please report it at https://github\.com/\S+/issues with its traceback.*--traceback.*JAXFERRY_TRACEBACK=1"


loss_fn = chain()


def make(loss=None, optimizer=None, **options):
    loss = loss or (lambda params, x: loss_fn(params, x))  # steps of one function share its segments
    options = {"policy": "memferry", "profile": "estimate"} | options
    step = jaxferry.train_step(loss, optimizer or optax.adam(1e-2), **options)
    return step, step.init({f"w{i}": np.full((16, 16), 0.1 * (i + 1), np.float32) for i in range(DEPTH)})


def run(step, state, folder):
    step(state, X)
    state.block_until_ready()
    step.save(state, folder)


@pytest.mark.parametrize("stage", STAGES)
def test_an_internal_error_of_each_stage_says_so_and_the_state_trains_on_with_the_same_bits(
    stage, monkeypatch, tmp_path
):
    step, state = make()
    if stage in ("step", "transfer", "checkpoint"):
        step.prepare(X)
    before = state.params
    with monkeypatch.context() as patched:
        patched.setattr(STAGES[stage], Mock(side_effect=KeyError("lost")))
        pattern = rf"internal error of JaxFerry in \S+\.py, line \d+, stage {stage}: KeyError: 'lost'; {REPORT}"
        with pytest.raises((jaxferry.InternalError, jaxferry.TaskError), match=pattern) as caught:
            run(step, state, tmp_path / "saved")
    cause = caught.value.__cause__
    assert (
        isinstance(cause, KeyError) and cause.__traceback__ is not None and str(Path(__file__)) not in str(caught.value)
    )
    assert state.damage is None
    if stage != "checkpoint":
        assert state.step == 0 and "the state is that before the step" in str(caught.value)
        jax.tree.map(np.testing.assert_array_equal, state.params, before)
        run(step, state, tmp_path / "saved")
    other, expected = make()
    other(expected, X)
    jax.tree.map(np.testing.assert_array_equal, state.params, expected.params)


def test_an_internal_error_while_layers_are_updated_says_what_it_has_left_of_the_state(monkeypatch):
    step, state = make()
    step(state, X), state.block_until_ready()
    before = state.params
    with monkeypatch.context() as patched:
        patched.setattr("jaxferry.engine.runner.collect_results", Mock(side_effect=KeyError("lost")))
        with pytest.raises((jaxferry.TaskError, jaxferry.StateError), match=f"internal error.*{REPORT}") as caught:
            step(state, X)
    if state.damage is None:
        assert "the state is that before the step" in str(caught.value)
        jax.tree.map(np.testing.assert_array_equal, state.params, before)
    else:
        assert "the state lies between two steps: restore a checkpoint" in str(caught.value)


def test_an_internal_error_outside_of_steps_says_so_too(monkeypatch, tmp_path):
    step, state = make()
    step.save(state, tmp_path / "saved")

    def save_beside():
        step.save(state, tmp_path / "saved", wait=False)
        step.wait_for_saves()

    for function, stage, call in (
        ("checkpoint.write_arrays", "checkpoint", save_beside),
        ("checkpoint.leaves.indices", "checkpoint", lambda: step.restore(tmp_path / "saved")),
        ("training.entry.read_options", "arguments", make),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(f"jaxferry.{function}", Mock(side_effect=KeyError("lost")))
            with pytest.raises(jaxferry.InternalError, match=rf"stage {stage}: KeyError: 'lost'; {REPORT}"):
                call()
    step.wait_for_saves()  # raises an error once
    assert step.restore(tmp_path / "saved").step == 0


@pytest.mark.parametrize("error", [ValueError, RuntimeError])
@pytest.mark.parametrize("function", ["arrays.chunk_shape", "arrays._numbered", "leaves.indices", "leaves.read_about"])
def test_an_internal_error_of_a_checkpoint_is_not_told_as_the_file_system_s(function, error, monkeypatch, tmp_path):
    step, state = make()
    step.save(state, tmp_path / "saved")
    function = function.replace("leaves.read_about", "read_about")
    monkeypatch.setattr(f"jaxferry.checkpoint.{function}", Mock(side_effect=error("lost")))
    with pytest.raises(jaxferry.InternalError, match=rf"stage checkpoint: {error.__name__}: lost; {REPORT}"):
        step.save(state, tmp_path / "other")
        step.restore(tmp_path / "saved")


OF_THREADS = [
    Operation.LOAD,
    Operation.FORWARD,
    Operation.OFFLOAD,
    Operation.UPDATE,
    *(f"ready_tasks.ReadyTasks.{name}" for name in ("_end_for", "arrive", "has_started", "take")),
    *("lanes.Monitor.wake", "lanes.StepRun._next_task", "lanes._do_tasks"),
]


@pytest.mark.parametrize("where", OF_THREADS)
def test_an_internal_error_of_a_thread_in_a_task_or_between_two_fails_the_step_which_nobody_waits_for_forever(
    where, monkeypatch
):
    step, state = make()
    step(state, X), state.block_until_ready()
    before = state.params
    with monkeypatch.context() as patched:
        failing = Mock(side_effect=ZeroDivisionError("by nothing"))
        if isinstance(where, Operation):
            patched.setitem(executor.OPERATIONS, where, failing)
        else:
            patched.setattr(f"jaxferry.engine.{where}", failing)
        match = rf"internal error of JaxFerry .*ZeroDivisionError: by nothing.*{REPORT}"
        with pytest.raises(jaxferry.TaskError, match=match) as caught:
            step(state, X), state.block_until_ready()
    assert "the state is that before the step" in str(caught.value)
    assert state.damage is None and state.step == 1
    jax.tree.map(np.testing.assert_array_equal, state.params, before)
    other, expected = make()
    for trained, of in ((step, state), (other, expected), (other, expected)):
        trained(of, X)
    jax.tree.map(np.testing.assert_array_equal, state.params, expected.params)


def broken_optimizer(part):
    given = optax.adam(1e-2)

    def fails(*args):
        raise KeyError("of the user")

    return given._replace(**{part: fails})


def broken_loss(params, x):
    raise KeyError("of the user")


class BrokenLeaf:
    shape, dtype = (16, 16), np.dtype(np.float32)

    def __array__(self, *args, **kwargs):
        raise KeyError("of the user")


def of_users():
    step, state = make()
    return {
        "loss": lambda: (lambda step, state: step(state, X))(*make(broken_loss)),
        "apply": lambda: step.apply(state, broken_loss, X),
        "init of the optimizer": lambda: make(optimizer=broken_optimizer("init")),
        "update of the optimizer": lambda: make(optimizer=broken_optimizer("update")),
        "init_fn": lambda: step.init_from(lambda key: broken_loss(key, key), jax.random.key(0)),
        "trainable": lambda: make(trainable=lambda path: broken_loss(path, path)),
        "leaf": lambda: step.init({f"w{i}": BrokenLeaf() for i in range(DEPTH)}),
    }


@pytest.mark.parametrize("where", of_users())
def test_an_error_raised_in_a_function_of_the_users_stays_what_it_is(where):
    with pytest.raises(KeyError, match="of the user") as caught:
        of_users()[where]()
    assert str(caught.traceback[-1].path) == __file__


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: (lambda step, state: step(state, X, X))(*make()), TypeError, "takes 2 positional arguments"),
        (
            lambda: make(optimizer=optax.GradientTransformation(lambda: (), optax.sgd(1.0).update)),
            TypeError,
            "takes 0 pos",
        ),
        (lambda: make(optimizer=optax.masked(optax.adam(1.0), {"w0": True})), ValueError, "pytree structure error"),
        (lambda: (lambda step, state: step(state, X))(*make(lambda p, x: "loss")), jaxferry.PartitionError, "a str"),
    ],
    ids=["arguments of the loss", "arguments of the optimizer", "mask", "result"],
)
def test_a_call_that_a_function_of_the_users_does_not_take_is_no_internal_error(call, error, match):
    with pytest.raises(error, match=match) as caught:
        call()
    assert not isinstance(caught.value, jaxferry.InternalError)


def leaked_tracer():
    kept = []
    jax.jit(lambda x: kept.append(x) or x)(X)
    return kept[0]


def of_leaks():
    step, state = make()
    leaked, own = leaked_tracer(), optax.adam(1e-2)
    init = optax.GradientTransformation(lambda params: (leaked.sum(), own.init(params)), lambda g, s, p=None: (g, s))
    update = own._replace(update=lambda g, s, p=None: (jax.tree.map(lambda a: a + leaked.sum(), g), s))
    return {
        "loss": lambda: (lambda step, state: step(state, X))(*make(lambda p, x: loss_fn(p, x + leaked))),
        "part of the loss": lambda: (lambda step, state: step(state, X))(
            *make(lambda p, x: loss_fn(p, x) * leaked.sum())
        ),
        "apply": lambda: step.apply(state, lambda p, x: loss_fn(p, x) + leaked, X),
        "init of the optimizer": lambda: make(optimizer=init),
        "update of the optimizer": lambda: make(optimizer=update),
        "init_fn": lambda: step.init_from(lambda key: {f"w{i}": X.T @ leaked for i in range(DEPTH)}, jax.random.key(0)),
        "params": lambda: step.init({f"w{i}": leaked for i in range(DEPTH)}),
        "batch": lambda: step(state, leaked),
    }


@pytest.mark.parametrize("where", of_leaks())
def test_a_tracer_that_a_function_of_the_users_has_kept_is_no_internal_error(where):
    with pytest.raises((jaxferry.InputError, jax.errors.UnexpectedTracerError), match=r"tracer|under jax\.jit"):
        of_leaks()[where]()


RETURNED = [
    (lambda g, s: g, r"must return \(updates, state\), it returned a dict"),
    (lambda g, s: None, r"must return \(updates, state\), it returned None"),
    (lambda g, s: (g, s, s), r"must return \(updates, state\), it returned a tuple of 3"),
    (lambda g, s: ("abc", s), "must return updates of arrays, it returned a str"),
    (lambda g, s: (None, s), r"must have the tree of the gradients: they lack \['w0'\]"),
    (lambda g, s: ({"w1": g["w1"], "w2": g["w2"]}, s), r"they lack \['w0'\]"),
    (lambda g, s: ({**g, "w3": g["w0"]}, s), r"they add \['w3'\]"),
    (lambda g, s: (g, "abc"), "must return a state of arrays, it returned a str"),
]


def of_wrong_kind():
    step, state = make()
    key = jax.random.key(0)
    init_only = optax.GradientTransformation(lambda params: "abc", optax.sgd(1.0).update)
    return {
        "init must return a tree of arrays, it returned a str": lambda: make(optimizer=init_only),
        "init must return a tree of arrays, it returned a str\\b": lambda: TrainedShapes(X, init_only, None),
        "function must be a function of .*, got 3": lambda: step.apply(state, 3, X),
        "init_fn must be a function of a PRNG key, got 3": lambda: step.init_from(3, key),
        "init_fn must return a tree of arrays, it returns a str": lambda: step.init_from(lambda key: "abc", key),
        "rng must be a PRNG key or a tree of arrays, got a str": lambda: step.init_from(lambda key: {"a": X}, "abc"),
    }


@pytest.mark.parametrize(("update", "match"), RETURNED)
def test_what_an_optimizer_s_update_returns_is_refused_by_what_it_is(update, match):
    optimizer = optax.GradientTransformation(lambda params: optax.EmptyState(), lambda g, s, params=None: update(g, s))
    with pytest.raises(jaxferry.InputError, match=match):
        make(optimizer=optimizer)


@pytest.mark.parametrize("match", of_wrong_kind())
def test_what_is_no_function_or_makes_no_array_is_refused_by_its_name(match):
    with pytest.raises(jaxferry.InputError, match=match):
        of_wrong_kind()[match]()


def test_an_operation_without_a_derivative_is_refused_as_by_jax():
    def loss(params, x):
        x = jax.pure_callback(np.asarray, jax.ShapeDtypeStruct((8, 16), jnp.float32), x @ params["w0"])
        return jnp.mean(x)

    step, state = make(loss)
    with pytest.raises(ValueError) as expected:
        jax.grad(loss)(state.params, X)
    with pytest.raises(ValueError, match=re.escape(str(expected.value))):
        step(state, X)
    assert state.step == 0


@pytest.mark.parametrize("end", ["Connection reset by peer", "Connection closed by peer", "Timed out waiting 30000ms"])
def test_the_end_of_another_process_is_not_told_as_an_error_of_the_package(end):
    error = ValueError(f"UNKNOWN: Gloo AllGather failed: [external/gloo/pair.cc:534] {end} [127.0.0.1]:5\nmore")
    assert not errors.is_internal(error)
    told = errors.described(error)
    assert told.startswith("another process has ended, or cannot be reached: UNKNOWN: Gloo") and "\n" not in told
