"""Operations on arrays in host memory: Direct Host Access (DHA) for reads, in-place stores for gradients.

Each operation is one custom call of the native library, or without the library its twin in plain JAX (`twins.py`).
Results are equal up to the summation order of products. Use them inside jitted functions. They are differentiable
once; under `jax.vmap`, reads run sequentially. Host arrays lie in `pinned_host` memory and stay there; `offset`
selects a piece of a larger array, such as a flat vector. `native` is as for `is_native`.

MemFerry, section III: kernels that read pinned host memory; section V: gradients written to host memory.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxferry.errors import InputError
from jaxferry.native import targets, twins
from jaxferry.native.loading import is_available
from jaxferry.native.self_tests import is_usable
from jaxferry.native.targets import GatherShape, ProductShape

_FULL_BITS = 32


def as_stored(values: Any) -> Any:
    """Returns values, within a jitted function, so that what reads them there gets the bits that the program stores.

    XLA may drop both casts where a value is cast to 16 bits and used again in fp32 (`xla_allow_excess_precision`): the
    stored array may then be infinite while the same program finds its norm finite. A barrier behind each value of
    fewer than 32 bits prevents that.
    """

    def stored(value: jax.Array) -> jax.Array:
        is_rounded = jnp.issubdtype(value.dtype, jnp.floating) and jnp.finfo(value.dtype).bits < _FULL_BITS
        return jax.lax.optimization_barrier(value) if is_rounded else value

    return jax.tree.map(stored, values)


DTYPES = (np.dtype(np.float32), np.dtype(jnp.bfloat16), np.dtype(np.float16))
"""Dtypes of the native operations; the twins accept any floating dtype."""


def is_native(*dtypes: Any, native: bool | None = None) -> bool:
    """Whether the native library runs an operation on these dtypes, those of all its arrays.

    `native` forces the library or the twin. None uses the library if JAX's default platform has it and it passes its
    self-test there.
    """
    if native is None:
        native = is_usable(jax.local_devices()[0])
    elif native:
        is_available(jax.default_backend())  # registers the operations
    return native and all(np.dtype(dtype) in DTYPES for dtype in dtypes)


def dha_gather(
    table: jax.Array, indices: jax.Array, *, shape: GatherShape | None = None, native: bool | None = None
) -> jax.Array:
    """Returns rows of a table in host memory; only these rows cross the link, each distinct one once.

    Differentiable in the table: repeated rows are summed on the device, and only touched rows are sent. `table` is
    `[rows, columns]`, or any host array with the table's location in `shape`; `indices` are integers of any shape, in
    `[0, rows)`.

    Returns:
      `[*indices.shape, columns]` on the device, in the table's dtype. An index out of range yields a row of NaN.

    Raises:
      InputError: if shapes do not fit.
    """
    shape = shape or GatherShape(*_matrix("table", table))
    _check_piece("table", table, shape.offset, shape.rows * shape.columns)
    if not hasattr(indices, "dtype"):
        raise InputError(f"indices must be an array of integers, got {indices!r}")
    if not jnp.issubdtype(indices.dtype, jnp.integer):
        raise InputError(f"indices must be integers, got {indices.dtype}{list(indices.shape)}")
    if jnp.iinfo(indices.dtype).max > np.iinfo(np.int32).max:  # 32 bits of it could lie in the range again
        indices = jnp.where((indices >= 0) & (indices < shape.rows), indices, -1).astype(np.int32)
    return _gather(shape, is_native(table.dtype, native=native), table, indices)


def dha_matmul(
    x: jax.Array,
    w: jax.Array,
    *,
    transpose: bool = False,
    shape: ProductShape | None = None,
    out_dtype: Any = None,
    scratch_bytes: int | None = None,
    native: bool | None = None,
) -> jax.Array:
    """Returns `x @ w` (or `x @ w.T`), `[.., n]` on the device; each byte of the weight crosses the link once.

    Panels of the weight are staged through a bounded scratch buffer on the device; each is multiplied while the next
    arrives. Differentiable in x and w.

    Args:
      x: `[.., k]` on the device.
      w: `[k, n]` (or `[n, k]` if `transpose`) in host memory, cast to the dtype of x after the transfer; or any host
        array, with the weight's location in `shape`.
      transpose: whether to multiply by the transpose; ignored if `shape` is given.
      shape: the weight's location in the host array; None for the whole array.
      out_dtype: dtype of the result; default: that of x.
      scratch_bytes: maximum size of the scratch buffer; None for 8 MiB, or more where rows or columns of w are long:
        enough for panels of 128, but at most a quarter of w. It splits no sum. On a CPU, results do not depend on it;
        on a GPU, the last bits may, because cuBLASLt chooses its algorithm by panel size.
      native: see `is_native`.

    Raises:
      InputError: if shapes do not fit.
    """
    if shape is None:
        rows, columns = _matrix("w", w)
        shape = ProductShape(columns, rows, True) if transpose else ProductShape(rows, columns)
    _check_piece("w", w, shape.offset, shape.k * shape.n)
    if x.ndim == 0 or x.shape[-1] != shape.k:
        raise InputError(f"x must have {shape.k} columns to match w, got shape {list(x.shape)}")
    _check_scratch(scratch_bytes)
    out = np.dtype(out_dtype or x.dtype)
    is_known = out in (x.dtype, np.dtype(np.float32))
    settings = _Product(shape, out, scratch_bytes, is_known and is_native(x.dtype, w.dtype, native=native))
    return _matmul(settings, x, w)


def dha_read(
    vector: jax.Array,
    shapes: Sequence[Sequence[int]] | None = None,
    offsets: Sequence[int] | None = None,
    *,
    native: bool | None = None,
) -> list[jax.Array]:
    """Returns device copies of pieces of a host array: small parameters such as scales and biases.

    `shapes` has the shape of each piece, None for one piece, the whole array; `offsets` the first element of each,
    None if the pieces are consecutive.

    Raises:
      InputError: if a piece exceeds the array.
    """
    shapes = [vector.shape] if shapes is None else [tuple(shape) for shape in shapes]
    if offsets is not None and len(offsets) != len(shapes):
        raise InputError(f"offsets must hold an offset for each of {len(shapes)} shapes, got {list(offsets)}")
    sizes = [math.prod(shape) for shape in shapes]
    offsets = [sum(sizes[:i]) for i in range(len(sizes))] if offsets is None else list(offsets)
    for size, offset in zip(sizes, offsets, strict=True):
        _check_piece("vector", vector, offset, size)
    return _read(tuple(shapes), tuple(offsets), is_native(vector.dtype, native=native), vector)


def gradient_store(
    destination: jax.Array,
    gradient: jax.Array,
    *,
    offset: int = 0,
    accumulate: bool = False,
    native: bool | None = None,
) -> jax.Array:
    """Writes a gradient into an array in host memory from element `offset` on, or adds it in fp32 and rounds.

    The store is in place if the destination is a donated argument of the jitted function (`donate_argnums`). The
    gradient is on the device, and cast to the destination's dtype. Returns the destination, in host memory if the
    jitted function's `out_shardings` say so.

    Raises:
      InputError: if the gradient exceeds the destination.
    """
    _check_piece("destination", destination, offset, gradient.size)
    if is_native(destination.dtype, gradient.dtype, native=native):
        return targets.gradient_store(destination, gradient, offset, accumulate)
    return twins.gradient_store(destination, gradient, offset, accumulate)


def dha_matmul_gradient(
    destination: jax.Array,
    x: jax.Array,
    dy: jax.Array,
    *,
    transpose: bool = False,
    offset: int = 0,
    accumulate: bool = False,
    round_to: Any = None,
    scratch_bytes: int | None = None,
    native: bool | None = None,
) -> jax.Array:
    """Writes a weight's gradient, `x.T @ dy`, into host memory panel by panel; it never exists whole on the device.

    `x` is `[.., k]` and `dy` `[.., n]`, of one dtype, on the device. With `transpose`, `dy.T @ x` of shape `[n, k]` is
    stored instead of `[k, n]`. The product is rounded to `round_to` before the cast to the destination's dtype.
    `offset`, `accumulate` and the result are as for `gradient_store`, `scratch_bytes` as for `dha_matmul`.

    Raises:
      InputError: if shapes or dtypes do not fit.
    """
    if x.ndim == 0 or dy.ndim == 0 or x.shape[:-1] != dy.shape[:-1] or x.dtype != dy.dtype:
        raise InputError(
            f"x and dy must have the same dtype and leading dimensions, got {x.dtype}{list(x.shape)} and "
            f"{dy.dtype}{list(dy.shape)}"
        )
    _check_scratch(scratch_bytes)
    if round_to is not None and np.dtype(round_to) not in DTYPES:
        raise InputError(f"round_to must be float32, bfloat16, float16 or None, got {round_to!r}")
    shape = ProductShape(x.shape[-1], dy.shape[-1], transpose, offset)
    _check_piece("destination", destination, offset, shape.k * shape.n)
    if is_native(destination.dtype, x.dtype, native=native):
        return targets.dha_matmul_gradient(destination, x, dy, shape, accumulate, round_to, scratch_bytes)
    made = as_stored(twins.product(x, dy, transpose, jnp.dtype(np.float32)).astype(round_to or np.float32))
    return twins.gradient_store(destination, made, offset, accumulate)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gather(shape: GatherShape, native: bool, table: jax.Array, indices: jax.Array) -> jax.Array:
    return (targets if native else twins).dha_gather(table, indices, shape)


def _gather_backward(shape: GatherShape, native: bool, residuals: Any, rows: jax.Array) -> Any:
    table, indices = residuals
    places, sums = sum_repeated(indices.ravel(), rows.reshape(indices.size, shape.columns), shape.rows)
    store = targets.row_store if native else twins.row_store
    return _like(store(_zeros_like(table), places, sums, shape), table), None


_gather.defvjp(lambda *args: (_gather(*args), args[2:]), _gather_backward)


def sum_repeated(indices: jax.Array, rows: jax.Array, num_rows: int) -> tuple[jax.Array, jax.Array]:
    """Sums rows `[m, columns]` with equal indices `[m]` on the device; ignores indices outside `[0, num_rows)`.

    Returns:
      Distinct indices `[m]`, padded with `num_rows`, and the sums `[m, columns]` in the dtype of `rows` (summed in
      fp32).
    """
    # A small dtype may not hold `num_rows`; a 64-bit index may not fit into 32 bits.
    wide = indices.astype(np.int32) if indices.dtype.itemsize < 4 else indices
    indices = jnp.where((wide >= 0) & (wide < num_rows), wide, num_rows).astype(np.int32)
    places, numbers = jnp.unique(indices, size=indices.size, fill_value=num_rows, return_inverse=True)
    sums = jax.ops.segment_sum(rows.astype(jnp.float32), numbers.ravel(), num_segments=indices.size)
    return places, as_stored(sums.astype(rows.dtype))


@dataclasses.dataclass(frozen=True)
class _Product:
    """The non-differentiable arguments of a product."""

    shape: ProductShape
    out_dtype: np.dtype
    scratch_bytes: int | None
    native: bool


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul(settings: _Product, x: jax.Array, w: jax.Array) -> jax.Array:
    if settings.native:
        return targets.dha_matmul(x, w, settings.shape, settings.out_dtype, settings.scratch_bytes)
    return twins.dha_matmul(x, w, settings.shape, settings.out_dtype)


def _matmul_backward(settings: _Product, residuals: Any, dy: jax.Array) -> Any:
    (x, w), shape = residuals, settings.shape
    dy = dy.astype(x.dtype)
    turned = ProductShape(shape.n, shape.k, not shape.transpose, shape.offset)
    dx = _matmul(dataclasses.replace(settings, shape=turned, out_dtype=np.dtype(x.dtype)), dy, w)
    dw = dha_matmul_gradient(
        _zeros_like(w),
        x,
        dy,
        transpose=shape.transpose,
        offset=shape.offset,
        round_to=x.dtype,
        scratch_bytes=settings.scratch_bytes,
        native=settings.native,
    )
    return dx, _like(dw, w)


_matmul.defvjp(lambda *args: (_matmul(*args), args[1:]), _matmul_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _read(shapes: Any, offsets: Any, native: bool, vector: jax.Array) -> list[jax.Array]:
    if native:
        return targets.dha_read(vector, offsets, shapes)
    return [twins.part(vector, offset, shape) for offset, shape in zip(offsets, shapes, strict=True)]


def _read_backward(shapes: Any, offsets: Any, native: bool, vector: jax.Array, gradients: Any) -> Any:
    stored = _zeros_like(vector)
    for gradient, offset in zip(gradients, offsets, strict=True):
        stored = gradient_store(stored, gradient, offset=offset, accumulate=True, native=native)
    return (_like(stored, vector),)


_read.defvjp(lambda *args: (_read(*args), args[3]), _read_backward)


def _zeros_like(host: jax.Array) -> jax.Array:
    return twins.to_host(jnp.zeros(host.shape, host.dtype))


def _like(result: jax.Array, host: jax.Array) -> jax.Array:
    """Moves a result to the memory space of the parameter's type: a cotangent must have the parameter's type."""
    return jax.device_put(result, jax.typeof(host).memory_space)


def _matrix(name: str, array: jax.Array) -> tuple[int, int]:
    if array.ndim != 2:
        raise InputError(f"{name} must be a matrix, or shape= must locate one in it, got shape {list(array.shape)}")
    return array.shape[0], array.shape[1]


def _check_scratch(scratch_bytes: int | None) -> None:
    if scratch_bytes is None:
        return
    if not isinstance(scratch_bytes, int | np.integer) or scratch_bytes < 0:
        raise InputError(f"scratch_bytes must be a number of bytes, 0 or more, got {scratch_bytes!r}")


def _check_piece(name: str, array: jax.Array, offset: int, size: int) -> None:
    if not isinstance(offset, int | np.integer):
        raise InputError(f"the offset into {name} must be an integer known when the function is traced, got {offset!r}")
    if not 0 <= offset <= array.size - size:
        raise InputError(
            f"{name} has {array.size} elements, shape {list(array.shape)}; it cannot hold {size} from element {offset}"
        )
