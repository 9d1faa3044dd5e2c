"""Parts of parameters in host memory: read, written, and shared by several processes.

Arrays in host memory, whole or in parts, and conversions between the two forms.

A parameter that a model scans over, and its optimizer state, is stored in parts, one per layer. Of several processes,
each stores some elements of each array. Users see it whole.

What programs read in host memory (DHA) where several processes share a layer's vectors.

    shares of all processes (pinned) --to the device, gather, to the host--> a row of each process's shares (pinned)

Each process then has all of the layer. The exchange is one program before the first that reads the layer after an
update, in the order in which all processes issue their programs. Vectors that no update replaces, those of frozen
parameters, are exchanged once. With one process its own vectors are read.
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

from jaxferry.native import host_sums
from jaxferry.partition import Layer, Part, Span, bits_of
from jaxferry.transport import DATA, ORPHANED_COPIES, Placement, Vectors, as_numpy

Key = tuple[Any, Part | Span | None]
"""Identifies an array: a parameter's number or the path of a leaf of the state, and its part; None for the whole."""

Parts = Mapping[Part | Span | None, Any]
"""A whole array under None, or its parts, or the elements of these that a process holds."""


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


@dataclasses.dataclass(frozen=True, eq=False)
class Owned:
    """An array of which this process holds some elements.

    Attributes:
      parts: these, or those of each part, by `Span`.
      shape: shape of the whole.
      dtype: its dtype.
    """

    parts: Parts
    shape: tuple[int, ...]
    dtype: Any

    @property
    def span(self) -> Span:
        """Which elements it holds, of the array or of each part."""
        return next(span for span in self.parts if isinstance(span, Span))

    @property
    def axis(self) -> int | None:
        """The axis along which it is stored in parts; None if it is not."""
        return None if self.span.part is None else self.span.part.axis

    @property
    def arrays(self) -> list[Any]:
        """The elements that it holds, of each part in order."""
        numbered = [(span.part.number if span.part else 0, span) for span in self.parts if isinstance(span, Span)]
        return [self.parts[span] for _, span in sorted(numbered, key=lambda pair: pair[0])]


_PIECE_BYTES = 16 * 2**20
"""The bytes of rows that processes gather at a time; they are in memory several times meanwhile."""


class Pieces:
    """Arrays that callers take one by one; cuts or joins them if a caller asks for the other form.

    Releases an array as soon as its parts exist, so that at most one array exists twice. Where processes hold elements
    of an array, and a caller asks for another form, all processes must do so, in the same order.

    Args:
      arrays: by name and part; the caller keeps no references. Those of NumPy are the user's, and are copied.
      placement: where they live.
      shapes: of the whole arrays, by name; needed where processes hold some elements each.
    """

    def __init__(
        self, arrays: Mapping[Any, Parts], placement: Placement, shapes: Mapping[Any, tuple[int, ...]] | None = None
    ) -> None:
        self._placement, self._shapes = placement, shapes or {}
        self._arrays = {name: dict(parts) for name, parts in arrays.items()}
        self._given: dict[Key, jax.Array] = {}

    def take(self, key: Key) -> jax.Array:
        """Returns the array of a key; a copy if it has been taken before, since updates work in place."""
        name, part = key
        if key in self._given:
            return on_host(self._given[key], self._placement)
        if part not in self._arrays[name]:
            self._arrays[name] = self._in_form_of(name, part)
        array = self._arrays[name].pop(part)
        self._given[key] = on_host(array, self._placement) if isinstance(array, np.ndarray) else array
        return self._given[key]

    def left(self) -> dict[Any, dict[Part | Span | None, Any]]:
        """Returns all arrays by name and part, taken or not, each once."""
        found = {name: dict(parts) for name, parts in self._arrays.items()}
        for (name, part), array in self._given.items():
            found[name][part] = array
        return found

    def _in_form_of(self, name: Any, part: Part | Span | None) -> dict[Part | Span | None, Any]:
        """Cuts an array into parts, or elements, like this one; joins it if that is None."""
        shape, found, span = self._shapes.get(name, ()), self._arrays[name], part if isinstance(part, Span) else None
        base = part.part if isinstance(part, Span) else part
        ones = [None] if base is None else [Part(number, base.length, base.axis) for number in range(base.length)]
        if base is not None and not any(isinstance(known, Span) for known in found):
            found = {None: whole_of(found, shape, self._placement)}
        made: dict[Part | Span | None, Any] = {}
        for one in ones:
            array = whole_of(found, shape, self._placement, one)
            if span is None:
                made[one] = on_host(array, self._placement)
            else:
                own = dataclasses.replace(span, part=one)
                made[own] = on_host(own.of(array), self._placement)
        return made


