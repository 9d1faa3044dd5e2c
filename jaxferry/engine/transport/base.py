"""Moves layers between host (flat vectors) and device (parameters in their own shapes).

    pinned vectors --load--> device parameters ... gradients --store--> pinned vectors --gather--> the optimizer

All operations are asynchronous. Two transports implement this interface: `DevicePut` (plain JAX) and `Ferry` (the
native library's own queues).
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxferry.engine.global_arrays import empty
from jaxferry.engine.host.pinned import Vectors, borrowed, from_shares, on_cpu
from jaxferry.engine.placement import Placement
from jaxferry.engine.program_keys import NO_JOINS, Joins
from jaxferry.engine.shared_programs import shared_function
from jaxferry.engine.trace.marks import TaskMark
from jaxferry.engine.transport.held import CopyInFlight, DeviceLayer, HeldBytes, HostGradient, PutCopy, delete_all
from jaxferry.native import NativeLibrary
from jaxferry.partition import Gradient, Layer, RowGradient
from jaxferry.settings import ThreadPool

_OF_LOADS = frozenset({"unpack", "load", "load onto", "load vacant", "arrived", "vacate"})
"""Programs that move parameters; all others move gradients."""


class Transport:
    """Moves layers and their gradients; the base class of all transports.

    Gradients have the dtypes of `Layer.trained`. Their sums over micro-batches have those of its `wide`: an arriving
    gradient of fewer bits is added by the host.

    Args:
      placement: the memories between which they move.
      layers: the layers; loads move all their parameters, gradients cover the trained ones.
      accumulates: whether gradients are summed over micro-batches.

    Attributes:
      library: the native library, if the transport uses it.
      staging_bytes: device memory that transfers need beside the moved bytes.
      held: counts the bytes of parameters on the device.
    """

    library: NativeLibrary | None = None

    def __init__(self, placement: Placement, layers: Sequence[Layer], accumulates: bool = False) -> None:
        self._placement, self._layers = placement, list(layers)
        self._gradients = [layer.trained for layer in layers]
        self._sums = [layer.wide for layer in self._gradients] if accumulates else self._gradients
        # As they are on the device and in the memory that it reaches, and where the host adds.
        kinds, ownership = (self._layers, self._gradients, self._sums), placement.ownership
        self._there = [list(map(ownership.shared, layers)) for layers in kinds]
        self._here = [[ownership.of(layer.trained) for layer in layers] for layers in kinds]
        self._programs: dict[Any, Any] = {}
        self._of_layer: dict[tuple[str, int, bool], Any] = {}
        self._spare: dict[Any, list[Vectors]] = {}
        self._written_before: dict[tuple[int, bool], list[Vectors]] = {}
        self._num_sum_vectors: collections.Counter[int] = collections.Counter()
        self._adder = ThreadPool(1, "jaxferry rows")
        self.held = HeldBytes()
        self.staging_bytes = 0

    def load(self, layer: int, vectors: Vectors, mark: TaskMark | None = None) -> DeviceLayer:
        """Starts the copy of a layer's parameters from pinned memory into device buffers.

        Args:
          layer: the layer.
          vectors: its parameters.
          mark: records when the copy starts and ends; None for no record.
        """
        size = self._layers[layer].num_bytes
        self.held.add(size)
        try:
            return self._load(layer, size, vectors, mark)
        except BaseException:
            self.held.add(-size)
            raise

    def vacate(self, held: DeviceLayer) -> None:
        """Notes that all programs that read a device copy have been issued, for the load that will replace it.

        That load waits for these programs, and not for others. If a program reads the copy after all, it waits for all
        that are issued before the copy is dropped.
        """

    def drop(self, held: DeviceLayer, is_reused: bool = True) -> None:
        """Frees a device copy once the programs that read it have run; does nothing if it is freed already.

        Args:
          held: the copy.
          is_reused: whether its buffers may be kept for another load.
        """
        if held.is_dropped:
            return
        held.is_dropped = True
        self._drop(held, is_reused)
        self.held.add(-held.num_bytes)

    def take(self, held: DeviceLayer) -> list[jax.Array]:
        """The arrays of a device copy, for a program that donates them; the copy counts as freed."""
        arrays = held.parameters()
        held.is_dropped = True
        self.held.add(-held.num_bytes)
        return arrays

    @property
    def joins(self) -> Joins:
        """Which of its work may be part of other programs."""
        return NO_JOINS

    @property
    def adds_on_host(self) -> bool:
        """Whether the host of an accelerator adds all that `store` adds to a stored gradient."""
        return False

    def release(self) -> None:
        """Frees device memory that is kept for later loads."""

    def hold(self, copies: Sequence[CopyInFlight]) -> None:
        """Makes the device wait for copies before its next program, and frees what they read for that program."""
        for copy in copies:
            copy.hold()

    def settle(self) -> None:
        """Waits for copies of gradients that nobody wants any more, and frees what is kept for them."""

    def store(
        self,
        layer: int,
        gradients: Sequence[Gradient],
        onto: HostGradient | None = None,
        mark: TaskMark | None = None,
        is_sum: bool = False,
        into: Vectors | None = None,
    ) -> HostGradient:
        """Starts the copy of a layer's gradients to the host, and frees the device's copy when it has ended.

        It may also copy other arrays of the same layout, such as new parameters.

        Args:
          layer: the layer.
          gradients: those of its trained parameters, on the device: joined as by `Layer.join_small`, or one for each
            parameter if some are rows of lookups.
          onto: the stored gradient of an earlier use of the layer, to which these are added; it is consumed.
          mark: records when the copy starts and ends; None for no record.
          is_sum: whether they are sums over micro-batches, joined arrays in the dtypes of such sums.
          into: vectors in pinned memory to overwrite, which are donated; None for the transport's own. The result's
            `vectors` replace them, in the same memory or in other.
        """
        raise NotImplementedError

    def is_widened(self, layer: int) -> bool:
        """Whether a layer's gradients are summed in other dtypes than their own."""
        return self._sums[layer] is not self._gradients[layer]

    def is_summed_on_host(self, layer: int, gradient: HostGradient | None) -> bool:
        """Whether the device cannot add to a layer's stored gradient, since it is summed where the optimizer reads it.

        Args:
          layer: the layer.
          gradient: None if none is stored yet, which the device may then begin.
        """
        if gradient is None or self.is_widened(layer):
            return self.is_widened(layer)
        is_copied = gradient.is_gathered and not gradient.written
        return not self._placement.is_cpu and (gradient.finish is not None or is_copied)

    def add_on_host(self, layer: int, onto: HostGradient | None, more: HostGradient) -> HostGradient:
        """Adds a stored gradient to another one of the layer, in a thread that waits for both; both are consumed.

        Args:
          layer: the layer.
          onto: the sum of earlier ones; None begins one.
          more: the gradient.
        """

        def added() -> Vectors:
            arrived = self.gather(layer, more)
            if onto is None:
                total = self.program("begin", layer, is_sum=True)(self._sum_vectors(layer)[0], arrived)
            else:
                known = own_vectors(self.gather(layer, onto), onto, self._placement)
                total = self.program("sum", layer, is_sum=True)(known, arrived)
            jax.block_until_ready(total)
            self.recycle(layer, more)
            return tuple(total)

        # In the order of the stores, so that each finds the sum that it adds to.
        return HostGradient((), False, more.copy, finish=self._adder.submit(added).result)

    def destinations(self, layer: int, onto: HostGradient | None = None, is_sum: bool = False) -> Vectors:
        """Returns vectors in pinned memory for a program that writes a layer's gradient there, or adds it.

        Args:
          layer: the layer.
          onto: the gradient to add to, which is not summed on the host; None for one to write.
          is_sum: whether a sum over micro-batches is written.
        """
        if onto is None:
            shapes = self._there[2 if is_sum else 1][layer].vectors
            spare = self._written_before.get((layer, is_sum))
            if spare is None:
                spare = self._written_before[layer, is_sum] = self._spares(layer, shapes, is_pinned=True)
            if spare:
                return spare.pop()
            if self._placement.is_cpu:
                return tuple(self.program("empty", layer, is_sum)())
            # A program of the device would make the vectors there first, in device memory that nothing counts.
            where = self._placement.pinned_of(self._layers[layer])
            return tuple(empty(v.size, v.dtype, where) for v in shapes)
        if onto.is_gathered and not self._placement.is_cpu:
            written, onto.written = onto.written, ()
            return written
        if onto.copy is not None:
            onto.copy.hold()
            onto.copy.forget()
            onto.copy = None
        return onto.vectors

    def queued(self, vectors: Sequence[jax.Array], arrays: Sequence[jax.Array]) -> HostGradient:
        """Wraps the gradient whose copy into `destinations` a program has queued: see `ProgramKey.stores`.

        Args:
          vectors: where it goes.
          arrays: what is copied.
        """
        raise NotImplementedError

    def written(self, vectors: Sequence[jax.Array]) -> HostGradient:
        """Wraps the gradient that a program has written into `destinations`."""
        return HostGradient(tuple(vectors), self._placement.is_cpu)

    def gather(self, layer: int, gradient: HostGradient) -> Vectors:
        """Returns the gradient's vectors in memory that the optimizer reads.

        This waits for the copy, so the issuing thread must not call it for a gradient that has just left.
        """
        with gradient.lock:
            has_waited = gradient.copy is not None
            if gradient.finish is not None:  # which waits for the copy too
                gradient.vectors, gradient.finish, gradient.is_gathered = gradient.finish(), None, True
            elif gradient.copy is not None:
                gradient.copy.wait()
            gradient.copy = None
            if not gradient.is_gathered:
                written = gradient.vectors
                if self._placement.num_devices > 1:
                    gradient.vectors = from_shares(written, self._placement, self._gradients[layer])
                else:
                    # Views are remembered. That pays where later steps write the same memory, as by the library.
                    is_remembered = gradient.is_reusable and self.library is not None
                    place = self._placement
                    gradient.vectors = borrowed(written, place, has_waited) if is_remembered else on_cpu(written, place)
                gradient.written, gradient.is_gathered = written, True
            return gradient.vectors

    def recycle(self, layer: int, gradient: HostGradient) -> None:
        """Reuses the vectors of a gradient once the optimizer has read it.

        Earlier reuse would be unsafe: if the program that wrote them fails late, so does all that uses them.
        """
        if gradient.is_gathered and gradient.is_reusable:
            vectors, is_pinned = gradient.written or gradient.vectors, bool(gradient.written) or self._placement.is_cpu
            spare = self._spares(layer, vectors, is_pinned)
            # Where the host adds, some sums are copies that nothing takes again.
            if is_pinned or len(spare) < self._num_sum_vectors[layer]:
                spare.append(vectors)

    def _spares(self, layer: int, like: Sequence[Any], is_pinned: bool) -> list[Vectors]:
        """A layer's vectors of these shapes to write again: in pinned memory, or where the host adds gradients.

        Each layer has its own: the norm of a gradient may be read when its vectors come back, and until the step ends.
        """
        shapes = tuple((vector.shape, vector.dtype) for vector in like)
        return self._spare.setdefault((layer, is_pinned or self._placement.is_cpu, shapes), [])

    def _sum_vectors(self, layer: int) -> tuple[Vectors, bool]:
        """Vectors where the host adds gradients, and whether they are zeros."""
        shapes = self._here[2][layer].vectors
        if spare := self._spares(layer, shapes, is_pinned=False):
            return spare.pop(), False
        self._num_sum_vectors[layer] += 1
        return tuple(self.program("zeros", layer, is_sum=True)()), True

    def _load(self, layer: int, size: int, vectors: Vectors, mark: TaskMark | None) -> DeviceLayer:
        raise NotImplementedError

    def _drop(self, held: DeviceLayer, is_reused: bool) -> None:
        delete_all(held.arrays)

    def _store_rows(
        self, layer: int, gradients: Sequence[Gradient], onto: HostGradient | None, mark: TaskMark | None
    ) -> HostGradient:
        """Adds gradients of lookups on the host, where they become dense, and frees the device's copy."""

        def zeros() -> Vectors:
            vectors, are_zeros = self._sum_vectors(layer)
            return vectors if are_zeros else tuple(self.program("clear", layer, is_sum=True)(vectors))

        def dense(rows: Sequence[Gradient]) -> Vectors:
            if onto is None:
                return tuple(self.program("add", layer, is_sum=True)(rows, zeros()))
            known = own_vectors(self.gather(layer, onto), onto, self._placement)
            if onto.written:
                jax.block_until_ready(known)
                self.recycle(layer, onto)
                onto.written = ()
            return tuple(self.program("add", layer, is_sum=True)(rows, known))

        if self._placement.is_cpu:
            stored = HostGradient(dense(gradients), True)
            delete_all(jax.tree.leaves(gradients))
            return stored
        rows = jax.device_put(self._of_one(gradients), self._placement.pinned_alone)
        if mark is not None:
            mark.watch(jax.tree.leaves(rows))

        def arrived() -> Vectors:
            leaves, tree = jax.tree.flatten(rows)
            return jax.block_until_ready(dense(jax.tree.unflatten(tree, on_cpu(leaves, self._placement))))

        # In the order of the stores, so that each finds the sum that it adds to.
        return HostGradient((), False, PutCopy(gradients, rows), finish=self._adder.submit(arrived).result)

    def _of_one(self, arrays: Any) -> Any:
        """Arrays of which each device has all, as arrays of the first device."""
        if self._placement.num_devices == 1:
            return arrays
        return jax.tree.map(lambda array: array.addressable_shards[0].data, arrays)

    def program(self, name: str, layer: int, is_sum: bool = False) -> Any:
        """The jitted function of a name, for sums over micro-batches if so; groups of the same layout share it."""
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

    def _jitted(self, name: str, layer: Layer) -> Any:
        gathered, pinned = self._placement.update_output, self._placement.pinned

        def add(gradients: Sequence[Gradient], onto: Vectors) -> Vectors:
            known, gradients = computable((onto, gradients))
            own = layer.owned(split(layer, gradients))
            return layer.pack([added(a, b) for a, b in zip(layer.unpack(known), own, strict=True)], known)

        def zeros() -> Vectors:
            return tuple(jnp.zeros(v.shape, v.dtype) for v in layer.vectors)

        def total(onto: Vectors, stored: Vectors) -> Vectors:
            return tuple(a + b.astype(a.dtype) for a, b in zip(*computable((onto, stored)), strict=True))

        def begin(into: Vectors, stored: Vectors) -> Vectors:
            return tuple(b.astype(v.dtype) for v, b in zip(layer.vectors, computable(stored), strict=True))

        if name == "sum":
            return jax.jit(total, donate_argnums=0, out_shardings=gathered)
        if name == "begin":
            return jax.jit(begin, donate_argnums=0, keep_unused=True, out_shardings=gathered)
        if name == "add":
            return jax.jit(add, donate_argnums=1, out_shardings=gathered)
        if name == "clear":
            return jax.jit(lambda vectors: zeros(), donate_argnums=0, keep_unused=True, out_shardings=gathered)
        return jax.jit(zeros, out_shardings=pinned if name == "empty" else gathered)


def own_vectors(vectors: Vectors, gradient: HostGradient, placement: Placement) -> Vectors:
    """A gradient's gathered vectors, copied if they are views: programs may then take them as donated arguments."""
    if not gradient.written:
        return vectors
    # The runtime may alias the copy: a program that is donated it then copies it once more, but only in its own memory.
    return tuple(jax.device_put(np.array(vector), placement.host) for vector in vectors)


def computable(host: Any) -> Any:
    """Makes host arrays operands within a jitted function; on a CPU this placement copies nothing."""
    return jax.device_put(host, jax.memory.Space.Device)


def split(layer: Layer, gradients: Sequence[Gradient]) -> list[Gradient]:
    """The gradient of each parameter, within a jitted function; see `Transport.store`."""
    arrays = [gradient for gradient in gradients if not isinstance(gradient, RowGradient)]
    return list(layer.split_small(arrays)) if len(arrays) == len(gradients) else list(gradients)


def added(known: jax.Array, gradient: Gradient) -> jax.Array:
    """Adds a gradient, which may be rows of lookups, to another one."""
    return gradient.onto(known) if isinstance(gradient, RowGradient) else known + gradient
