"""Failing steps and the resulting state: a callback of the model raises, or a task raises."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxferry
from accelerator import emulate
from faults import Fault, identity_that_calls
from jaxferry.modes import GradientPlace, Mode
from jaxferry.step import Kind, LayerPlan, Operation, Plan
from jaxferry.transport import Placement
from models import chain
from planned import assert_same_bits, state_after, taken
from slowly import slow, slow_cases
from steps import fail, transport_of, with_sums_in_host_memory, wrap

DEPTH = 3
BATCH = np.linspace(-1, 1, 64 * 8, dtype=np.float32).reshape(64, 8)  # of values that are worth a move


# CI runs the engine's tests once more on the emulated accelerator, where one thread issues for the device.
@pytest.fixture(params=["lanes", *slow("one for the device")])
def threads(request, monkeypatch):
    if request.param != "lanes":
        emulate(monkeypatch)


def make(fault, *, gradient=GradientPlace.DEVICE, mode=Mode.GFGB, depth=DEPTH, **options):
    """A step of a perceptron with a residual around each layer, whose backward of each layer calls `fault`."""

    faulty = identity_that_calls(fault)

    def loss_fn(params, x):
        skip = None
        for i in range(depth):
            x = x + faulty(jnp.tanh(x @ params[f"l{i}"]["w"] + params[f"l{i}"]["b"]))
            skip = x if i == 0 else skip
            x = x + skip if i == 3 else x  # a value that two forwards and two backwards read
        return jnp.mean((x - 1) ** 2)

    generator = np.random.default_rng(0)
    params = {
        f"l{i}": {"w": generator.normal(size=(8, 8)).astype(np.float32) / 4, "b": np.zeros(8, np.float32)}
        for i in range(depth)
    }
    modes = itertools.cycle(mode if isinstance(mode, tuple) else (mode,))
    plan = Plan("any", 1.0, tuple(LayerPlan(f"l{i}", next(modes), gradient) for i in range(depth)))
    return jaxferry.train_step(loss_fn, jaxferry.adamw(1e-2), plan=plan, **options), params


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("mode", [Mode.RELOAD, *slow(Mode.RESIDENT)])
@pytest.mark.parametrize("gradient", [GradientPlace.HOST, *slow(GradientPlace.DEVICE)])
@pytest.mark.parametrize("offloads", [False, *slow(True)])
def test_a_callback_that_raises_before_any_update_costs_no_step_and_no_bit(gradient, mode, offloads, tmp_path):
    fault, depth = Fault(), 6 if offloads else DEPTH
    step, params = make(fault, gradient=gradient, mode=mode, clip_norm=1e3, depth=depth)
    expected = [state_after(step, params, BATCH, n).params for n in range(5)]
    if offloads:
        options = {"gradient": gradient, "mode": mode, "clip_norm": 1e3, "depth": depth}
        step, _ = make(fault, offload_activations=True, **options)
        step.init(params)
        assert any(task.kind is Kind.SAVE for task in step.prepare(BATCH).schedule.tasks)
    for at in range(1, 2 * depth + 1):
        state = state_after(step, params, BATCH, 2)
        fault.arm(at)
        with pytest.raises(
            jaxferry.TaskError, match=r"the callback broke.*the state is that before the step"
        ) as caught:
            for _ in range(2):  # a device may report it late
                state, metrics = step(state, BATCH)
        assert caught.value.layer in params
        assert_same_bits(state.params, expected[state.step])
        if at == depth:
            step.save(state, tmp_path / "saved")
            assert_same_bits(step.restore(tmp_path / "saved").params, expected[state.step])
        while state.step < 4:
            state, metrics = step(state, BATCH)
        assert_same_bits(state.params, expected[4])
        assert metrics["device_param_bytes_peak"] <= sum(leaf.nbytes for leaf in jax.tree.leaves(params))


@pytest.mark.cpu_device
def test_the_error_of_the_last_layer_s_program_names_forward_and_backward():
    fault = Fault()
    step, params = make(fault, clip_norm=1e3)
    state = state_after(step, params, BATCH, 1)
    for at, what in ((DEPTH - 1, "forward of layer 'l1'"), (DEPTH + 1, "forward or backward of layer 'l2'")):
        fault.arm(at)
        with pytest.raises(jaxferry.TaskError, match=f"the {what} failed"):
            step(state, BATCH)


@pytest.mark.usefixtures("threads")
def test_the_first_step_of_a_structure_updates_after_all_gradients_so_every_failure_is_rolled_back(tmp_path):
    """A step without clipping: later steps update layer by layer."""
    fault = Fault()
    plain, params = make(Fault())
    expected = [state_after(plain, params, BATCH, n).params for n in range(3)]
    for at in range(1, 2 * DEPTH + 1):
        step, params = make(fault)
        fault.arm(None)
        state = step.init(params)
        fault.arm(at)
        with pytest.raises(jaxferry.TaskError, match=r"the callback broke.*the state is that before the step"):
            state = taken(step, state, BATCH, 2)
        assert_same_bits(state.params, expected[state.step])
        state = taken(step, state, BATCH, 2 - state.step)
        assert_same_bits(state.params, expected[2])


class OutOfMemory:
    """A backward that runs out of memory on batches of more than `most_rows` rows."""

    def __init__(self, most_rows):
        self.most_rows = most_rows

    def __call__(self, backward, step, instruction):
        [batch] = [step.values[value] for value in step.program.partition.graph.batch]
        if batch.shape[0] > self.most_rows:
            raise RuntimeError("RESOURCE_EXHAUSTED: out of memory while trying to allocate")
        return backward(step, instruction)


@pytest.mark.usefixtures("threads")
def test_a_device_that_runs_out_of_memory_in_the_first_backward_trains_on_with_a_smaller_batch(monkeypatch):
    step, params = make(Fault())
    small = BATCH[:2]
    expected = state_after(step, params, small, 3).params
    wrap(monkeypatch, Operation.BACKWARD, OutOfMemory(2))
    state = step.init(params)
    with pytest.raises(jaxferry.TaskError, match=r"RESOURCE_EXHAUSTED.*the state is that before the step"):
        step(state, BATCH)
    assert state.step == 0 and transport_of(step, BATCH).loaded_bytes.now == 0
    assert_same_bits(state.params, params)
    state = taken(step, state, small, 3)
    assert_same_bits(state.params, expected)


@pytest.mark.usefixtures("threads")
def test_a_failure_after_an_update_has_begun_damages_the_state_and_every_use_says_so(monkeypatch, tmp_path):
    step, params = make(Fault())
    state = state_after(step, params, BATCH, 3)
    step.save(state, tmp_path / "saved")
    expected = state_after(step, params, BATCH, 5).params
    with monkeypatch.context() as patch:
        fail(patch, [Operation.UPDATE], after=1, message="no memory is left")
        with pytest.raises(jaxferry.JaxFerryError, match="the update of layer 'l1' failed: no memory is left"):
            step(state, BATCH)
            state.block_until_ready()
    uses = [
        lambda: step(state, BATCH),
        lambda: state.params,
        lambda: state.opt_state,
        lambda: step.evaluate(state, BATCH),
        lambda: step.save(state, tmp_path / "other"),
        state.block_until_ready,
    ]
    for use in uses:
        with pytest.raises(jaxferry.StateError, match=r"layer 'l1' failed: no memory.*two steps: restore .*saved"):
            use()
    state = step.restore(tmp_path / "saved")
    state = taken(step, state, BATCH, 2)
    assert_same_bits(state.params, expected)


@pytest.mark.usefixtures("threads")
def test_without_a_checkpoint_a_damaged_state_says_that_one_is_needed(monkeypatch):
    step, params = make(Fault())
    state = state_after(step, params, BATCH, 2)
    fail(monkeypatch, [Operation.UPDATE], after=1)
    with pytest.raises(jaxferry.JaxFerryError, match="restore a checkpoint"):
        step(state, BATCH)
        state.block_until_ready()


@pytest.mark.usefixtures("threads")
def test_an_update_task_that_fails_before_any_update_rolls_back_a_step_that_has_returned(monkeypatch):
    step, params = make(Fault())
    expected = [state_after(step, params, BATCH, n).params for n in (2, 4)]
    state = state_after(step, params, BATCH, 2)
    with monkeypatch.context() as patch:
        fail(patch, [Operation.UPDATE], after=0)
        with pytest.raises(jaxferry.TaskError, match="the state is that before the step"):
            step(state, BATCH)
            state.block_until_ready()
    assert state.step == 2
    assert_same_bits(state.params, expected[0])
    state = taken(step, state, BATCH, 4 - state.step)
    assert_same_bits(state.params, expected[1])


@pytest.mark.cpu_device  # an accelerator may report the failure with a later micro-batch
@pytest.mark.parametrize(
    ("sums", "clip_norm"),
    [
        ("on the device", None),
        *slow_cases(
            ("by transfers", 1.0),
            ("by programs", None),
            ("on the device", 1.0),
            ("by transfers", None),
            ("by programs", 1.0),
        ),
    ],
)
def test_a_micro_batch_that_fails_is_rolled_back_or_takes_the_state_to_the_last_update(sums, clip_norm, tmp_path):
    fault = Fault()
    gradient = GradientPlace.HOST if sums == "by programs" else GradientPlace.DEVICE
    step, params = make(fault, gradient=gradient, accumulate=3, clip_norm=clip_norm)
    step.init(params)
    if sums == "by transfers":
        with_sums_in_host_memory(step.prepare(BATCH))
    expected = [state_after(step, params, BATCH, 3 * n).params for n in range(4)]
    outcomes = set()
    for before in (3, 4, 5):
        for at in range(1, 2 * DEPTH + 1):
            state = state_after(step, params, BATCH, before)
            fault.arm(at)
            with pytest.raises(jaxferry.TaskError, match="the callback broke") as caught:
                step(state, BATCH)
            # The last forward and its backward are one program, the first that adds to existing sums.
            is_before_all_sums = before == 3 or at < DEPTH or (at <= DEPTH + 1 and sums != "by programs")
            if is_before_all_sums:
                assert state.step == before and "the state is that before the step" in str(caught.value)
            else:
                assert state.step == 3 and "the state is that after the last update" in str(caught.value)
            outcomes.add(state.step == before)
            if at in (DEPTH - 1, 2 * DEPTH):
                step.save(state, tmp_path / "saved")
                restored = step.restore(tmp_path / "saved")
                assert_same_bits(restored.params, expected[restored.step // 3])
            state = taken(step, state, BATCH, 9 - state.step)
            assert_same_bits(state.params, expected[3])
    assert outcomes == {True, False}


def test_an_optimizer_whose_callback_raises_damages_the_state_unless_it_was_the_first_update(tmp_path):
    fault = Fault()

    def calls(updates, state, params=None):
        return jax.tree.map(identity_that_calls(fault), updates), state

    transformation = optax.GradientTransformation(lambda params: optax.EmptyState(), calls)
    _, params = make(fault)

    def loss_fn(params, x):
        for layer in params.values():
            x = x + jnp.tanh(x @ layer["w"] + layer["b"])
        return jnp.mean((x - 1) ** 2)

    step = jaxferry.train_step(loss_fn, optax.chain(transformation, optax.sgd(1e-2, 0.9)))
    expected = state_after(step, params, BATCH, 4).params
    state = state_after(step, params, BATCH, 3)
    step.save(state, tmp_path / "saved")
    fault.arm(2)
    with pytest.raises(jaxferry.JaxFerryError, match="the callback broke"):
        state, _ = step(state, BATCH)
        state.block_until_ready()
    with pytest.raises(jaxferry.StateError, match=r"restore .*saved"):
        step(state, BATCH)
    state, _ = step(step.restore(tmp_path / "saved"), BATCH)
    assert_same_bits(state.params, expected)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("name", ["gather", "load", "store"])
def test_a_transport_that_fails_before_any_update_costs_no_bit(name, monkeypatch):
    step, params = make(Fault(), clip_norm=1e3)
    expected = state_after(step, params, BATCH, 4).params
    state = state_after(step, params, BATCH, 3)
    transport = transport_of(step, BATCH)
    if name == "store" and transport.joins.stores:  # by programs, which take the destinations
        name = "destinations"
    function, calls = getattr(transport, name), []

    def fails_once(*args):
        calls.append(args)
        if len(calls) == 2:
            raise RuntimeError("no memory is left")
        return function(*args)

    step.evaluate(state, BATCH)  # frees what was prefetched
    monkeypatch.setattr(transport, name, fails_once)
    with pytest.raises(jaxferry.TaskError, match=r"no memory is left.*the state is that before the step"):
        step(state, BATCH)
        state.block_until_ready()
    while state.step < 4:
        step(state, BATCH)
    assert_same_bits(state.params, expected)


@pytest.mark.cpu_device  # so is the emulated one
@pytest.mark.parametrize(
    ("kind", "threads"),
    [
        (Kind.FETCH, "one for the device"),
        *slow_cases((Kind.SAVE, "lanes"), (Kind.SAVE, "one for the device"), (Kind.FETCH, "lanes")),
    ],
)
def test_a_move_that_fails_costs_no_step_and_no_bit(kind, threads, monkeypatch):
    options = {"mode": (Mode.RELOAD, Mode.GFGB), "depth": 6, "clip_norm": 1e3}  # else an update may have begun before
    plain, params = make(Fault(), **options)
    expected = [state_after(plain, params, BATCH, n).params for n in range(5)]
    if threads != "lanes":
        emulate(monkeypatch)
    step, params = make(Fault(), offload_activations=True, **options)
    state = state_after(step, params, BATCH, 2)
    num_moves = sum(task.kind is kind for task in step.prepare(BATCH).schedule.tasks)
    for number in range(num_moves):
        state = state_after(step, params, BATCH, 0)
        with monkeypatch.context() as patch:
            fail(patch, [Operation(kind.value)], after=number, message="no memory")
            with pytest.raises(jaxferry.TaskError, match=f"the {kind.value} of layer .* failed: no memory"):
                state, _ = step(state, BATCH)
        assert state.step == 0
        state = taken(step, state, BATCH, 4 - state.step)
        assert_same_bits(state.params, expected[4])
    assert num_moves >= 2


def loss_of_what_the_host_returns(on_host):
    """The loss of a perceptron whose batch a function on the host returns first."""

    def loss_fn(params, x):
        x = jax.pure_callback(on_host, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        return chain()(params, x)

    return loss_fn


ON_A_CPU = pytest.mark.cpu_device
"""An accelerator tells of an evaluation's failure when its results are read."""


