"""Adam's moments in 16 and 8 bits: rounding that keeps the mean, and training with them, by the library and by XLA."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import jaxferry
from jaxferry.errors import InputError
from jaxferry.modes import GradientPlace, Mode
from jaxferry.native import FACTORS, SIMD, HostStep, StepFactors, StepPart, library
from jaxferry.optimizer import moments as few_bits
from jaxferry.optimizer import moments_of
from jaxferry.step import LayerPlan, Plan
from models import chain
from planned import assert_same_bits

WIDTH, DEPTH = 64, 4
BATCH = np.random.default_rng(1).normal(size=(4, WIDTH)).astype(np.float32)
loss_fn = chain()
DTYPES = pytest.mark.parametrize("moments", ["bfloat16", "int8"])


def parameters():
    generator = np.random.default_rng(0)
    return {f"l{i}": {"w": generator.normal(size=(WIDTH, WIDTH)).astype(np.float32) * 0.1} for i in range(DEPTH)}


def step_of(optimizer, mode=Mode.GFGB, **options):
    layers = tuple(LayerPlan(f"l{i}", mode, GradientPlace.DEVICE) for i in range(DEPTH))
    return jaxferry.train_step(loss_fn, optimizer, plan=Plan("any", 1.0, layers), **options)


def by_xla(optimizer):
    """The same transformation without the description by which the library runs it."""
    return optax.GradientTransformationExtraArgs(optimizer.init, optimizer.update)


def adam_with(moments, **options):
    more = {"masters": "bfloat16"} if "masters" in moments else {}
    return jaxferry.adamw(1e-2, moments=moments.split()[0], **more, **options)


def test_random_rounding_keeps_the_mean_and_takes_neighbours_only():
    gradients = np.random.default_rng(0).normal(size=1 << 18).astype(np.float32)
    for value in (1 + 2**-9, 1 + 2**-10 + 2**-15, 3e-12, -1.7):
        exact = np.float32(value)
        zeros = jnp.zeros(gradients.size)
        noise = few_bits._noise(jnp.uint32(7), gradients, zeros, zeros)
        for half in (noise >> 16, noise & 0xFFFF):
            found = np.asarray(few_bits._dithered(zeros + exact, half)).astype(np.float64)
            low, high = found.min(), found.max()
            assert len(np.unique(found)) == 2 and low < exact < high and abs(high - low) < 2**-7 * abs(exact)
            deviation = (high - low) / 2 / np.sqrt(gradients.size)
            assert abs(found.mean() - exact) < 5 * deviation


def test_what_bf16_holds_infinities_and_nan_stay():
    numbers = np.array([0, -0.0, 1.5, -3, np.inf, -np.inf, np.nan, 2.0**-126, 2.0**127], np.float32)
    for noise in (0, 0x8000, 0xFFFF):
        found = few_bits._dithered(jnp.asarray(numbers), jnp.uint32(noise))
        np.testing.assert_array_equal(np.asarray(found).astype(np.float32), numbers)


def stepped(simd, count, moments, gradient):
    """A step of Adam by the library; returns the master and both moments."""
    master, copy = np.zeros(gradient.size, np.float32), np.zeros(gradient.size, np.float32)
    own, counts, factors = [m.copy() for m in moments], [np.array(count, np.int32)], StepFactors(1)
    rule, dtypes = jaxferry.adam(1e-2).rule, [np.dtype(np.float32)]
    numbers = {"unscale": 1, "clip": 1, **rule.factors((optax.ScaleByAdamState(np.int32(count), None, None), ()))}
    factors.values[:], factors.counts[:] = [numbers[name] for name in FACTORS], count
    library("cpu").set_host_simd(simd)
    step = HostStep(rule.step, [StepPart(0, 0, False)], [master], [[m] for m in own], dtypes, dtypes, counts, factors)
    step.gradients[0], step.copies[0] = gradient.ctypes.data, copy.ctypes.data
    assert step.run()
    library("cpu").set_host_simd(SIMD[-1])
    return [master, *own]


def test_the_library_rounds_as_xla_does_with_any_instructions():
    generator = np.random.default_rng(0)
    gradient = generator.normal(size=100_013).astype(np.float32)
    gradient[::7] = 0
    moments = [generator.normal(size=gradient.size).astype(ml_dtypes.bfloat16) for _ in range(2)]
    moments[1] = np.abs(moments[1])
    optimizer = jaxferry.adam(1e-2, moments="bfloat16")
    params = np.zeros(gradient.size, np.float32)
    state = optimizer.init(params)
    state = (state[0]._replace(count=np.int32(5), mu=moments[0], nu=moments[1]), *state[1:])
    updates, (new, *_) = jax.jit(optimizer.update)(gradient, state, params)
    results = [stepped(simd, 5, moments, gradient) for simd in SIMD]
    for found in results[1:]:
        assert_same_bits(found, results[0])
    master, first, second = results[0]
    np.testing.assert_allclose(master, updates, rtol=2e-5, atol=1e-9)
    for own, theirs in ((first, new.mu), (second, new.nu)):
        own, theirs = own.view(np.int16).astype(int), np.asarray(theirs).view(np.int16).astype(int)
        # XLA fuses operations: a last bit of fp32 may turn a rounding.
        assert np.abs(own - theirs).max() <= 1 and (own != theirs).mean() < 1e-3
    assert (second.view(np.int16) != moments[1].view(np.int16)).mean() > 0.05


@pytest.mark.parametrize("moments", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("nesterov", [False, True])
def test_masters_in_bfloat16_are_rounded_alike_by_xla_and_with_any_instructions(moments, nesterov):
    size, generator = 100_013, np.random.default_rng(0)
    optimizer = jaxferry.adamw(1e-3, weight_decay=0.1, moments=moments, masters="bfloat16", nesterov=nesterov)
    params = {"w": generator.normal(size=size).astype(np.float32)}
    gradients = [{"w": generator.normal(size=size).astype(np.float32)} for _ in range(3)]
    for gradient in gradients:
        gradient["w"][::7] = 0
    results, held = [], [np.array(params["w"]), params["w"].astype(ml_dtypes.bfloat16)]
    for simd in SIMD:
        library("cpu").set_host_simd(simd)
        results += [by_library(optimizer, params, gradients, is_copy) for is_copy in (False, True)]
    library("cpu").set_host_simd(SIMD[-1])
    for found in results[1:]:
        assert_same_bits(found, results[0])
    state = optimizer.init(params)
    for gradient in gradients:
        updates, state = jax.jit(optimizer.update)(gradient, state, params)
        params = optax.apply_updates(params, updates)
    found = results[0].astype(ml_dtypes.bfloat16)
    assert_same_bits(found.astype(np.float32), results[0])
    theirs = np.asarray(params["w"]).astype(ml_dtypes.bfloat16)
    # XLA fuses operations: a last bit of fp32 may turn a rounding.
    off = np.abs(found.view(np.int16).astype(int) - theirs.view(np.int16).astype(int))
    assert off.max() <= 1 and (off > 0).mean() < 1e-3
    assert 0.01 < (found != held[1]).mean() < 0.99


def by_library(optimizer, params, gradients, is_copy):
    """Parameters after steps of the library, whose masters are the bf16 copy or whole."""
    rule, state, master = optimizer.rule, optimizer.init(params), params["w"].copy()
    copy = master.astype(ml_dtypes.bfloat16)
    moments = [[np.array(leaf)] for tree in rule.moments(state) for leaf in jax.tree.leaves(tree)]
    bf16, count, factors = np.dtype(ml_dtypes.bfloat16), np.array(0, np.int32), StepFactors(1)
    masters, dtypes = [np.empty(0, np.uint16) if is_copy else master], ([np.dtype(np.float32)], [bf16])
    step = HostStep(rule.step, [StepPart(0, 0, True)], masters, moments, *dtypes, [count], factors)
    step.copies[0] = copy.ctypes.data
    for number, gradient in enumerate(gradients):
        counted = state[0]._replace(count=np.int32(number))
        numbers = {"unscale": 1, "clip": 1, **rule.factors((counted, *state[1:]))}
        factors.values[:], factors.counts[:] = [numbers[name] for name in FACTORS], number
        step.gradients[0] = gradient["w"].ctypes.data
        assert step.run()
    if not is_copy:
        assert_same_bits(master, copy.astype(np.float32))
    return copy.astype(np.float32)


def test_masters_in_bfloat16_follow_updates_that_are_too_small_for_them():
    # A step is a thirtieth of what bf16 resolves: to nearest, no parameter would change.
    wide, rounded = (jaxferry.adam(1e-4, masters=dtype) for dtype in ("float32", "bfloat16"))
    gradients = jnp.asarray(np.random.default_rng(0).normal(1, 0.1, size=(200, 1 << 14)).astype(np.float32))
    means = []
    for own in (wide, rounded):
        params, update = jnp.full(1 << 14, 1.0), jax.jit(own.update)
        state = own.init(params)
        for gradient in gradients:
            updates, state = update(gradient, state, params)
            params = optax.apply_updates(params, updates)
        means.append(float(params.mean()))
    np.testing.assert_allclose(means[1], means[0], atol=3e-4)
    assert means[0] < 0.985


@DTYPES
def test_first_moments_reach_a_constant_gradient(moments):
    """By the smallest of steps: a larger 1 - b1 is rounded away less often."""
    optimizer, wide = (jaxferry.adam(1e-3, b1=0.999, moments=dtype) for dtype in (moments, "float32"))
    gradient = jnp.linspace(1.0, 2.0, 1 << 12)
    means = []
    for own in (optimizer, wide):
        state = jax.lax.fori_loop(0, 3000, lambda _, s, own=own: own.update(gradient, s)[1], own.init(gradient))
        means.append(float((moments_of(state)[0] / gradient).mean()))
    np.testing.assert_allclose(means[0], means[1], rtol={"bfloat16": 2e-3, "int8": 1e-2}[moments])


@DTYPES
def test_elements_without_a_gradient_are_not_rounded_in_lockstep(moments):
    optimizer, wide = (jaxferry.adam(1e-3, moments=dtype) for dtype in (moments, "float32"))
    gradient = jnp.linspace(1.0, 2.0, 1 << 12)
    means = []
    for own in (optimizer, wide):
        state = own.update(gradient, own.init(gradient))[1]
        state = jax.lax.fori_loop(0, 1000, lambda _, s, own=own: own.update(0 * gradient, s)[1], state)
        means.append(float(moments_of(state)[1].mean()))
    # Elements with equal moments go on together; all with one chance would be off by 10 %.
    np.testing.assert_allclose(means[0], means[1], rtol=0.04)


@DTYPES
def test_second_moments_follow_gradients_that_fall(moments):
    optimizer, wide = (jaxferry.adam(1e-3, moments=dtype) for dtype in (moments, "float32"))
    gradients = np.random.default_rng(0).normal(size=(2000, 2048)).astype(np.float32)
    gradients[500:] *= 0.1
    means = []
    for own in (optimizer, wide):
        update = jax.jit(lambda gradient, state, own=own: own.update(gradient, state)[1])
        state = own.init(jnp.zeros(2048))
        for gradient in gradients:
            state = update(gradient, state)
        means.append(float(moments_of(state)[1].mean()))
    np.testing.assert_allclose(means[0], means[1], rtol=0.02)


@DTYPES
@pytest.mark.parametrize("options", [{}, {"compute_dtype": jnp.bfloat16, "clip_norm": 1.0}], ids=["fp32", "bf16"])
def test_training_agrees_with_xla_and_with_fp32_moments(options, moments):
    losses, own = {}, adam_with(moments)
    for name, optimizer in {"own": own, "xla": by_xla(own), "fp32": jaxferry.adamw(1e-2)}.items():
        step = step_of(optimizer, **options)
        state, losses[name] = step.init(parameters()), []
        for _ in range(20):
            state, metrics = step(state, BATCH)
            losses[name].append(float(metrics["loss"]))
        dtypes = {leaf.dtype for leaf in jax.tree.leaves((state.opt_state[0].mu, state.opt_state[0].nu))}
        assert dtypes == {np.dtype(np.float32 if name == "fp32" else {"int8": np.uint8}.get(moments, jnp.bfloat16))}
    np.testing.assert_allclose(losses["own"], losses["xla"], rtol=2e-2)
    np.testing.assert_allclose(losses["own"], losses["fp32"], rtol=5e-2)
    assert losses["own"][-1] < losses["own"][0] / 2 and losses["own"] != losses["fp32"]


def test_other_dtypes_are_refused():
    with pytest.raises(InputError, match="moments must be a name, one of float32, bfloat16, int8, got 'int4'"):
        jaxferry.adamw(1e-3, moments="int4")
    with pytest.raises(InputError, match="is the dtype of both moments: leave out mu_dtype"):
        jaxferry.adam(1e-3, mu_dtype=jnp.bfloat16, moments="bfloat16")
    with pytest.raises(InputError, match="moments must be a name"):
        jaxferry.adam(1e-3, moments=["bfloat16"])
    with pytest.raises(InputError, match="masters must be a name, one of float32, bfloat16, got 'int8'"):
        jaxferry.adamw(1e-3, masters="int8")
    rounded = jaxferry.adam(1e-3, masters="bfloat16")
    with pytest.raises(InputError, match=r'masters="bfloat16" needs the parameters: pass them to update'):
        rounded.update(jnp.ones(3), rounded.init(jnp.ones(3)))
    with pytest.raises(InputError, match=r'masters="bfloat16" needs real parameters of at most 32 bits'):
        rounded.init(jnp.ones(3, jnp.complex64))
    for moments in ("bfloat16", "int8"):
        with pytest.raises(InputError, match=f'moments="{moments}" needs real parameters: take moments="float32"'):
            jaxferry.adam(1e-3, moments=moments).init(jnp.ones(3, jnp.complex64))
