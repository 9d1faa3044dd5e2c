"""Arrays in host memory, whole, in parts, or shared by several processes, and conversions between these forms.

A parameter that a model scans over, and its optimizer state, is stored in parts, one per layer. Of several processes,
each stores some elements of each array. Users see it whole.

What programs read in host memory (DHA) where several processes share a layer's vectors:

    shares of all processes (pinned) --to the device, gather, to the host--> a row of each process's shares (pinned)

The exchange is one program before the first that reads the layer after an update, in the order in which all processes
issue their programs. Vectors of frozen parameters are exchanged once. With one process its own vectors are read.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxferry.native import MOMENT_BLOCK, host_sums
from jaxferry.optimizer.scratch import OnDiskArray
from jaxferry.partition import Layer, Part, Span, bits_of
from jaxferry.processes import is_key
from jaxferry.transport import DATA, ORPHANED_COPIES, Placement, Vectors, as_numpy, unwritten

Where = Part | Span | None
"""Which elements of an array: those of a part, consecutive ones of the array or of a part, or all (None)."""

Key = tuple[Any, Where]
"""Identifies an array in memory: a parameter's number or the path of a leaf of the state, and which elements it has."""


_PIECE_BYTES = 16 * 2**20
"""The bytes of rows that processes gather at a time; they are in memory several times meanwhile."""


@dataclasses.dataclass(frozen=True, eq=False)
class Stored:
    """An array of some shape and dtype as it is stored: whole, in parts, or this process's elements of either.

    `pieces` are the arrays in memory, by which elements they have. If processes hold some elements each, every process
    must call `array` and `elements`.
    """

    pieces: Mapping[Where, Any]
    shape: tuple[int, ...]
    dtype: Any

    @property
    def span(self) -> Span | None:
        """Which elements of the array, or of a part, this process holds; None if all."""
        return next((where for where in self.pieces if isinstance(where, Span)), None)

    @property
    def axis(self) -> int | None:
        """The axis along which it is stored in parts; None if it is not."""
        part = next(map(_part, self.pieces))
        return None if part is None else part.axis

    @property
    def arrays(self) -> list[Any]:
        """The arrays in memory, in the order of the parts."""
        return [self.pieces[where] for where in self._ordered()]

    def _ordered(self) -> list[Where]:
        return sorted(self.pieces, key=lambda where: part.number if (part := _part(where)) else 0)

    def array(self, placement: Placement, part: Part | None = None) -> np.ndarray:
        """Returns it, or a part of it, as NumPy memory, which may be that of its pieces.

        A part of which processes hold some elements each is gathered alone.
        """
        span, axis = self.span, self.axis
        if part in self.pieces:
            return np.asarray(self.pieces[part])
        if span is None:
            whole = np.asarray(self.arrays[0]) if axis is None else np.stack(list(map(np.asarray, self.arrays)), axis)
        elif axis is None:
            own, size = np.asarray(self.pieces[span]), math.prod(self.shape[1:])
            if part is not None and part.axis == 0:
                return _gathered(own, span, part.number * size, size, placement).reshape(self.shape[1:])
            whole = _gathered(own, span, 0, math.prod(self.shape), placement).reshape(self.shape)
        else:
            shape = (*self.shape[:axis], *self.shape[axis + 1 :])
            found = [
                _gathered(np.asarray(self.pieces[where]), where, 0, math.prod(shape), placement).reshape(shape)
                for where in self._ordered()
                if isinstance(where, Span) and part in (None, where.part)
            ]
            return np.stack(found, axis) if part is None else found[0]
        return whole if part is None else _part_of(whole, part)

    def elements(self, placement: Placement, index: Any) -> np.ndarray:
        """Returns a copy of the elements at an index of NumPy's; other rows than a slice's are not gathered."""
        if None in self.pieces:
            whole = self.pieces[None]
            return np.array((np.asarray(whole) if isinstance(whole, jax.Array) else whole)[index])
        span, axis = self.span, self.axis
        if span is None and isinstance(index, slice):
            ones, of_each = (self.arrays[index], ...) if axis == 0 else (self.arrays, index)
            if ones and axis is not None:
                return np.stack([np.asarray(part)[of_each] for part in ones], axis)
        first_axis, rest = (index[0], index[1:]) if isinstance(index, tuple) and index else (index, ())
        is_rows = self.shape and isinstance(first_axis, slice) and first_axis.step in (None, 1)
        if span is not None and axis is None and is_rows:
            start, stop, _ = first_axis.indices(self.shape[0])
            if start < stop:
                own = np.asarray(self.pieces[span])
                pieces = _gathered_rows(own, span, (start, stop), self.shape[1:], placement)
                # Copies, of which each releases its piece.
                return np.concatenate([np.array(piece[(slice(None), *rest)]) for piece in pieces])
        return np.array(self.array(placement)[index])


