"""The layout of a layer's vectors where several devices share them.

    device 0             device 1
    [a: 1/2 | b: 1/2]    [a: 1/2 | b: 1/2]    each parameter is split evenly, whatever layer it is in

A parameter's share is filled up where the number of devices does not divide it. The vectors are split along their only
axis, so packing moves nothing between devices, and unpacking gathers each parameter.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxferry.partition.layout import Layer, Leaf


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
