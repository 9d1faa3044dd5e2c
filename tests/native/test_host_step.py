"""The host step against NumPy, operation by operation: every rule, dtype, instruction set and number of threads."""

import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxferry.native.host_step import FACTORS, KINDS, NUM_MOMENTS, StepPart, StepRule, host_step
from jaxferry.native.library import SIMD

DTYPES = (np.float32, ml_dtypes.bfloat16, np.float16)
CHUNK = 1 << 15
NUMBERS = {
    "unscale": 1 / 1024,
    "clip": 0.3,
    "rate": -1e-2,
    "decay": 0.1,
    "first": 1.25,
    "gradient": 0.75,
    "second": 3.5,
}


@pytest.fixture
def steps(cpu):
    """The library; afterwards it uses the best instructions and all threads again."""
    yield cpu
    cpu.set_host_simd(SIMD[-1])
    cpu.set_host_threads(0)


def rule_of(kind):
    return StepRule(kind, b1=0.9, b2=0.99, eps=1e-8, eps_root=1e-12)


def normal(size, dtype, seed, scale=1.0):
    return (np.random.default_rng(seed).normal(size=size).astype(np.float32) * np.float32(scale)).astype(dtype)


def arrays_of(kind, size, gradient_dtype=ml_dtypes.bfloat16, copy_dtype=ml_dtypes.bfloat16):
    """A gradient, a master, the moments and a compute copy."""
    moments = [np.abs(normal(size, np.float32, 2 + i)) for i in range(NUM_MOMENTS[kind])]
    return normal(size, gradient_dtype, 0, 900), normal(size, np.float32, 1), moments, np.zeros(size, copy_dtype)


def run(kind, gradients, masters, moments, copies, parts, numbers=NUMBERS, copy_dtypes=()):
    """The step by the library; arrays become JAX's own first."""

    @functools.partial(jax.jit, donate_argnums=(2, 3, 4))
    def step(factors, gradients, masters, moments, copies):
        return host_step(rule_of(kind), parts, factors, gradients, masters, moments, copies, copy_dtypes)

    factors = jnp.asarray([numbers[name] for name in FACTORS], jnp.float32)
    # An address is no memory to donate.
    step = step if isinstance(copies, list) else jax.jit(step.__wrapped__, donate_argnums=(2, 3))
    return jax.tree.map(np.asarray, step(factors, *jax.tree.map(jnp.array, (gradients, masters, moments, copies))))


def run_one(kind, gradient, master, moments, copy, decays=True, numbers=NUMBERS):
    masters, moments, copies = run(
        kind, [gradient], [master], [[m] for m in moments], [copy], [StepPart(0, 0, decays)], numbers
    )
    return [masters[0], *(moment[0] for moment in moments), copies[0]]


def flushed(x):
    """Subnormal numbers become zeros."""
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), x), x)


class Rounded:
    """fp32 numbers; every operation is rounded and flushed separately."""

    def __init__(self, x):
        self.x = flushed(np.asarray(x, np.float32))

    def __add__(self, other):
        return Rounded(self.x + other.x)

    def __mul__(self, other):
        return Rounded(self.x * other.x)

    def __truediv__(self, other):
        return Rounded(self.x / other.x)

    def sqrt(self):
        return Rounded(np.sqrt(self.x))

    def sign(self):
        return Rounded(np.sign(self.x))


def update_of(kind, g, moments, n):
    """The update and the new moments, as README.md of xla_ffi defines them."""
    if kind in ("adam", "nadam"):
        m = n["1-b1"] * g + n["b1"] * moments[0]
        v = n["1-b2"] * (g * g) + n["b2"] * moments[1]
        mean = n["first"] * m + n["gradient"] * g if kind == "nadam" else n["first"] * m
        return mean / ((n["second"] * v + n["eps_root"]).sqrt() + n["eps"]), [m, v]
    if kind == "lion":
        direction = n["1-b1"] * g + n["b1"] * moments[0]
        return direction.sign(), [n["1-b2"] * g + n["b2"] * moments[0]]
    if kind == "sgd":
        return g, []
    m = g + n["b1"] * moments[0]
    return (m if kind == "momentum" else g + n["b1"] * m), [m]


def expected_of(kind, gradient, master, moments, copy, decays=True, numbers=NUMBERS):
    rule = rule_of(kind)
    constants = {"b1": rule.b1, "1-b1": 1 - rule.b1, "b2": rule.b2, "1-b2": 1 - rule.b2}
    constants |= {"eps": rule.eps, "eps_root": rule.eps_root}
    n = {name: Rounded(number) for name, number in {**numbers, **constants}.items()}
    with np.errstate(all="ignore"):
        g = Rounded(gradient.astype(np.float32)) * n["unscale"] * n["clip"]
        update, moments = update_of(kind, g, [Rounded(m) for m in moments], n)
        p = Rounded(master)
        p = p + n["rate"] * (update + n["decay"] * p if decays else update)
        return [p.x, *(m.x for m in moments), p.x.astype(copy.dtype)]


