"""The CPU's kernels against NumPy, through XLA: padded rows, every rounding, every size of a panel."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxferry.native import library
from native.native_operations import ROUNDING, Operations
from native.operations_suite import FerrySuite, ProductSuite
from native_calls import call, scratch

DTYPES = (np.float32, ml_dtypes.bfloat16, np.float16)
HALVES = (ml_dtypes.bfloat16, np.float16)


@pytest.fixture(scope="module")
def operations():
    library("cpu")  # registers what the operations call
    return Operations(jax.devices("cpu")[0], "jaxferry_", dict.fromkeys(ROUNDING, 2.0**-23))


class TestProducts:
    test_padded_rows_of_odd_products_change_nothing = ProductSuite.test_padded_rows_of_odd_products_change_nothing
    test_padded_rows_of_odd_gradients_change_nothing = ProductSuite.test_padded_rows_of_odd_gradients_change_nothing


class TestFerry(FerrySuite):
    pass


def normal(shape, dtype, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32).astype(dtype)


@functools.partial(jax.jit, static_argnames=("offset", "accumulate"), donate_argnums=0)
def gradient_store(destination, gradient, offset=0, accumulate=False):
    arguments = [destination, gradient]
    return call("gradient_store", arguments, [destination], {0: 0}, offset=offset, accumulate=accumulate)[0]


@functools.partial(jax.jit, static_argnames=("n", "offset", "transpose", "panel", "dtype", "k", "width"))
def matmul(x, w, n, offset=0, transpose=False, panel=1 << 12, dtype=None, k=None, width=None):
    attributes = {"offset": offset, "k": k or x.shape[-1], "n": n, "transpose": transpose}
    result = jax.ShapeDtypeStruct((*x.shape[:-1], width or n), dtype or x.dtype)
    return call("dha_matmul", [x, w, scratch(panel)], [result], **attributes)[0]


@functools.partial(
    jax.jit, static_argnames=("offset", "transpose", "accumulate", "round_to", "panel"), donate_argnums=0
)
def matmul_gradient(destination, x, dy, offset=0, transpose=False, accumulate=False, round_to=0, panel=1 << 12):
    attributes = {"offset": offset, "k": x.shape[-1], "n": dy.shape[-1], "transpose": transpose}
    attributes |= {"accumulate": accumulate, "round_to": round_to}
    arguments = [destination, x, dy, scratch(panel)]
    return call("dha_matmul_gradient", arguments, [destination], {0: 0}, **attributes)[0]


def bits(array):
    array = np.asarray(array)
    return array.view({2: np.uint16, 4: np.uint32}[array.dtype.itemsize])


def assert_same_bits(actual, expected):
    actual, expected = np.asarray(actual), np.asarray(expected)
    are_nan = np.isnan(expected.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(actual.astype(np.float32)), are_nan)
    np.testing.assert_array_equal(bits(actual)[~are_nan], bits(expected)[~are_nan])


@pytest.mark.parametrize("dtype", HALVES)
def test_every_number_of_16_bits_becomes_itself_in_fp32(cpu, dtype):
    numbers = np.arange(65536, dtype=np.uint16).view(dtype)
    stored = gradient_store(jnp.zeros(65536, jnp.float32), jnp.asarray(numbers))
    # NumPy converts, since XLA's threads flush subnormal numbers to zero.
    assert_same_bits(stored, numbers.astype(np.float32))


@pytest.mark.parametrize("dtype", HALVES)
def test_fp32_is_rounded_as_numpy_rounds(cpu, dtype):
    rng = np.random.default_rng(3)
    anything = rng.integers(0, 2**32, 200_000, dtype=np.uint32).view(np.float32)
    exponents = rng.uniform(-26, 17, 100_000)
    ordinary = (np.exp2(exponents) * rng.choice([-1, 1], exponents.size)).astype(np.float32)
    every = np.arange(65535, dtype=np.uint16)
    every = every[np.isfinite(every.view(dtype).astype(np.float32))]
    every = every[:-1][np.diff(every) == 1]
    low, high = (number.view(dtype).astype(np.float64) for number in (every, every + np.uint16(1)))
    halfway = ((low + high) / 2).astype(np.float32)
    numbers = np.concatenate([anything, ordinary, halfway])
    with np.errstate(over="ignore", invalid="ignore"):
        expected = numbers.astype(dtype)
    assert_same_bits(gradient_store(jnp.zeros(numbers.size, dtype), jnp.asarray(numbers)), expected)


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_does_not_depend_on_the_size_of_its_panels(cpu, dtype, transpose):
    x, w = normal((37, 200), dtype), normal(200 * 2300, dtype, 1)
    sizes = [2 * 200 * 4 * num_columns for num_columns in (0, 1, 7, 64, 65, 300, 1023, 1024, 1100, 2048, 2300)]
    results = [matmul(x, w, 2300, transpose=transpose, panel=size) for size in sizes]
    for result in results[1:]:
        assert_same_bits(result, results[0])


@pytest.mark.parametrize(("round_to", "dtype"), [(1, ml_dtypes.bfloat16), (2, np.float16)])
def test_a_gradient_is_rounded_through_another_dtype(cpu, round_to, dtype):
    x, dy = normal((6, 20), np.float32), normal((6, 30), np.float32, 1)
    plain = np.asarray(matmul_gradient(jnp.zeros(600), x, dy))
    rounded = matmul_gradient(jnp.zeros(600), x, dy, round_to=round_to)
    assert_same_bits(rounded, plain.astype(dtype).astype(np.float32))
    added = matmul_gradient(jnp.ones(600), x, dy, accumulate=True, round_to=round_to)
    assert_same_bits(added, 1 + plain.astype(dtype).astype(np.float32))


def test_a_gradient_does_not_depend_on_the_size_of_its_panels(cpu):
    x, dy = normal((50, 2300), np.float32), normal((50, 60), np.float32, 1)
    sizes = [2 * 60 * 4 * num_rows for num_rows in (0, 1, 50, 64, 100, 1023, 1024, 1100, 2048, 2300)]
    results = [matmul_gradient(jnp.zeros(2300 * 60), x, dy, panel=size) for size in sizes]
    for result in results[1:]:
        assert_same_bits(result, results[0])
