"""Vectors in pinned host memory: views in place of copies, and what waits until the device has read them.

`jax.device_put` between an accelerator's client and the CPU backend is a synchronous copy through a literal and a
staging buffer. But pinned memory is host memory, so one address serves both: a NumPy view of it, and an array of the
CPU backend on that view. Where the CPU cannot reach it, the functions here copy by `jax.device_put`.

The runtime frees pinned memory with its last reference, whatever the device does with it. So a thread waits for the
device where an owner is deleted: a transport with copies in flight, or a training state that issued programs read.

Python's garbage collector calls finalizers wherever Python allocates; up to 3.11 that includes JAX's own code. While
JAX records a stack, it keeps it in a buffer of the thread (jaxlib/traceback.cc). A JAX function that records one too,
such as `jax.block_until_ready`, corrupts that buffer, and Python crashes some time later. So a finalizer here calls no
JAX function and nothing that takes a lock: it hands the copies over to the thread.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import math
import queue
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxferry.native import NativeLibrary, host_sums
from jaxferry.partition import Layer
from jaxferry.processes import copied_zeros, from_rows
from jaxferry.settings import with_own_settings
from jaxferry.transport.placement import Placement

Vectors = tuple[jax.Array, ...]

_MAPPINGS = "/proc/self/maps"
_CHECKED_BYTES = 1 << 16
_ALIGNMENT = 64  # the CPU backend copies memory that is not aligned to as many bytes
_MOST_VIEWS = 1 << 14  # views that are remembered, of a few hundred bytes each


class _Memory:
    """Bytes by NumPy's array interface; a view of them keeps their owner alive."""

    def __init__(self, address: int, num_bytes: int, owner: jax.Array | None = None) -> None:
        self._owner = owner
        self.__array_interface__ = {"shape": (num_bytes,), "typestr": "|u1", "data": (address, False), "version": 3}


@functools.cache
def can_view(placement: Placement) -> bool:
    """Whether the CPU reaches the placement's pinned memory by its address; tried once, on a small array."""
    try:
        return _reaches(placement)
    except Exception:  # noqa: BLE001 - a client may not tell addresses; then there are copies
        return False


def _reaches(placement: Placement) -> bool:
    expected = np.arange(_CHECKED_BYTES, dtype=np.uint8)
    array = jax.block_until_ready(jax.device_put(expected.copy(), placement.pinned_alone))
    if not is_mapped(array.unsafe_buffer_pointer(), array.nbytes):
        return False
    view = _bytes_of(array)
    if not np.array_equal(view, expected):
        return False
    np.copyto(view, expected[::-1])
    return np.array_equal(np.asarray(array), expected[::-1])


def on_cpu(arrays: Sequence[jax.Array], placement: Placement) -> Vectors:
    """Waits for arrays in pinned memory; returns the CPU backend's views of them, which change when the device writes.

    Programs must not take them as donated arguments.
    """
    if not can_view(placement):
        return tuple(jax.device_put(array, placement.host) for array in arrays)
    return tuple(jax.device_put(view, placement.host) for view in map(as_numpy, arrays))


def borrowed(arrays: Sequence[jax.Array], placement: Placement, are_ready: bool = False) -> Vectors:
    """As `on_cpu`, but the caller must keep the arrays alive: the views of a block of memory are made once."""
    if not can_view(placement):
        return on_cpu(arrays, placement)
    if not are_ready:
        jax.block_until_ready(arrays)
    addresses = [array.unsafe_buffer_pointer() for array in arrays]
    # Empty arrays may have no address.
    if any(address % _ALIGNMENT or not address for address in addresses):
        return on_cpu(arrays, placement)
    pairs = zip(addresses, arrays, strict=True)
    return tuple(_view(address, array.shape, array.dtype, placement) for address, array in pairs)


