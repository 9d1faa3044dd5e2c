"""Moves layers between host (flat vectors) and device (parameters in their own shapes).

    pinned vectors --load--> device parameters ... gradients --store--> pinned vectors --gather--> the optimizer

All operations are asynchronous. Two transports implement this interface: `DevicePut` (plain JAX) and `Ferry` (the
native library's own queues).
"""

from __future__ import annotations

import abc
import collections
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np

from jaxferry.native import NativeLibrary, host_sums
from jaxferry.partition import Gradient, Layer, RowGradient
from jaxferry.processes import empty
from jaxferry.step import NO_JOINS, Joins
from jaxferry.transport.copies import Addend, CopyInFlight, DeviceLayer, HostGradient, LoadedBytes, PutCopy, delete_all
from jaxferry.transport.marks import TaskMark
from jaxferry.transport.pinned import Vectors, as_numpy, borrowed, can_view, from_shares, on_cpu
from jaxferry.transport.placement import Placement
from jaxferry.transport.shared_programs import shared_function

_OF_LOADS = frozenset({"unpack", "load", "load onto", "load vacant", "load unused", "arrived", "vacate"})
"""Programs that move parameters; all others move gradients."""


class Transport(abc.ABC):
    """Moves layers and their gradients; the base class of all transports.

    Loads move all parameters of a layer. Gradients have the dtypes of `Layer.trained`. Sums may have those of its
    `wide`: the host adds what arrives in fewer bits.

    Attributes:
      library: the native library, if the transport uses it.
      staging_bytes: device memory that transfers need beside the moved bytes.
      loaded_bytes: counts the bytes of parameters on the device.
      pools: whether the memory of a gradient that has been used may be another layer's next, with the same vectors.
      made_ahead: vectors that `make_ahead` has asked for and that nothing has taken, by layer and whether of sums.
    """

    library: NativeLibrary | None = None
    pools = False

    def __init__(self, placement: Placement, layers: Sequence[Layer], accumulates: bool = False) -> None:
        self._placement, self._layers = placement, list(layers)
        self._gradients = [layer.trained for layer in layers]
        self._sums = [layer.wide for layer in self._gradients]
        # As they are on the device and in the memory that it reaches, and where the host adds.
        kinds, ownership = (self._layers, self._gradients, self._sums), placement.ownership
        self._there = [list(map(ownership.shared, layers)) for layers in kinds]
        self._here = [[ownership.of(layer.trained) for layer in layers] for layers in kinds]
        self._programs: dict[Any, Any] = {}
        self._of_layer: dict[tuple[str, int, bool], Any] = {}
        self._spare: dict[Any, list[Vectors]] = {}
        self._written_before: dict[tuple[int, bool], list[Vectors]] = {}
        self._num_begun: collections.Counter[tuple[int | None, bool]] = collections.Counter()
        self.loaded_bytes = LoadedBytes()
        self.made_ahead: dict[tuple[int, bool], Future[Vectors]] = {}
        self.staging_bytes = 0

    def load(self, layer: int, vectors: Vectors, mark: TaskMark | None = None) -> DeviceLayer:
        """Starts the copy of a layer's parameters from pinned memory to the device; `mark` records start and end."""
        size = self._layers[layer].num_bytes
        self.loaded_bytes.add(size)
        try:
            return self._load(layer, size, vectors, mark)
        except BaseException:
            self.loaded_bytes.add(-size)
            raise

    def vacate(self, copy: DeviceLayer) -> None:  # noqa: B027 - nothing to do by default
        """Notes that all programs that read a device copy have been issued, for the load that will replace it.

        That load waits for these programs, and not for others. If a program reads the copy after all, it waits for all
        that are issued before the copy is dropped.
        """

    @property
    def reserves(self) -> bool:
        """Whether loads into buffers that stay allocated start earlier."""
        return False

    def drop(self, copy: DeviceLayer, is_reused: bool = True, is_reserved: bool = False) -> None:
        """Frees a device copy once the programs that read it have run; does nothing if it is freed already.

        With `is_reused`, its buffers may be kept for another load. With `is_reserved`, they stay allocated for the
        next load of the layer, or until `release`; that load is issued once the last reader of the copy is known to
        have ended.
        """
        if copy.is_dropped:
            return
        copy.is_dropped = True
        self._drop(copy, is_reused, is_reserved)
        self.loaded_bytes.add(-copy.num_bytes)

    def take(self, copy: DeviceLayer) -> list[jax.Array]:
        """The arrays of a device copy, for a program that donates them; the copy counts as freed."""
        arrays = copy.parameters()
        copy.is_dropped = True
        self.loaded_bytes.add(-copy.num_bytes)
        return arrays

    @property
    def joins(self) -> Joins:
        """Which of its work may be part of other programs."""
        return NO_JOINS

    @property
    def adds_on_host(self) -> bool:
        """Whether the host of an accelerator adds all that `store` adds to a stored gradient."""
        return False

    def release(self) -> None:  # noqa: B027 - nothing to do by default
        """Frees device memory that is kept for later loads."""

    def hold(self, copies: Sequence[CopyInFlight]) -> None:
        """Makes the device wait for copies before its next program, and frees what they read for that program."""
        for copy in copies:
            copy.hold()

    def settle(self) -> None:  # noqa: B027 - nothing to do by default
        """Waits for copies of gradients that nobody wants any more, and frees what is kept for them."""

    @abc.abstractmethod
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
        """Starts the copy of a layer's gradients to the host, and frees the device's copy when it has ended.

        It may also copy other arrays of the same layout, such as new parameters.

        Args:
          layer: the layer.
          gradients: those of its trained parameters, on the device: joined as by `Layer.join_small`, or one for each
            parameter if some are rows of lookups.
          onto: the stored gradient of an earlier use of the layer, to which these are added; it is consumed.
          mark: records when the copy starts and ends.
          is_sum: whether they are sums over micro-batches, joined arrays in the dtypes of `wide`.
          widens: whether the host sums them in these dtypes, and they have others unless `is_sum`.
          into: vectors in pinned memory to overwrite, which are donated; None for the transport's own. The result's
            `vectors` replace them, in the same memory or in other.
        """

    def is_summed_on_host(self, gradient: HostGradient) -> bool:
        """Whether the device cannot add to a stored gradient, since it is summed where the optimizer reads it."""
        is_copied = gradient.is_gathered and not gradient.written
        return not self._placement.is_cpu and (gradient.is_summed_on_host or is_copied)

    def add_on_host(self, layer: int, onto: HostGradient | None, more: HostGradient) -> HostGradient:
        """Lets the host add a stored gradient to another one of the layer; returns the sum."""

        def add(targets: Sequence[np.ndarray]) -> None:
            for target, vector in zip(targets, self.gather(layer, more), strict=True):
                host_sums.add(target, as_numpy(vector), adds=onto is not None)
            self.recycle(layer, more)

        total = self._begun_on_host(layer, widens=True) if onto is None else onto
        return self._add_later(layer, total, add, more.copy)

    def _add_later(self, layer: int, total: HostGradient, add: Addend, copy: CopyInFlight | None) -> HostGradient:
        """Lets the host add something to a gradient; a CPU adds at once, since its programs write there too."""
        total.add_later(add, copy)
        if self._placement.is_cpu:
            self.gather(layer, total)
        return total

    def _begun_on_host(self, layer: int, widens: bool) -> HostGradient:
        """A gradient of which nothing is written yet; the host will begin it."""
        placement = self._placement
        if placement.is_cpu or (placement.num_devices == 1 and can_view(placement)):
            return HostGradient(self.destinations(layer, is_sum=widens), placement.is_cpu)
        # Nothing else would be read through the memory that the device can write.
        shapes = self._here[2 if widens else 1][layer].vectors
        spare = self._spares(layer, shapes, is_pinned=False)
        if spare:
            return HostGradient(spare.pop(), True)
        self._num_begun[self._owner(layer)] += 1
        return HostGradient(tuple(jax.device_put(np.empty(v.shape, v.dtype), placement.host) for v in shapes), True)

    def destinations(self, layer: int, onto: HostGradient | None = None, is_sum: bool = False) -> Vectors:
        """Returns vectors in pinned memory for a program that writes a layer's gradient there, or adds it to `onto`.

        `onto` is not summed on the host. With `is_sum`, a sum in the dtypes of `wide` is written.
        """
        if onto is None:
            kind = layer, is_sum and self._sums[layer] is not self._gradients[layer]
            if (spare := self._written_before.get(kind)) is None:
                shapes = self._there[2 if is_sum else 1][layer].vectors
                spare = self._written_before[kind] = self._spares(layer, shapes, is_pinned=True)
            if spare:
                return spare.pop()
            made = self.made_ahead.pop(kind, None)
            # What the thread could not make is made again, for the error.
            return self._new_vectors(*kind) if made is None or made.exception() else made.result()
        if onto.is_gathered and not self._placement.is_cpu:
            written, onto.written = onto.written, ()
            return written
        if onto.copy is not None:
            onto.copy.hold()
            onto.copy.forget()
            onto.copy = None
        return onto.vectors

    def _new_vectors(self, layer: int, is_sum: bool) -> Vectors:
        # A program of an accelerator would make them there first, in memory that nothing counts.
        where = self._placement.pinned if self._placement.is_cpu else self._placement.pinned_of(self._layers[layer])
        return tuple(empty(v.size, v.dtype, where) for v in self._there[2 if is_sum else 1][layer].vectors)

    def make_ahead(
        self,
        stored: Mapping[int, bool],
        summed: Collection[int] = (),
        widened: Collection[int] = (),
        submit: Any = None,
    ) -> None:
        """Lets a thread make the vectors that the first `destinations` of layers return: to pin memory takes long.

        `stored` has the layers whose gradients a step stores, in that order, and whether programs write them there
        themselves; of these the device sums the `summed` ones, and `widened` ones are summed in the dtypes of `wide`.
        What earlier calls have asked for, and nothing has taken, is dropped unless it is wanted again.
        """
        taken = {
            layer: self._taken(is_written, layer in summed, layer in widened) for layer, is_written in stored.items()
        }
        wanted = dict.fromkeys((layer, is_sum) for layer, kinds in taken.items() for is_sum in kinds)
        for kind in list(self.made_ahead):
            if kind not in wanted and (dropped := self.made_ahead.pop(kind, None)) is not None:
                dropped.cancel()
        for kind in wanted:
            # Whatever a step has taken once comes back for the next one.
            if submit is not None and kind not in self.made_ahead and kind not in self._written_before:
                self.made_ahead[kind] = submit(self._new_vectors, *kind)

    def _taken(self, is_written: bool, is_summed: bool, widens: bool) -> Sequence[bool]:
        """The vectors that a step's gradient of a layer takes: for each, whether they are those of sums."""
        return (False,) if not widens else (True,) if is_summed else (False, True)

    def compile(  # noqa: B027 - nothing to do by default
        self, loads: Mapping[int, int], reserved: Collection[int], stored: Collection[int], marks: bool
    ) -> None:
        """Compiles what a step runs to move layers, so that its first run need not."""

    def written(self, vectors: Sequence[jax.Array]) -> HostGradient:
        """Wraps the gradient that a program has written into `destinations`."""
        return HostGradient(tuple(vectors), self._placement.is_cpu)

    def gather(self, layer: int, gradient: HostGradient, reads_shares: bool = False) -> Vectors:
        """Returns the gradient's vectors in memory that the optimizer reads, with all that is stored added up.

        With `reads_shares`, as several devices share them if nothing has been joined or added.
        This waits for the copies, so the issuing thread must not call it for a gradient that has just left.
        """
        with gradient.lock:
            has_waited = gradient.copy is not None
            if gradient.copy is not None:
                gradient.copy.wait()
            gradient.copy = None
            if reads_shares and not (gradient.is_gathered or gradient.addends):
                return gradient.vectors
            if not gradient.is_gathered:
                written = gradient.vectors
                if self._placement.num_devices > 1:
                    gradient.vectors = from_shares(written, self._placement, self._gradients[layer])
                else:
                    # Views are remembered. That pays where later steps write the same memory, as by the library.
                    is_remembered = gradient.is_reusable and self.library is not None
                    placement = self._placement
                    gradient.vectors = (
                        borrowed(written, placement, has_waited) if is_remembered else on_cpu(written, placement)
                    )
                gradient.written, gradient.is_gathered = written, True
            # What is stored meanwhile is left to the next reader.
            for _ in range(len(gradient.addends)):
                gradient.addends.popleft()(list(map(as_numpy, gradient.vectors)))
            return gradient.vectors

    def recycle(self, layer: int, gradient: HostGradient) -> None:
        """Reuses the vectors of a gradient once the optimizer has read it; earlier, its program may still fail."""
        if gradient.is_reusable:
            vectors = gradient.written or gradient.vectors
            is_pinned = bool(gradient.written) or self._placement.is_cpu or not gradient.is_gathered
            spare = self._spares(layer, vectors, is_pinned)
            # Of those that the optimizer reads, some are copies that nothing takes again.
            if is_pinned or len(spare) < self._num_begun[self._owner(layer)]:
                spare.append(vectors)

    def _spares(self, layer: int, like: Sequence[Any], is_pinned: bool) -> list[Vectors]:
        """Vectors of these shapes to write again: a layer's own, since a norm may be read when they come back."""
        shapes = tuple((vector.shape, vector.dtype) for vector in like)
        return self._spare.setdefault((self._owner(layer), is_pinned or self._placement.is_cpu, shapes), [])

    def _owner(self, layer: int) -> tuple[int | None, bool]:
        """Whose spare vectors a layer takes: its own, or those of all layers that the devices hold whole or not."""
        return None if self.pools else layer, self._layers[layer].is_whole

    @abc.abstractmethod
    def _load(self, layer: int, size: int, vectors: Vectors, mark: TaskMark | None) -> DeviceLayer:
        """Starts the copy of a layer of this size for `load`, which counts it."""

    def _drop(self, copy: DeviceLayer, is_reused: bool, is_reserved: bool) -> None:
        delete_all(copy.arrays)

    def _store_rows(
        self, layer: int, gradients: Sequence[Gradient], onto: HostGradient | None, mark: TaskMark | None, widens: bool
    ) -> HostGradient:
        """Lets the host add gradients, of which rows of lookups become dense there, and frees the device's copy."""
        total = self._begun_on_host(layer, widens) if onto is None else onto
        if self._placement.is_cpu:
            there, copy = gradients, None
        else:
            own: Any = gradients
            if self._placement.num_devices > 1:  # each of which has all
                own = jax.tree.map(lambda array: array.addressable_shards[0].data, gradients)
            there = jax.device_put(own, self._placement.pinned_alone)
            copy = PutCopy(gradients, there)
            if mark is not None:
                mark.watch(jax.tree.leaves(there))

        def add(targets: Sequence[np.ndarray]) -> None:
            if copy is not None:
                copy.wait()
            for target in targets if onto is None else ():
                host_sums.clear(target)
            split_up = split(self._gradients[layer], there)
            add_gradients(self._here[2][layer], targets, split_up, self._placement)

        self._add_later(layer, total, add, copy)
        if self._placement.is_cpu:
            delete_all(jax.tree.leaves(gradients))
        return total

    def program(self, name: str, layer: int, is_sum: bool = False) -> Any:
        """The jitted function of a name, for sums in the dtypes of `wide` if so; groups of the same layout share it."""
        known = self._of_layer.get((name, layer, is_sum))
        if known is None:
            kinds = self._there if name in _OF_LOADS or name == "pack" else self._here
            made = kinds[0 if name in _OF_LOADS else 2 if is_sum else 1][layer]
            key = (name, made.layout)
            if key not in self._programs:
                content = (type(self), *key, self._placement, self._placement.is_cpu)
                self._programs[key] = shared_function(content, lambda: self._jitted(name, made))
            known = self._of_layer[name, layer, is_sum] = self._programs[key]
        return known

    @abc.abstractmethod
    def _jitted(self, name: str, layer: Layer) -> Any: ...