def assert_same_bits(actual, expected):
    """Compares bits, except for those of NaN."""
    for ours, theirs in zip(actual, expected, strict=True):
        are_nan = np.isnan(theirs.astype(np.float32))
        np.testing.assert_array_equal(np.isnan(ours.astype(np.float32)), are_nan)
        bits = np.dtype(f"u{ours.dtype.itemsize}")
        np.testing.assert_array_equal(ours[~are_nan].view(bits), theirs[~are_nan].view(bits))


def every_kind_of_number(dtype):
    """Zeros, subnormal, small, huge and infinite numbers and NaN, of both signs."""
    info = ml_dtypes.finfo(dtype)
    small = [0.0, info.smallest_subnormal, info.smallest_subnormal * 5, info.tiny / 2, info.tiny, info.tiny * 3]
    rest = [1e-7, 0.5, 1.0, 3.0, 1e4, float(info.max) / 2, info.max, np.inf, np.nan]
    numbers = np.array([*small, *rest]).astype(np.float32)
    return np.concatenate([numbers, -numbers]).astype(dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("decays", [True, False])
def test_every_rule_is_computed_operation_by_operation(steps, kind, decays):
    arrays = arrays_of(kind, 1000)
    assert_same_bits(run_one(kind, *arrays, decays), expected_of(kind, *arrays, decays))


@pytest.mark.parametrize("copy_dtype", DTYPES)
@pytest.mark.parametrize("gradient_dtype", DTYPES)
def test_gradients_and_copies_have_any_dtype(steps, gradient_dtype, copy_dtype):
    arrays = arrays_of("adam", 777, gradient_dtype, copy_dtype)
    assert_same_bits(run_one("adam", *arrays), expected_of("adam", *arrays))


@pytest.mark.parametrize("simd", SIMD)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_zeros_subnormals_huge_numbers_infinities_and_nan_are_treated_alike(steps, kind, dtype, simd):
    steps.set_host_simd(simd)
    gradients, masters, moments = (every_kind_of_number(d) for d in (dtype, np.float32, np.float32))
    grid = np.meshgrid(gradients, masters, np.abs(moments), indexing="ij")
    gradient, master, moment = (axis.ravel() for axis in grid)
    arrays = (gradient, master, [moment] * NUM_MOMENTS[kind], np.zeros(gradient.size, dtype))
    numbers = NUMBERS | {"unscale": 1.0, "clip": 1.0}
    assert_same_bits(run_one(kind, *arrays, numbers=numbers), expected_of(kind, *arrays, numbers=numbers))


def test_subnormal_numbers_are_zero_on_every_thread(steps):
    steps.set_host_threads(4)
    numbers = NUMBERS | {"unscale": 1.0, "clip": 1.0}
    gradient, master, *moments = [np.full(64 * CHUNK, x, np.float32) for x in (0.0, 1e-39, 1e-39, 1e-39)]
    assert master.all()
    for result in run_one("adam", gradient, master, moments, np.ones_like(master), numbers=numbers):
        assert not result.any()


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        pytest.param(kind, dtype, marks=[] if dtype in (DTYPES[number % 3], np.float32) else pytest.mark.slow)
        for number, kind in enumerate(KINDS)
        for dtype in DTYPES
    ],
)
def test_every_instruction_set_and_number_of_threads_gives_the_same_bits(steps, kind, dtype):
    arrays = arrays_of(kind, 5 * CHUNK + 13, dtype, dtype)
    steps.set_host_threads(1)
    steps.set_host_simd("portable")
    expected = run_one(kind, *arrays)
    for simd in SIMD:
        used = steps.set_host_simd(simd)
        assert SIMD.index(used) <= SIMD.index(simd)
        for threads in (1, 2, 7, 0):
            steps.set_host_threads(threads)
            assert_same_bits(run_one(kind, *arrays), expected)


