"""The host step against NumPy, operation by operation: every rule, dtype, instruction set and number of threads."""

import jax
import ml_dtypes
import numpy as np
import pytest

from jaxferry.native import (
    FACTORS,
    KINDS,
    NUM_MOMENTS,
    SIMD,
    HostStep,
    StepFactors,
    StepPart,
    StepRule,
    library,
    rest_size,
)
from pairwise import pairwise
from python_runs import run_python

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


def run(kind, gradients, masters, moments, copies, parts, numbers=NUMBERS, counts=()):
    """The step by the library, on copies of masters, moments and compute copies; returns these."""
    masters, moments, copies = jax.tree.map(np.array, (masters, moments, copies))
    dtypes = ([array.dtype for array in arrays] for arrays in (gradients, copies))
    factors = StepFactors(len(counts))
    factors.values[:], factors.counts[:] = [numbers[name] for name in FACTORS], counts
    step = HostStep(rule_of(kind), parts, masters, moments, *dtypes, counts, factors)
    for addresses, arrays in ((step.gradients, gradients), (step.copies, copies)):
        addresses[:] = [array.ctypes.data for array in arrays]
    assert step.run()
    return masters, moments, copies


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


@pytest.mark.parametrize(("kind", "dtype", "simd"), pairwise(KINDS, DTYPES, SIMD))
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


def split_of(master, copy):
    """What a bf16 copy lacks of a master, and whether both are the master."""
    rest = np.empty(rest_size(master.size), np.uint16)
    return rest, library("cpu").split(master, copy.view(np.uint16), rest)


def joined(copy, rest):
    made = np.empty(copy.size, np.float32)
    library("cpu").join(copy.view(np.uint16), rest[: copy.size], rest[copy.size :].view(np.uint8), made)
    return made


def test_every_upper_half_of_a_number_is_split_and_joined_exactly_with_ties_infinities_and_nan(cpu):
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    for lower in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        master = (upper | lower).view(np.float32)
        master = master[~np.isnan(master) | (master.view(np.uint32) & 0x400000 != 0)]  # no signalling NaN
        with np.errstate(invalid="ignore"):
            copy = master.astype(ml_dtypes.bfloat16)
        copy.view(np.uint16)[np.isnan(master)] = (master.view(np.uint32) >> 16)[np.isnan(master)]
        rest, is_exact = split_of(master, copy)
        assert is_exact
        np.testing.assert_array_equal(joined(copy, rest).view(np.uint32), master.view(np.uint32))


def test_a_master_is_not_split_from_another_copy_or_as_a_signalling_nan(cpu):
    master = np.arange(100, dtype=np.float32)
    copy = master.astype(ml_dtypes.bfloat16)
    assert split_of(master, copy)[1]
    copy.view(np.uint16)[50] += 2
    assert not split_of(master, copy)[1]
    signalling = np.array([0x7F800001], np.uint32).view(np.float32)
    assert not split_of(signalling, np.array([0x7FC0], np.uint16).view(ml_dtypes.bfloat16))[1]


@pytest.mark.parametrize("simd", SIMD)
@pytest.mark.parametrize("kind", KINDS)
def test_a_split_master_takes_the_same_steps(steps, kind, simd):
    steps.set_host_simd(simd)
    sizes = [1, 3, 4, 7, 8, 15, 16, 17, 24, 33, CHUNK + 5]
    starts = np.cumsum([3, *sizes])
    gradients = normal(starts[-1], ml_dtypes.bfloat16, 0, 900)
    masters = [normal(size, np.float32, i) for i, size in enumerate(sizes)]
    moments = [[np.abs(normal(size, np.float32, 50 + i)) for i, size in enumerate(sizes)]] * NUM_MOMENTS[kind]
    parts = [StepPart(0, int(start), i % 3 > 0) for i, start in enumerate(starts[:-1])]
    copies = np.zeros(starts[-1], ml_dtypes.bfloat16)
    for start, master in zip(starts, masters, strict=False):
        copies[start : start + master.size] = master.astype(copies.dtype)
    expected, split_moments, split_copies = (masters, moments, [copies]), moments, [copies]
    rests = [split_of(m, copies[s : s + m.size])[0] for s, m in zip(starts, masters, strict=False)]
    for _ in range(3):
        expected = run(kind, [gradients], *expected, parts)
        rests, split_moments, split_copies = run(kind, [gradients], rests, split_moments, split_copies, parts)
    found = [joined(split_copies[0][s : s + n], rest) for s, n, rest in zip(starts, sizes, rests, strict=False)]
    assert_same_bits(found, expected[0])
    assert_same_bits(jax.tree.leaves((split_moments, split_copies)), jax.tree.leaves(expected[1:]))


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


@pytest.mark.parametrize(
    "wrong",
    [np.ones(10), np.ones(9, np.float32), np.ones(20, np.float32)[::2], np.broadcast_to(np.float32(1), (10,))],
    ids=["dtype", "size", "strides", "read-only"],
)
def test_moments_that_cannot_be_updated_in_place_are_refused(steps, wrong):
    master, dtypes = np.ones(10, np.float32), [np.dtype(np.float32)]
    with pytest.raises(ValueError, match="masters and moments are writable fp32 arrays"):
        HostStep(rule_of("momentum"), [StepPart(0, 0, True)], [master], [[wrong]], dtypes, dtypes, [], StepFactors(0))


def test_counts_that_the_factors_are_not_of_are_refused(steps):
    dtypes, counts = [np.dtype(np.float32)], [np.zeros((), np.int64)]
    given = (rule_of("sgd"), [StepPart(0, 0, True)], [np.ones(10, np.float32)], [], dtypes, dtypes)
    for counts, number in (([np.zeros((), np.int64)], 1), ([np.zeros((), np.int32)], 2)):
        with pytest.raises(ValueError, match=f"the factors are of {number} counts, int32, got"):
            HostStep(*given, counts, StepFactors(number))


def test_a_step_counts_itself_and_does_nothing_with_factors_of_another_step(steps):
    dtypes, counts = [np.dtype(np.float32)], [np.array(3, np.int32), np.array(2**31 - 1, np.int32)]
    master, gradient, copy, factors = (
        np.ones(10, np.float32),
        np.ones(10, np.float32),
        np.zeros(10, np.float32),
        StepFactors(2),
    )
    step = HostStep(rule_of("sgd"), [StepPart(0, 0, False)], [master], [], dtypes, dtypes, counts, factors)
    step.gradients[0], step.copies[0] = gradient.ctypes.data, copy.ctypes.data
    factors.values[:] = [{"unscale": 1, "clip": 1, "rate": -0.5}.get(name, 0) for name in FACTORS]
    factors.counts[:] = 3, 2**31 - 1
    assert step.run() and not step.run()
    assert (master == 0.5).all() and (copy == 0.5).all()
    assert [int(count) for count in counts] == [4, 2**31 - 1]


def test_the_number_of_threads_comes_from_the_environment_and_can_be_set(steps):
    code = "from jaxferry.native import library; print(library('cpu').set_host_threads(0))"
    assert run_python("-c", code, JAXFERRY_HOST_THREADS="3").split() == ["3"]
    assert steps.set_host_threads(5) == 5
    assert steps.set_host_threads(0) >= 1
