"""JAX's settings around and inside a step: training is the same, or the step is refused before it begins."""

import concurrent.futures
import contextlib
import functools
import os
import pathlib
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxferry
from jaxferry import settings
from pairwise import pairwise
from planned import assert_same_bits
from python_runs import run_python
from settings_runs import FLAGS, loss_fn, make_params, set_flag

X = np.linspace(-1, 1, 32, dtype=np.float32).reshape(4, 8)
OPTIONS = {
    "default": {},
    "device_put": {"transport": "device_put"},
    "one pass, clipped": {"optimizer": jaxferry.adamw(1e-2), "clip_norm": 0.5},
    "accumulated": {"accumulate": 2},
}

CONTEXTS = {
    "debug_nans": lambda: jax.debug_nans(True),
    "debug_infs": lambda: jax.debug_infs(True),
    "disable_jit": jax.disable_jit,
    "check_tracer_leaks": lambda: jax.check_tracer_leaks(True),
    "strict promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "debug_key_reuse": lambda: jax.debug_key_reuse(True),
    "legacy_prng_key": lambda: jax.legacy_prng_key("error"),
    "transfer_guard": lambda: jax.transfer_guard("disallow"),
    "explicit transfer_guard": lambda: jax.transfer_guard("disallow_explicit"),
    "default_device": lambda: jax.default_device(jax.devices("cpu")[1]),
    "thread_guard": lambda: jax.thread_guard(True),
    "mesh": lambda: jax.set_mesh(jax.make_mesh((2,), ("data",))),
} | {f"{name}={value!r}": lambda name=name, value=value: set_flag(name, value) for name, value in FLAGS.items()}


def train(context, options, is_around_the_first_step):
    """Losses and parameters after steps outside and inside of a context, in which everything else is asked too."""
    options = dict(options)
    step = jaxferry.train_step(loss_fn, options.pop("optimizer", optax.adamw(1e-2)), **options)
    state, losses = step.init(make_params()), []
    for number in range(4):
        inside = contextlib.nullcontext() if number in (0 if not is_around_the_first_step else 3, 3) else context()
        with inside, warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="jax_disable_jit")
            state, metrics = step(state, X)
            if number == 2:
                evaluated = step.evaluate(state, X)
                state = state.copy()
                params = state.params
        losses.append(float(metrics["loss"]))
    return losses, float(evaluated), params, state.params


def test_the_loss_function_is_traced_for_the_device_of_the_step():
    seen = []

    def looking(params, x):
        seen.append(jax.config.jax_default_device)
        return loss_fn(params, x)

    step = jaxferry.train_step(looking, optax.sgd(1e-2), device=jax.devices("cpu")[0])
    state, _ = step(step.init(make_params()), X)
    step.evaluate(state, X)
    assert set(seen) == {"cpu"}


def test_a_function_that_computes_while_it_is_traced_is_planned_by_the_device_at_hand():
    seen = []

    def computing(x):
        seen.append(jax.config.jax_default_device)
        with jax.ensure_compile_time_eval():
            ones = jnp.arange(8) * 0 + 1
        return x * ones

    jaxpr = settings.for_planned_gpu(lambda: jax.make_jaxpr(computing)(X))
    assert jaxpr.out_avals[0].shape == X.shape
    assert seen[0] == "gpu" and (len(seen) == 1 or seen[1] is None)


@functools.cache
def expected(options):
    return train(contextlib.nullcontext, OPTIONS[options], False)


@pytest.mark.parametrize(
    ("context", "options", "is_around_the_first_step"), pairwise(CONTEXTS, OPTIONS, (False, True)), ids=str
)
def test_training_has_the_same_bits_under_every_setting(context, options, is_around_the_first_step):
    losses, evaluated, *params = train(CONTEXTS[context], OPTIONS[options], is_around_the_first_step)
    assert (losses, evaluated) == expected(options)[:2]
    assert_same_bits(params, list(expected(options)[2:]))


