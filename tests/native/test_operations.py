"""The operations on host memory, native and plain, against NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxferry.errors import InputError
from jaxferry.native import GatherShape, ProductShape, is_available, operations, status, targets
from jaxferry.transport import make_placement

DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16]
TOLERANCE = {jnp.float32: 1e-5, jnp.bfloat16: 2e-2, jnp.float16: 2e-3}


@pytest.fixture(params=[True, False], ids=["native", "plain"])
def native(request):
    assert is_available("cpu"), status("cpu").message
    return request.param


@pytest.fixture(params=DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def dtype(request):
    return request.param


PLACEMENT = make_placement(jax.devices("cpu")[0])


def numbers(shape, dtype, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def on_host(array):
    return jax.device_put(array, PLACEMENT.pinned)


def exact(array):
    return np.asarray(array, np.float64)


def assert_close(actual, expected, dtype, scale=1.0):
    tolerance = TOLERANCE[dtype] * scale
    np.testing.assert_allclose(exact(actual), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shape", [(4,), (2, 3), (1,), (0,), ()])
def test_a_gather_is_rows_of_the_table(shape, dtype, native):
    table = numbers((7, 5), dtype)
    indices = np.random.default_rng(1).integers(0, 7, shape)
    rows = jax.jit(lambda t, i: operations.dha_gather(t, i, native=native))(on_host(table), jnp.asarray(indices))
    np.testing.assert_array_equal(exact(rows), exact(table)[indices])
    assert rows.dtype == table.dtype and rows.sharding.memory_kind == "device"


def test_an_index_of_64_bits_is_out_of_range_whatever_its_lower_half_says(native):
    with jax.enable_x64(True):
        indices = jnp.array([3, 2**32 + 3, -(2**32) + 3], jnp.int64)
        rows = operations.dha_gather(on_host(numbers((4, 2), jnp.float32)), indices, native=native)
    assert np.isnan(exact(rows)).all(axis=1).tolist() == [False, True, True]


def test_an_index_out_of_range_gives_nan(dtype, native):
    table = numbers((4, 3), dtype)
    rows = operations.dha_gather(on_host(table), jnp.array([0, 4, -1, 3]), native=native)
    assert np.isnan(exact(rows)).all(axis=1).tolist() == [False, True, True, False]


def test_a_gather_finds_a_table_within_a_vector(dtype, native):
    vector, indices = numbers((40,), dtype), jnp.array([2, 0, 2])
    rows = operations.dha_gather(on_host(vector), indices, shape=GatherShape(5, 3, 11), native=native)
    np.testing.assert_array_equal(exact(rows), exact(vector)[11:26].reshape(5, 3)[[2, 0, 2]])


def test_the_gradient_of_a_gather_adds_up_repeated_rows(dtype, native):
    table, indices = numbers((6, 4), dtype), jnp.array([[1, 5, 1], [1, 0, 7]])
    weights = numbers((2, 3, 4), dtype, seed=2)

    def loss(table):
        rows = operations.dha_gather(table, indices, native=native)
        return jnp.sum(jnp.where(jnp.isnan(rows), 0, rows * weights).astype(jnp.float32))

    gradient = jax.jit(jax.grad(loss))(on_host(table))
    expected = np.zeros((6, 4))
    for index, row in zip(np.asarray(indices).ravel(), exact(weights).reshape(6, 4), strict=True):
        if index < 6:
            expected[index] += row
    assert_close(gradient, expected, dtype)
    assert gradient.sharding.memory_kind == "pinned_host"


# Rows of x, k, n: one row, odd sizes, no rows, sizes of a layer.
SIZES = [((1,), 5, 3), ((3,), 1, 1), ((2, 3), 17, 9), ((0,), 4, 3), ((33,), 64, 130), ((), 4, 2)]


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize(("leading", "k", "n"), SIZES)
def test_a_product_is_that_of_the_matrices(leading, k, n, transpose, dtype, native):
    x, w = numbers((*leading, k), dtype), numbers((n, k) if transpose else (k, n), dtype, seed=1)
    y = jax.jit(lambda x, w: operations.dha_matmul(x, w, transpose=transpose, native=native))(x, on_host(w))
    assert_close(y, exact(x) @ (exact(w).T if transpose else exact(w)), dtype, scale=k**0.5)
    assert y.dtype == x.dtype and y.shape == (*leading, n)


@pytest.mark.parametrize("transpose", [False, True])
def test_the_gradients_of_a_product_are_products(transpose, dtype, native):
    x, w = numbers((2, 3, 8), dtype), numbers((5, 8) if transpose else (8, 5), dtype, seed=1)
    dy = numbers((2, 3, 5), dtype, seed=2)

    def loss(x, w):
        return jnp.sum((operations.dha_matmul(x, w, transpose=transpose, native=native) * dy).astype(jnp.float32))

    dx, dw = jax.jit(jax.grad(loss, argnums=(0, 1)))(x, on_host(w))
    matrix = exact(w).T if transpose else exact(w)
    expected = np.einsum("abk,abn->kn", exact(x), exact(dy))
    assert_close(dx, exact(dy) @ matrix.T, dtype, scale=3)
    assert_close(dw, expected.T if transpose else expected, dtype, scale=3)
    assert dw.sharding.memory_kind == "pinned_host" and dw.dtype == w.dtype


@pytest.mark.parametrize("transpose", [False, True])
def test_rows_that_are_padded_for_a_gpu_give_the_same_products_and_gradients(transpose, dtype):
    x, w = numbers((5, 24 + 1), dtype), on_host(numbers((37, 25) if transpose else (25, 37), dtype, seed=1))
    dy = numbers((5, 37), dtype, seed=2)

    def run(x, w):
        y, pull = jax.vjp(lambda x, w: operations.dha_matmul(x, w, transpose=transpose, native=True), x, w)
        return y, *pull(dy)

    plain = jax.jit(run)(x, w)
    padded = jax.jit(lambda x, w: run(x, w))  # compiled anew
    with targets.for_products_of("gpu"):
        program = padded.lower(x, w).as_text()
    assert "tensor<5x32x" in program and "tensor<5x40x" in program
    for found, expected in zip(padded(x, w), plain, strict=True):
        assert found.shape == expected.shape
        np.testing.assert_array_equal(exact(found), exact(expected))


@pytest.mark.parametrize("scratch_bytes", [64, 1000, 1 << 20])
def test_the_scratch_does_not_change_the_result(scratch_bytes, dtype):
    x, w = numbers((5, 24), dtype), on_host(numbers((24, 37), dtype, seed=1))
    expected = operations.dha_matmul(x, w, native=True)
    y = operations.dha_matmul(x, w, scratch_bytes=scratch_bytes, native=True)
    np.testing.assert_array_equal(exact(y), exact(expected))


def test_a_product_casts_the_weight_and_widens_the_result(native):
    x, w = numbers((3, 16), jnp.bfloat16), numbers((16, 4), jnp.float32, seed=1)
    y = operations.dha_matmul(x, on_host(w), out_dtype=jnp.float32, native=native)
    assert y.dtype == jnp.float32
    assert_close(y, exact(x) @ exact(w.astype(jnp.bfloat16)), jnp.float32, scale=10)


def test_a_read_gives_pieces_of_the_vector_and_its_gradient_adds_them_up(dtype, native):
    vector = numbers((20,), dtype)
    shapes, offsets = [(2, 3), (5,), (), (0,), (4,)], [1, 7, 19, 3, 5]

    def loss(vector):
        pieces = operations.dha_read(vector, shapes, offsets, native=native)
        return sum(jnp.sum((i + 1) * piece.astype(jnp.float32)) for i, piece in enumerate(pieces))

    pieces = operations.dha_read(on_host(vector), shapes, offsets, native=native)
    expected = np.zeros(20)
    for i, (piece, shape, offset) in enumerate(zip(pieces, shapes, offsets, strict=True)):
        size = int(np.prod(shape))
        np.testing.assert_array_equal(exact(piece), exact(vector)[offset : offset + size].reshape(shape))
        expected[offset : offset + size] += i + 1
    np.testing.assert_array_equal(exact(jax.jit(jax.grad(loss))(on_host(vector))), expected)


def stored(operation, destination, *args):
    """The result of a store into a donated host array, and whether that array was written in place."""
    host = on_host(destination)
    pointer = host.unsafe_buffer_pointer()
    result = jax.jit(operation, donate_argnums=0, out_shardings=PLACEMENT.pinned)(host, *args)
    assert result.sharding.memory_kind == "pinned_host"
    return exact(result), result.unsafe_buffer_pointer() == pointer


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("shape", [(3, 5), (1,), (0,), ()])
def test_a_store_writes_or_adds_and_touches_nothing_else(shape, accumulate, dtype, native):
    before, gradient = numbers((30,), jnp.float32), numbers(shape, dtype, seed=1)

    def store(destination, gradient):
        return operations.gradient_store(destination, gradient, offset=7, accumulate=accumulate, native=native)

    after, is_in_place = stored(store, before, gradient)
    expected = exact(before)
    size = gradient.size
    expected[7 : 7 + size] = exact(gradient).ravel() + (expected[7 : 7 + size] if accumulate else 0)
    np.testing.assert_allclose(after, expected, rtol=1e-6, atol=1e-6)
    assert is_in_place or not native


@pytest.mark.parametrize("accumulate", [False, True])
def test_a_store_rounds_once_to_the_destination(accumulate, native):
    before, gradient = numbers((64,), jnp.bfloat16, seed=1), numbers((64,), jnp.float32)
    after, _ = stored(
        lambda d, g: operations.gradient_store(d, g, accumulate=accumulate, native=native), before, gradient
    )
    wide = gradient + before.astype(jnp.float32) if accumulate else gradient
    np.testing.assert_array_equal(after, exact(wide.astype(jnp.bfloat16)))


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("scratch_bytes", [256, 1 << 20])
def test_a_gradient_of_a_product_goes_to_its_place(scratch_bytes, transpose, accumulate, dtype, native):
    x, dy, before = numbers((2, 9, 7), dtype), numbers((2, 9, 11), dtype, seed=1), numbers((100,), dtype, seed=2)

    def store(destination, x, dy):
        return operations.dha_matmul_gradient(
            destination,
            x,
            dy,
            transpose=transpose,
            offset=13,
            accumulate=accumulate,
            scratch_bytes=scratch_bytes,
            native=native,
        )

    after, is_in_place = stored(store, before, x, dy)
    product = np.einsum("abk,abn->nk" if transpose else "abk,abn->kn", exact(x), exact(dy)).ravel()
    expected = exact(before)
    expected[13:90] = product + (expected[13:90] if accumulate else 0)
    assert_close(after, expected, dtype, scale=5)
    assert is_in_place or not native


def test_a_product_rounds_through_the_dtype_that_it_would_have_had(native):
    x, dy = numbers((50, 3), jnp.bfloat16), numbers((50, 4), jnp.bfloat16, seed=1)
    after, _ = stored(
        lambda d, x, dy: operations.dha_matmul_gradient(d, x, dy, round_to=jnp.bfloat16, native=native),
        jnp.zeros(12, jnp.float32),
        x,
        dy,
    )
    np.testing.assert_array_equal(after, exact(jnp.asarray(after, jnp.bfloat16)))
    assert_close(after.reshape(3, 4), exact(x).T @ exact(dy), jnp.bfloat16, scale=5)


# Few lengths, since XLA compiles every operation anew for each.
@given(st.sampled_from([1, 9]).flatmap(lambda size: st.lists(st.integers(-2, 6), min_size=size, max_size=size)))
def test_sums_of_repeated_rows_are_those_of_a_scatter(indices):
    rows = numbers((len(indices), 3), jnp.float32)
    places, sums = operations.sum_repeated(jnp.array(indices), rows, 5)
    inside = np.asarray(places)[np.asarray(places) < 5]
    assert len(set(inside.tolist())) == len(inside)
    actual, expected = np.zeros((5, 3)), np.zeros((5, 3))
    for place, row in zip(np.asarray(places), exact(sums), strict=True):
        if place < 5:
            actual[place] += row
    for index, row in zip(indices, exact(rows), strict=True):
        if 0 <= index < 5:
            expected[index] += row
    np.testing.assert_allclose(actual, expected, atol=1e-5)


def test_other_dtypes_are_computed_without_the_library():
    assert operations.is_native(jnp.float32, native=True)
    assert not operations.is_native(jnp.float64, native=True)
    assert not operations.is_native(jnp.float32, native=False)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda h: operations.dha_gather(h, jnp.array([0])), "table must be a matrix"),
        (lambda h: operations.dha_gather(h, jnp.array([0]), shape=GatherShape(4, 4)), "12 elements"),
        (lambda h: operations.dha_gather(h, jnp.array([0.5]), shape=GatherShape(3, 4)), "indices must be integers"),
        (lambda h: operations.dha_matmul(jnp.ones((2, 5)), h, shape=ProductShape(4, 3)), "x must have 4 columns"),
        (lambda h: operations.dha_matmul(jnp.ones((2, 4)), h, shape=ProductShape(4, 3, offset=1)), "from element 1"),
        (lambda h: operations.dha_read(h, [(5,)], [8]), "5 from element 8"),
        (lambda h: operations.gradient_store(h, jnp.ones(4), offset=9), "4 from element 9"),
        (lambda h: operations.dha_matmul_gradient(h, jnp.ones((2, 3)), jnp.ones((3, 3))), "leading dimensions"),
    ],
)
def test_what_does_not_fit_is_named(call, words):
    with pytest.raises(InputError, match=words):
        call(on_host(jnp.ones(12)))


def test_the_gradient_of_a_lookup_by_a_small_dtype_reaches_its_rows(native):
    indices = jnp.array([0, 5, 5, 100], jnp.int8)

    def total(table):
        return operations.dha_gather(table, indices, native=native).sum()

    gradient = jax.jit(jax.grad(total), out_shardings=PLACEMENT.pinned)(on_host(jnp.ones((1000, 2))))
    expected = np.zeros((1000, 2))
    expected[[0, 5, 100]] = [[1], [2], [1]]
    np.testing.assert_array_equal(exact(gradient), expected)


def test_reads_can_be_mapped_over_a_batch(native):
    table, x = on_host(numbers((7, 5), jnp.float32)), numbers((3, 2, 7), jnp.float32, 1)
    indices = jnp.array([[0, 3], [6, 6], [1, 2]])
    rows = jax.jit(jax.vmap(lambda i: operations.dha_gather(table, i, native=native)))(indices)
    np.testing.assert_array_equal(exact(rows), exact(table)[np.asarray(indices)])
    product = jax.jit(jax.vmap(lambda x: operations.dha_matmul(x, table, native=native)))(x)
    np.testing.assert_allclose(exact(product), exact(x) @ exact(table), rtol=1e-5, atol=1e-5)


def test_arguments_that_are_not_acceptable_are_named(native):
    table, x = on_host(numbers((7, 5), jnp.float32)), numbers((3, 7), jnp.float32)
    dy = numbers((3, 5), jnp.float32)
    wrong = {
        "scratch_bytes": lambda: operations.dha_matmul(x, table, scratch_bytes=-1, native=native),
        "indices": lambda: operations.dha_gather(table, [0, 1], native=native),
        "an offset for each": lambda: operations.dha_read(table, [(2,), (3,)], [0], native=native),
        "round_to": lambda: operations.dha_matmul_gradient(table, x, dy, round_to=jnp.int8, native=native),
        "known when": lambda: jax.jit(lambda o: operations.gradient_store(table, dy, offset=o, native=native))(1),
    }
    for message, call in wrong.items():
        with pytest.raises(InputError, match=message):
            call()
