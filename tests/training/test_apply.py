"""Evaluation: `step.apply` and `step.evaluate` against plain `jit`, under memory budgets."""

import gc
import itertools
import signal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxferry
import models
from jaxferry.modes import Mode
from jaxferry.native import is_available
from jaxferry.step import Source
from jaxferry.transport import Allocator, Placement
from planned import assert_same_bits, plan_of, train
from slowly import slow
from steps import after_each_program
from tolerances import LOSS_RTOL
from watched import device_bytes

RTOL = {"rtol": LOSS_RTOL, "atol": 1e-6}


def logits_fn(params, tokens):
    return models.GPT(depth=2, block=models.Mlp).apply({"params": params}, tokens)


def everything(params, batch, scale, train=False):
    """A tree of everything a function may return: values of parameters or of the batch, a parameter, a constant."""
    logits = logits_fn(params, batch["tokens"])
    return {
        "last": logits[:, -1] * scale,
        "both": (logits.argmax(-1), optax.tree.norm(params)),
        "tokens": batch["tokens"],
        "sum": batch["tokens"].sum(),
        "table": params["wpe"]["embedding"],
        "half": params["h_1"]["scale"].astype(jnp.bfloat16),
        "number": 1.5,
        "nothing": None,
        "train": jnp.int32(train),
    }


@pytest.mark.parametrize("transport", ["ferry", *slow("device_put")])
def test_any_function_returns_what_plain_jit_does(gpt, transport):
    if transport == "ferry" and not is_available("cpu"):
        pytest.skip("needs the native library")
    step = jaxferry.train_step(gpt.loss_fn, optax.sgd(0.1), transport=transport)
    state, _ = train(step, gpt, 1)
    args = ({"tokens": gpt.batch}, 2.0)
    ours = step.apply(state, everything, *args, train=True)
    expected = jax.jit(everything, static_argnames="train")(state.params, *args, train=True)
    assert jax.tree.structure(ours) == jax.tree.structure(expected)
    for leaf, same in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        assert (leaf.shape, leaf.dtype) == (same.shape, same.dtype)
        np.testing.assert_allclose(np.asarray(leaf, np.float32), np.asarray(same, np.float32), **RTOL)


def decode(params, tokens, caches, position):
    """One more row of an attention over all rows so far: the cache goes in and comes out."""
    x, grown = params["embedding"][tokens], []
    for layer, cache in zip(params["layers"], caches, strict=True):
        cache = jax.lax.dynamic_update_slice(cache, (x @ layer["key"]["kernel"])[:, None], (0, position, 0))
        scores = jnp.einsum("bc,btc->bt", x @ layer["query"]["kernel"], cache)
        weights = jax.nn.softmax(jnp.where(jnp.arange(cache.shape[1]) <= position, scores, -jnp.inf))
        x = x + jnp.einsum("bt,btc->bc", weights, cache)
        grown.append(cache)
    return x @ params["embedding"].T, grown


def test_tokens_are_sampled_with_a_cache_as_argument_and_result():
    keys = iter(jax.random.split(jax.random.key(0), 16))
    layers = [{name: {"kernel": jax.random.normal(next(keys), (8, 8))} for name in ("query", "key")} for _ in range(3)]
    params = {"embedding": jax.random.normal(next(keys), (32, 8)), "layers": layers}
    step = jaxferry.train_step(lambda params, tokens: decode(params, tokens, cache, 0)[0].var(), optax.sgd(0.1))
    cache = [jnp.zeros((2, 6, 8))] * 3
    state, plain = step.init(params), jax.jit(decode)
    ours = theirs = (jnp.array([3, 5]), cache)
    for position in range(6):
        ours = step.apply(state, decode, *ours, position)
        theirs = plain(params, *theirs, position)
        np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-5, atol=1e-5)
        ours, theirs = ((logits.argmax(-1), caches) for logits, caches in (ours, theirs))
        np.testing.assert_array_equal(ours[0], theirs[0])
    segments = step.compiler.evaluator(decode, (*ours, 0), {}).partition.segments
    assert len(segments) == 5
    assert len({segment.program for segment in segments}) == 3


