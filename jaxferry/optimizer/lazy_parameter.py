"""A parameter of a state that is copied when it is read, whole or piece by piece."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxferry.partition import Span
from jaxferry.partition.packed import BYTES

_PIECE_BYTES = 32 * 2**20


@dataclasses.dataclass(frozen=True, eq=False)
class LazyParameter:
    """A parameter that is not copied yet; `np.asarray` copies it, an index copies some elements.

    Attributes:
      read: returns a copy of the elements at an index of NumPy's, of the parameter of a number; with `as_bytes`, of
        the bytes in which it is stored.
      leaf: its number in the flattened tree of parameters.
      aval: its shape and dtype, as the user sees them: that of its master, unless it is stored as bytes.
      stored: those in which it is stored.
    """

    read: Callable[..., np.ndarray] = dataclasses.field(repr=False)
    leaf: int
    aval: Any
    stored: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return tuple(self.aval.shape)

    @property
    def dtype(self) -> np.dtype:
        """Its dtype: that of its master, unless it is stored as bytes."""
        return np.dtype(self.aval.dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        found = self.read(self.leaf, ...)
        return found if dtype is None else found.astype(dtype, copy=False)

    def __getitem__(self, index: Any) -> np.ndarray:
        return self.read(self.leaf, index)

    def read_into(self, made: np.ndarray, span: Span | None = None) -> None:
        """Reads it, or some elements of it, into an array of any dtype; a few rows at a time.

        An array of bytes receives a parameter that is stored as bytes as it is stored.
        """
        as_bytes = self.stored is not self.aval and made.dtype in BYTES
        aval = self.stored if as_bytes else self.aval
        if not aval.shape:
            whole = self.read(self.leaf, ..., as_bytes=as_bytes)
            made[...] = whole if span is None else span.of(whole)
            return
        row = math.prod(aval.shape[1:])
        rows = max(1, _PIECE_BYTES // max(1, row * np.dtype(aval.dtype).itemsize))
        # Where several processes hold elements each, all read the same rows at a time.
        for first in range(0, aval.shape[0], rows):
            found = self.read(self.leaf, slice(first, first + rows), as_bytes=as_bytes)
            if span is None:
                made[first : first + rows] = found
            else:
                span.put(made, first * row, found)
