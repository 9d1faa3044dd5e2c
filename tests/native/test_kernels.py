"""The CPU's kernels against NumPy, through XLA: padded rows, every rounding, every size of a panel."""

import jax
import ml_dtypes
import numpy as np
import pytest

from jaxferry.native import library
from native.native_operations import ROUNDING, Operations
from native.operations_suite import FerrySuite, ProductSuite

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


@pytest.fixture
def stored(cpu, operations):
    """Stores numbers into zeros of a dtype."""
    return lambda numbers, dtype: operations.store(
        operations.host(np.zeros(numbers.size, dtype)), operations.device(numbers)
    )


def bits(array):
    array = np.asarray(array)
    return array.view({2: np.uint16, 4: np.uint32}[array.dtype.itemsize])


def assert_same_bits(actual, expected):
    actual, expected = np.asarray(actual), np.asarray(expected)
    are_nan = np.isnan(expected.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(actual.astype(np.float32)), are_nan)
    np.testing.assert_array_equal(bits(actual)[~are_nan], bits(expected)[~are_nan])


@pytest.mark.parametrize("dtype", HALVES)
def test_every_number_of_16_bits_becomes_itself_in_fp32(stored, dtype):
    numbers = np.arange(65536, dtype=np.uint16).view(dtype)
    # NumPy converts, since XLA's threads flush subnormal numbers to zero.
    assert_same_bits(stored(numbers, np.float32), numbers.astype(np.float32))


@pytest.mark.parametrize("dtype", HALVES)
def test_fp32_is_rounded_as_numpy_rounds(stored, dtype):
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
    assert_same_bits(stored(numbers, dtype), expected)


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_does_not_depend_on_the_size_of_its_panels(cpu, operations, dtype, transpose):
    x, w = normal((37, 200), dtype), normal(200 * 2300, dtype, 1)
    sizes = [2 * 200 * 4 * num_columns for num_columns in (0, 1, 7, 64, 65, 300, 1023, 1024, 1100, 2048, 2300)]
    operands = operations.device(x), operations.host(w), (200, 2300)
    results = [operations.matmul(*operands, transpose=transpose, scratch_bytes=size) for size in sizes]
    for result in results[1:]:
        assert_same_bits(result, results[0])
