"""The operations on host memory, native and plain, against NumPy in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxferry.errors import InputError
from jaxferry.native import GatherShape, ProductShape, is_available, status, targets, twins
from jaxferry.native import operations as ops
from jaxferry.transport import make_placement
from native.native_operations import DTYPES as DTYPES_BY_NAME
from native.native_operations import ROUNDING, Operations
from native.operations_suite import CopySuite, ProductSuite

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


class Public(Operations):
    """The package's functions, by the native library or in plain JAX, which copies what it stores into."""

    def __init__(self, native):
        super().__init__(jax.devices("cpu")[0], "jaxferry_", dict.fromkeys(ROUNDING, 2.0**-23))
        self.native = self.is_in_place = native

    def run(self, function, *operands, **options):
        return jax.jit(functools.partial(function, native=self.native, **options))(*operands)

    def into(self, function, *operands, **options):
        """Runs a function that writes into its first operand."""
        own = functools.partial(function, **options)
        return jax.jit(own, donate_argnums=0, out_shardings=PLACEMENT.pinned)(*operands)

    def gather(self, table, indices, offset, rows, columns):
        return self.run(ops.dha_gather, table, indices, shape=GatherShape(rows, columns, offset))

    def matmul(self, x, w, shape, *, offset=0, transpose=False, result=None, scratch_bytes=1 << 16):
        options = {"shape": ProductShape(*shape, transpose, offset), "out_dtype": result and DTYPES_BY_NAME[result]}
        return self.run(ops.dha_matmul, x, w, **options, scratch_bytes=scratch_bytes)

    def read(self, vector, shapes, offsets):
        return self.run(ops.dha_read, vector, shapes=shapes, offsets=offsets)

    def store(self, destination, gradient, offset=0, accumulate=False):
        options = {"offset": offset, "accumulate": accumulate, "native": self.native}
        return self.into(ops.gradient_store, destination, gradient, **options)

    def add_rows(self, destination, indices, rows, offset, num_rows):
        function, shape = (targets if self.native else twins).row_store, GatherShape(num_rows, rows.shape[-1], offset)
        return self.into(function, destination, indices, rows, shape=shape)

    def matmul_gradient(self, destination, x, dy, *, round_to=None, **options):
        options |= {"round_to": round_to and DTYPES_BY_NAME[round_to], "native": self.native}
        return self.into(ops.dha_matmul_gradient, destination, x, dy, **options)


@pytest.fixture
def operations(native):
    return Public(native)


class TestCopies(CopySuite):
    pass


class TestProducts(ProductSuite):
    # Rows are padded behind the functions.
    test_padded_rows_of_odd_products_change_nothing = test_padded_rows_of_odd_gradients_change_nothing = None


