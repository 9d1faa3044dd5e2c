"""Arrays in host memory, whole or in parts, and conversions between the two forms.

A parameter that a model scans over, and its optimizer state, is stored in parts, one per layer. Users and checkpoints
see it whole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxferry.engine.placement import Placement
from jaxferry.partition import Part


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


Key = tuple[Any, Part | Span | None]
"""Identifies an array: a parameter's number or the path of a leaf of the state, and its part; None for the whole."""


@dataclasses.dataclass(frozen=True, eq=False)
class Stacked:
    """An array that is stored in parts.

    Attributes:
      parts: the parts in order.
      axis: the axis along which they are stacked.
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
        """Returns the whole array, as a copy."""
        return np.stack([np.asarray(part) for part in self.parts], self.axis)


class Pieces:
    """Arrays that callers take one by one; cuts or joins them if a caller asks for the other form.

    Releases an array as soon as its parts exist, so that at most one array exists twice.

    Args:
      arrays: by name and part; the caller keeps no references.
      placement: where they live.
    """

    def __init__(self, arrays: Mapping[Any, Mapping[Part | None, Any]], placement: Placement) -> None:
        self._placement = placement
        self._arrays = {name: dict(parts) for name, parts in arrays.items()}
        self._given: dict[tuple[Any, Part | None], jax.Array] = {}

    def take(self, key: Key) -> jax.Array:
        """Returns the array of a key; a copy if it has been taken before, since updates work in place."""
        name, part = key
        assert not isinstance(part, Span)
        if (name, part) in self._given:
            return on_host(self._given[name, part], self._placement)
        known = self._arrays[name]
        if part not in known:
            known = self._arrays[name] = self._in_form_of(part, together(known))
        self._given[name, part] = known.pop(part)
        return self._given[name, part]

    def left(self) -> dict[Any, dict[Part | None, Any]]:
        """Returns all arrays by name and part, taken or not, each once."""
        found = {name: dict(parts) for name, parts in self._arrays.items()}
        for (name, part), array in self._given.items():
            found[name][part] = array
        return found

    def _in_form_of(self, part: Part | None, found: Any) -> dict[Part | None, Any]:
        """Cuts an array into parts like this one, or joins its parts if that is None."""
        whole = found.whole() if isinstance(found, Stacked) else found
        if part is None:
            return {None: on_host(whole, self._placement)}
        ones = [Part(number, part.length, part.axis) for number in range(part.length)]
        return {one: cut(whole, one, self._placement) for one in ones}


def on_host(array: Any, placement: Placement, dtype: np.dtype | None = None) -> jax.Array:
    """Returns a copy in host memory that nothing else references, in `dtype` if given."""
    # JAX aliases aligned NumPy memory even with may_alias=False.
    return jax.device_put(np.array(array, dtype), placement.host)


def cut(array: Any, part: Part, placement: Placement) -> jax.Array:
    """Returns a part of an array, in host memory."""
    return on_host(np.asarray(array)[(slice(None),) * part.axis + (part.number,)], placement)


def together(parts: Mapping[Part | None, Any]) -> Any:
    """Returns the array itself if it is whole, or its parts as a `Stacked`."""
    if None in parts:
        return parts[None]
    ordered = sorted((part for part in parts if part is not None), key=lambda part: part.number)
    return Stacked(tuple(parts[part] for part in ordered), ordered[0].axis)


def joined(parts: Mapping[Part | None, Any]) -> Any:
    """Returns the array itself if it is whole, or joins its parts."""
    found = together(parts)
    return found.whole() if isinstance(found, Stacked) else found