ENTRIES = {
    "params": lambda step, state, path: state.params,
    "params=": lambda step, state, path: setattr(state, "params", make_params()),
    "lazy_params": lambda step, state, path: np.asarray(state.lazy_params["l0"]["w"]),
    "an element of lazy_params": lambda step, state, path: state.lazy_params["l0"]["w"][1:3],
    "opt_state": lambda step, state, path: state.opt_state,
    "opt_state=": lambda step, state, path: setattr(state, "opt_state", step.init(make_params()).opt_state),
    "set_hyperparams": lambda step, state, path: state.set_hyperparams(learning_rate=0.5),
    "copy": lambda step, state, path: state.copy(),
    "masters": lambda step, state, path: state.masters(),
    "optimizer_state": lambda step, state, path: state.optimizer_state(),
    "stored": lambda step, state, path: state.stored(copied=True),
    "init": lambda step, state, path: step.init(make_params()),
    "prepare": lambda step, state, path: step.prepare(X),
    "evaluate": lambda step, state, path: step.evaluate(state, X),
    "save": lambda step, state, path: step.save(state, path),
    "save in the background": lambda step, state, path: (step.save(state, path, wait=False), step.wait_for_saves()),
    "restore": lambda step, state, path: step.restore(path),
}
STRICT = {
    "jax_transfer_guard": "disallow_explicit",
    "jax_debug_nans": True,
    "jax_disable_jit": True,
    "jax_numpy_dtype_promotion": "strict",
}


@contextlib.contextmanager
def strict_settings(in_whole_process):
    with contextlib.ExitStack() as stack, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="jax_disable_jit")
        for name, value in STRICT.items():
            own = getattr(jax, name.removeprefix("jax_"))
            stack.enter_context(set_flag(name, value) if in_whole_process else own(value))
        stack.enter_context(jax.set_mesh(jax.make_mesh((2,), ("data",))))
        yield


@pytest.mark.parametrize("in_whole_process", [True, False], ids=["flags", "contexts"])
@pytest.mark.parametrize("entry", ENTRIES)
def test_every_entry_works_under_strict_settings(entry, in_whole_process, tmp_path):
    step = jaxferry.train_step(loss_fn, optax.inject_hyperparams(optax.adam)(0.1))
    state, _ = step(step.init(make_params()), X)
    step.save(state, tmp_path / "saved")
    with strict_settings(in_whole_process):
        ENTRIES[entry](step, state, tmp_path / "saved")
        assert jax.config.jax_debug_nans
    assert step(state, X)[0].step == 2


def test_an_entry_that_settings_forbid_leaves_the_step_to_other_threads():
    step = jaxferry.train_step(loss_fn, optax.sgd(0.1))
    state = step.init(make_params())
    with jax.no_execution(True), pytest.raises(jaxferry.InputError, match="jax_no_execution"):
        state.copy()
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        assert threads.submit(step, state, X).result()[0].step == 1


def test_settings_of_numerics_reach_the_loss_function():
    seen = []

    def watched(params, x):
        seen.append((jax.config.jax_default_matmul_precision, str(jax.config.jax_numpy_dtype_promotion)))
        return loss_fn(params, x)

    step = jaxferry.train_step(watched, optax.sgd(0.1))
    state = step.init(make_params())
    with jax.default_matmul_precision("highest"), jax.numpy_dtype_promotion("strict"):
        step(state, X)
    assert seen == [("highest", "strict")]
    step(state, X)
    assert seen[1:] == [(None, "standard")]


def test_a_program_forbidden_by_name_leaves_the_state_as_it_was():
    step = jaxferry.train_step(loss_fn, optax.sgd(0.1))
    state, _ = step(step.init(make_params()), X)
    before = state.params
    with jax.no_execution(True), pytest.raises(jaxferry.InputError, match="jax_no_execution"):
        step(state, X)
    with jax.no_tracing(True):
        state, _ = step(state, X)
        with pytest.raises(jaxferry.InputError, match=r"jax_no_tracing.*new shapes"):
            step(state, X[:2])
    assert state.step == 2
    fresh = jaxferry.train_step(loss_fn, optax.sgd(0.1))
    again, _ = fresh(fresh.init(before), X)
    assert_same_bits(again.params, state.params)


