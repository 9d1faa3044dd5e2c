"""The native operations as XLA knows them, without the package's own wrappers around them."""

import jax
import jax.numpy as jnp
import numpy as np


def call(operation, arguments, results, aliases=None, **attributes):
    """A native operation of arrays; attributes become 64-bit integers, or arrays of them."""
    attributes = {
        name: np.asarray(value, np.int64) if isinstance(value, list) else np.int64(value)
        for name, value in attributes.items()
    }
    shapes = [jax.ShapeDtypeStruct(result.shape, result.dtype) for result in results]
    function = jax.ffi.ffi_call(
        f"jaxferry_{operation}", shapes, input_output_aliases=aliases or {}, has_side_effect=True
    )
    return function(*arguments, **attributes)


def scratch(num_bytes):
    return call("scratch", [], [jax.ShapeDtypeStruct((num_bytes,), jnp.uint8)])[0]


def ferry_load(vectors, arrays, where=None, offsets=None, is_vacant=False):
    """Queues copies into the arrays; each from its own vector, from the start on, unless said otherwise."""
    where = range(len(arrays)) if where is None else where
    offsets = [0] * len(arrays) if offsets is None else offsets
    aliases = {len(vectors) + i: i for i in range(len(arrays))}
    places = {"vectors": list(where), "offsets": list(offsets), "vacant": is_vacant}
    return call("ferry_load", [*vectors, *arrays], arrays, aliases, **places)


def ferry_store(arrays, vector, offsets=None, accumulate=False):
    offsets = [0] * len(arrays) if offsets is None else offsets
    return call("ferry_store", [*arrays, vector], [vector], {len(arrays): 0}, offsets=offsets, accumulate=accumulate)[0]


def ferry_wait(arrays):
    return call("ferry_wait", arrays, arrays, {i: i for i in range(len(arrays))})


def ferry_vacate(arrays):
    return call("ferry_vacate", arrays, arrays, {i: i for i in range(len(arrays))})


def wait_and_count(arrays):
    """Waits, in a program that XLA takes for too long to be run by the thread that calls it."""
    arrays = ferry_wait(arrays)
    return arrays, jnp.sum(scratch(1 << 12).astype(jnp.int32))


load = jax.jit(lambda vectors, arrays: ferry_load(vectors, arrays), donate_argnums=1)
store = jax.jit(lambda arrays, vector: ferry_store(arrays, vector), donate_argnums=1)
add = jax.jit(lambda arrays, vector: ferry_store(arrays, vector, accumulate=True), donate_argnums=1)
wait = jax.jit(wait_and_count, donate_argnums=0)
