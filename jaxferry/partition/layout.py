"""The layout of a layer's leaves in its flat vectors.

Large leaves come first in a vector, then all small ones (`SMALL_BYTES`), each in tree order. So the small ones are side
by side and one transfer can move them. A matrix that is read in place starts at a multiple of `ALIGNED_BYTES`: leaves
of an odd size come after the other large ones, and each further matrix that would be misaligned has its own vector.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

SMALL_BYTES = 128 * 1024
"""A transfer of fewer bytes is mostly latency: 6 us (`Machine.link_latency_s`) at 25 GB/s are 150 KB."""
ALIGNED_BYTES = 128
"""A GPU reads host memory in pieces of so many bytes."""
MATRIX_BYTES = 2**20
"""Leaves of so many bytes are aligned, and what is read from them in pieces is worth it."""


@dataclasses.dataclass(frozen=True)
class Part:
    """One slice of a stacked parameter; the slice no longer has the stacking axis.

    Attributes:
      number: the index of the slice along the axis.
      length: the number of slices.
      axis: the stacking axis.
    """

    number: int
    length: int
    axis: int = 0


@dataclasses.dataclass(frozen=True)
class Span:
    """Consecutive elements of a flattened array, or of the flattened part of one.

    Attributes:
      start, stop: its first element, and the one after its last.
      part: the part that is flattened; None for the whole array.
    """

    start: int
    stop: int
    part: Part | None = None

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    def of(self, array: Any) -> Any:
        """Returns these elements of an array of any shape."""
        return array.reshape(-1)[self.start : self.stop]

    def put(self, made: np.ndarray, first: int, found: np.ndarray) -> None:
        """Writes to the span's elements, `made`, those that are among some consecutive ones.

        Args:
          made: the elements of the span, flat.
          first: the place of the first found element in the flattened array.
          found: elements that follow each other there, in any shape.
        """
        start, stop = max(self.start, first), min(self.stop, first + found.size)
        if start < stop:
            made[start - self.start : stop - self.start] = found.reshape(-1)[start - first : stop - first]


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One parameter of a layer.

    Attributes:
      index: its index among the stored parameters: the flattened tree with each stacked leaf replaced by its parts.
      path: its path in that tree, joined by "/"; the path of a part contains the part's number.
      shape: its shape.
      dtype: the compute dtype, in which the loss function sees it.
      master_dtype: the dtype in which the optimizer updates it; for a frozen parameter, its original dtype.
      vector: the index of the layer's vector that holds it.
      offset: its first element in that vector.
      source: the index, in the model's own flattened tree, of the parameter that it belongs to.
      part: the part of that parameter; None for the whole parameter.
      is_trained: whether it has a gradient and an update; otherwise it is frozen.
      is_small: whether a transfer of it alone would be mostly latency.
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
    is_small: bool = False

    @functools.cached_property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class Transfer:
    """One copy to host memory: of one large gradient, or of all small gradients of a vector.

    Attributes:
      vector: the index of the layer's vector.
      offset: the first element in that vector.
      leaves: indices of the gradients, in the order of their offsets.
    """

    vector: int
    offset: int
    leaves: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Layer:
    """The unit of planning: parameters that move together, in one flat vector per dtype.

    Frozen parameters have separate vectors after the trained ones; gradients and updates skip them.

    Attributes:
      name: module path.
      leaves: the parameters, in tree order.
      is_whole: whether each process holds all of it (`Ownership`).
      block: the modules between two cuts, of which it has a part; "" if it has all of them.
    """

    name: str
    leaves: tuple[Leaf, ...]
    is_whole: bool = False
    block: str = ""

    @functools.cached_property
    def vectors(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shape and dtype of each flat vector; most layers have one."""
        sizes: dict[int, int] = {}
        dtypes: dict[int, np.dtype] = {}
        for leaf in self.leaves:
            sizes[leaf.vector] = sizes.get(leaf.vector, 0) + leaf.size
            dtypes[leaf.vector] = leaf.dtype
        return tuple(jax.ShapeDtypeStruct((sizes[i],), dtypes[i]) for i in sorted(sizes))

    @functools.cached_property
    def trained(self) -> Layer:
        """The layer without its frozen parameters, as gradients and updates move it; its vectors come first."""
        leaves = tuple(leaf for leaf in self.leaves if leaf.is_trained)
        return self if leaves == self.leaves else dataclasses.replace(self, leaves=leaves)

    @functools.cached_property
    def wide(self) -> Layer:
        """The layer as the sums of its gradients are stored: in fp32 where it has fewer bits."""
        leaves = tuple(dataclasses.replace(leaf, dtype=wide_dtype(leaf.dtype)) for leaf in self.leaves)
        return self if leaves == self.leaves else dataclasses.replace(self, leaves=leaves)

    @functools.cached_property
    def num_parameters(self) -> int:
        """Number of parameters."""
        return sum(leaf.size for leaf in self.leaves)

    @functools.cached_property
    def num_bytes(self) -> int:
        """Bytes in the compute dtype, which a load transfers."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in self.leaves)

    @functools.cached_property
    def layout(self) -> tuple[Any, ...]:
        """What the layer's programs depend on; layers with equal layouts share programs."""
        return tuple(
            (leaf.shape, leaf.dtype, leaf.master_dtype, leaf.vector, leaf.offset, leaf.is_small) for leaf in self.leaves
        )

    @functools.cached_property
    def transfers(self) -> tuple[Transfer, ...]:
        """The copies that bring the layer's gradients to host memory."""
        small: dict[int, list[int]] = {}
        made = []
        for index, leaf in enumerate(self.leaves):
            if leaf.is_small:
                small.setdefault(leaf.vector, []).append(index)
            else:
                made.append(Transfer(leaf.vector, leaf.offset, (index,)))
        for vector, indices in small.items():
            indices.sort(key=lambda index: self.leaves[index].offset)
            made.append(Transfer(vector, self.leaves[indices[0]].offset, tuple(indices)))
        return tuple(made)

    def owned(self, gradients: Sequence[Any]) -> list[Any]:
        """The elements of whole gradients that the layer holds: all, but see `OwnedLayer`."""
        return list(gradients)

    def join_small(self, gradients: Sequence[jax.Array]) -> list[jax.Array]:
        """Joins small gradients, inside a jitted function: returns one array for each of `transfers`."""
        joined = []
        for transfer in self.transfers:
            joined.append(_side_by_side(gradients[index] for index in transfer.leaves))
        return joined

    def split_small(self, joined: Sequence[jax.Array]) -> list[jax.Array]:
        """Reverses `join_small`: returns one array for each leaf."""
        gradients: dict[int, jax.Array] = {}
        for transfer, array in zip(self.transfers, joined, strict=True):
            if len(transfer.leaves) == 1:
                gradients[transfer.leaves[0]] = array.reshape(self.leaves[transfer.leaves[0]].shape)
                continue
            end = 0
            for leaf, index in ((self.leaves[index], index) for index in transfer.leaves):
                start, end = end, end + leaf.size
                gradients[index] = array[start:end].reshape(leaf.shape)
        return [gradients[index] for index in range(len(self.leaves))]

    def pack_joined(self, joined: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """Packs what `join_small` returns into flat vectors, inside a jitted function."""
        return self.pack(self.split_small(joined))

    def pack(self, leaves: Sequence[Any], into: Sequence[jax.Array] | None = None) -> tuple[jax.Array, ...]:
        """Packs arrays of the leaves' shapes (any dtype) into flat vectors, inside a jitted function.

        `into` may hold vectors of the same shapes that are donated arguments of the function. They are then updated in
        place, leaf by leaf, so that XLA allocates no result and makes no extra pass over it. Small neighbours are
        written together: each write takes XLA as long to compile as a large operation.
        """
        parts: list[list[tuple[Leaf, jax.Array]]] = [[] for _ in self.vectors]
        for leaf, array in sorted(zip(self.leaves, leaves, strict=True), key=lambda pair: pair[0].offset):
            parts[leaf.vector].append((leaf, jnp.ravel(array).astype(leaf.dtype)))
        if into is None:
            return tuple(_side_by_side(part for _, part in own) for own in parts)
        written = list(into)
        for number, own in enumerate(parts):
            runs: list[list[tuple[Leaf, jax.Array]]] = []
            end = -1  # of the last leaf, if that is small
            for leaf, part in own:
                if leaf.is_small and leaf.offset == end:
                    runs[-1].append((leaf, part))
                else:
                    runs.append([(leaf, part)])
                end = leaf.offset + part.size if leaf.is_small else -1
            for run in runs:
                joined = _side_by_side(part for _, part in run)
                written[number] = jax.lax.dynamic_update_slice(written[number], joined, (run[0][0].offset,))
        return tuple(written)

    def unpack(self, vectors: Sequence[jax.Array]) -> list[jax.Array]:
        """Unpacks flat vectors into arrays of the leaves' shapes and compute dtypes, inside a jitted function."""
        return [
            jax.lax.slice(vectors[leaf.vector], (leaf.offset,), (leaf.offset + leaf.size,)).reshape(leaf.shape)
            for leaf in self.leaves
        ]


def _side_by_side(parts: Iterable[jax.Array]) -> jax.Array:
    """The elements of arrays in one vector; a single array stays as it is."""
    arrays = list(parts)
    return arrays[0] if len(arrays) == 1 else jnp.concatenate([jnp.ravel(array) for array in arrays])


def wide_dtype(dtype: Any) -> np.dtype:
    """The dtype in which gradients of a dtype are summed."""
    return np.dtype(np.float32 if np.dtype(dtype).itemsize < 4 else dtype)


def make_layer(
    name: str,
    indices: Sequence[int],
    paths: Sequence[str],
    avals: Sequence[Any],
    master_dtypes: Sequence[np.dtype],
    frozen: Collection[int] = (),
    origins: Sequence[tuple[int, Part | None]] | None = None,
    block: str = "",
) -> Layer:
    """Lays out some leaves of a flattened tree as one layer.

    Args:
      name: the layer's name.
      indices: the leaves.
      paths: the path of every leaf of the tree.
      avals: shape and compute dtype of every leaf.
      master_dtypes: master dtype of every leaf.
      frozen: indices of the frozen leaves.
      origins: `(Leaf.source, Leaf.part)` of every leaf; None if no parameter is stacked.
      block: as for `Layer`.
    """
    places = _places(indices, avals, frozen)
    # Vectors of trained leaves come first.
    vectors = list(dict.fromkeys((index in frozen, *places[index][0]) for index in indices))
    numbers = {key: number for number, key in enumerate(sorted(vectors, key=lambda key: (key[0], key[2] > 0)))}
    leaves = []
    for index in indices:
        (dtype, nth), offset = places[index]
        source, part = (index, None) if origins is None else origins[index]
        is_frozen, shape = index in frozen, tuple(avals[index].shape)
        is_small = math.prod(shape) * np.dtype(dtype).itemsize < SMALL_BYTES
        place = (numbers[is_frozen, dtype, nth], offset, source, part, not is_frozen, is_small)
        leaves.append(Leaf(index, paths[index], shape, dtype, master_dtypes[index], *place))
    return Layer(name, tuple(leaves), block=block)


def _places(
    indices: Sequence[int], avals: Sequence[Any], frozen: Collection[int]
) -> dict[int, tuple[tuple[np.dtype, int], int]]:
    """For each leaf its vector, by dtype and number among those of the dtype, and its first element there."""

    def order(index: int) -> tuple[bool, bool, bool]:
        num_bytes = _num_bytes(avals[index])
        return num_bytes < SMALL_BYTES, num_bytes % ALIGNED_BYTES != 0, num_bytes < MATRIX_BYTES

    found: dict[int, tuple[tuple[np.dtype, int], int]] = {}
    ends: dict[tuple[bool, np.dtype], list[int]] = {}
    for index in sorted(indices, key=order):
        dtype = np.dtype(avals[index].dtype)
        of_kind = ends.setdefault((index in frozen, dtype), [0])
        is_misaligned = of_kind[0] * dtype.itemsize % ALIGNED_BYTES != 0
        nth = 0
        if is_misaligned and _num_bytes(avals[index]) >= MATRIX_BYTES:
            nth = len(of_kind)
            of_kind.append(0)
        found[index] = (dtype, nth), of_kind[nth]
        of_kind[nth] += math.prod(avals[index].shape)
    return found


def _num_bytes(aval: Any) -> int:
    return math.prod(aval.shape) * np.dtype(aval.dtype).itemsize
