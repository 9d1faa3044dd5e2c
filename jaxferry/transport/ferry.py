"""The transport of the native library: copies on its own queues, between host memory and existing device buffers.

One program enqueues a copy and another waits for it, so the copy overlaps everything that the device runs between the
two. A parameter is copied directly into a buffer of its own shape, and a large gradient from one. All small gradients
of a vector leave as one transfer, since a transfer of each would be mostly latency: their program has joined them. The
next layer of the same layout reuses the buffers of a dropped layer. Its load waits for their last reader, and for
nothing that the device runs after that: a program which is issued behind the last reader tells the library. The first
loads of the next step wait for updates, and so for the last readers of their layers: where the buffers of these stay
allocated, the device need not wait for anything.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxferry.errors import NativeError
from jaxferry.native import Donating, NativeLibrary, Vacancy, library, targets
from jaxferry.partition import Gradient, Layer, RowGradient
from jaxferry.step import NO_JOINS, Joins
from jaxferry.transport.base import Transport
from jaxferry.transport.copies import CopyInFlight, DeviceLayer, HostGradient, delete_all
from jaxferry.transport.interrupts import deferred_interrupts
from jaxferry.transport.marks import TaskMark
from jaxferry.transport.pinned import ORPHANED_COPIES, InFlight, Vectors
from jaxferry.transport.placement import Placement
from jaxferry.transport.shared_programs import in_background, shared_function


def queue_stores(
    layer: Layer, sources: Sequence[jax.Array], into: Sequence[jax.Array], accumulate: bool = False
) -> list[jax.Array]:
    """Queues the copies of a layer's joined gradients to its vectors in pinned memory, and returns these."""
    stored = list(into)
    for number, vector in enumerate(into):
        chosen = [i for i, transfer in enumerate(layer.transfers) if transfer.vector == number]
        offsets = [layer.transfers[i].offset for i in chosen]
        stored[number] = targets.ferry_store([sources[i] for i in chosen], vector, offsets, accumulate)
    return stored


Waiter = Callable[[Sequence[jax.Array]], Sequence[jax.Array]]


class StoredCopy(CopyInFlight):
    """One gradient on its way to host memory: copies by `native` of `sources` into `arrays`.

    `landed` makes the device wait for copies of arrays, which it is donated, and returns them. The copy is among
    `in_flight` until it has ended. `gradient` returns the gradient that it is for, or None once nobody has it any
    more.
    """

    def __init__(
        self, native: NativeLibrary, vectors: Vectors, sources: Sequence[jax.Array], landed: Waiter, in_flight: InFlight
    ) -> None:
        self.arrays = vectors
        self.gradient: Callable[[], object] = lambda: self
        self._native, self._sources, self._landed, self._in_flight = native, sources, landed, in_flight
        self._lock = threading.Lock()
        in_flight[id(self)] = (self, sources)

    def wait(self) -> None:
        """Waits on the host until the copy has ended, and frees its sources."""
        # After this, the copy is on its queue.
        jax.block_until_ready(self.arrays)
        addresses = [array.unsafe_buffer_pointer() for array in self.arrays]
        self._native.wait_for(addresses, [array.nbytes for array in self.arrays])
        self.forget()

    def settle(self) -> None:
        """See `CopyInFlight`: copies end in their order."""
        self.forget()

    def hold(self) -> None:
        """Makes the device wait for the copy before its next program, and frees the sources for that program."""
        if sources := self.take_sources():
            delete_all(self._landed(sources))

    def take_sources(self) -> Sequence[jax.Array]:
        """The arrays that are copied, for whoever waits for the copy and frees them; none if that is done."""
        with self._lock:
            taken, self._sources = self._sources, ()
        return taken

    def forget(self) -> None:
        """Frees the sources. The copy has ended, or the device waits for it and for what replaces the vectors."""
        delete_all(self.take_sources())
        self._in_flight.pop(id(self), None)


def hold_together(copies: Sequence[StoredCopy], landed: Waiter, keeps_freed: bool) -> None:
    """Makes the device wait for copies before its next program, and frees their sources for that program.

    The copies end in their order. With `keeps_freed`, freed memory stays as it is until the device has run what was
    issued before: then the device waits for the last copy alone. A CPU's memory does not, so what a copy still reads
    goes to a program that waits.
    """
    taken = [copy.take_sources() for copy in copies]
    for sources in taken[-1:] if keeps_freed else _joined(taken):
        if sources:
            delete_all(landed(sources))
    for sources in taken[:-1] if keeps_freed else ():
        delete_all(sources)


