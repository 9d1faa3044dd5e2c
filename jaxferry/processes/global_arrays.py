"""Arrays over devices of several processes, each of which reaches only its own devices.

JAX's own `device_put` to such an array compares the values of all processes, and so exchanges them. These functions
exchange nothing, apart from `merged`, so any thread may call them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding


def spread(array: Any, where: NamedSharding) -> jax.Array:
    """Puts an array that is the same in all processes on their devices."""
    if is_key(array) and not where.is_fully_addressable:  # JAX puts no keys on other processes' devices
        keys = spread(jax.random.key_data(array), where)
        return jax.random.wrap_key_data(keys, impl=jax.random.key_impl(array))
    if where.is_fully_addressable or is_global(array):
        return jax.device_put(array, where)
    whole = np.asarray(array)
    return jax.make_array_from_callback(whole.shape, where, lambda index: whole[index])


def joined_rows(array: Any, where: NamedSharding, by_process: NamedSharding) -> jax.Array:
    """Joins this process's rows with all others' in one array; `by_process` splits the first axis by process."""
    is_split = where.spec and where.spec[0] is not None
    made = jax.make_array_from_process_local_data(where if is_split else by_process, np.asarray(array))
    return made if is_split else jax.device_put(made, where)


def moved(arrays: Sequence[jax.Array], where: Sequence[NamedSharding]) -> list[jax.Array]:
    """Copies arrays to other memories of the same devices, with the same shards."""
    if all(there.is_fully_addressable for there in where):
        copies: list[jax.Array] = jax.device_put(list(arrays), list(where))
        return copies
    made: list[jax.Array] = []
    for array, there in zip(arrays, where, strict=True):
        own = [shard.data for shard in array.addressable_shards]
        each = [SingleDeviceSharding(next(iter(part.devices())), memory_kind=there.memory_kind) for part in own]
        made.append(jax.make_array_from_single_device_arrays(array.shape, there, jax.device_put(own, each)))
    return made


def from_rows(rows: np.ndarray, size: int, where: NamedSharding) -> jax.Array:
    """Makes a vector of `size` elements; the rows are the shards of this process's devices."""
    places = where.addressable_devices_indices_map((size,))
    start_of = {device: index[0].start or 0 for device, index in places.items() if index is not None}
    starts = sorted(set(start_of.values()))
    parts = [
        jax.device_put(rows[starts.index(start)], SingleDeviceSharding(device, memory_kind=where.memory_kind))
        for device, start in start_of.items()
    ]
    return jax.make_array_from_single_device_arrays((size,), where, parts)


def empty(size: int, dtype: Any, where: NamedSharding) -> jax.Array:
    """Makes a vector of `size` zeros, which programs may overwrite; only this process's shards exist here."""
    if where.is_fully_addressable:
        return jax.device_put(copied_zeros((size,), np.dtype(dtype)), where)
    num = len(where.addressable_devices_indices_map((size,)))
    return from_rows(np.zeros((num, where.shard_shape((size,))[0]), dtype), size, where)


_LONG_ROW_BYTES = 512
_ALIASED_ALIGNMENT = 16  # JAX aliases NumPy memory that starts at a multiple of so many bytes, and copies other memory


def copied_zeros(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Returns zeros that take no memory, since nobody writes there, and that JAX does not alias.

    Rows of one row are copied the fastest; JAX takes each element by itself where these are short.
    """
    if len(shape) > 1 and shape[-1] * dtype.itemsize >= _LONG_ROW_BYTES:
        return np.broadcast_to(np.zeros(shape[-1:], dtype), shape)
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = np.zeros(num_bytes + 2 * _ALIASED_ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIASED_ALIGNMENT + _ALIASED_ALIGNMENT // 2
    return memory[start : start + num_bytes].view(dtype).reshape(shape)


def merged(array: np.ndarray, where: NamedSharding) -> np.ndarray:
    """Joins arrays of which each process has some elements, and zeros elsewhere; each process must call this.

    They have one shape. Two processes must not have values for one byte. `where` splits the first axis over the
    processes. Each device exchanges all bytes of the array, a piece at a time.
    """
    raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    words = np.zeros(-(-raw.size // 4), np.uint32)
    words.view(np.uint8)[: raw.size] = raw
    for start in range(0, words.size, _MERGED_WORDS):
        piece = words[start : start + _MERGED_WORDS]
        own = np.zeros((1, max(1 << (piece.size - 1).bit_length(), _LEAST_WORDS)), np.uint32)
        own[0, : piece.size] = piece
        shape = (where.mesh.shape[where.spec[0]], own.shape[1])
        parts = [jax.device_put(own, device) for device in where.mesh.local_devices]
        total = _total(where)(jax.make_array_from_single_device_arrays(shape, where, parts))
        piece[:] = np.asarray(total.addressable_data(0))[: piece.size]
    return words.view(np.uint8)[: raw.size].view(array.dtype).reshape(array.shape)


_MERGED_WORDS, _LEAST_WORDS = 1 << 22, 1 << 8


@functools.cache
def _total(where: NamedSharding) -> Any:
    whole = NamedSharding(where.mesh, PartitionSpec())
    return jax.jit(lambda rows: rows.sum(axis=0, dtype=rows.dtype), out_shardings=whole)


def is_global(array: Any) -> bool:
    """Returns whether an array has shards on devices of other processes."""
    return isinstance(array, jax.Array) and not array.is_fully_addressable


def global_shape(leaf: Any, num_processes: int) -> Any:
    """Returns the shape and dtype that an argument of a step has over all processes.

    Arrays of all processes, PRNG keys and structs with a sharding keep it. Of others, each process has its own rows.
    """
    sharding = getattr(leaf, "sharding", None)
    is_whole = sharding is not None and not sharding.is_fully_addressable
    if num_processes == 1 or is_whole or not has_rows(leaf):
        return leaf
    shape = (num_processes * leaf.shape[0], *leaf.shape[1:])
    return jax.ShapeDtypeStruct(shape, jax.dtypes.canonicalize_dtype(leaf.dtype))


def has_rows(leaf: Any) -> bool:
    """Returns whether an argument has a first axis of which each process has its own part."""
    shape, dtype = getattr(leaf, "shape", ()), getattr(leaf, "dtype", None)
    return bool(shape) and not is_key(leaf) and not is_raw_key(shape, dtype)


def is_key(array: Any) -> bool:
    """Returns whether an array consists of PRNG keys."""
    return bool(jax.dtypes.issubdtype(getattr(array, "dtype", np.float32), jax.dtypes.prng_key))


def is_raw_key(shape: Sequence[int], dtype: Any) -> bool:
    """Returns whether an array may be a PRNG key of JAX's older form."""
    return bool(dtype == np.uint32 and tuple(shape) in ((2,), (4,)))
