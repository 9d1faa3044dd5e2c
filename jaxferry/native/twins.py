"""Plain JAX twins of the native operations: the reference in tests, and the fallback without a library.

`device_put` copies whole host arrays to the device before the computation, and results back to the host.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxferry.native.targets import GatherShape, ProductShape


def to_device(arrays: Any) -> Any:
    """Copies host arrays to the device, inside a jitted function; on a CPU this placement copies nothing."""
    return jax.device_put(arrays, jax.memory.Space.Device)


def to_host(array: jax.Array) -> jax.Array:
    """Copies a device array to the host, inside a jitted function."""
    return jax.device_put(array, jax.memory.Space.Host)


def part(vector: jax.Array, offset: int, shape: Sequence[int]) -> jax.Array:
    """Copies a contiguous piece of a host array to the device, in the given shape."""
    size = math.prod(shape)
    return jax.lax.slice(to_device(vector).ravel(), (offset,), (offset + size,)).reshape(tuple(shape))


def dha_gather(table: jax.Array, indices: jax.Array, shape: GatherShape) -> jax.Array:
    """Returns rows of a table; NaN for indices out of range."""
    rows = part(table, shape.offset, (shape.rows, shape.columns))
    return rows.at[indices].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)


def dha_matmul(x: jax.Array, w: jax.Array, shape: ProductShape, out_dtype: jnp.dtype) -> jax.Array:
    """Returns `x @ w` or `x @ w.T`, with the weight cast to the dtype of x."""
    matrix = part(w, shape.offset, shape.weight_shape).astype(x.dtype)
    contracted = 1 if shape.transpose else 0
    numbers = (((x.ndim - 1,), (contracted,)), ((), ()))
    return jax.lax.dot_general(x, matrix, numbers, preferred_element_type=out_dtype)


def gradient_store(destination: jax.Array, gradient: jax.Array, offset: int, accumulate: bool) -> jax.Array:
    """Returns the destination with the gradient written or added at `offset`."""
    known, flat = to_device(destination), gradient.ravel()
    if accumulate:
        before = jax.lax.slice(known.ravel(), (offset,), (offset + flat.size,))
        flat = before.astype(jnp.float32) + flat.astype(jnp.float32)
    written = jax.lax.dynamic_update_slice(known.ravel(), flat.astype(known.dtype), (offset,))
    return to_host(written.reshape(known.shape))


def product(x: jax.Array, dy: jax.Array, transpose: bool, out_dtype: jnp.dtype) -> jax.Array:
    """Returns `x.T @ dy` (or `dy.T @ x`), summed over all leading dimensions."""
    leading = tuple(range(x.ndim - 1))
    first, second = (dy, x) if transpose else (x, dy)
    return jax.lax.dot_general(first, second, ((leading, leading), ((), ())), preferred_element_type=out_dtype)


def row_store(destination: jax.Array, indices: jax.Array, rows: jax.Array, shape: GatherShape) -> jax.Array:
    """Returns the destination with rows added at the indices, which are distinct."""
    known = to_device(destination).ravel()
    table = part(destination, shape.offset, (shape.rows, shape.columns)).astype(jnp.float32)
    table = table.at[indices].add(rows.astype(jnp.float32), mode="drop", wrap_negative_indices=False)
    written = jax.lax.dynamic_update_slice(known, table.astype(known.dtype).ravel(), (shape.offset,))
    return to_host(written.reshape(destination.shape))