def _joined(taken: list[Sequence[jax.Array]]) -> Iterator[list[jax.Array]]:
    """The sources of several copies together, so many that the numbers of arrays, and so of programs, are few."""
    left = [sources for sources in taken if sources]
    while left:
        num = 1 << (len(left).bit_length() - 1)
        yield [array for sources in left[:num] for array in sources]
        left = left[num:]


class Ferry(Transport):
    """Copies by `ferry_load`, `ferry_store` and `ferry_wait`."""

    def __init__(self, placement: Placement, layers: Sequence[Layer], accumulates: bool = False) -> None:
        super().__init__(placement, layers, accumulates)
        self._accumulates = accumulates
        self.library = self._native = library(placement.platform)
        # Layers of the same layout share buffers. A layout is long, so its number stands for it.
        numbers: dict[Any, int] = {}
        self._layouts = [numbers.setdefault(layer.layout, len(numbers)) for layer in layers]
        self._free: dict[int, list[Sequence[jax.Array]]] = {number: [] for number in numbers.values()}
        self._reserved: dict[int, Sequence[jax.Array]] = {}
        self._landed = shared_function(("landed", placement, placement.is_cpu), lambda: landed_program(placement))
        # Copies that nothing has waited for. JAX does not know of them, so their sources and targets must stay alive.
        self.in_flight: InFlight = {}
        ORPHANED_COPIES.watch(self, self.library, self.in_flight)

    @property
    def joins(self) -> Joins:
        """See `Transport`. On a CPU the lanes' threads wait themselves; sums over micro-batches are stored apart."""
        return NO_JOINS if self._placement.is_cpu else Joins(arrives=True, stores=not self._accumulates)

    def store(
        self,
        layer: int,
        gradients: Sequence[Gradient],
        onto: HostGradient | None = None,
        mark: TaskMark | None = None,
        is_sum: bool = False,
        widens: bool = False,
        into: Vectors | None = None,
    ) -> HostGradient:
        """See `Transport.store`."""
        arrays = [gradient for gradient in gradients if not isinstance(gradient, RowGradient)]
        if len(arrays) < len(gradients):
            return self._store_rows(layer, gradients, onto, mark, widens)
        adds_on_host = widens and not is_sum if onto is None else widens or self.is_summed_on_host(onto)
        if adds_on_host:
            return self.add_on_host(layer, onto, self._copy(layer, arrays, None, mark, is_sum))
        return self._copy(layer, arrays, onto, mark, is_sum, into)

    def _copy(
        self,
        layer: int,
        arrays: Sequence[jax.Array],
        onto: HostGradient | None,
        mark: TaskMark | None,
        is_sum: bool,
        into: Vectors | None = None,
    ) -> HostGradient:
        """Queues the copy of joined gradients, or their addition to a stored one of the same dtypes."""
        into = self.destinations(layer, onto, is_sum) if into is None else into
        store = self.program("store" if onto is None else "accumulate", layer, is_sum)
        return self.queued(_marked(store, (arrays, into), mark), arrays)

    def queued(self, vectors: Sequence[jax.Array], arrays: Sequence[jax.Array]) -> HostGradient:
        """Wraps the gradient whose copy into `destinations` a program has queued: see `ProgramKey.stores`."""
        copy = StoredCopy(self._native, tuple(vectors), arrays, self._landed, self.in_flight)
        stored = HostGradient(copy.arrays, self._placement.is_cpu, copy)
        copy.gradient = weakref.ref(stored)
        return stored

    def compile(
        self, loads: Mapping[int, int], reserved: Collection[int], stored: Collection[int], marks: bool
    ) -> None:
        """See `Transport.compile`. On a CPU, loads into known buffers are compiled when they are called."""
        wanted: dict[tuple[int, bool], int] = {}
        for layer, num in loads.items():
            kinds = {layer in reserved, layer in reserved and num == 1}
            wanted |= {(self._layouts[layer], is_reserved): layer for is_reserved in kinds}
        pairs = [(layer, is_reserved) for (_, is_reserved), layer in wanted.items()]
        calls = [call for pair in pairs for call in self._calls_of_load(*pair, marks)]
        by_layout = {self._layouts[layer]: layer for layer in stored}
        calls += [call for layer in by_layout.values() for call in self._calls_of_store(layer, marks)]
        # The lanes' threads have the settings of these, on which compiled programs depend.
        # What fails here fails in the step, which says what it was doing.
        concurrent.futures.wait([in_background(program.compile, *args) for program, args in calls])

    def _calls_of_load(
        self, layer: int, is_reserved: bool, is_recorded: bool
    ) -> list[tuple[Donating, tuple[Any, ...]]]:
        """The programs of a layer's loads, into new and into known buffers, each with its arguments."""
        placement, own = self._placement, self._layers[layer]
        vectors = tuple(placement.readable(own))
        arrays = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placement.device) for leaf in own.leaves]
        token = self._tokens(is_recorded)
        found: list[tuple[str, tuple[Any, ...]]] = [("load", (vectors, *token))]
        if not placement.is_cpu:
            found.append(("load unused" if is_reserved else "load vacant", (vectors, arrays, *token)))
            found += [] if is_reserved else [("vacate", (arrays,))]
        found += [("arrived", (arrays, vectors))] if is_recorded or not self.joins.arrives else []
        return [(self.program(name, layer), args) for name, args in found]

    def _calls_of_store(self, layer: int, is_recorded: bool) -> list[tuple[Donating, tuple[Any, ...]]]:
        """Likewise of the stores of a layer's gradient that is no rows of lookups."""
        placement, own = self._placement, self._gradients[layer]
        leaves = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in own.leaves]
        joined = jax.eval_shape(own.join_small, leaves)
        arrays = [jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=placement.device) for each in joined]
        vectors = tuple(jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=placement.pinned_of(own)) for v in own.vectors)
        store = self.program("store", layer), (arrays, vectors, *self._tokens(is_recorded))
        landed = [] if placement.is_cpu else [(self._landed, (arrays,))]
        return [*landed, *([store] if is_recorded or not self.joins.stores else [])]

    def _tokens(self, is_recorded: bool) -> list[jax.ShapeDtypeStruct]:
        return [jax.ShapeDtypeStruct((1,), np.uint8, sharding=self._placement.device)] if is_recorded else []

    def hold(self, copies: Sequence[CopyInFlight]) -> None:
        """See `Transport.hold`."""
        stored = [copy for copy in copies if isinstance(copy, StoredCopy)]
        hold_together(stored, self._landed, self._placement.platform != "cpu")

    def settle(self) -> None:
        """See `Transport.settle`."""
        for copy, _ in list(self.in_flight.values()):
            if isinstance(copy, StoredCopy) and copy.gradient() is None:
                with contextlib.suppress(RuntimeError, NativeError):  # nobody wants a failed one either
                    copy.wait()
                copy.forget()

    def _load(self, layer: int, size: int, vectors: Vectors, mark: TaskMark | None) -> DeviceLayer:
        free, reserved = self._free[self._layouts[layer]], self._reserved.pop(layer, None)
        if reserved is None and not free:
            self._release_free()
        # What writes the vectors may be a program behind the last reader of the buffers.
        sources: tuple[Any, ...] = vectors
        is_ready = not self._placement.is_cpu and all(source.is_ready() for source in sources)
        arguments: tuple[Any, ...] = (vectors,)
        if reserved is not None:
            name, arguments = "load unused" if is_ready else "load onto", (vectors, reserved)
        elif free:  # those that have been free for longest
            name, arguments = "load vacant" if is_ready else "load onto", (vectors, free.pop(0))
        else:
            name = "load"
        load, wait = self.program(name, layer), self.program("arrived", layer)

        def arrive(arrays: Sequence[jax.Array]) -> Sequence[jax.Array]:
            arrived: Sequence[jax.Array] = wait(arrays, vectors)
            forget()
            return arrived

        with deferred_interrupts():
            copy = DeviceLayer(layer, size, list(_marked(load, arguments, mark)), arrive)
            forget = copy.forget = functools.partial(self.in_flight.pop, id(copy), None)
            self.in_flight[id(copy)] = (copy, vectors)
        return copy

    def vacate(self, copy: DeviceLayer) -> None:
        """See `Transport.vacate`. On a CPU, a load runs when its buffers are free."""
        if not self._placement.is_cpu:
            # Waits for the copy, which may still be writing.
            arrays = copy.parameters()
            with deferred_interrupts():
                copy.arrays, copy.is_vacant = self.program("vacate", copy.layer)(arrays), True

    @property
    def reserves(self) -> bool:
        """See `Transport`. On a CPU, a load runs when its buffers are free."""
        return not self._placement.is_cpu

    def _drop(self, copy: DeviceLayer, is_reused: bool, is_reserved: bool) -> None:
        if is_reserved:
            assert copy.layer not in self._reserved, "two buffers of a layer are reserved"
            self._reserved[copy.layer] = copy.parameters()
        elif is_reused:
            if not copy.is_vacant:
                self.vacate(copy)
            self._free[self._layouts[copy.layer]].append(copy.parameters())
        else:
            delete_all(copy.parameters())

    def release(self) -> None:
        """See `Transport.release`."""
        while self._reserved:
            delete_all(self._reserved.popitem()[1])
        self._release_free()

    def _release_free(self) -> None:
        """Frees all others. Loads call it, so there are never more of these than were in use at one time."""
        for buffers in self._free.values():
            while buffers:
                delete_all(buffers.pop())

    def _jitted(self, name: str, layer: Layer) -> Any:
        made = _load_programs(layer, self._placement) | _store_programs(layer, self._placement)
        return Donating(made[name](), f"the program {name!r}")