@functools.lru_cache(maxsize=_MOST_VIEWS)
def _view(address: int, shape: tuple[int, ...], dtype: np.dtype, placement: Placement) -> jax.Array:
    num_bytes = math.prod(shape) * dtype.itemsize
    return jax.device_put(np.asarray(_Memory(address, num_bytes)).view(dtype).reshape(shape), placement.host)


def shares_of(vector: jax.Array, placement: Placement) -> list[np.ndarray]:
    """Waits for the shares that this process's devices have of a vector in pinned memory.

    They are writable views where the CPU reaches them, else copies; of one device, the vector itself.
    """
    shares = sorted(vector.addressable_shards, key=lambda shard: shard.index[0].start or 0)
    return [as_numpy(shard.data) if can_view(placement) else np.asarray(shard.data) for shard in shares]


def from_shares(vectors: Sequence[jax.Array], placement: Placement, layer: Layer) -> Vectors:
    """Waits for all or the first vectors of a layer that devices share; copies what this process owns of them."""
    wanted = placement.ownership.of(layer).vectors[: len(vectors)]
    made = tuple(unwritten(own.shape, vector.dtype, placement) for own, vector in zip(wanted, vectors, strict=True))
    shares = [shares_of(vector, placement) for vector in vectors]
    placement.ownership.from_shares(layer, shares, list(map(as_numpy, made)))
    return made


def unwritten(shape: tuple[int, ...], dtype: Any, placement: Placement, is_pinned: bool = False) -> jax.Array:
    """A new array in host memory, ordinary or for one device, to be written by its address.

    JAX owns the memory, since it would alias aligned NumPy memory, which updates cannot overwrite.
    """
    where = placement.pinned if is_pinned else placement.host
    made = host_sums.empty(shape, dtype, where) if placement.is_cpu or not is_pinned else None
    return jax.device_put(copied_zeros(shape, np.dtype(dtype)), where) if made is None else made


def as_numpy(array: jax.Array) -> np.ndarray:
    """A writable view of an array in host memory; waits for the array."""
    return _bytes_of(jax.block_until_ready(array)).view(array.dtype).reshape(array.shape)


def to_pinned(vectors: Sequence[jax.Array], placement: Placement, layer: Layer | None = None) -> Vectors:
    """Copies all or the first vectors of a layer from the CPU backend into pinned memory, unless they are there.

    Where several processes train, these are what this one owns; where several devices share them, `layer` is needed.
    """
    if placement.is_cpu:
        return tuple(vectors)
    if placement.num_devices > 1:
        assert layer is not None
        own, where = placement.ownership, placement.pinned_of(layer)
        shares = own.to_shares(layer, [np.asarray(vector) for vector in vectors])
        return tuple(from_rows(rows, rows.shape[1] * own.num_shares(layer), where) for rows in shares)
    # From NumPy: another client's array would pass through a literal. JAX may keep the NumPy array that it is given.
    return tuple(jax.device_put(np.array(vector), placement.pinned) for vector in vectors)


def updated_vectors(
    old: Sequence[Vectors], made: Sequence[Sequence[Any]], placement: Placement, layers: Sequence[Layer]
) -> list[Vectors]:
    """The compute copy after an update, in the pinned memory of an accelerator.

    The CPU overwrites each layer's `old` vectors, which no program may be reading, if it can. `made` are new vectors
    of each layer's trained parameters, which are its first ones, in ordinary memory: what this process owns of them.
    """
    triples = zip(old, made, layers, strict=True)
    if not can_view(placement):
        stored = [(jax.block_until_ready(to_pinned(new, placement, layer)), vectors) for vectors, new, layer in triples]
        return [(*new, *vectors[len(new) :]) for new, vectors in stored]
    for vectors, new, layer in triples:
        shares = [shares_of(vector, placement) for vector in vectors[: len(new)]]
        placement.ownership.write_shares(layer, list(map(np.asarray, new)), shares)
    return list(old)


def _bytes_of(array: jax.Array) -> np.ndarray:
    if not array.nbytes:
        return np.empty(0, np.uint8)
    return np.asarray(_Memory(array.unsafe_buffer_pointer(), array.nbytes, array))


