"""Backwards that really fail, by a callback of the model's that raises: what becomes of the state."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxferry
from faults import Fault, identity_that_calls
from jaxferry.engine import executor
from jaxferry.engine.placement import Placement
from jaxferry.modes import GradientPlace, Mode
from jaxferry.plan.records import LayerPlan, Plan
from planned import assert_same_bits, state_after

DEPTH = 3
BATCH = np.linspace(-1, 1, 32, dtype=np.float32).reshape(4, 8)


def make(fault, *, gradient=GradientPlace.DEVICE, mode=Mode.GFGB, **options):
    """A step of a perceptron with a residual around each layer, whose backward of each layer calls `fault`."""

    faulty = identity_that_calls(fault)

    def loss_fn(params, x):
        for i in range(DEPTH):
            x = x + faulty(jnp.tanh(x @ params[f"l{i}"]["w"] + params[f"l{i}"]["b"]))
        return jnp.mean((x - 1) ** 2)

    generator = np.random.default_rng(0)
    params = {
        f"l{i}": {"w": generator.normal(size=(8, 8)).astype(np.float32), "b": np.zeros(8, np.float32)}
        for i in range(DEPTH)
    }
    plan = Plan("any", 1.0, tuple(LayerPlan(f"l{i}", mode, gradient) for i in range(DEPTH)))
    return jaxferry.train_step(loss_fn, jaxferry.adamw(1e-2), plan=plan, **options), params


@pytest.mark.parametrize("threads", ["lanes", "one for the device"])
@pytest.mark.parametrize("mode", [Mode.RELOAD, pytest.param(Mode.RESIDENT, marks=pytest.mark.slow)])
@pytest.mark.parametrize("gradient", list(GradientPlace))
def test_a_callback_that_raises_once_costs_no_step_and_no_bit(gradient, mode, threads, monkeypatch, tmp_path):
    if threads != "lanes":
        monkeypatch.setattr(Placement, "is_cpu", property(lambda self: False))
    fault = Fault()
    step, params = make(fault, gradient=gradient, mode=mode)
    expected = [state_after(step, params, BATCH, n).params for n in range(5)]
    num_tried_again = 0
    for at in range(1, 2 * DEPTH + 1):
        state = state_after(step, params, BATCH, 2)
        fault.arm(at)
        with pytest.raises(jaxferry.TaskError, match="the callback broke") as caught:
            for _ in range(2):  # a device may tell of it late
                state, metrics = step(state, BATCH)
        assert caught.value.layer in params
        num_tried_again += "tried again" in str(caught.value)
        step.save(state, tmp_path / "saved")
        restored = step.restore(tmp_path / "saved")
        assert restored.step == state.step
        assert_same_bits(restored.params, expected[state.step])
        while state.step < 4:
            state, metrics = step(state, BATCH)
        assert_same_bits(state.params, expected[4])
        assert metrics["device_param_bytes_peak"] <= sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    assert num_tried_again >= 1


@pytest.mark.parametrize("clip_norm", [1.0, pytest.param(None, marks=pytest.mark.slow)])
@pytest.mark.parametrize("sums", ["on the device", pytest.param("by transfers", marks=pytest.mark.slow), "by programs"])
def test_micro_batches_are_taken_back_tried_again_or_given_up_to_the_last_update(sums, clip_norm, tmp_path):
    fault = Fault()
    gradient = GradientPlace.HOST if sums == "by programs" else GradientPlace.DEVICE
    step, params = make(fault, gradient=gradient, accumulate=3, clip_norm=clip_norm)
    step.init(params)
    if sums == "by transfers":
        step.prepare(BATCH)._executor._kept = frozenset()
    expected = [state_after(step, params, BATCH, 3 * n).params for n in range(4)]
    for before in (3, 4, 5):
        for at in range(1, 2 * DEPTH + 1):
            state = state_after(step, params, BATCH, before)
            fault.arm(at)
            with pytest.raises(jaxferry.TaskError, match="the callback broke") as caught:
                step(state, BATCH)
            # The last forward and its backward are one program, the first one that adds to what there is.
            if before == 3 or at < DEPTH or (at <= DEPTH + 1 and sums != "by programs"):
                assert state.step == before and "tried again" not in str(caught.value)
            elif sums == "by programs":
                assert state.step == 3 and "the state is that after the last update" in str(caught.value)
            else:
                assert state.step == before and "tried again" in str(caught.value)
            step.save(state, tmp_path / "saved")
            restored = step.restore(tmp_path / "saved")
            assert_same_bits(restored.params, expected[restored.step // 3])
            while state.step < 9:
                state, _ = step(state, BATCH)
            assert_same_bits(state.params, expected[3])


@pytest.mark.parametrize("threads", ["lanes", "one for the device"])
def test_what_raises_again_after_an_update_is_tried_again_whenever_the_state_is_used(threads, monkeypatch, tmp_path):
    if threads != "lanes":
        monkeypatch.setattr(Placement, "is_cpu", property(lambda self: False))
    fault = Fault()
    step, params = make(fault)
    expected = [state_after(step, params, BATCH, n).params for n in (2, 4)]
    state = state_after(step, params, BATCH, 1)
    fault.arm(2 * DEPTH, times=100)
    with pytest.raises(jaxferry.TaskError, match="tried again when the state is next used"):
        for _ in range(2):  # a device may tell of it late
            state, _ = step(state, BATCH)
    for use in (lambda: state.params, lambda: step(state, BATCH), lambda: step.save(state, tmp_path / "saved")):
        with pytest.raises(jaxferry.TaskError, match=r"(?s)the callback broke.*again; it is tried again"):
            use()
    fault.arm(None)
    step.save(state, tmp_path / "saved")
    assert state.step == 2
    assert_same_bits(step.restore(tmp_path / "saved").params, expected[0])
    while state.step < 4:
        state, _ = step(state, BATCH)
    assert_same_bits(state.params, expected[1])


@pytest.mark.parametrize("clip_norm", [1.0, pytest.param(None, marks=pytest.mark.slow)])
@pytest.mark.parametrize("sums", ["on the device", "by transfers"])
@pytest.mark.parametrize("before", [pytest.param(4, marks=pytest.mark.slow), 5])
def test_a_micro_batch_that_raises_again_before_any_update_is_given_up(before, sums, clip_norm, tmp_path):
    fault = Fault()
    step, params = make(fault, accumulate=3, clip_norm=clip_norm)
    step.init(params)
    if sums == "by transfers":
        step.prepare(BATCH)._executor._kept = frozenset()
    expected = [state_after(step, params, BATCH, 3 * n).params for n in range(4)]
    state = state_after(step, params, BATCH, before)
    fault.arm(2 * DEPTH, times=100)
    with pytest.raises(jaxferry.TaskError, match="tried again when the state is next used"):
        step(state, BATCH)
    with pytest.raises(jaxferry.TaskError, match="again; the state is that after the last update"):
        step.save(state, tmp_path / "saved")
    step.save(state, tmp_path / "saved")
    assert state.step == 3
    assert_same_bits(state.params, expected[1])
    fault.arm(None)
    while state.step < 9:
        state, _ = step(state, BATCH)
    assert_same_bits(state.params, expected[3])


@pytest.mark.parametrize(
    "options", [{}, {"clip_norm": 0.1}, {"accumulate": 2}], ids=["plain", "clipped", "accumulated"]
)
def test_an_update_that_raises_once_is_tried_again(options, tmp_path):
    fault = Fault()

    def calls(updates, state, params=None):
        return jax.tree.map(identity_that_calls(fault), updates), state

    transformation = optax.GradientTransformation(lambda params: optax.EmptyState(), calls)
    _, params = make(fault)

    def loss_fn(params, x):
        for layer in params.values():
            x = x + jnp.tanh(x @ layer["w"] + layer["b"])
        return jnp.mean((x - 1) ** 2)

    step = jaxferry.train_step(loss_fn, optax.chain(transformation, optax.sgd(1e-2, 0.9)), **options)
    expected = state_after(step, params, BATCH, 4).params
    state = state_after(step, params, BATCH, 3)
    state.block_until_ready()
    fault.arm(2)
    with pytest.raises(jaxferry.TaskError, match="the callback broke"):
        state, _ = step(state, BATCH)
        state.block_until_ready()
    step.save(state, tmp_path / "saved")
    assert_same_bits(state.params, expected)
    assert_same_bits(step.restore(tmp_path / "saved").params, expected)


@pytest.mark.parametrize("threads", ["lanes", "one for the device"])
@pytest.mark.parametrize(
    ("name", "at"),
    [pytest.param("to_pinned", 1, marks=pytest.mark.slow), ("to_pinned", 3), ("gather", 2), ("recycle", 2)],
)
def test_what_fails_around_an_update_is_tried_again_without_updating_twice(threads, name, at, monkeypatch):
    if threads != "lanes":
        monkeypatch.setattr(Placement, "is_cpu", property(lambda self: False))
    step, params = make(Fault())
    expected = state_after(step, params, BATCH, 4).params
    state = state_after(step, params, BATCH, 3)
    owner = executor if name == "to_pinned" else step.prepare(BATCH)._executor._transfers
    function, calls = getattr(owner, name), itertools.count(1)

    def fails_once(*args):
        if next(calls) == at:
            raise RuntimeError("no memory is left")
        return function(*args)

    monkeypatch.setattr(owner, name, fails_once)
    with pytest.raises(jaxferry.TaskError, match="no memory is left"):
        step(state, BATCH)
        state.block_until_ready()
    state.block_until_ready()
    while state.step < 4:
        step(state, BATCH)
    assert_same_bits(state.params, expected)