def on_host(array: Any, placement: Placement, dtype: np.dtype | None = None) -> jax.Array:
    """Returns a copy in host memory that nothing else references, in `dtype` if given; PRNG keys keep theirs."""
    if is_key(array):
        return jax.device_put(jnp.copy(array), placement.host, may_alias=False)
    source = np.asarray(array)
    wanted = source.dtype if dtype is None else dtype
    return filled(source.shape, wanted, placement, lambda made: host_sums.copy(made, source))


def is_key(array: Any) -> bool:
    """Whether an array holds PRNG keys."""
    return bool(jax.dtypes.issubdtype(getattr(array, "dtype", np.float32), jax.dtypes.prng_key))


def filled(
    shape: tuple[int, ...],
    dtype: np.dtype,
    placement: Placement,
    fill: Callable[[np.ndarray], None],
    is_pinned: bool = False,
) -> jax.Array:
    """Returns a new array in host memory; no other one of its size exists meanwhile.

    Args:
      shape: its shape.
      dtype: its dtype.
      placement: where arrays live.
      fill: writes the content into a NumPy view of the array.
      is_pinned: whether it is in pinned memory, which the CPU must be able to write.
    """
    where = placement.pinned if is_pinned else placement.host
    if bits_of(dtype) < 8:
        # JAX stores several elements in a byte, and NumPy does not.
        source = np.empty(shape, dtype)
        fill(source)
        return jax.device_put(source, where)
    # Of memory that JAX owns, since it would alias aligned NumPy memory, which updates cannot overwrite.
    made = host_sums.empty(tuple(shape), dtype, where) if placement.is_cpu or not is_pinned else None
    if made is None:
        made = jax.device_put(_copied_zeros(shape, np.dtype(dtype)), where)
    fill(as_numpy(made))
    return made


_LONG_ROW_BYTES = 512
_ALIASED_ALIGNMENT = 16
"""JAX aliases NumPy memory that starts at a multiple of so many bytes, and copies other memory."""


