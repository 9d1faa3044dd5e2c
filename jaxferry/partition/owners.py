"""Which elements of each parameter a process or a device holds, where several train together.

The layout of a layer's vectors where several devices share them.

    device 0             device 1
    [a: 1/2 | b: 1/2]    [a: 1/2 | b: 1/2]    each parameter is split evenly, whatever layer it is in

A parameter's share is filled up where the number of devices does not divide it. The vectors are split along their only
axis, so packing moves nothing between devices, and unpacking gathers each parameter.

Which elements of each parameter a process holds in host memory, where several processes train together.

    parameter   [ share 0 | share 1 | share 2 | share 3 ]    one share for each device (`SharedLayer`)
    process 0     own       own
    process 1                         own       own

A process owns the shares of its devices. It holds masters, optimizer state, compute copy and gradients of these
elements alone. It holds a layer whole if the layer's update is not element-wise.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxferry.native import host_sums
from jaxferry.partition.layout import Layer, Leaf, Span
from jaxferry.partition.rows import RowGradient


@dataclasses.dataclass(frozen=True)
class SharedLayer(Layer):
    """A layer whose vectors and joined gradients are split over devices.

    Attributes:
      num_devices: the number of devices.
    """

    num_devices: int = 1

    @property
    def vectors(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """See `Layer.vectors`; of all devices."""
        starts, dtypes = self._starts(), {leaf.vector: leaf.dtype for leaf in self.leaves}
        sizes = [
            max(starts[i] + self._share(leaf) for i, leaf in enumerate(self.leaves) if leaf.vector == v) for v in dtypes
        ]
        pairs = sorted(zip(dtypes, sizes, strict=True))
        return tuple(jax.ShapeDtypeStruct((self.num_devices * size,), dtypes[v]) for v, size in pairs)

    @functools.cached_property
    def layout(self) -> tuple[object, ...]:
        """See `Layer.layout`."""
        return (self.num_devices, *super().layout)

    def join_small(self, gradients: Sequence[jax.Array]) -> list[jax.Array]:
        """See `Layer.join_small`; the results are split over the devices."""
        return [
            self._flat([self._split(index, gradients[index]) for index in transfer.leaves])
            for transfer in self.transfers
        ]

    def split_small(self, joined: Sequence[jax.Array]) -> list[jax.Array]:
        """See `Layer.split_small`; gathers each parameter."""
        return [
            flat[: leaf.size].reshape(leaf.shape)
            for leaf, flat in zip(self.leaves, self.split_shares(joined), strict=True)
        ]

    def split_shares(self, joined: Sequence[jax.Array]) -> list[jax.Array]:
        """Likewise as the devices share each leaf: flat and filled up. Moves nothing between them."""
        shares: dict[int, jax.Array] = {}
        for transfer, array in zip(self.transfers, joined, strict=True):
            rows, start = array.reshape(self.num_devices, -1), 0
            for index in transfer.leaves:
                stop = start + self._share(self.leaves[index])
                shares[index], start = rows[:, start:stop].reshape(-1), stop
        return [shares[index] for index in range(len(self.leaves))]

    def shares_of_joined(self, joined: Sequence[np.ndarray]) -> list[np.ndarray]:
        """What `join_small` returns, from what that of one device returns; NumPy arrays."""
        made = []
        for transfer, array in zip(self.transfers, joined, strict=True):
            rows, start = [], 0
            for index in transfer.leaves:
                size, share = self.leaves[index].size, self._share(self.leaves[index])
                filled = np.zeros(self.num_devices * share, array.dtype)
                filled[:size] = array.reshape(-1)[start : start + size]
                rows.append(filled.reshape(self.num_devices, share))
                start += size
            made.append(np.concatenate(rows, axis=1).reshape(-1))
        return made

    def filled_up(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """Arrays of the leaves' shapes as the devices share them: flat and filled up."""
        return [self._split(index, array).reshape(-1) for index, array in enumerate(arrays)]

    def pack_joined(self, joined: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """See `Layer.pack_joined`."""
        parts: list[list[tuple[int, jax.Array]]] = [[] for _ in self.vectors]
        for transfer, array in zip(self.transfers, joined, strict=True):
            parts[transfer.vector].append((transfer.offset, array.reshape(self.num_devices, -1)))
        ordered = [sorted(own, key=lambda pair: pair[0]) for own in parts]
        return tuple(self._flat([array for _, array in own]) for own in ordered)

    def pack(self, leaves: Sequence[jax.Array], into: Sequence[jax.Array] | None = None) -> tuple[jax.Array, ...]:
        """See `Layer.pack`; `into` must be None."""
        assert into is None
        return self.pack_joined(
            self.join_small([jnp.asarray(x, leaf.dtype) for leaf, x in zip(self.leaves, leaves, strict=True)])
        )

    def unpack(self, vectors: Sequence[jax.Array]) -> list[jax.Array]:
        """See `Layer.unpack`."""
        starts, whole = self._starts(), [vector.reshape(self.num_devices, -1) for vector in vectors]
        cut = [whole[x.vector][:, starts[i] : starts[i] + self._share(x)] for i, x in enumerate(self.leaves)]
        return [own.reshape(-1)[: leaf.size].reshape(leaf.shape) for leaf, own in zip(self.leaves, cut, strict=True)]

    @functools.cached_property
    def places(self) -> list[tuple[int, int]]:
        """For each parameter the first element of its share in that of its vector, and the elements of the share."""
        return [(start, self._share(leaf)) for start, leaf in zip(self._starts(), self.leaves, strict=True)]

    def _share(self, leaf: Leaf) -> int:
        """The elements of a parameter on each device."""
        return -(-leaf.size // self.num_devices)

    def _starts(self) -> list[int]:
        """The first element of each parameter's share in the share of its vector."""
        filled, starts = dict[int, int](), [0] * len(self.leaves)
        for index in sorted(range(len(self.leaves)), key=lambda index: self.leaves[index].offset):
            leaf = self.leaves[index]
            starts[index] = filled.get(leaf.vector, 0)
            filled[leaf.vector] = starts[index] + self._share(leaf)
        return starts

    def _split(self, index: int, array: jax.Array) -> jax.Array:
        """A parameter or its gradient, as rows of one device each."""
        share = self._share(self.leaves[index])
        flat = jnp.ravel(array)
        return jnp.pad(flat, (0, self.num_devices * share - flat.size)).reshape(self.num_devices, share)

    def _flat(self, rows: Sequence[jax.Array]) -> jax.Array:
        return (rows[0] if len(rows) == 1 else jnp.concatenate(rows, axis=1)).reshape(-1)


def shared(layer: Layer, num_devices: int) -> Layer:
    """The layer as so many devices share it; the layer itself for one."""
    return layer if num_devices == 1 else SharedLayer(layer.name, layer.leaves, layer.is_whole, num_devices=num_devices)


@dataclasses.dataclass(frozen=True)
class OwnedLayer(Layer):
    """A process's elements of a layer's parameters, in flat vectors of their own; its leaves are flat.

    Attributes:
      spans: for each leaf, which elements of the parameter it holds.
    """

    spans: tuple[Span, ...] = ()

    @functools.cached_property
    def layout(self) -> tuple[Any, ...]:
        """See `Layer.layout`."""
        return (tuple((span.start, span.stop) for span in self.spans), *super().layout)

    def owned(self, gradients: Sequence[Any]) -> list[Any]:
        """See `Layer.owned`."""
        return [
            dataclasses.replace(array, span=span) if isinstance(array, RowGradient) else span.of(array)
            for array, span in zip(gradients, self.spans, strict=True)
        ]


@dataclasses.dataclass(frozen=True)
class Piece:
    """Consecutive elements of a parameter that one device has.

    Attributes:
      device: the device's number among those of its process.
      start: the first one's place in the device's share of the vector.
      first, stop: which of the process's elements they are.
    """

    device: int
    start: int
    first: int
    stop: int

    @property
    def size(self) -> int:
        """How many they are."""
        return self.stop - self.first

    def of(self, shares: Sequence[np.ndarray]) -> np.ndarray:
        """They, as a view of the shares that the process's devices have of the vector."""
        return shares[self.device][self.start : self.start + self.size]


@dataclasses.dataclass(frozen=True)
class Ownership:
    """The elements that one process owns.

    Attributes:
      num_devices: the number of devices of all processes.
      num_own: the number of this process's devices.
      first: the number of its first device.
    """

    num_devices: int = 1
    num_own: int = 1
    first: int = 0

    @property
    def is_all(self) -> bool:
        """Whether the process owns everything: it is the only one."""
        return self.num_own == self.num_devices

    def num_shares(self, layer: Layer) -> int:
        """The number of devices over which a layer's vectors are split."""
        return self.num_own if layer.is_whole else self.num_devices

    def shared(self, layer: Layer) -> Layer:
        """The layer as devices have its vectors."""
        return shared(layer, self.num_shares(layer))

    def span(self, layer: Layer, leaf: Leaf) -> Span | None:
        """The elements of a parameter that the process owns; None for all."""
        if self.is_all or layer.is_whole:
            return None
        share = -(-leaf.size // self.num_devices)
        start, stop = (min(number * share, leaf.size) for number in (self.first, self.first + self.num_own))
        return Span(start, stop, leaf.part)

    def of(self, layer: Layer) -> Layer:
        """The process's elements of a layer, as the host computes with them; the layer itself if these are all."""
        spans = [span for leaf in layer.leaves if (span := self.span(layer, leaf)) is not None]
        if not spans:
            return layer
        filled: dict[int, int] = {}
        made: dict[int, Leaf] = {}
        for i in sorted(range(len(spans)), key=lambda i: layer.leaves[i].offset):
            leaf, size = layer.leaves[i], spans[i].size
            made[i] = dataclasses.replace(leaf, shape=(size,), offset=filled.get(leaf.vector, 0))
            filled[leaf.vector] = made[i].offset + size
        leaves = tuple(made[i] for i in range(len(spans)))
        return OwnedLayer(layer.name, leaves, spans=tuple(spans))

    def num_host_bytes(self, layer: Layer) -> int:
        """The bytes of the vectors that the process's devices have of a layer."""
        num_shares = self.num_shares(layer)
        return sum(v.size // num_shares * self.num_own * v.dtype.itemsize for v in self.shared(layer).vectors)

    def num_whole_bytes(self, layer: Layer) -> int:
        """The bytes of a copy that the process has of all devices' vectors, besides its own; 0 if these are all."""
        if self.is_all or layer.is_whole:
            return 0
        return sum(v.size * v.dtype.itemsize for v in self.shared(layer).vectors)

    def placed(self, layer: Layer) -> list[tuple[Leaf, list[Piece]]]:
        """The process's elements of each parameter, and where its devices have them in their shares of the vectors."""
        num, leaves = self.num_shares(layer), self.of(layer).leaves
        if num == 1:
            return [(leaf, [Piece(0, leaf.offset, 0, leaf.size)]) for leaf in leaves]
        places = SharedLayer(layer.name, layer.leaves, num_devices=num).places
        return [
            (leaf, [Piece(i, start, first, min(first + share, leaf.size)) for i, first in enumerate(firsts)])
            for leaf, (start, share) in zip(leaves, places, strict=True)
            for firsts in [range(0, leaf.size, max(share, 1))]
        ]

    def to_shares(self, layer: Layer, vectors: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Copies vectors of the process's elements, all of a layer or the first ones, as its devices have them.

        Returns:
          Arrays of one row for each device.
        """
        sizes = [v.size // self.num_shares(layer) for v in self.shared(layer).vectors[: len(vectors)]]
        made = [np.zeros((self.num_own, size), v.dtype) for size, v in zip(sizes, vectors, strict=True)]
        self.write_shares(layer, vectors, [list(rows) for rows in made])
        return made

    def write_shares(self, layer: Layer, vectors: Sequence[np.ndarray], rows: Sequence[Sequence[np.ndarray]]) -> None:
        """Likewise into the shares of each vector; what fills them up stays as it is."""
        for own, there in self._pairs(layer, vectors, rows):
            host_sums.copy(there, own)

    def from_shares(self, layer: Layer, rows: Sequence[Sequence[np.ndarray]], vectors: Sequence[np.ndarray]) -> None:
        """The inverse of `write_shares`."""
        for own, there in self._pairs(layer, vectors, rows):
            host_sums.copy(own, there)

    def _pairs(
        self, layer: Layer, vectors: Sequence[np.ndarray], rows: Sequence[Sequence[np.ndarray]]
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The same elements of these vectors and in shares of them."""
        for leaf, pieces in self.placed(layer):
            for piece in pieces if leaf.vector < len(vectors) else ():
                first = leaf.offset + piece.first
                yield vectors[leaf.vector][first : first + piece.size], piece.of(rows[leaf.vector])


def held_whole(layers: Sequence[Layer], leaves: Collection[int]) -> tuple[Layer, ...]:
    """The layers, those with any of these leaves of the model's own tree marked as held whole by each process."""
    return tuple(
        dataclasses.replace(layer, is_whole=True) if any(leaf.source in leaves for leaf in layer.leaves) else layer
        for layer in layers
    )
