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
import threading
from collections.abc import Iterable, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from jaxferry.native import library, rest_size
from jaxferry.partition import Leaf, Piece
from jaxferry.transport import Placement, as_numpy, unwritten

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
        self.join(made, start)
        return made

    def join(self, made: np.ndarray, start: int = 0) -> None:
        """Writes elements of the flattened array, from `start` on, into a contiguous vector."""
        size = made.size
        for copy, first, at in zip(self._copies, *_starts([copy.size for copy in self._copies]), strict=True):
            low, stop = max(start - first, 0), min(start + size - first, copy.size)
            if low < stop:
                self._join(copy, at, low, stop, made[first + low - start : first + stop - start])

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


class JoinedMasters:
    """Split masters as whole arrays, for an update that takes them so.

    Those of one update are kept for the next one if `keeps`: new memory takes longer than what is done in it.
    """

    def __init__(self, placement: Placement) -> None:
        self._placement, self.keeps = placement, False
        self._free, self._lock = list[jax.Array](), threading.Lock()

    def masters(self, masters: Sequence[Any]) -> list[Any]:
        """The masters, of which split ones are in arrays of their own."""
        made = list(masters)
        with self._lock:
            free, self._free = self._free, []
        wanted = [(number, own) for number, own in enumerate(masters) if isinstance(own, SplitMaster)]
        for number, own in wanted:
            place = next((place for place, array in enumerate(free) if array.shape == own.shape), None)
            if place is not None:
                made[number] = free.pop(place)
        free.clear()  # before there is new memory
        for number, own in wanted:
            if made[number] is own:
                made[number] = unwritten(own.shape, own.dtype, self._placement)
            own.join(as_numpy(made[number]).reshape(-1))
        return made

    def keep(self, whole: Sequence[Any], masters: Sequence[Any]) -> None:
        """Takes the arrays back of masters that are split again."""
        if self.keeps:
            self._free = [array for array, own in zip(whole, masters, strict=True) if isinstance(own, SplitMaster)]


def rests(rest: np.ndarray, sizes: Sequence[int]) -> list[np.ndarray]:
    """What shares of these sizes of a compute copy lack each."""
    if not rest.size:
        return [rest] * len(sizes)
    return [rest[at : at + rest_size(size)] for size, at in zip(sizes, _starts(sizes)[1], strict=True)]


def _starts(sizes: Sequence[int]) -> tuple[list[int], list[int]]:
    """For shares of these sizes, the first element of each, and where what it lacks begins."""
    own, lacking = (list(itertools.accumulate(each, initial=0))[:-1] for each in (sizes, map(rest_size, sizes)))
    return own, lacking


def split(master: jax.Array, copies: Sequence[np.ndarray], form: MasterForm, before: Any = None) -> Any:
    """The master in a form, whose compute copy is in these shares; itself if it is small or cannot be split.

    Only signalling NaNs cannot. What the copy lacks is written where `before`, the master until now, has it.
    """
    if master.size < _LEAST_SIZE or form is MasterForm.WHOLE:
        return master
    sizes = [copy.size for copy in copies]
    size = sum(map(rest_size, sizes)) if form is MasterForm.SPLIT else 0
    has_room = isinstance(before, SplitMaster) and isinstance(before.rest, np.ndarray) and before.rest.size == size
    rest = before.rest if has_room else np.empty(size, np.uint16)
    whole = np.asarray(master).reshape(-1)
    if form is MasterForm.SPLIT:
        for copy, first, own in zip(copies, _starts(sizes)[0], rests(rest, sizes), strict=True):
            if not library("cpu").split(whole[first : first + copy.size], copy, own):
                return master
    return SplitMaster(rest, copies, tuple(master.shape))


def master_bytes(leaf: Leaf, form: MasterForm, pieces: Sequence[Piece]) -> int:
    """The bytes of a master in host memory, in this form if that is possible."""
    if form is MasterForm.WHOLE or not is_split(leaf):
        return leaf.size * leaf.master_dtype.itemsize
    return 2 * sum(rest_size(piece.size) for piece in pieces) if form is MasterForm.SPLIT else 0


def joined_bytes(placed: Iterable[tuple[Leaf, Sequence[Piece]]]) -> int:
    """The bytes of the masters of a layer that are split, as an update takes them whole."""
    return sum(master_bytes(leaf, MasterForm.WHOLE, pieces) for leaf, pieces in placed if is_split(leaf))


def is_split(leaf: Leaf) -> bool:
    """Whether a master can have another form than whole."""
    has_dtypes = leaf.master_dtype == np.float32 and leaf.dtype == jnp.bfloat16
    return leaf.is_trained and has_dtypes and leaf.size >= _LEAST_SIZE