def test_a_function_is_traced_once_for_each_structure_of_its_arguments(gpt):
    traced = []

    def function(params, tokens, scale=1.0):
        traced.append(tokens.shape)
        return logits_fn(params, tokens).sum() * scale

    step = jaxferry.train_step(gpt.loss_fn, optax.sgd(0.1))
    state = step.init(gpt.params)
    first = float(step.apply(state, function, gpt.batch, scale=1.0))
    assert float(step.apply(state, function, gpt.batch, scale=2.0)) == 2 * first
    state, _ = step(state, gpt.batch)
    changed = float(step.apply(state, function, gpt.batch, scale=1.0))
    assert changed != first
    assert traced == [gpt.batch.shape] * 2  # the first training step's layers replaced its own
    step.apply(state, function, gpt.batch[:1])
    step.apply(state, function, gpt.batch)
    assert len(traced) == 4


def test_applying_first_does_not_make_the_state_change_its_layers_back_and_forth(gpt):
    step = jaxferry.train_step(gpt.loss_fn, optax.sgd(0.1))
    state = step.init(gpt.params)
    step.apply(state, lambda params: params["wte"]["embedding"].sum())
    state, _ = step(state, gpt.batch)
    layers = state.host.layers
    step.apply(state, logits_fn, gpt.batch)
    step.apply(state, lambda params: params["h_1"]["scale"].sum())
    assert state.host.layers is layers


def test_a_function_without_parameters_is_refused(gpt):
    step = jaxferry.train_step(gpt.loss_fn, optax.sgd(0.1))
    state = step.init(gpt.params)
    with pytest.raises(jaxferry.PartitionError, match="reads no parameter"):
        step.apply(state, lambda params, tokens: tokens.sum(), gpt.batch)


def test_a_loop_that_has_no_derivative_is_applied(gpt):
    def search(params, tokens):
        def extend(tokens):
            logits = logits_fn(params, tokens)[:, -1]
            return jnp.concatenate([tokens[:, 1:], logits.argmax(-1)[:, None]], axis=1)

        return jax.lax.while_loop(lambda known: known[0, -1] != 7, lambda known: extend(known) * 0 + 7, tokens)

    step = jaxferry.train_step(gpt.loss_fn, optax.sgd(0.1))
    state = step.init(gpt.params)
    np.testing.assert_array_equal(step.apply(state, search, gpt.batch), search(gpt.params, gpt.batch))


class Watch:
    """Measures what is on the device once each program has run, by JAX's own list of arrays."""

    def __init__(self, monkeypatch):
        gc.collect()  # what earlier tests have left could go meanwhile
        self.peak, self._before = 0, device_bytes(())
        after_each_program(monkeypatch, self._measure)

    def _measure(self, number):
        self.peak = max(self.peak, device_bytes(()) - self._before)


def narrow(params, tokens):
    """A model with a large table that looks up a few rows."""
    x = params["table"][tokens]
    for block in params["blocks"]:
        x = x + jax.nn.relu(x @ block["up"]["kernel"]) @ block["down"]["kernel"]
    return x.mean(axis=1)


def narrow_params():
    keys = iter(jax.random.split(jax.random.key(0), 8))
    shapes = {"up": (16, 256), "down": (256, 16)}
    blocks = [
        {name: {"kernel": jax.random.normal(next(keys), shape) / 16} for name, shape in shapes.items()}
        for _ in range(3)
    ]
    return {"table": jax.random.normal(next(keys), (2000, 16)), "blocks": blocks}


@pytest.mark.parametrize("transport", ["ferry", *slow("device_put")])
def test_every_budget_that_is_not_refused_holds(transport, monkeypatch):
    if transport == "ferry" and not is_available("cpu"):
        pytest.skip("needs the native library")
    params, tokens = narrow_params(), jnp.arange(12).reshape(3, 4)

    def make(budget):
        step = jaxferry.train_step(
            lambda params, tokens: narrow(params, tokens).var(),
            optax.sgd(0.1),
            memory_budget=budget,
            transport=transport,
        )
        return step, step.init(params)

    free, state = make(None)
    expected = free.apply(state, narrow, tokens)
    most = free.compiler.evaluator(narrow, (tokens,), {}).peak.total
    with pytest.raises(jaxferry.BudgetError) as refused:
        step, state = make(1)
        step.apply(state, narrow, tokens)
    least = refused.value.smallest_bytes
    assert least < most
    with pytest.raises(jaxferry.BudgetError):
        step, state = make(least - 1)
        step.apply(state, narrow, tokens)
    reads, waits = set(), set()
    for budget in (least, (least + most) // 2, most - 1, most):
        step, state = make(budget)
        with monkeypatch.context() as patch:
            watch = Watch(patch)
            result = step.apply(state, narrow, tokens)
            assert 0 < watch.peak <= budget
        np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5)
        evaluator = step.compiler.evaluator(narrow, (tokens,), {})
        assert evaluator.peak.total <= budget
        assert evaluator.transport.loaded_bytes.peak <= evaluator.peak.parameters
        reads.update(evaluator.stream.reads)
        waits.update(evaluator.stream.ahead)
    assert reads == {Source.DEVICE, Source.HOST}
    assert waits == {True, False}