@pytest.mark.parametrize("entry", ["step", pytest.param("evaluate", marks=ON_A_CPU)])
@pytest.mark.parametrize("where", ["callback", "move"])
def test_a_failure_in_what_depends_on_the_batch_alone_says_so_and_leaves_the_state(entry, where, monkeypatch):
    is_broken = False

    def on_host(x):
        if is_broken:
            raise ValueError("no such token")
        return x

    loss_fn = loss_of_what_the_host_returns(on_host)

    def made():
        step = jaxferry.train_step(loss_fn, optax.adam(1e-2))
        return step, step.init({f"w{i}": np.full((8, 8), 0.1, np.float32) for i in range(3)})

    def no_room(*args):
        raise RuntimeError("RESOURCE_EXHAUSTED: no such token")

    x = np.ones((2, 8), np.float32)
    step, state = made()
    run = {"step": step, "evaluate": step.evaluate}[entry]
    step(state, x), step.evaluate(state, x)
    is_broken = where == "callback"
    with monkeypatch.context() as patched:
        if where == "move":
            patched.setattr(Placement, "put", no_room)
        pattern = r"what depends on the batch alone, before the first layer, failed: .*no such token"
        with pytest.raises(jaxferry.TaskError, match=re.compile(pattern, re.DOTALL)) as caught:
            run(state, x)
    assert caught.value.layer == "" and caught.value.__cause__ is not None
    assert state.step == 1 and state.damage is None
    is_broken = False
    step(state, x)
    other, expected = made()
    for _ in range(2):
        other(expected, x)
    np.testing.assert_array_equal(state.params["w0"], expected.params["w0"])