def _copied_zeros(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Returns zeros that take no memory, since nobody writes there, and that JAX does not alias.

    Rows of one row are copied the fastest; JAX takes each element by itself where these are short.
    """
    if len(shape) > 1 and shape[-1] * dtype.itemsize >= _LONG_ROW_BYTES:
        return np.broadcast_to(np.zeros(shape[-1:], dtype), shape)
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = np.zeros(num_bytes + 2 * _ALIASED_ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIASED_ALIGNMENT + _ALIASED_ALIGNMENT // 2
    return memory[start : start + num_bytes].view(dtype).reshape(shape)


def stored_key(key: Key) -> Key:
    """The key of the array, or of its part, that holds the elements of a key."""
    name, part = key
    return (name, part.part) if isinstance(part, Span) else key


def copied(array: Any, where: NamedSharding) -> jax.Array:
    """Returns a copy of an array, or of keys of random numbers, in a memory of this process's devices."""
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        return jax.device_put(array, where, may_alias=False)
    # From NumPy: another client's array would pass through a literal. A CPU may keep the memory that it is given.
    source, devices = np.asarray(array), list[Any](where.device_set)
    keeps = any(device.platform == "cpu" for device in devices)
    return jax.device_put(np.array(source) if keeps else source, where)


def cut(array: Any, part: Part, placement: Placement) -> jax.Array:
    """Returns a part of an array, in host memory."""
    return on_host(_part_of(np.asarray(array), part), placement)


def together(parts: Parts) -> Any:
    """Returns the array itself if it is whole, or its parts as a `Stacked`."""
    if None in parts:
        return parts[None]
    ordered = sorted((part for part in parts if isinstance(part, Part)), key=lambda part: part.number)
    return Stacked(tuple(parts[part] for part in ordered), ordered[0].axis)


def in_stored_form(parts: Parts, aval: Any) -> Any:
    """Returns an array as it is stored, without copies: itself, or a `Stacked` or `Owned`."""
    is_owned = any(isinstance(part, Span) for part in parts)
    return Owned(parts, tuple(aval.shape), aval.dtype) if is_owned else together(parts)


def numpy_bytes(avals: Iterable[Any]) -> int:
    """Returns the bytes of arrays of NumPy, of which each element takes a byte or more."""
    return sum(math.prod(aval.shape) * np.dtype(aval.dtype).itemsize for aval in avals)


def whole_of(parts: Parts, shape: tuple[int, ...], placement: Placement, part: Part | None = None) -> Any:
    """Returns an array, or a part of it, as NumPy memory, which may be that of `parts`.

    If processes hold some elements each, every process must call this. A part of which they hold elements is then
    gathered alone.

    Args:
      parts: the array as it is stored.
      shape: shape of the whole.
      placement: where it lives.
      part: the wanted part; None for the whole.
    """
    spans = {known.part: known for known in parts if isinstance(known, Span)}
    if not spans:
        found = together(parts)
        whole = found.whole() if isinstance(found, Stacked) else np.asarray(found)
        return whole if part is None else _part_of(whole, part)
    if None in spans:
        own, span = np.asarray(parts[spans[None]]), spans[None]
        if part is not None and part.axis == 0:
            size = math.prod(shape[1:])
            return _gathered(own, span, part.number * size, size, placement).reshape(shape[1:])
        whole = _gathered(own, span, 0, math.prod(shape), placement).reshape(shape)
        return whole if part is None else _part_of(whole, part)
    parts_of = sorted((known for known in spans if known is not None), key=lambda known: known.number)
    axis = parts_of[0].axis
    shape_of_one = (*shape[:axis], *shape[axis + 1 :])

    def one(part: Part) -> np.ndarray:
        span = spans[part]
        return _gathered(np.asarray(parts[span]), span, 0, math.prod(shape_of_one), placement).reshape(shape_of_one)

    if part is not None:
        return one(part)
    return np.stack([one(part) for part in parts_of], axis)


def elements_of(parts: Parts, shape: tuple[int, ...], placement: Placement, index: Any) -> np.ndarray:
    """Returns a copy of some elements of an array; if processes hold some elements each, every process must call this.

    Of a slice of rows, alone or first in a tuple, no other rows are copied or gathered.

    Args:
      parts: the array as it is stored.
      shape: shape of the whole.
      placement: where it lives.
      index: which elements, an index of NumPy's.
    """
    if None in parts:
        return np.array(np.asarray(parts[None])[index])
    spans = {known.part: known for known in parts if isinstance(known, Span)}
    if not spans and isinstance(index, slice):
        stacked: Stacked = together(parts)
        ones, own = (stacked.parts[index], ...) if stacked.axis == 0 else (stacked.parts, index)
        if ones:
            return np.stack([np.asarray(part)[own] for part in ones], stacked.axis)
    first_axis, rest = (index[0], index[1:]) if isinstance(index, tuple) and index else (index, ())
    if None in spans and shape and isinstance(first_axis, slice) and first_axis.step in (None, 1):
        start, stop, _ = first_axis.indices(shape[0])
        if start < stop:
            pieces = _gathered_rows(np.asarray(parts[spans[None]]), spans[None], (start, stop), shape[1:], placement)
            # Copies, of which each releases its piece.
            return np.concatenate([np.array(piece[(slice(None), *rest)]) for piece in pieces])
    return np.array(whole_of(parts, shape, placement)[index])


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
