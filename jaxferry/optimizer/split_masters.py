"""fp32 masters that are stored as their compute copy, which exists anyway, and the 17 bits that it lacks.

    bf16 compute copy, pinned: 2 bytes    16 bits that rounding cut off: 2 bytes    whether it rounded up: 1 bit

A master in fp32 beside its compute copy would take 6 bytes. The host step of the native library reads and writes this
form (`jaxferry.native.HostStep`); whoever else needs a master reads it as an array, which joins it, bit for bit.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np

from jaxferry.native import library, rest_size
from jaxferry.partition import Leaf
from jaxferry.transport import as_numpy

_LEAST_SIZE = 1024
"""Smaller masters stay whole: the records of a split one take more than it saves."""


class SplitMaster:
    """A master that NumPy reads as an fp32 array; `rest` is a uint16 array of what its compute copy lacks.

    It is written by writing both. Deep copies are the master itself, as of the arrays that checkpoints write.
    """

    dtype = np.dtype(np.float32)
    itemsize = dtype.itemsize

    def __init__(self, rest: np.ndarray, vector: jax.Array, offset: int, shape: tuple[int, ...]) -> None:
        self.rest, self.shape = rest, shape
        self._vector, self._offset = vector, offset

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes of the array that NumPy reads."""
        return self.size * self.itemsize

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("a split master is joined: NumPy cannot read it without a copy")
        found = self._elements(0, self.size).reshape(self.shape)
        return found if dtype is None else found.astype(dtype, copy=False)

    def __getitem__(self, index: Any) -> np.ndarray:
        """The elements at an index of NumPy's; of slices, only the rows that these cut from the array are joined."""
        slices = index if isinstance(index, tuple) else (index,)
        start, inner, shape, left = 0, self.size, [], list(self.shape)
        for own in slices:
            if not left or not isinstance(own, slice) or own.step not in (None, 1):
                return np.asarray(np.asarray(self)[index])
            first, stop, _ = own.indices(left[0])
            inner //= max(left.pop(0), 1)
            start += first * inner
            shape.append(max(stop - first, 0))
            if shape[-1] != 1:
                break
        num = math.prod(shape)
        found = self._elements(start, num * inner).reshape(*shape, *left)
        return found[(*[slice(None)] * len(shape), *slices[len(shape) :])]

    def __deepcopy__(self, memo: Any) -> SplitMaster:
        return self

    def _elements(self, start: int, size: int) -> np.ndarray:
        """Joins `size` elements of the flattened array."""
        first = start // 8 * 8  # where a byte of `up` begins
        made = np.empty(start + size - first, np.float32)
        low, up = self.rest[: self.size], self.rest[self.size :].view(np.uint8)
        library("cpu").join(self._copy()[first:], low[first:], up[first // 8 :], made)
        return made[start - first :]

    def _copy(self) -> np.ndarray:
        bits = as_numpy(self._vector).view(np.uint16)
        return bits[self._offset : self._offset + self.size]


def split(master: jax.Array, vector: jax.Array, leaf: Leaf) -> Any:
    """The master in this form, whose compute copy is `leaf` of a vector; itself if it is small or cannot be split.

    Only signalling NaNs cannot.
    """
    if master.size < _LEAST_SIZE:
        return master
    made = SplitMaster(np.empty(rest_size(master.size), np.uint16), vector, leaf.offset, tuple(master.shape))
    is_exact = library("cpu").split(np.asarray(master), made._copy(), made.rest)
    return made if is_exact else master


def split_bytes(size: int) -> int:
    """The bytes that split masters of so many elements take beside their compute copy."""
    return 2 * rest_size(size) if size >= _LEAST_SIZE else 4 * size
