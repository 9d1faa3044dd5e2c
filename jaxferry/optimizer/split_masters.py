"""fp32 masters that are stored as their compute copy, which exists anyway, and the 17 bits that it lacks.

    bf16 compute copy, pinned: 2 bytes    16 bits that rounding cut off: 2 bytes    whether it rounded up: 1 bit

A master in fp32 beside its compute copy would take 6 bytes. The host step of the native library reads and writes this
form (`jaxferry.native.HostStep`); whoever else needs a master reads it as an array, which joins it, bit for bit.
Of a master that is rounded to bf16 (`moments.with_masters_in_bfloat16`), the copy lacks nothing.
"""

from __future__ import annotations

import abc
import enum
import itertools
import math
from collections.abc import Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from jaxferry.native import library, rest_size
from jaxferry.partition import Leaf, Piece

_IN_A_WORD = 16  # of the bits that say whether a master was rounded up
_LEAST_SIZE = 1024
"""Smaller masters stay whole: the records of a split one take more than it saves."""


class MasterForm(enum.Enum):
    """What is stored of an fp32 master beside a bf16 compute copy."""

    WHOLE = enum.auto()
    SPLIT = enum.auto()  # what the copy lacks
    COPY = enum.auto()  # nothing: bf16 holds it


class LazyArray(abc.ABC):
    """An array whose elements are made when NumPy reads them.

    Deep copies are the array itself, as of what checkpoints write.
    """

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype) -> None:
        self.shape, self.dtype = shape, dtype

    @property
    def itemsize(self) -> int:
        """The bytes of an element."""
        return self.dtype.itemsize

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

    @abc.abstractmethod
    def elements(self, start: int, size: int) -> np.ndarray:
        """A copy of `size` elements of the flattened array."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("NumPy cannot read this array without a copy: its elements are made when they are read")
        found = self.elements(0, self.size).reshape(self.shape)
        return found if dtype is None else found.astype(dtype, copy=False)

    def __getitem__(self, index: Any) -> np.ndarray:
        """The elements at an index of NumPy's; of slices, only the rows that these cut from the array are read."""
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
        found = self.elements(start, num * inner).reshape(*shape, *left)
        return found[(*[slice(None)] * len(shape), *slices[len(shape) :])]

    def __deepcopy__(self, memo: Any) -> Self:
        return self


class SplitMaster(LazyArray):
    """A master that NumPy reads as an fp32 array; `rest` is a uint16 array of what its compute copy lacks.

    It is written by writing both. `copies` are views of the compute copy as uint16: of its share on each device, in
    their order; `rest` has what each of them lacks, one after the other. An empty `rest` is that of a master in bf16.
    """

    def __init__(self, rest: Any, copies: Sequence[np.ndarray], shape: tuple[int, ...]) -> None:
        super().__init__(shape, np.dtype(np.float32))
        self.rest, self._copies = rest, copies

    @property
    def form(self) -> MasterForm:
        """Which form it has."""
        return MasterForm.SPLIT if self.rest.size else MasterForm.COPY

    def with_rest(self, rest: Any) -> SplitMaster:
        """The same master with what its compute copy lacks elsewhere."""
        return SplitMaster(rest, self._copies, self.shape)

    def elements(self, start: int, size: int) -> np.ndarray:
        """See `LazyArray`."""
        made = np.empty(size, np.float32)
        for copy, first, at in zip(self._copies, *_starts([copy.size for copy in self._copies]), strict=True):
            low, stop = max(start - first, 0), min(start + size - first, copy.size)
            if low < stop:
                self._join(copy, at, low, stop, made[first + low - start : first + stop - start])
        return made

    def _join(self, copy: np.ndarray, at: int, start: int, stop: int, made: np.ndarray) -> None:
        """Elements of a share of the compute copy, with what it lacks from `at` on."""
        if self.form is MasterForm.COPY:
            made[:] = copy[start:stop].view(jnp.bfloat16)
            return
        first, up = start // _IN_A_WORD * _IN_A_WORD, at + copy.size
        bits = self.rest[up + first // _IN_A_WORD : up + -(-stop // _IN_A_WORD)].view(np.uint8)
        joined = made if first == start else np.empty(stop - first, np.float32)
        library("cpu").join(copy[first:stop], self.rest[at + first : at + stop], bits, joined)
        if joined is not made:
            made[:] = joined[start - first :]


def rests(rest: np.ndarray, sizes: Sequence[int]) -> list[np.ndarray]:
    """What shares of these sizes of a compute copy lack each."""
    if not rest.size:
        return [rest] * len(sizes)
    return [rest[at : at + rest_size(size)] for size, at in zip(sizes, _starts(sizes)[1], strict=True)]


def _starts(sizes: Sequence[int]) -> tuple[list[int], list[int]]:
    """For shares of these sizes, the first element of each, and where what it lacks begins."""
    own, lacking = (list(itertools.accumulate(each, initial=0))[:-1] for each in (sizes, map(rest_size, sizes)))
    return own, lacking


def split(master: jax.Array, copies: Sequence[np.ndarray], form: MasterForm) -> Any:
    """The master in a form, whose compute copy is in these shares; itself if it is small or cannot be split.

    Only signalling NaNs cannot.
    """
    if master.size < _LEAST_SIZE or form is MasterForm.WHOLE:
        return master
    sizes = [copy.size for copy in copies]
    rest = np.empty(sum(map(rest_size, sizes)) if form is MasterForm.SPLIT else 0, np.uint16)
    whole = np.asarray(master).reshape(-1)
    if form is MasterForm.SPLIT:
        for copy, first, own in zip(copies, _starts(sizes)[0], rests(rest, sizes), strict=True):
            if not library("cpu").split(whole[first : first + copy.size], copy, own):
                return master
    return SplitMaster(rest, copies, tuple(master.shape))


def master_bytes(leaf: Leaf, form: MasterForm, pieces: Sequence[Piece]) -> int:
    """The bytes of a master in host memory, in this form if that is possible."""
    if form is MasterForm.WHOLE or not is_split(leaf) or leaf.size < _LEAST_SIZE:
        return leaf.size * leaf.master_dtype.itemsize
    return 2 * sum(rest_size(piece.size) for piece in pieces) if form is MasterForm.SPLIT else 0


def is_split(leaf: Leaf) -> bool:
    """Whether a master can have another form than whole."""
    return leaf.is_trained and leaf.master_dtype == np.float32 and leaf.dtype == jnp.bfloat16