def stored_whole(array: Any) -> Stored:
    """Returns the record of an array that is stored whole."""
    return Stored({None: array}, tuple(array.shape), array.dtype)


def _part(where: Where) -> Part | None:
    return where.part if isinstance(where, Span) else where


class Pieces:
    """Arrays by name that callers take one by one; cuts or joins them if a caller asks for the other form.

    Releases an array as soon as its parts exist, so that at most one array exists twice. Where processes hold elements
    of an array, and a caller asks for another form, all processes must do so, in the same order. NumPy's arrays are
    the user's, and are copied, as split masters are joined; to others the caller keeps no references.
    """

    def __init__(self, arrays: Mapping[Any, Stored], placement: Placement) -> None:
        self._placement = placement
        self._avals = {name: (stored.shape, stored.dtype) for name, stored in arrays.items()}
        self._arrays = {name: dict(stored.pieces) for name, stored in arrays.items()}
        self._given: dict[Key, jax.Array] = {}

    def put(self, key: Key, array: Any) -> None:
        """Replaces an array that has been taken, which nothing here keeps alive any more."""
        self._given[key] = array

    def take(self, key: Key, lazily: bool = False) -> Any:
        """Returns the array of a key; a copy if it has been taken before, since updates work in place.

        With `lazily`, one that nobody has read from a scratch file is returned as it is.
        """
        name, part = key
        if key in self._given:
            return on_host(self._given[key], self._placement)
        if part not in self._arrays[name]:
            self._arrays[name] = self._in_form_of(name, part)
        array = self._arrays[name].pop(part)
        is_own = isinstance(array, jax.Array) or (lazily and isinstance(array, OnDiskArray))
        self._given[key] = array if is_own else on_host(array, self._placement)
        return self._given[key]

    def left(self) -> dict[Any, Stored]:
        """Returns all arrays by name, taken or not, each once."""
        found = {name: dict(pieces) for name, pieces in self._arrays.items()}
        for (name, where), array in self._given.items():
            found[name][where] = array
        return {name: Stored(pieces, *self._avals[name]) for name, pieces in found.items()}

    def _in_form_of(self, name: Any, where: Where) -> dict[Where, Any]:
        """Cuts an array into parts, or elements, like this one; joins it if that is None."""
        stored, placement = Stored(self._arrays[name], *self._avals[name]), self._placement
        base = where.part if isinstance(where, Span) else where
        ones = [None] if base is None else [Part(number, base.length, base.axis) for number in range(base.length)]
        if base is not None and stored.span is None:
            stored = stored_whole(stored.array(placement))
        made: dict[Where, Any] = {}
        for one in ones:
            array = stored.array(placement, one)
            if isinstance(where, Span):
                own = dataclasses.replace(where, part=one)
                made[own] = on_host(own.of(array), placement)
            else:
                made[one] = on_host(array, placement)
        return made


