"""Gradients of a parameter group that is updated on the device: the sum over its uses, within jitted functions.

one device:       arrays of the parameters' shapes
several devices:  shares of them, flat, where the update is element-wise; gathered otherwise
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxferry.engine.streamed_updates import Uses
from jaxferry.native import as_stored
from jaxferry.partition import Gradient, Layer, Leaf, RowGradient, SharedLayer
from jaxferry.transport.base import added, split


def have_rows(uses: Sequence[Sequence[Any]]) -> bool:
    """Whether some gradients are rows of lookups."""
    return any(isinstance(gradient, RowGradient) for use in uses for gradient in use)


def total_of(layer: Layer, uses: Uses, adds_rows: bool = False) -> list[jax.Array]:
    """The sum over all uses, in the master dtypes, one array for each leaf; zeros without any.

    Of a layer that devices share, they are flat, as of `SharedLayer.filled_up`. Rows of the first use are added in the
    master dtypes as well if `adds_rows`, as the host does over micro-batches.
    """
    zeros = [jnp.zeros(leaf.shape, leaf.master_dtype) for leaf in layer.leaves]
    total = None
    for use in uses:
        gradients = _of_shares(layer, use, zeros, adds_rows) if isinstance(layer, SharedLayer) else split(layer, use)
        if total is None:
            total = [_widened(g, z, adds_rows) for g, z in zip(gradients, zeros, strict=True)]
        else:
            total = [added(a, g) for a, g in zip(total, gradients, strict=True)]
    if total is None and isinstance(layer, SharedLayer):
        return layer.filled_up(zeros)
    return zeros if total is None else total


def _of_shares(
    layer: SharedLayer, use: Sequence[Gradient], zeros: Sequence[jax.Array], adds_rows: bool
) -> list[Gradient]:
    """The gradients of a use as devices share them; those with rows are whole until now."""
    if not have_rows([use]):
        return [*layer.split_shares([array for array in use if not isinstance(array, RowGradient)])]
    return [*layer.filled_up([_widened(g, z, adds_rows) for g, z in zip(use, zeros, strict=True)])]


def _widened(gradient: Gradient, zeros: jax.Array, adds_rows: bool) -> jax.Array:
    if not isinstance(gradient, RowGradient):
        return gradient.astype(zeros.dtype)
    return gradient.onto(zeros) if adds_rows else as_stored(gradient.dense()).astype(zeros.dtype)


def gathered(array: jax.Array, leaf: Leaf) -> jax.Array:
    """A parameter, or its gradient, of which devices may have shares; gathers them."""
    return array if array.shape == leaf.shape else array[: leaf.size].reshape(leaf.shape)
