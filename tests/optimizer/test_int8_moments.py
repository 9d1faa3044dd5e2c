"""Adam's moments in codes of 8 bits: what codes hold, and the same bits by the library, by XLA and in all places."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxferry
from jaxferry.modes import Mode, UpdatePlace
from jaxferry.native import FACTORS, SIMD, HostStep, StepFactors, StepPart, library
from jaxferry.optimizer import moments as int8_moments
from jaxferry.step import LayerPlan, Plan
from jaxferry.step import streaming as planned_streaming
from planned import assert_same_bits, taken

BLOCK = 256
SIGNED, UNSIGNED = 0x80, 0
WIDTH, DEPTH = 64, 3
BATCH = np.random.default_rng(1).normal(size=(4, WIDTH)).astype(np.float32)
OPTIMIZER = jaxferry.adamw(1e-2, weight_decay=0.1, moments="int8")


@pytest.fixture
def steps():
    """Afterwards the library uses the best instructions and all threads again."""
    yield library("cpu")
    library("cpu").set_host_simd(SIMD[-1])
    library("cpu").set_host_threads(0)


def coded(numbers, sign, noise=0):
    """The numbers of one block after it was stored, with these random numbers of 20 bits."""
    block = jnp.zeros(BLOCK).at[: len(numbers)].set(jnp.asarray(numbers, jnp.float32))[None]
    codes, scales = int8_moments._encoded(block, jnp.broadcast_to(jnp.uint32(noise), block.shape), sign)
    return np.asarray(int8_moments._decoded(codes, scales, sign))[0, : len(numbers)]


@pytest.mark.parametrize(("sign", "largest"), [(SIGNED, 0x7F), (UNSIGNED, 0xFF)])
@pytest.mark.parametrize("noise", [0, 0x80000, 0xFFFFF])
def test_every_number_of_a_code_is_stored_exactly(sign, largest, noise):
    bits = (np.arange(1, largest + 1) + (1016 - largest)).astype(np.uint32) << 20  # up to 1
    numbers = bits.view(np.float32)
    assert numbers[-1] == 1 and numbers[0] < (2.0**-15 if sign else 2.0**-31)
    for factor in (1, 2.0**-60, 2.0**40):
        own = (factor * numbers).astype(np.float32)
        np.testing.assert_array_equal(coded(own, sign, noise), own)
        if sign:
            signed = np.concatenate([-own, own[-1:]])
            np.testing.assert_array_equal(coded(signed, sign, noise), signed)


@pytest.mark.parametrize("sign", [SIGNED, UNSIGNED])
def test_numbers_within_the_range_are_one_of_their_two_neighbours(sign):
    numbers = np.exp2(np.random.default_rng(0).uniform(-14 if sign else -30, 0, BLOCK)).astype(np.float32)
    low, high = coded(numbers, sign), coded(numbers, sign, 0xFFFFF)
    assert (low <= numbers).all() and (numbers <= high).all() and (high <= 1.125 * low).all()


def test_small_second_moments_do_not_become_zero_and_zeros_stay():
    found = coded([1, 2.0**-40, 1e-30, 0], UNSIGNED)
    assert found[3] == 0 and found[1] == found[2] == np.float32(1.25 * 2.0**-32)
    assert not coded(np.zeros(BLOCK), UNSIGNED).any() and not coded(np.zeros(BLOCK), SIGNED, 0xFFFFF).any()


@pytest.mark.parametrize("value", [0.3, 1e-3, 2e-5, 1e-6])
def test_first_moments_keep_their_mean_even_below_the_least_number_of_a_code(value):
    noise = jnp.asarray(np.random.default_rng(0).integers(0, 1 << 20, (4096, BLOCK), np.uint32))
    numbers = jnp.full((4096, BLOCK), jnp.float32(-value)).at[:, 0].set(1)
    found = np.asarray(int8_moments._decoded(*int8_moments._encoded(numbers, noise, SIGNED), SIGNED))[:, 1:]
    deviation = max(value / 16, np.sqrt(value * 2.0**-15)) / np.sqrt(found.size)
    assert abs(found.astype(np.float64).mean() + value) < 5 * deviation


def test_what_is_not_finite_stays_so_and_no_other_number_of_its_block_becomes_so():
    for sign in (SIGNED, UNSIGNED):
        found = coded([np.inf, np.nan, 3e38, 1, 0], sign)
        assert np.isposinf(found[0]) and np.isnan(found[1]) and np.isfinite(found[2:]).all() and found[4] == 0
    assert np.isneginf(coded([-np.inf, 1], SIGNED)[0])


def test_a_state_has_2_03_bytes_a_parameter():
    params = {"w": jnp.zeros((512, 768)), "b": jnp.zeros(100), "s": jnp.zeros((3, 5, 256))}
    state = OPTIMIZER.init(params)
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(state)) < 2.034 * sum(leaf.size for leaf in params.values())
    assert jax.tree.map(jnp.shape, state[0].mu_scale) == {"w": (512, 3), "b": (1,), "s": (3, 5)}
    assert jax.tree.map(jnp.shape, state[0].mu) == jax.tree.map(jnp.shape, params)


def stepped(optimizer, master, gradient, state):
    """A step by the library; returns the master and what it keeps of the moments."""
    own = [np.array(leaf) for leaf in optimizer.rule.moments(state)]
    master, copy, factors = master.copy(), np.zeros_like(master), StepFactors(1)
    numbers = {"unscale": 1, "clip": 1, **jax.jit(optimizer.rule.factors)(state)}
    factors.values[:], factors.counts[:] = [numbers[name] for name in FACTORS], state[0].count
    counts, dtypes = [np.array(state[0].count, np.int32)], [np.dtype(np.float32)]
    step = HostStep(
        optimizer.rule.step, [StepPart(0, 0, True)], [master], [[x] for x in own], dtypes, dtypes, counts, factors
    )
    step.gradients[0], step.copies[0] = gradient.ctypes.data, copy.ctypes.data
    assert step.run()
    return [master, *own]


def same_but_nan(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        assert_same_bits(*(np.where(np.isnan(x), x.dtype.type(0), x) for x in (ours, theirs)))
        np.testing.assert_array_equal(np.isnan(ours), np.isnan(theirs))


@pytest.mark.parametrize(
    ("size", "nesterov"), [(1, False), (255, True), (256, False), (257, True), (20_001, False), (20_001, True)]
)
def test_the_library_computes_what_xla_does_bit_by_bit_with_any_instructions(steps, size, nesterov):
    optimizer = jaxferry.adamw(1e-2, weight_decay=0.1, moments="int8", nesterov=nesterov)
    generator, one = np.random.default_rng(size), np.float32(1)

    @jax.jit
    def update(gradient, one, state, master):
        # The product takes subnormal numbers for zero, as the division by a loss scale does.
        updates, state = optimizer.update(gradient * one, state, master)
        return optax.apply_updates(master, updates), state

    master = generator.normal(size=size).astype(np.float32)
    state = optimizer.init(master)
    for number in range(6):
        gradient = generator.normal(size=size) * 10.0 ** generator.uniform(-25, 5, size=size)
        gradient = gradient.astype(np.float32)
        gradient[::7], gradient[1::97] = 0, 1e-40
        if number > 3:
            gradient[-1:], gradient[3::1000], gradient[5::2000] = 1e38, -np.inf, np.nan
        new = update(gradient, one, state, master)
        expected = [np.asarray(leaf) for leaf in (new[0], *optimizer.rule.moments(new[1]))]
        for simd in SIMD:
            for num_threads in (1, 3):
                steps.set_host_simd(simd)
                steps.set_host_threads(num_threads)
                same_but_nan(stepped(optimizer, master, gradient, state), expected)
        master, state = (jax.tree.map(np.asarray, tree) for tree in new)


def loss_fn(params, x):
    for layer in params.values():
        x = jnp.tanh(x @ layer["w"] + layer["b"]) * jnp.mean(layer["c"])
    return jnp.mean(x**2)


def parameters():
    generator = np.random.default_rng(0)
    return {
        f"l{i}": {
            "w": generator.normal(size=(WIDTH, WIDTH)).astype(np.float32) * 0.1,
            "b": np.zeros(WIDTH, np.float32),
            "c": np.ones(300, np.float32),
        }
        for i in range(DEPTH)
    }


def by_optax(loss_fn, optimizer, params, num_steps):
    @jax.jit
    def step(params, state):
        updates, state = optimizer.update(jax.grad(loss_fn)(params, BATCH), state, params)
        return optax.apply_updates(params, updates), state

    state = optimizer.init(params)
    for _ in range(num_steps):
        params, state = step(params, state)
    return params, state


def test_the_bits_do_not_depend_on_where_a_layer_is_updated_or_on_a_checkpoint(monkeypatch, tmp_path):
    monkeypatch.setattr(planned_streaming, "SUBGROUP_BYTES", 12_000)
    places = [(Mode.GFGB, UpdatePlace.HOST), (Mode.GFGB, UpdatePlace.GPU), (Mode.RESIDENT, UpdatePlace.GPU)]
    results, subgroups = [], []
    places.append((Mode.RESIDENT, UpdatePlace.RESIDENT))
    for (mode, place), transport in zip(places, ("ferry", "device_put", "ferry", "device_put"), strict=True):
        plan = Plan("any", 1.0, tuple(LayerPlan(f"l{i}", mode, update=place) for i in range(DEPTH)))
        step = jaxferry.train_step(loss_fn, OPTIMIZER, plan=plan, transport=transport)
        state = taken(step, step.init(parameters()), BATCH, 3)
        if place is not UpdatePlace.HOST:
            step.save(state, tmp_path / f"{mode} {place}")
            state = step.restore(tmp_path / f"{mode} {place}")
        state = taken(step, state, BATCH, 2)
        results.append((state.params, state.opt_state))
        subgroups.append({len(unit.subgroups) for unit in state.host.units})
    assert subgroups == [{0}, {3}, {3}, {0}]
    for found in results[1:]:
        assert_same_bits(found, results[0])


def scanned(params, x):
    return jnp.mean(jax.lax.scan(lambda x, own: (jnp.tanh(x @ own[0] + own[1][:WIDTH]), None), x, params)[0] ** 2)


@pytest.mark.parametrize("width", [BLOCK, WIDTH])
def test_stacked_layers_have_the_bits_of_optax_by_layer_or_together_if_blocks_cross_layers(width):
    layers = parameters().values()
    params = [np.stack([layer["w"] for layer in layers]), np.zeros((DEPTH, width), np.float32)]
    step = jaxferry.train_step(scanned, OPTIMIZER)
    if width % BLOCK:
        with pytest.warns(UserWarning, match=r"whole stacked parameters .*: 256 elements of its moments share a scale"):
            state = taken(step, step.init(params), BATCH, 4)
    else:
        state = taken(step, step.init(params), BATCH, 4)
    assert len(state.host.units) == (1 if width % BLOCK else DEPTH)
    assert_same_bits((state.params, state.opt_state), by_optax(scanned, OPTIMIZER, params, 4))


def test_codes_with_scales_of_another_number_are_refused():
    dtypes, codes, scales = [np.dtype(np.float32)], np.zeros(300, np.uint8), np.zeros(1, np.float32)
    given = ([StepPart(0, 0, True)], [np.ones(300, np.float32)], [[codes], [codes], [scales], [scales]])
    with pytest.raises(ValueError, match=r"masters and moments are writable fp32 arrays, got float32\(1,\)"):
        HostStep(OPTIMIZER.rule.step, *given, dtypes, dtypes, [], StepFactors(0))
