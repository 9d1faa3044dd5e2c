"""Which elements of each parameter a process holds in host memory, where several processes train together.

    parameter   [ share 0 | share 1 | share 2 | share 3 ]    one share for each device (`SharedLayer`)
    process 0     own       own
    process 1                         own       own

A process owns the shares of its devices. It holds masters, optimizer state, compute copy and gradients of these
elements alone. It holds a layer whole if the layer's update is not element-wise.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from jaxferry.partition.layout import Layer, Leaf, Span
from jaxferry.partition.rows import RowGradient
from jaxferry.partition.shared_layout import SharedLayer, shared


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

    def to_shares(self, layer: Layer, vectors: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Copies vectors of the process's elements, all of a layer or the first ones, as its devices have them.

        Returns:
          Arrays of one row for each device.
        """
        sizes = [v.size // self.num_shares(layer) for v in self.shared(layer).vectors[: len(vectors)]]
        made = [np.zeros((self.num_own, size), v.dtype) for size, v in zip(sizes, vectors, strict=True)]
        for leaf, start, share in self._places(layer, len(vectors)):
            filled = np.zeros(self.num_own * share, vectors[leaf.vector].dtype)
            filled[: leaf.size] = vectors[leaf.vector][leaf.offset : leaf.offset + leaf.size]
            made[leaf.vector][:, start : start + share] = filled.reshape(self.num_own, share)
        return made

    def from_shares(self, layer: Layer, rows: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The inverse of `to_shares`."""
        made = [np.empty(v.size, of_one.dtype) for v, of_one in zip(self.of(layer).vectors, rows, strict=False)]
        for leaf, start, share in self._places(layer, len(rows)):
            own = rows[leaf.vector][:, start : start + share]
            made[leaf.vector][leaf.offset : leaf.offset + leaf.size] = own.reshape(-1)[: leaf.size]
        return made

    def _places(self, layer: Layer, num_vectors: int) -> list[tuple[Leaf, int, int]]:
        """The leaves of the process in these vectors, each with the first element and the size of a device's share."""
        there = SharedLayer(layer.name, layer.leaves, num_devices=self.num_shares(layer))
        pairs = zip(self.of(layer).leaves, there.places, strict=True)
        return [(leaf, start, share) for leaf, (start, share) in pairs if leaf.vector < num_vectors]


def held_whole(layers: Sequence[Layer], leaves: Collection[int]) -> tuple[Layer, ...]:
    """The layers, those with any of these leaves of the model's own tree marked as held whole by each process."""
    return tuple(
        dataclasses.replace(layer, is_whole=True) if any(leaf.source in leaves for leaf in layer.leaves) else layer
        for layer in layers
    )
