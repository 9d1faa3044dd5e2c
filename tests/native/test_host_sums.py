"""Sums in host memory, in place: the library's bits are NumPy's, whatever the number of threads."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxferry.native import host_sums, library

DTYPES = [np.dtype(np.float32), np.dtype(jnp.bfloat16), np.dtype(np.float16)]
PAIRS = [(to, added) for to in DTYPES for added in DTYPES if added == to or to == np.float32]
SIZE = 3 * 2**15 + 17  # several chunks, and a rest


def numbers(dtype, *shape, seed=0):
    return np.random.default_rng(seed).normal(0, 3, shape).astype(dtype)


def sum_of(known, more):
    """In fp32, rounded once."""
    return (known.astype(np.float32) + more.astype(np.float32)).astype(known.dtype)


@pytest.fixture(params=[1, 3])
def threads(request):
    native = library("cpu")
    native.set_host_threads(request.param)
    yield
    native.set_host_threads(0)


@pytest.fixture(params=["library", "numpy"])
def either(request, monkeypatch):
    if request.param == "numpy":
        monkeypatch.setattr(host_sums, "_native", lambda *arrays: None)


@pytest.mark.usefixtures("threads", "either")
@pytest.mark.parametrize(("to", "added"), PAIRS)
def test_a_sum_is_in_fp32_rounded_once_and_in_place(to, added):
    target, source = numbers(to, SIZE), numbers(added, SIZE, seed=1)
    expected, view = sum_of(target, source), target[5:-5]
    host_sums.add(view, source[5:-5])
    np.testing.assert_array_equal(view, expected[5:-5])
    np.testing.assert_array_equal(target[:5], numbers(to, SIZE)[:5])
    host_sums.add(target, source, adds=False)
    np.testing.assert_array_equal(target, source.astype(to))
    host_sums.clear(view)
    assert not view.any() and target[:5].any() and target[-5:].any()


@pytest.mark.usefixtures("threads", "either")
@pytest.mark.parametrize(("to", "added"), PAIRS)
@pytest.mark.parametrize("columns", [1, 7, 1500])
def test_rows_are_added_one_after_another_and_rounded_once(to, added, columns):
    num_rows = 40
    # Many repetitions of one row, rows outside the table, and each other one once.
    indices = np.concatenate([np.full(50, 3), [-1, num_rows, 2**31 - 1], np.arange(num_rows)]).astype(np.int32)
    np.random.default_rng(2).shuffle(indices)
    rows, table = numbers(added, len(indices), columns), numbers(to, num_rows, columns, seed=1)
    totals = table.astype(np.float32)
    for index, row in zip(indices, rows, strict=True):
        if 0 <= index < num_rows:
            totals[index] += row.astype(np.float32)
    expected = totals.astype(to)
    # As a process holds it: the first element and the last one are not those of a row.
    for start, stop in ((0, table.size), (columns // 2 + columns, table.size - columns // 3 - 2)):
        target = table.reshape(-1)[start:stop].copy()
        host_sums.add_rows(target, rows, indices, start)
        np.testing.assert_array_equal(target, expected.reshape(-1)[start:stop])


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int64, np.uint64])
def test_indices_of_any_integer_dtype_find_their_rows(dtype):
    target = np.zeros(6, np.float32)
    host_sums.add_rows(target, np.ones((4, 2), np.float32), np.array([2, 0, 2, np.iinfo(dtype).max], dtype))
    np.testing.assert_array_equal(target, [1, 1, 0, 0, 2, 2])


@pytest.mark.usefixtures("either")
def test_nothing_is_added_by_no_rows_or_columns():
    table = numbers(np.float32, 12)
    for number, columns in ((0, 4), (3, 0)):
        host_sums.add_rows(table, np.ones((number, columns), np.float32), np.zeros(number, np.int32))
    np.testing.assert_array_equal(table, numbers(np.float32, 12))


def test_float64_is_summed_in_its_own_precision():
    target, source = np.full(3, 1.0), np.full(3, 2.0**-40)
    host_sums.add(target, source)
    host_sums.add_rows(target, source[:1].reshape(1, 1), np.array([2]))
    np.testing.assert_array_equal(target, 1 + np.array([1, 1, 2]) * 2.0**-40)


def test_sizes_that_do_not_fit_are_an_error():
    with pytest.raises(ValueError, match="2 elements do not fit 3"):
        host_sums.add(np.zeros(3, np.float32), np.zeros(2, np.float32))
    with pytest.raises(ValueError, match="2 rows and indices of shape"):
        host_sums.add_rows(np.zeros(3, np.float32), np.zeros((2, 3), np.float32), np.zeros(1, np.int32))
