"""Arrays in host memory that are whole or in parts, and each form made of the other.

A parameter that a model scans over, and whatever the optimizer keeps for it, is stored in parts, one a layer; users and
checkpoints know it whole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxferry.engine.placement import Placement
from jaxferry.partition import Part

Key = tuple[Any, Part | None]
"""What an array is of: a parameter's number or the path of a leaf of the state, and which part of it; None for all."""


@dataclasses.dataclass(frozen=True, eq=False)
class Stacked:
    """An array that is there in parts.

    Attributes:
      parts: the parts in order.
      axis: the axis that they are stacked along.
    """

    parts: tuple[Any, ...]
    axis: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole."""
        shape = self.parts[0].shape
        return (*shape[: self.axis], len(self.parts), *shape[self.axis :])

    @property
    def dtype(self) -> Any:
        """Its dtype."""
        return self.parts[0].dtype

    def whole(self) -> np.ndarray:
        """The array, newly made."""
        return np.stack([np.asarray(part) for part in self.parts], self.axis)


class Pieces:
    """Arrays that are given away one by one, cut or put together where they are asked for in another form.

    An array that is cut is let go of once its parts are there, so that no more than one is there twice.

    Args:
      arrays: by name and part; the caller keeps no references.
      placement: where they live.
    """

    def __init__(self, arrays: Mapping[Any, Mapping[Part | None, Any]], placement: Placement) -> None:
        self._placement = placement
        self._arrays = {name: dict(parts) for name, parts in arrays.items()}
        self._given: dict[Key, jax.Array] = {}

    def take(self, key: Key) -> jax.Array:
        """The array of a key; a copy if it has been asked for before (an update works in place)."""
        if key in self._given:
            return on_host(self._given[key], self._placement)
        name, part = key
        known = self._arrays[name]
        if part not in known:
            found = together(known)
            known.clear()
            whole = found.whole() if isinstance(found, Stacked) else found
            if part is None:
                known[None] = on_host(whole, self._placement)
            else:
                for number in range(part.length):
                    one = Part(number, part.length, part.axis)
                    known[one] = cut(whole, one, self._placement)
        self._given[key] = known.pop(part)
        return self._given[key]


def on_host(array: Any, placement: Placement, dtype: np.dtype | None = None) -> jax.Array:
    """An array in memory that nobody else has, in another dtype if one is given."""
    # JAX takes NumPy's memory as its own where that is aligned, even if told that it may not.
    return jax.device_put(np.array(array, dtype), placement.host)


def cut(array: Any, part: Part, placement: Placement) -> jax.Array:
    """A part of an array in host memory."""
    return on_host(np.asarray(array)[(slice(None),) * part.axis + (part.number,)], placement)


def together(parts: Mapping[Part | None, Any]) -> Any:
    """The array as it is, or all its parts as a `Stacked`."""
    if None in parts:
        return parts[None]
    ordered = sorted((part for part in parts if part is not None), key=lambda part: part.number)
    return Stacked(tuple(parts[part] for part in ordered), ordered[0].axis)


def joined(parts: Mapping[Part | None, Any]) -> Any:
    """The array as it is, or made of all its parts."""
    found = together(parts)
    return found.whole() if isinstance(found, Stacked) else found
