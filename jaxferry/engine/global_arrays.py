"""Arrays over devices of several processes, each of which reaches only its own devices.

JAX's own `device_put` compares what all processes give to such an array, so it exchanges values between them. What is
here does not, so any thread may call it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding

from jaxferry.partition.graph import is_raw_key


def spread(array: Any, where: NamedSharding) -> jax.Array:
    """An array of which this process knows all, such as one that all processes have alike.

    Args:
      array: a NumPy array or scalar, or an array of this process's devices.
      where: its sharding.
    """
    if where.is_fully_addressable or is_global(array):
        return jax.device_put(array, where)
    if _is_key(array):
        keys = spread(jax.random.key_data(array), where)
        return jax.random.wrap_key_data(keys, impl=jax.random.key_impl(array))
    whole = np.asarray(array)
    return jax.make_array_from_callback(whole.shape, where, lambda index: whole[index])


def joined_rows(array: Any, where: NamedSharding, by_process: NamedSharding) -> jax.Array:
    """An array of which each process has its own rows.

    Args:
      array: this process's rows.
      where: the sharding of the whole.
      by_process: one that splits the first axis over the processes.
    """
    is_split = where.spec and where.spec[0] is not None
    made = jax.make_array_from_process_local_data(where if is_split else by_process, np.asarray(array))
    return made if is_split else jax.device_put(made, where)


def moved(arrays: Sequence[jax.Array], where: Sequence[NamedSharding]) -> list[jax.Array]:
    """Copies in other memories of the same devices, split as the arrays are."""
    if all(there.is_fully_addressable for there in where):
        copies: list[jax.Array] = jax.device_put(list(arrays), list(where))
        return copies
    return [_moved_parts(array, there) for array, there in zip(arrays, where, strict=True)]


def _moved_parts(array: jax.Array, where: NamedSharding) -> jax.Array:
    own = [shard.data for shard in array.addressable_shards]
    there = [SingleDeviceSharding(next(iter(part.devices())), memory_kind=where.memory_kind) for part in own]
    return jax.make_array_from_single_device_arrays(array.shape, where, jax.device_put(own, there))


def whole(array: jax.Array) -> np.ndarray:
    """The values of an array whose parts are all on this process's devices, though others may have them too."""
    if array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    found = np.empty(array.shape, array.dtype)
    for shard in array.addressable_shards:
        found[shard.index] = np.asarray(shard.data)
    return found


def is_global(array: Any) -> bool:
    """Whether an array has parts on devices of other processes."""
    return isinstance(array, jax.Array) and not array.is_fully_addressable


def global_shape(leaf: Any, num_processes: int) -> Any:
    """The shape and dtype of an argument of a step in all processes.

    Args:
      leaf: an argument, or its shape and dtype. Arrays of all processes and PRNG keys have their own shape, as has a
        struct with a sharding; of others each process has its own rows.
      num_processes: the number of processes.
    """
    is_whole = is_global(leaf) or (
        getattr(leaf, "sharding", None) is not None and not leaf.sharding.is_fully_addressable
    )
    if num_processes == 1 or is_whole or not has_rows(leaf):
        return leaf
    shape = (num_processes * leaf.shape[0], *leaf.shape[1:])
    return jax.ShapeDtypeStruct(shape, jax.dtypes.canonicalize_dtype(leaf.dtype))


def has_rows(leaf: Any) -> bool:
    """Whether an argument has a first axis of which each process has its own part."""
    shape, dtype = getattr(leaf, "shape", ()), getattr(leaf, "dtype", None)
    return bool(shape) and not _is_key(leaf) and not is_raw_key(shape, dtype)


def _is_key(array: Any) -> bool:
    return bool(jax.dtypes.issubdtype(getattr(array, "dtype", np.float32), jax.dtypes.prng_key))
