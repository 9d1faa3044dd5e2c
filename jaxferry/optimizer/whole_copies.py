"""What programs read in host memory (DHA) where several processes share a layer's vectors.

    shares of all processes (pinned) --to the device, gather, to the host--> a row of each process's shares (pinned)

Each process then has all of the layer. The exchange is one program before the first that reads the layer after an
update, in the order in which all processes issue their programs. Vectors that no update replaces, those of frozen
parameters, are exchanged once. With one process its own vectors are read.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxferry.partition import Layer
from jaxferry.transport.orphaned_copies import ORPHANED_COPIES
from jaxferry.transport.pinned import Vectors
from jaxferry.transport.placement import DATA, Placement


class WholeCopies:
    """The copies of one training state.

    Args:
      placement: where arrays live.
    """

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._made_of: dict[int, list[weakref.ref[jax.Array]]] = {}
        # What holds the copies outlives this object until the device has read them.
        self._held: dict[int, list[jax.Array]] = {}
        ORPHANED_COPIES.keep(self, placement, self._held)

    def of(self, group: int, layer: Layer, vectors: Vectors) -> list[jax.Array]:
        """What programs read; of several processes, all must call this in one order.

        Args:
          group: the number of the layer.
          layer: the layer.
          vectors: its vectors in pinned memory, as updates make them.
        """
        if not self._placement.exchanges(layer):
            return list(vectors)
        made_of, held = self._made_of.pop(group, []), self._held.pop(group, [])
        are_new = [i >= len(made_of) or made_of[i]() is not vector for i, vector in enumerate(vectors)]
        chosen = [i for i, is_new in enumerate(are_new) if is_new]
        copies = dict(enumerate(held))
        if chosen:
            # Programs that still read the old copies were issued before, and run before this one.
            old = [copies[i] for i in chosen if i in copies]
            made = _exchange(self._placement)([vectors[i] for i in chosen], old)
            copies |= zip(chosen, self._placement.in_turn(made), strict=True)
        self._made_of[group] = list(map(weakref.ref, vectors))
        self._held[group] = [copies[i] for i in range(len(vectors))]
        return list(self._held[group])

    @property
    def num_bytes(self) -> int:
        """The bytes of all copies in this process."""
        copies = [copy for held in self._held.values() for copy in held]
        return sum(shard.data.nbytes for copy in copies for shard in copy.addressable_shards)

    def drop(self) -> None:
        """Frees the copies once the device has read them."""
        if self._held:
            ORPHANED_COPIES.drop(self._placement, dict(self._held))
        self._made_of.clear()
        self._held.clear()


@functools.cache
def _exchange(placement: Placement) -> Any:
    """A jitted function of vectors and the copies to overwrite, all or none."""
    there = NamedSharding(placement.pinned.mesh, PartitionSpec(None, DATA))

    def exchange(vectors: Sequence[jax.Array], old: Sequence[jax.Array]) -> list[jax.Array]:
        own = [jax.device_put(vector, jax.memory.Space.Device) for vector in vectors]
        rows = [vector.reshape(placement.num_processes, -1) for vector in own]
        whole = [jax.lax.with_sharding_constraint(row, there.with_memory_kind("device")) for row in rows]
        return [jax.device_put(array, jax.memory.Space.Host) for array in whole]

    options: dict[str, Any] = {"donate_argnums": 1, "keep_unused": True}
    return jax.jit(exchange, out_shardings=there.with_memory_kind("pinned_host"), **options)