def part_aval(aval: Any, part: Where) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of a part of an array, or of some of its elements."""
    shape = tuple(aval.shape)
    if isinstance(part, Span):
        shape = (part.size,)
    elif part is not None:
        shape = (*shape[: part.axis], *shape[part.axis + 1 :])
    return jax.ShapeDtypeStruct(shape, aval.dtype)


def cut_like(part: Where, shape: Sequence[int], of_leaf: Sequence[int]) -> Where:
    """Which elements of a leaf's state belong to some of the leaf's: the same ones, or the scales of their blocks."""
    if not isinstance(part, Span) or tuple(shape) == tuple(of_leaf):
        return part
    return dataclasses.replace(part, start=part.start // MOMENT_BLOCK, stop=-(-part.stop // MOMENT_BLOCK))


def on_host(array: Any, placement: Placement, dtype: np.dtype | None = None) -> jax.Array:
    """Returns a copy in host memory that nothing else references, in `dtype` if given; PRNG keys keep theirs."""
    if is_key(array):
        return jax.device_put(jnp.copy(array), placement.host, may_alias=False)
    source = np.asarray(array)
    wanted = source.dtype if dtype is None else dtype
    return filled(source.shape, wanted, placement, lambda made: host_sums.copy(made, source))


def filled(
    shape: tuple[int, ...],
    dtype: np.dtype,
    placement: Placement,
    fill: Callable[[np.ndarray], None],
) -> jax.Array:
    """Returns a new array in ordinary host memory; no other one of its size exists meanwhile."""
    if bits_of(dtype) < 8:
        # JAX stores several elements in a byte, and NumPy does not.
        source = np.empty(shape, dtype)
        fill(source)
        return jax.device_put(source, placement.host)
    made = unwritten(tuple(shape), dtype, placement)
    fill(as_numpy(made))
    return made


def stored_key(key: Key) -> Key:
    """The key of the array, or of its part, that holds the elements of a key."""
    return key[0], _part(key[1])


def copied(array: Any, where: NamedSharding) -> jax.Array:
    """Returns a copy of an array, or of keys of random numbers, in a memory of this process's devices."""
    if is_key(array):
        return jax.device_put(array, where, may_alias=False)
    # From NumPy: another client's array would pass through a literal. A CPU may keep the memory that it is given.
    source, devices = np.asarray(array), list[Any](where.device_set)
    keeps = any(device.platform == "cpu" for device in devices)
    return jax.device_put(np.array(source) if keeps else source, where)


def cut(array: Any, part: Part, placement: Placement) -> jax.Array:
    """Returns a part of an array, in host memory."""
    return on_host(_part_of(np.asarray(array), part), placement)


def numpy_bytes(avals: Iterable[Any]) -> int:
    """Returns the bytes of arrays of NumPy, of which each element takes a byte or more; keys count as none."""
    return sum(math.prod(aval.shape) * np.dtype(aval.dtype).itemsize for aval in avals if not is_key(aval))


def _gathered_rows(
    own: np.ndarray, span: Span, rows: tuple[int, int], row: tuple[int, ...], placement: Placement
) -> Iterator[np.ndarray]:
    """Gathers rows of an array, of which each process holds some elements, some at a time."""
    size = math.prod(row)
    step = max(1, _PIECE_BYTES // max(1, size * own.itemsize))
    for first in range(*rows, step):
        num = min(step, rows[1] - first)
        yield _gathered(own, span, first * size, num * size, placement).reshape(num, *row)


def _gathered(own: np.ndarray, span: Span, first: int, size: int, placement: Placement) -> np.ndarray:
    """Elements of a flattened array of which each process holds some."""
    made = np.zeros(size, own.dtype)
    start, stop = max(span.start, first), min(span.stop, first + size)
    if start < stop:
        made[start - first : stop - first] = own[start - span.start : stop - span.start]
    return placement.merged(made)


def _part_of(array: np.ndarray, part: Part) -> np.ndarray:
    return array[(slice(None),) * part.axis + (part.number,)]


class WholeCopies:
    """The copies of one training state."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._made_of: dict[int, list[Callable[[], Any]]] = {}
        # What holds the copies outlives this object until the device has read them.
        self._held: dict[int, list[jax.Array]] = {}
        ORPHANED_COPIES.keep(self, placement, self._held)

    def of(self, group: int, layer: Layer, vectors: Vectors) -> list[jax.Array]:
        """What programs read; of several processes, all must call this in one order."""
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

    def outdate(self, group: int, num: int) -> None:
        """Notes that the first vectors of a group have new numbers, maybe in the same memory."""
        made_of = self._made_of.get(group, [])
        made_of[:num] = [_gone] * min(num, len(made_of))

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


def _gone() -> None: ...


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