def test_disable_jit_warns_once_that_it_has_no_effect(monkeypatch):
    monkeypatch.setattr(settings, "_warned", set())
    step = jaxferry.train_step(loss_fn, optax.sgd(0.1))
    with jax.disable_jit(), pytest.warns(UserWarning, match="jax_disable_jit has no effect") as caught:
        state = step.init(make_params())
        step(state, X)
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.parametrize("flag", ["jax_debug_nans", "jax_debug_infs"])
@pytest.mark.parametrize("value", [0.0, -1.0], ids=["the loss", "a gradient alone"])
def test_who_looks_for_a_nan_is_told_its_layer_and_keeps_the_state(flag, value):
    """At zero the loss of a root is finite and its derivative is not; below zero both are not."""

    def rooted(params, x):
        x = x @ params["first"]["w"]
        return jnp.mean(jnp.sqrt(x * params["second"]["w"]))

    params = {"first": {"w": jnp.eye(8)}, "second": {"w": jnp.ones(8)}}
    step = jaxferry.train_step(rooted, optax.sgd(0.1))
    state, _ = step(step.init(params), np.ones((4, 8), np.float32))
    before = state.params
    with set_flag(flag, True), pytest.raises(jaxferry.NonFiniteError, match=r"first|second") as caught:
        step(state, np.full((4, 8), value, np.float32))
    assert caught.value.layer in ("first", "second")
    assert_same_bits(state.params, before)


def test_a_program_without_donation_is_refused_before_anything_is_written(monkeypatch):
    """As a setting of a future JAX could make it: the library relies on donation, and says so by name."""
    step = jaxferry.train_step(loss_fn, optax.sgd(0.1), transport="ferry")
    state = step.init(make_params(width=24))  # programs of its own
    before, jit = state.params, jax.jit

    def without(function, **options):
        return jit(function, **{name: value for name, value in options.items() if name != "donate_argnums"})

    with monkeypatch.context() as patched:
        patched.setattr(jax, "jit", without)
        with pytest.raises(jaxferry.JaxFerryError, match="does not donate its argument"):
            step(state, np.ones((4, 24), np.float32))
    assert_same_bits(state.params, before)


LONG = """
import jax, jax.numpy as jnp, numpy as np, optax, jaxferry
from settings_runs import loss_fn, make_params

jax.config.update("jax_debug_nans", True)
for transport in ("ferry", "device_put"):
    step = jaxferry.train_step(loss_fn, optax.adamw(1e-3), transport=transport)
    state = step.init(make_params())
    for _ in range(60):
        state, metrics = step(state, np.ones((4, 8), np.float32))
kept = [np.zeros(size) for size in range(1, 5000)]
"""


@pytest.mark.slow
def test_a_long_run_under_debug_nans_leaves_memory_whole():
    """In a process of its own: copies into freed memory end it after some dozens of steps."""
    run_python("-c", LONG)


TESTS = pathlib.Path(__file__).parent
# Planners and the simulator train nothing. Tests of native operations by themselves donate to programs of their own,
# which jax_debug_nans prevents. Attacks repeat in other processes what other tests show. Tests of a GPU need one.
NOT_TRAINING = {"attack", "gpu", "native", "planner", "step", "weights"}
FOLDERS = sorted({path.parent.name for path in TESTS.glob("*/test_*.py")} - NOT_TRAINING)
TRAINING = {"no room": sorted(TESTS.glob("test_*.py")), **{name: [TESTS / name] for name in FOLDERS}}


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("paths", TRAINING.values(), ids=TRAINING)
def test_the_tests_of_training_pass_under_debug_nans(paths):
    """But for those that say at the test what debug_nans changes for them."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "--tb=short", "-m", "not slow", *map(str, paths)]
    environment = {**os.environ, "JAX_DEBUG_NANS": "1"}
    environment.pop("JAXFERRY_TESTS_CACHE", None)
    result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=TESTS.parent)
    assert result.returncode == 0, result.stdout[-8000:]