@pytest.mark.parametrize("kind", Allocator)
def test_the_smallest_budget_of_a_refusal_is_enough_beside_what_an_allocator_does_not_split(kind, gpt, monkeypatch):
    monkeypatch.setattr(Placement, "allocator", kind)

    def apply(budget):
        step = jaxferry.train_step(gpt.loss_fn, optax.sgd(0.1), memory_budget=budget)
        result = step.apply(step.init(gpt.params), logits_fn, gpt.batch)
        return result, step.compiler.evaluator(logits_fn, (gpt.batch,), {}).peak

    with pytest.raises(jaxferry.BudgetError) as refused:
        apply(1)
    least = refused.value.smallest_bytes
    result, peak = apply(least)
    assert peak.counted < peak.total <= least
    np.testing.assert_allclose(result, apply(None)[0], **RTOL)
    with pytest.raises(jaxferry.BudgetError):
        apply(peak.counted)


@pytest.mark.slow
def test_evaluation_has_the_budget_of_training_and_frees_what_that_keeps(gpt, monkeypatch):
    def make(budget, **options):
        return jaxferry.train_step(gpt.loss_fn, optax.sgd(0.1), memory_budget=budget, **options)

    plan = plan_of(gpt, [Mode.RESIDENT])
    free = make(None, plan=plan)
    state, losses = train(free, gpt, 2)
    budget = free.prepare(gpt.batch).peak.total
    expected = float(free.evaluate(state, jnp.tile(gpt.batch, (8, 1))))
    assert len(state.resident) == len(state.host.layers)
    step = make(budget, plan=plan)
    state, _ = train(step, gpt, 1)
    assert len(state.resident) == len(state.host.layers)
    wide = next(
        wide
        for wide in (jnp.tile(gpt.batch, (copies, 1)) for copies in range(2, 64))
        if step.compiler.evaluator(gpt.loss_fn, (wide,), {}).peak.total
        + sum(layer.num_bytes for layer in state.host.layers)
        > budget
    )
    step.evaluate(state, wide)
    assert not state.resident
    state, metrics = step(state, gpt.batch)
    assert float(metrics["loss"]) == losses[1]
    np.testing.assert_allclose(float(step.evaluate(state, gpt.batch)), expected, rtol=LOSS_RTOL)
    with pytest.raises(jaxferry.BudgetError, match="too small for this forward"):
        step.evaluate(state, jnp.tile(gpt.batch, (512, 1)))


def test_at_most_two_layers_are_on_the_device(gpt):
    step = jaxferry.train_step(gpt.loss_fn, optax.sgd(0.1))
    state = step.init(gpt.params)
    step.apply(state, logits_fn, gpt.batch)
    evaluator = step.compiler.evaluator(logits_fn, (gpt.batch,), {})
    sizes = [state.host.layers[segment.group].num_bytes for segment in evaluator.partition.segments]
    most = max(a + b for a, b in itertools.pairwise(sizes))
    assert evaluator.transport.loaded_bytes.peak == most < sum(layer.num_bytes for layer in state.host.layers)
    assert evaluator.transport.loaded_bytes.now == 0


@pytest.mark.parametrize("at", [0, 3])
def test_an_interrupt_leaves_nothing_behind(gpt, at, monkeypatch):
    step = jaxferry.train_step(gpt.loss_fn, optax.sgd(0.1))
    state, _ = train(step, gpt, 1)
    before = step.apply(state, logits_fn, gpt.batch)
    evaluator = step.compiler.evaluator(logits_fn, (gpt.batch,), {})
    held = device_bytes(())

    def interrupt(number):
        if number == at:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        after_each_program(patch, interrupt)
        with pytest.raises(KeyboardInterrupt):
            step.apply(state, logits_fn, gpt.batch)
    assert evaluator.transport.loaded_bytes.now == 0
    evaluator.transport.release()
    assert device_bytes(()) <= held
    assert_same_bits(step.apply(state, logits_fn, gpt.batch), before)