@pytest.mark.parametrize("entry", ["step", *(pytest.param(e, marks=ON_A_CPU) for e in ("evaluate", "apply"))])
@pytest.mark.parametrize("transport", ["ferry", "device_put"])
def test_a_failure_within_a_layer_names_it_and_leaves_the_state(entry, transport):
    """A large value that depends on the batch alone is computed in the first layer that reads it."""

    def on_host(x):
        if x[0, 0] > 5:
            raise ValueError("no such token")
        return x

    loss_fn = loss_of_what_the_host_returns(on_host)

    step = jaxferry.train_step(loss_fn, optax.adam(1e-2), transport=transport)
    state = step.init({f"w{i}": np.full((256, 256), 0.01, np.float32) for i in range(3)})
    x = np.ones((8, 256), np.float32)
    run = {"step": step, "evaluate": step.evaluate, "apply": lambda state, x: step.apply(state, loss_fn, x)}[entry]
    step(state, x), step.evaluate(state, x)
    pattern = re.compile(r"the (forward|evaluation) of layer 'w0' failed.*no such token", re.DOTALL)
    with pytest.raises(jaxferry.TaskError, match=pattern) as caught:
        run(state, 9 * x)
    assert caught.value.layer == "w0" and caught.value.__cause__ is not None
    assert state.step == 1 and state.damage is None
    step(state, x)