@pytest.mark.parametrize("simd", SIMD)
def test_parameters_lie_anywhere_in_their_vectors(steps, simd):
    steps.set_host_simd(simd)
    sizes = [1, 0, 3, 15, 16, 17, 31, 33, 2 * CHUNK + 1, CHUNK, 5, 0]
    ends = np.cumsum([7, *sizes])
    parts = [StepPart(i % 2, int(ends[i]), i % 3 == 0) for i in range(len(sizes))]
    gradients = [normal(ends[-1] + 9, dtype, i, 900) for i, dtype in enumerate((np.float16, np.float32))]
    copies = [normal(ends[-1] + 9, dtype, 5) for dtype in (ml_dtypes.bfloat16, np.float16)]
    masters = [normal(size, np.float32, i) for i, size in enumerate(sizes)]
    moments = [[np.abs(normal(size, np.float32, 50 + i)) for i, size in enumerate(sizes)] for _ in range(2)]
    updated, new_moments, new_copies = run("adam", gradients, masters, moments, copies, parts)
    expected_copies = [copy.copy() for copy in copies]
    for i, part in enumerate(parts):
        where = slice(part.offset, part.offset + sizes[i])
        arrays = (gradients[part.vector][where], masters[i], [m[i] for m in moments], copies[part.vector][where])
        expected = expected_of("adam", *arrays, part.decays)
        assert_same_bits([updated[i], *(m[i] for m in new_moments)], expected[:-1])
        expected_copies[part.vector][where] = expected[-1]
    assert_same_bits(new_copies, expected_copies)


def test_without_parameters_nothing_happens(steps):
    masters, moments, copies = run("adam", [], [], [[], []], [], [])
    assert (masters, moments, copies) == ([], [[], []], [])


def test_all_is_updated_where_it_lies_and_needs_no_memory(steps):
    size = 4 * CHUNK
    gradient, master, moments, copy = arrays_of("adam", size)
    host = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="unpinned_host")

    @functools.partial(jax.jit, donate_argnums=(2, 3, 4), out_shardings=host)
    def step(factors, gradient, master, moments, copy):
        gradient, master, moments, copy = jax.device_put((gradient, master, moments, copy), jax.memory.Space.Device)
        return host_step(
            rule_of("adam"), [StepPart(0, 0, True)], factors, [gradient], [master], [[m] for m in moments], [copy]
        )

    gradient, *given = [jax.device_put(x, host, may_alias=False) for x in (gradient, master, *moments, copy)]
    factors = jnp.ones(len(FACTORS))
    compiled = step.lower(factors, gradient, given[0], given[1:3], given[3]).compile()
    stats = compiled.memory_analysis()
    assert stats.alias_size_in_bytes == size * (4 + 4 + 4 + 2)
    assert stats.temp_size_in_bytes < 1000
    addresses = []
    for _ in range(3):
        results = compiled(factors, gradient, given[0], given[1:3], given[3])
        given = jax.block_until_ready(jax.tree.leaves(results))
        addresses.append([x.unsafe_buffer_pointer() for x in given])
    assert addresses[1:] == addresses[:-1]


def test_copies_are_made_where_none_are_given(steps):
    gradient, master, moments, copy = arrays_of("adam", 100)
    shape = jax.ShapeDtypeStruct(copy.shape, copy.dtype)

    @functools.partial(jax.jit, donate_argnums=(2, 3))
    def step(factors, gradient, master, moments):
        return host_step(rule_of("adam"), [StepPart(0, 0, True)], factors, [gradient], [master], moments, [shape])

    factors = jnp.asarray([NUMBERS[name] for name in FACTORS], jnp.float32)
    given = jax.tree.map(jnp.array, (gradient, master, [[m] for m in moments]))
    _, _, [made] = step(factors, *given)
    assert_same_bits([np.asarray(made)], expected_of("adam", gradient, master, moments, copy)[-1:])