def numbers(shape, dtype, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def on_host(array):
    return jax.device_put(array, PLACEMENT.pinned)


def exact(array):
    return np.asarray(array, np.float64)


def assert_close(actual, expected, dtype, scale=1.0):
    tolerance = TOLERANCE[dtype] * scale
    np.testing.assert_allclose(exact(actual), expected, rtol=tolerance, atol=tolerance)


def test_an_index_of_64_bits_is_out_of_range_whatever_its_lower_half_says(native):
    with jax.enable_x64(True):
        indices = jnp.array([3, 2**32 + 3, -(2**32) + 3], jnp.int64)
        rows = ops.dha_gather(on_host(numbers((4, 2), jnp.float32)), indices, native=native)
    assert np.isnan(exact(rows)).all(axis=1).tolist() == [False, True, True]


def test_the_gradient_of_a_gather_adds_up_repeated_rows(dtype, native):
    table, indices = numbers((6, 4), dtype), jnp.array([[1, 5, 1], [1, 0, 7]])
    weights = numbers((2, 3, 4), dtype, seed=2)

    def loss(table):
        rows = ops.dha_gather(table, indices, native=native)
        return jnp.sum(jnp.where(jnp.isnan(rows), 0, rows * weights).astype(jnp.float32))

    gradient = jax.jit(jax.grad(loss))(on_host(table))
    expected = np.zeros((6, 4))
    for index, row in zip(np.asarray(indices).ravel(), exact(weights).reshape(6, 4), strict=True):
        if index < 6:
            expected[index] += row
    assert_close(gradient, expected, dtype)
    assert gradient.sharding.memory_kind == "pinned_host"


@pytest.mark.parametrize("transpose", [False, True])
def test_the_gradients_of_a_product_are_products(transpose, dtype, native):
    x, w = numbers((2, 3, 8), dtype), numbers((5, 8) if transpose else (8, 5), dtype, seed=1)
    dy = numbers((2, 3, 5), dtype, seed=2)

    def loss(x, w):
        return jnp.sum((ops.dha_matmul(x, w, transpose=transpose, native=native) * dy).astype(jnp.float32))

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
        y, pull = jax.vjp(lambda x, w: ops.dha_matmul(x, w, transpose=transpose, native=True), x, w)
        return y, *pull(dy)

    plain = jax.jit(run)(x, w)
    padded = jax.jit(lambda x, w: run(x, w))  # compiled anew
    with targets.for_products_of("gpu"):
        program = padded.lower(x, w).as_text()
    assert "tensor<5x32x" in program and "tensor<5x40x" in program
    for found, expected in zip(padded(x, w), plain, strict=True):
        assert found.shape == expected.shape
        np.testing.assert_array_equal(exact(found), exact(expected))


def test_a_read_gives_pieces_of_the_vector_and_its_gradient_adds_them_up(dtype, native):
    vector = numbers((20,), dtype)
    shapes, offsets = [(2, 3), (5,), (), (0,), (4,)], [1, 7, 19, 3, 5]

    def loss(vector):
        pieces = ops.dha_read(vector, shapes, offsets, native=native)
        return sum(jnp.sum((i + 1) * piece.astype(jnp.float32)) for i, piece in enumerate(pieces))

    pieces = ops.dha_read(on_host(vector), shapes, offsets, native=native)
    expected = np.zeros(20)
    for i, (piece, shape, offset) in enumerate(zip(pieces, shapes, offsets, strict=True)):
        size = int(np.prod(shape))
        np.testing.assert_array_equal(exact(piece), exact(vector)[offset : offset + size].reshape(shape))
        expected[offset : offset + size] += i + 1
    np.testing.assert_array_equal(exact(jax.jit(jax.grad(loss))(on_host(vector))), expected)


# Few lengths, since XLA compiles every operation anew for each.
@given(st.sampled_from([1, 9]).flatmap(lambda size: st.lists(st.integers(-2, 6), min_size=size, max_size=size)))
def test_sums_of_repeated_rows_are_those_of_a_scatter(indices):
    rows = numbers((len(indices), 3), jnp.float32)
    places, sums = ops.sum_repeated(jnp.array(indices), rows, 5)
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
    assert ops.is_native(jnp.float32, native=True)
    assert not ops.is_native(jnp.float64, native=True)
    assert not ops.is_native(jnp.float32, native=False)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda h: ops.dha_gather(h, jnp.array([0])), "table must be a matrix"),
        (lambda h: ops.dha_gather(h, jnp.array([0]), shape=GatherShape(4, 4)), "12 elements"),
        (
            lambda h: ops.dha_gather(h, jnp.array([0.5]), shape=GatherShape(3, 4)),
            "indices must be integers",
        ),
        (
            lambda h: ops.dha_matmul(jnp.ones((2, 5)), h, shape=ProductShape(4, 3)),
            "x must have 4 columns",
        ),
        (
            lambda h: ops.dha_matmul(jnp.ones((2, 4)), h, shape=ProductShape(4, 3, offset=1)),
            "from element 1",
        ),
        (lambda h: ops.dha_read(h, [(5,)], [8]), "5 from element 8"),
        (lambda h: ops.gradient_store(h, jnp.ones(4), offset=9), "4 from element 9"),
        (
            lambda h: ops.dha_matmul_gradient(h, jnp.ones((2, 3)), jnp.ones((3, 3))),
            "leading dimensions",
        ),
        (
            lambda h: ops.dha_matmul(jnp.ones((2, 4)), h, shape=ProductShape(4, 3), scratch_bytes=-1),
            "scratch_bytes",
        ),
        (lambda h: ops.dha_gather(h, [0, 1], shape=GatherShape(3, 4)), "indices"),  # type: ignore[arg-type]
        (lambda h: ops.dha_read(h, [(2,), (3,)], [0]), "an offset for each"),
        (
            lambda h: ops.dha_matmul_gradient(h, jnp.ones((2, 4)), jnp.ones((2, 3)), round_to=jnp.int8),
            "round_to",
        ),
        (lambda h: jax.jit(lambda o: ops.gradient_store(h, jnp.ones(4), offset=o))(1), "known when"),
    ],
)
def test_what_does_not_fit_is_named(call, words):
    with pytest.raises(InputError, match=words):
        call(on_host(jnp.ones(12)))