def _load_programs(layer: Layer, placement: Placement) -> dict[str, Callable[[], Any]]:
    numbers, offsets = [leaf.vector for leaf in layer.leaves], [leaf.offset for leaf in layer.leaves]

    def load_onto(vacancy: Vacancy, vectors: Vectors, into: Sequence[jax.Array], *token: jax.Array) -> Any:
        arrays = targets.ferry_load(vectors, into, numbers, offsets, vacancy)
        return arrays, [targets.mark(each, arrays, "load") for each in token]

    def load(vectors: Vectors, *token: jax.Array) -> Any:
        # Nothing is written before the copies arrive.
        into = [targets.empty(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)) for leaf in layer.leaves]
        return load_onto(Vacancy.UNKNOWN, vectors, into, *token)

    def arrived(arrays: Sequence[jax.Array], vectors: Vectors) -> list[jax.Array]:
        return targets.ferry_wait(arrays)

    jitted = functools.partial(jax.jit, out_shardings=placement.device)
    return {
        "load": lambda: jitted(load),
        "load onto": lambda: jitted(functools.partial(load_onto, Vacancy.UNKNOWN), donate_argnums=1),
        "load vacant": lambda: jitted(functools.partial(load_onto, Vacancy.NOTED), donate_argnums=1),
        "load unused": lambda: jitted(functools.partial(load_onto, Vacancy.SEEN), donate_argnums=1),
        # The copy's source vectors are an argument so that their memory is not reused before it has ended.
        "arrived": lambda: jitted(arrived, donate_argnums=0, keep_unused=True),
        "vacate": lambda: jitted(targets.ferry_vacate, donate_argnums=0),
    }


def _store_programs(layer: Layer, placement: Placement) -> dict[str, Callable[[], Any]]:
    def store(accumulate: bool, sources: Sequence[jax.Array], into: Vectors, *token: jax.Array) -> Any:
        stored = queue_stores(layer, sources, into, accumulate)
        return stored, [targets.mark(each, stored, "store") for each in token]

    def jitted_store(accumulate: bool) -> Any:
        return jax.jit(functools.partial(store, accumulate), donate_argnums=1, out_shardings=both)

    both = (placement.pinned, placement.device)
    return {"store": lambda: jitted_store(False), "accumulate": lambda: jitted_store(True)}


def landed_program(placement: Placement) -> Any:
    """Makes the program that lets the device wait for copies of any arrays."""
    return Donating(
        jax.jit(targets.ferry_wait, donate_argnums=0, out_shardings=placement.device), "the wait for copies"
    )


def _marked(program: Any, arguments: tuple[Any, ...], mark: TaskMark | None) -> Any:
    """Runs a program that enqueues copies, marks their start and end if there is a mark, and returns its results."""
    if mark is None:
        queued, _ = program(*arguments)
    else:
        queued, [marked] = program(*arguments, mark.token())
        mark.add(marked)
    return queued
