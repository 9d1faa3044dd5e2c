"""Copies that a program queues itself, within the functions that it is traced from."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from jaxferry.native import targets
from jaxferry.partition import Layer


def queue_stores(
    layer: Layer, sources: Sequence[jax.Array], into: Sequence[jax.Array], accumulate: bool = False
) -> list[jax.Array]:
    """Queues the copies of a layer's joined gradients to its vectors in pinned memory, and returns these.

    Args:
      layer: the trained parameters.
      sources: one array for each of `layer.transfers`.
      into: the vectors.
      accumulate: whether to add to what they hold.
    """
    stored = list(into)
    for number, vector in enumerate(into):
        chosen = [i for i, transfer in enumerate(layer.transfers) if transfer.vector == number]
        offsets = [layer.transfers[i].offset for i in chosen]
        stored[number] = targets.ferry_store([sources[i] for i in chosen], vector, offsets, accumulate)
    return stored
