"""Arguments of microbenchmarks, made from shapes.

Floating-point numbers have random signs and magnitudes between 0.05 and 0.1: no zeros, on which a GPU draws less power
and runs faster than in training, and no denormals, which are slow on a CPU. Integers are zero, so that lookups stay
within their tables; only gradients of lookups have rows all over the table. The time of a dense program does not
otherwise depend on values. Loops with data-dependent ends are the exception; they are measured on these values.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxferry.engine import Programs
from jaxferry.partition import Layer, RowGradient
from jaxferry.step import ProgramKey, Source, Target
from jaxferry.transport import Placement, Vectors

_LARGE_BYTES = 2**22
"""Arguments from this size on are made on the device: their way there takes longer than to compile a program."""


def sample(struct: Any, where: Any) -> Any:
    """Makes an array of a shape and dtype, in its own memory at a sharding."""
    if jnp.issubdtype(struct.dtype, jax.dtypes.extended):
        return jax.device_put(jnp.zeros(struct.shape, struct.dtype), where)
    device = next(iter(where.device_set))
    num_bytes = np.prod(struct.shape, dtype=float) * struct.dtype.itemsize
    if device.platform != "cpu" and where.memory_kind == "device" and num_bytes >= _LARGE_BYTES:
        return made_on_device(struct.shape, jnp.dtype(struct.dtype), where)()
    if jnp.issubdtype(struct.dtype, jnp.inexact):
        array = np.resize(_numbers(jnp.dtype(struct.dtype).name), struct.shape)
    else:
        array = np.zeros(struct.shape, struct.dtype)
    return jax.device_put(array, where, may_alias=False)


_NUM_NUMBERS = 65_521
"""A prime, so that rows of common lengths differ."""


@functools.lru_cache(maxsize=64)
def made_on_device(shape: tuple[int, ...], dtype: np.dtype, where: Any) -> Callable[[], jax.Array]:
    """The program that makes a sample on an accelerator, equal to one of the host's."""

    def make() -> jax.Array:
        if not jnp.issubdtype(dtype, jnp.inexact):
            return jnp.zeros(shape, dtype)
        places, stride = jnp.zeros(shape, jnp.uint32), 1
        for axis in reversed(range(len(shape))):
            along = jax.lax.broadcasted_iota(jnp.uint32, shape, axis) % _NUM_NUMBERS
            places = (places + along * np.uint32(stride) % _NUM_NUMBERS) % _NUM_NUMBERS
            stride = stride * shape[axis] % _NUM_NUMBERS
        return jnp.asarray(_numbers(dtype.name))[places]

    return jax.jit(make, out_shardings=where)


@functools.cache
def _numbers(dtype: str) -> np.ndarray:
    generator = np.random.default_rng(0)
    signs = generator.integers(0, 2, _NUM_NUMBERS) * 2 - 1
    return (signs * generator.uniform(0.05, 0.1, signs.shape)).astype(jnp.dtype(dtype))


def sample_gradient(gradient: Any, where: Any) -> Any:
    """Makes a gradient of a shape and dtype, or of a `RowGradient` of them, at a sharding.

    Rows of lookups belong to rows all over the table, as those of a batch do.
    """
    made = jax.tree.map(lambda leaf: sample(leaf, where), gradient)
    if not isinstance(gradient, RowGradient):
        return made
    number = int(np.prod(gradient.indices.shape))
    indices = np.arange(number) * gradient.shape[0] // max(number, 1)
    if not gradient.scatter.params["indices_are_sorted"]:
        indices = np.random.default_rng(0).permutation(indices)
    there = indices.reshape(gradient.indices.shape).astype(gradient.indices.dtype)
    return dataclasses.replace(made, indices=jax.device_put(there, where, may_alias=False))


def sample_vectors(layer: Layer, where: Any) -> Vectors:
    """Makes flat vectors of a layer in some memory."""
    return tuple(sample(vector, where) for vector in layer.vectors)


class ProgramArguments:
    """Makes arguments of a program: donated ones for each call, the others once."""

    def __init__(self, programs: Programs, key: ProgramKey, placement: Placement) -> None:
        arguments = programs.lowered(key).args_info[0]
        self._leaves, self._tree = jax.tree.flatten(arguments)
        # Vectors in host memory, by argument and group: what it writes, and what it reads there.
        num_written = sum(target is not Target.DEVICE for target in key.writes)
        read = [(int(key.writes_host), place) for place, source in enumerate(key.reads) if source is Source.HOST]
        where = dict.fromkeys([*((0, place) for place in range(num_written)), *read], placement.pinned)
        self._where = [
            where.get((number, place), placement.device)
            for number, argument in enumerate(arguments)
            for place, part in enumerate(argument if isinstance(argument, list) else [argument])
            for _ in jax.tree.leaves(part)
        ]
        self._kept = [
            None if leaf.donated else sample(leaf, at) for leaf, at in zip(self._leaves, self._where, strict=True)
        ]

    def __call__(self) -> tuple[Any, ...]:
        """Makes the arguments of a call."""
        arrays = [
            sample(leaf, where) if kept is None else kept
            for leaf, where, kept in zip(self._leaves, self._where, self._kept, strict=True)
        ]
        made: tuple[Any, ...] = jax.tree.unflatten(self._tree, arrays)
        return made
