"""How the leaves of a layer lie in its flat vectors."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Part:
    """Which part of a stacked parameter an array is.

    Attributes:
      number: its index along the axis, which it has lost.
      length: how many parts there are.
      axis: the axis that the parameter is cut along.
    """

    number: int
    length: int
    axis: int = 0


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One parameter of a layer.

    Attributes:
      index: its place among all parameters as they are stored: the flattened tree, parts in place of what is cut.
      path: its path in that tree, joined by "/"; that of a part has the part's number in it.
      shape: its shape.
      dtype: the dtype in which the loss function sees it (the compute dtype).
      master_dtype: the dtype in which the optimizer updates it; of a frozen one that in which it was given.
      vector: which vector of the layer holds it.
      offset: its first element there.
      source: the place, in the model's own flattened tree, of the parameter that it is or is a part of.
      part: which part of that it is; None for all of it.
      is_trained: whether it has a gradient and an update; else it is frozen.
    """

    index: int
    path: str
    shape: tuple[int, ...]
    dtype: np.dtype
    master_dtype: np.dtype
    vector: int
    offset: int
    source: int
    part: Part | None = None
    is_trained: bool = True

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class Layer:
    """The unit of planning: parameters that are moved together, one flat vector for each dtype among them.

    Frozen parameters have vectors of their own, after those of trained ones; gradients and updates leave them out.

    Attributes:
      name: module path.
      leaves: the parameters, ordered as in the tree.
    """

    name: str
    leaves: tuple[Leaf, ...]

    @property
    def vectors(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shape and dtype of each flat vector; nearly always there is just one."""
        sizes: dict[int, int] = {}
        dtypes: dict[int, np.dtype] = {}
        for leaf in self.leaves:
            sizes[leaf.vector] = leaf.offset + leaf.size
            dtypes[leaf.vector] = leaf.dtype
        return tuple(jax.ShapeDtypeStruct((sizes[i],), dtypes[i]) for i in sorted(sizes))

    @functools.cached_property
    def trained(self) -> Layer:
        """The trained parameters alone, as gradients and updates move them; their vectors are the layer's first."""
        leaves = tuple(leaf for leaf in self.leaves if leaf.is_trained)
        return self if leaves == self.leaves else Layer(self.name, leaves)

    @property
    def num_parameters(self) -> int:
        """Number of parameters."""
        return sum(leaf.size for leaf in self.leaves)

    @property
    def num_bytes(self) -> int:
        """Bytes in the compute dtype, as loads move them."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in self.leaves)

    @property
    def layout(self) -> tuple[Any, ...]:
        """What its programs depend on: layers with equal layouts share them."""
        return tuple((leaf.shape, leaf.dtype, leaf.master_dtype, leaf.vector, leaf.offset) for leaf in self.leaves)

    def pack(self, leaves: Sequence[Any], into: Sequence[jax.Array] | None = None) -> tuple[jax.Array, ...]:
        """Flat vectors from arrays of the leaves' shapes (any dtype), inside a jitted function.

        If `into` holds vectors of the same shapes, which the function is given as donated arguments, they are written
        piece by piece; XLA then needs no memory for the result and no pass over it.
        """
        parts: list[list[jax.Array]] = [[] for _ in self.vectors]
        written = None if into is None else list(into)
        for leaf, array in zip(self.leaves, leaves, strict=True):
            part = jnp.ravel(array).astype(leaf.dtype)
            if written is None:
                parts[leaf.vector].append(part)
            else:
                written[leaf.vector] = jax.lax.dynamic_update_slice(written[leaf.vector], part, (leaf.offset,))
        if written is not None:
            return tuple(written)
        return tuple(part[0] if len(part) == 1 else jnp.concatenate(part) for part in parts)

    def unpack(self, vectors: Sequence[jax.Array]) -> list[jax.Array]:
        """Arrays of the leaves' shapes and compute dtypes from flat vectors, inside a jitted function."""
        return [
            jax.lax.slice(vectors[leaf.vector], (leaf.offset,), (leaf.offset + leaf.size,)).reshape(leaf.shape)
            for leaf in self.leaves
        ]


def make_layer(
    name: str,
    indices: Sequence[int],
    paths: Sequence[str],
    avals: Sequence[Any],
    master_dtypes: Sequence[np.dtype],
    frozen: Collection[int] = (),
    origins: Sequence[tuple[int, Part | None]] | None = None,
) -> Layer:
    """Lays out the leaves `indices` of a flattened tree; `avals` have the compute dtypes, `frozen` are indices.

    `origins` holds `Leaf.source` and `Leaf.part` of each; None if no parameter is cut.
    """
    numbers: dict[tuple[bool, np.dtype], int] = {}
    for index in sorted(indices, key=lambda index: index in frozen):
        numbers.setdefault((index in frozen, np.dtype(avals[index].dtype)), len(numbers))
    filled: dict[int, int] = {}
    leaves = []
    for index in indices:
        dtype, shape, is_trained = np.dtype(avals[index].dtype), tuple(avals[index].shape), index not in frozen
        vector = numbers[not is_trained, dtype]
        offset = filled.get(vector, 0)
        source, part = (index, None) if origins is None else origins[index]
        leaves.append(
            Leaf(index, paths[index], shape, dtype, master_dtypes[index], vector, offset, source, part, is_trained)
        )
        filled[vector] = offset + leaves[-1].size
    return Layer(name, tuple(leaves))