def is_mapped(address: int, num_bytes: int) -> bool:
    """Whether the process may read and write these addresses; a device's own memory has no such mapping.

    They may lie in mappings side by side: advice for a part of the heap, as NumPy gives it, divides its mapping.
    """
    reached, end = address, address + num_bytes
    try:
        with open(_MAPPINGS, encoding="ascii", errors="replace") as file:
            for line in file:  # in the order of addresses
                span, rights = line.split()[:2]
                first, last = (int(number, 16) for number in span.split("-"))
                if first <= reached < last and rights.startswith("rw"):
                    reached = last
    except OSError:
        return False
    return reached >= end


InFlight = dict[int, tuple[Any, Any]]
"""By any key, the holder of the target arrays of a copy in flight, and the vectors that it reads."""


class OrphanedCopies:
    """Owns the thread that waits; the thread ends with the process, after all copies."""

    def __init__(self) -> None:
        self._left: queue.SimpleQueue[tuple[Any, Any] | None] = queue.SimpleQueue()
        self._owners: list[tuple[weakref.finalize[Any, Any], NativeLibrary]] = []
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def watch(self, owner: object, native: NativeLibrary, in_flight: InFlight) -> None:
        """Ensures that copies in flight are waited for when their owner is deleted or the process ends."""
        with self._lock:
            self._start()
            finalizer = weakref.finalize(owner, self._left.put, (native, in_flight))
            finalizer.atexit = False
            self._owners = [known for known in self._owners if known[0].alive]
            self._owners.append((finalizer, native))

    def keep(self, owner: object, placement: Placement, vectors: Any) -> None:
        """Ensures that pinned memory outlives the programs that its owner has issued, if the runtime itself does not.

        Once the owner is deleted, the thread waits for the device before it drops the arrays, or what holds them.
        """
        if not placement.is_cpu:
            with self._lock:
                self._start()
                weakref.finalize(owner, self._left.put, (placement, vectors)).atexit = False

    def drop(self, placement: Placement, vectors: Any) -> None:
        """Drops pinned memory once the device has run what has been issued so far."""
        if not placement.is_cpu:
            with self._lock:
                self._start()
            self._left.put((placement, vectors))

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(
                target=with_own_settings(self._run), name="jaxferry left copies", daemon=True
            )
            self._thread.start()
            # Registered after the library is loaded, so it runs before the library frees its resources.
            atexit.register(self._end)

    def _run(self) -> None:
        while (left := self._left.get()) is not None:
            if isinstance(left[0], Placement):
                _wait_for_device(left[0])
            else:
                _wait_for_all(*left)
            del left

    def _end(self) -> None:
        for finalizer, native in self._owners:
            if finalizer.alive:
                native.finish()
                finalizer()
        self._left.put(None)
        if self._thread is not None:
            self._thread.join()


ORPHANED_COPIES = OrphanedCopies()


def _wait_for_device(placement: Placement) -> None:
    """Returns when the device has run everything that was issued before."""
    with contextlib.suppress(Exception):  # what has failed reads nothing any more
        _probe(placement)().block_until_ready()
    # Copies, and programs of several CPU devices, may overtake the probe. What others drop meanwhile must go, so there
    # is never a reference to more than one array.
    for reference in list(map(weakref.ref, jax.live_arrays(placement.platform))):
        if (array := reference()) is not None:
            with contextlib.suppress(Exception):
                array.block_until_ready()
        del array


@functools.cache
def _probe(placement: Placement) -> Any:
    return jax.jit(lambda: jnp.zeros((), jnp.int8), out_shardings=placement.own)


def _wait_for_all(native: NativeLibrary, in_flight: InFlight) -> None:
    if in_flight:
        with contextlib.suppress(RuntimeError):  # a failed load has no copies in flight
            # After this, every issued copy is on its queue.
            jax.block_until_ready([held.arrays for held, _ in list(in_flight.values())])
        native.synchronize()
        in_flight.clear()