@pytest.mark.parametrize("is_wide", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_copies_are_written_to_the_addresses_that_are_given(steps, dtype, is_wide):
    size = CHUNK + 17
    of_gradients = np.float32 if is_wide else dtype
    gradient, master, moments, copy = arrays_of("adam", size, of_gradients, dtype)
    others = arrays_of("adam", 5, of_gradients, dtype)
    parts = [StepPart(0, 0, True), StepPart(1, 2, False)]
    given = [
        [gradient, np.concatenate([others[0][:2], others[0]])],
        [master, others[1]],
        [list(pair) for pair in zip(moments, others[2], strict=True)],
    ]
    expected = run("adam", *given, [copy, np.zeros(7, dtype)], parts)
    targets = [np.full(size, 3, dtype), np.full(7, 3, dtype)]
    addresses = np.asarray([target.ctypes.data for target in targets], np.uint64).view(np.uint8)
    masters, moments, copies = run("adam", *given, addresses, parts, copy_dtypes=[dtype, dtype])
    assert copies == []
    assert_same_bits(jax.tree.leaves([masters, moments, targets[0]]), jax.tree.leaves([*expected[:2], expected[2][0]]))
    assert_same_bits(targets[1][2:], expected[2][1][2:])
    assert (targets[1][:2] == 3).all()


@pytest.mark.parametrize(
    ("addresses", "copies", "message"),
    [
        (np.zeros(8, np.uint8), [1], "the address of copy 0 must be a multiple of 2 other than 0, got 0"),
        (np.asarray([65], np.uint64).view(np.uint8), [1], "must be a multiple of 2 other than 0, got 65"),
        (np.zeros(8, np.uint8), [3], r"copies must lie in \[0, 2\], got 3"),
        (np.zeros(8, np.uint8), [], "copies must have the dtype of each of the 1 copies, got 0"),
        (np.zeros(7, np.uint8), [1], r"must be their addresses, uint8\[8\], got uint8\[7\]"),
        (np.zeros(8, np.int8), [1], r"must be their addresses, uint8\[8\], got int8\[8\]"),
    ],
)
def test_addresses_that_are_none_are_refused(steps, addresses, copies, message):
    given = [*arguments()[:-1], jnp.asarray(addresses)]
    structs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in given[2:-1]]
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"host_step: .*{message}"):
        jax.block_until_ready(raw(given, structs, copies=copies))


def raw(arguments, results, **changes):
    """The operation as XLA knows it, for Adam on one parameter, with some attributes changed."""
    attributes = {"rule": 0, "vectors": [0], "offsets": [0], "decays": [1], "copies": []} | changes
    aliases = {2 + i: i for i in range(min(len(results), len(arguments) - 2))}
    numbers = {name: np.float64(0.5) for name in ("b1", "b2", "eps", "eps_root")}

    def convert(value):
        return np.asarray(value, np.int64) if isinstance(value, list) else np.int64(value)

    attributes = {name: convert(value) for name, value in attributes.items()}
    operation = jax.ffi.ffi_call("jaxferry_host_step", results, input_output_aliases=aliases, has_side_effect=True)
    return jax.jit(lambda *a: operation(*a, **attributes, **numbers))(*arguments)


def arguments(**changes):
    arrays = {
        "factors": jnp.ones(7),
        "gradient": jnp.ones(10, jnp.bfloat16),
        "master": jnp.ones(10),
        "first": jnp.ones(10),
        "second": jnp.ones(10),
        "copy": jnp.ones(10, jnp.bfloat16),
    } | changes
    return list(arrays.values())


WRONG = {
    "rule must lie in": ({}, {"rule": 6}),
    "factors must be float32": ({"factors": jnp.ones(6)}, {}),
    "the gradient must be float32, bfloat16": ({"gradient": jnp.ones(10, jnp.int32)}, {}),
    "the copy must be float32, bfloat16": ({"copy": jnp.ones(10, jnp.int32)}, {}),
    "the master must be float32": ({"master": jnp.ones(10, jnp.bfloat16)}, {}),
    "the second moment must have the size of its master": ({"second": jnp.ones(9)}, {}),
    "do not lie inside the gradient": ({"gradient": jnp.ones(9)}, {}),
    "do not lie inside the copy": ({"copy": jnp.ones(9)}, {}),
    "from offset 1 on": ({}, {"offsets": [1]}),
    "vectors must lie in": ({}, {"vectors": [1]}),
    "decays must be 0 or 1": ({}, {"decays": [2]}),
    "must have one number for each parameter": ({}, {"decays": [1, 0]}),
    "masters and moments and the copies as results": ({}, {"vectors": [0, 0], "offsets": [0, 0], "decays": [1, 0]}),
}


@pytest.mark.parametrize("message", WRONG)
def test_errors_name_the_operation_the_argument_and_the_shapes(steps, message):
    changes, attributes = WRONG[message]
    given = arguments(**changes)
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"host_step: .*{message}"):
        jax.block_until_ready(raw(given, [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in given[2:]], **attributes))


def test_a_missing_argument_is_an_error(steps):
    given = arguments()[:-2]
    structs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arguments()[2:]]
    with pytest.raises(jax.errors.JaxRuntimeError, match="host_step: there must be 5 arguments, or 6"):
        jax.block_until_ready(raw(given, structs))


def test_the_number_of_threads_comes_from_the_environment_and_can_be_set(steps):
    code = "from jaxferry.native import library; print(library('cpu').set_host_threads(0))"
    environment = os.environ | {"JAXFERRY_HOST_THREADS": "3", "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert result.stdout.split() == ["3"]
    assert steps.set_host_threads(5) == 5
    assert steps.set_host_threads(0) >= 1