def add_gradients(
    layer: Layer, targets: Sequence[np.ndarray], gradients: Sequence[Gradient], placement: Placement
) -> None:
    """Adds whole gradients to a layer's vectors in host memory, in place."""
    reads = as_numpy if placement.is_cpu or can_view(placement) else np.asarray
    for leaf, gradient in zip(layer.leaves, layer.owned(jax.tree.map(reads, gradients)), strict=True):
        target = targets[leaf.vector][leaf.offset : leaf.offset + leaf.size]
        if not isinstance(gradient, RowGradient):
            host_sums.add(target, np.ascontiguousarray(gradient).reshape(-1))
            continue
        num_rows, num_columns = gradient.shape
        indices, start = gradient.indices.reshape(-1), 0 if gradient.span is None else gradient.span.start
        if gradient.is_clipped:
            indices = np.clip(indices, 0, num_rows - 1)
        host_sums.add_rows(target, gradient.rows.reshape(-1, num_columns), indices, start)


def split(layer: Layer, gradients: Sequence[Gradient]) -> list[Gradient]:
    """The gradient of each parameter; see `Transport.store`."""
    arrays = [gradient for gradient in gradients if not isinstance(gradient, RowGradient)]
    return list(layer.split_small(arrays)) if len(arrays) == len(gradients) else list(gradients)


def added(known: jax.Array, gradient: Gradient) -> jax.Array:
    """Adds a gradient, which may be rows of lookups, to another one."""
    return gradient.onto(known) if isinstance(gradient, RowGradient) else known + gradient
