"""Layers on their way between host and device: flat vectors there, parameters of their own shapes here.

    pinned vectors --load--> device parameters ... gradients --store--> pinned vectors --gather--> the optimizer

All are asynchronous. Two transports share this interface: `DevicePut` (plain JAX) and `Ferry` (the native library's own
queues).
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxferry.engine.placement import Placement
from jaxferry.engine.trace.marks import TaskMark
from jaxferry.native import NativeLibrary
from jaxferry.partition import Gradient, Layer, RowGradient

Vectors = tuple[jax.Array, ...]

_OF_LOADS = frozenset({"unpack", "buffers", "load", "arrived"})
"""Programs that move parameters; all others move gradients."""


@dataclasses.dataclass
class DeviceLayer:
    """The device copy of a layer.

    Attributes:
      layer: which.
      num_bytes: its size.
      arrays: what holds it now.
      arrive: makes the parameters from `arrays` when the first program needs them; None once it has.
      is_dropped: whether it has been freed.
    """

    layer: int
    num_bytes: int
    arrays: Sequence[jax.Array]
    arrive: Callable[[Sequence[jax.Array]], Sequence[jax.Array]] | None = None
    is_dropped: bool = False

    def parameters(self) -> list[jax.Array]:
        """The parameters in the order of the layer's leaves."""
        if self.arrive is not None:
            arrive, self.arrive = self.arrive, None
            self.arrays = arrive(self.arrays)
        return list(self.arrays)


@dataclasses.dataclass
class HostGradient:
    """A layer's gradient in host memory, or on its way there.

    Attributes:
      vectors: what holds it, or will.
      is_gathered: whether the optimizer can read them; else they are in memory that the device can write.
      arrive: called with `vectors`, gives those that can be read; None if nothing is under way.
      written: what the device has written it into, where the optimizer reads a copy of that.
    """

    vectors: Vectors
    is_gathered: bool
    arrive: Callable[[Vectors], Vectors] | None = None
    written: Vectors = ()


class Transport:
    """Moves layers and their gradients; what all transports share.

    Args:
      placement: where they come from and go to.
      layers: the layers; loads move all their parameters, gradients are those of the trained ones.

    Attributes:
      library: the native library, if that does it.
      staging_bytes: device memory that transfers need beside what is moved.
      device_bytes: bytes of parameters on the device now.
      peak_device_bytes: the most that they have been since `reset_peak`.
    """

    library: NativeLibrary | None = None

    def __init__(self, placement: Placement, layers: Sequence[Layer]) -> None:
        self._placement, self._layers = placement, list(layers)
        self._programs: dict[Any, Any] = {}
        self._spare: dict[int, list[Vectors]] = {}
        self._lock = threading.Lock()
        self.device_bytes = 0
        self.peak_device_bytes = 0
        self.staging_bytes = 0

    def reset_peak(self, held: Iterable[DeviceLayer] | None = None) -> None:
        """Starts a new measurement of the peak.

        Args:
          held: what is on the device now, to be counted anew: copies of states that are gone, or of others, and what
            another transport has loaded; None if the count is right.
        """
        with self._lock:
            if held is not None:
                self.device_bytes = sum(layer.num_bytes for layer in held)
            self.peak_device_bytes = self.device_bytes

    def load(self, layer: int, vectors: Vectors, mark: TaskMark | None = None) -> DeviceLayer:
        """Starts the copy of a layer's parameters from pinned memory into device buffers.

        Args:
          layer: the layer.
          vectors: its parameters.
          mark: notes when the copy starts and ends; None if nobody wants to know.
        """
        size = sum(v.nbytes for v in vectors)
        self._count(size)
        try:
            return self._load(layer, size, vectors, mark)
        except BaseException:
            self._count(-size)
            raise

    def drop(self, held: DeviceLayer, is_reused: bool = True) -> None:
        """Frees a device copy once the programs that were given it have run; does nothing if that has been done.

        Args:
          held: the copy.
          is_reused: whether its buffers may be kept for another load.
        """
        if held.is_dropped:
            return
        held.is_dropped = True
        self._drop(held, is_reused)
        self._count(-held.num_bytes)

    def _count(self, num_bytes: int) -> None:
        with self._lock:
            self.device_bytes += num_bytes
            self.peak_device_bytes = max(self.peak_device_bytes, self.device_bytes)

    def release(self) -> None:
        """Frees device memory that is kept for later loads."""

    def store(
        self,
        layer: int,
        gradients: Sequence[Gradient],
        onto: HostGradient | None = None,
        mark: TaskMark | None = None,
    ) -> HostGradient:
        """Starts the copy of a layer's gradients to the host, and frees theirs when it has ended.

        Args:
          layer: the layer.
          gradients: one for each of its trained parameters, on the device.
          onto: what an earlier use of the layer has stored, to which these are added; it is given away.
          mark: notes when the copy starts and ends; None if nobody wants to know.
        """
        raise NotImplementedError

    def destinations(self, layer: int, onto: HostGradient | None = None) -> Vectors:
        """Vectors in pinned memory, to be given to a program that writes a layer's gradient there, or adds it."""
        if onto is None:
            return self._take(layer)
        if onto.is_gathered and not self._placement.is_cpu:
            written, onto.written = onto.written, ()
            return written or tuple(jax.device_put(v, self._placement.pinned) for v in onto.vectors)
        return onto.vectors if onto.arrive is None else onto.arrive(onto.vectors)

    def written(self, vectors: Sequence[jax.Array]) -> HostGradient:
        """The gradient that a program has written into `destinations`."""
        return HostGradient(tuple(vectors), self._placement.is_cpu)

    def gather(self, layer: int, gradient: HostGradient) -> Vectors:
        """The gradient's vectors where the optimizer reads them."""
        if gradient.arrive is not None:
            gradient.vectors = gradient.arrive(gradient.vectors)
            gradient.arrive = None
        if not gradient.is_gathered:
            written = gradient.vectors
            gradient.vectors = tuple(jax.device_put(v, self._placement.host) for v in written)
            gradient.written, gradient.is_gathered = written, True
        return gradient.vectors

    def recycle(self, layer: int, gradient: HostGradient) -> None:
        """Takes back the vectors of a gradient that the optimizer has used, to be written again.

        Not earlier: those of a program that turns out to have failed would spoil what is written into them.
        """
        vectors = gradient.vectors if self._placement.is_cpu else gradient.written
        if vectors:
            self._spare.setdefault(layer, []).append(vectors)

    def _load(self, layer: int, size: int, vectors: Vectors, mark: TaskMark | None) -> DeviceLayer:
        raise NotImplementedError

    def _drop(self, held: DeviceLayer, is_reused: bool) -> None:
        delete_all(held.arrays)

    def _take(self, layer: int) -> Vectors:
        """Vectors in pinned memory whose contents nobody needs."""
        spare = self._spare.setdefault(layer, [])
        return spare.pop() if spare else self.program("empty", layer)()

    def _store_rows(
        self, layer: int, gradients: Sequence[Gradient], onto: HostGradient | None, mark: TaskMark | None
    ) -> HostGradient:
        """Adds gradients of lookups on the host; there alone they become tables."""
        known = self._zeros(layer) if onto is None else self.gather(layer, onto)
        rows = gradients if self._placement.is_cpu else jax.device_put(gradients, self._placement.host)
        if mark is not None:
            mark.watch(jax.tree.leaves(rows))
        return HostGradient(self.program("add", layer)(rows, known), True)

    def _zeros(self, layer: int) -> Vectors:
        """Vectors of zeros that the optimizer can read."""
        spare = self._spare.get(layer)
        # Where the device is a CPU, those come back after the update (`recycle`).
        if self._placement.is_cpu and spare:
            return tuple(self.program("clear", layer)(spare.pop()))
        return tuple(self.program("zeros", layer)())

    def program(self, name: str, layer: int) -> Any:
        """The jitted function of a name; groups of the same layout share it."""
        made = self._layers[layer] if name in _OF_LOADS else self._layers[layer].trained
        key = (name, made.layout)
        if key not in self._programs:
            self._programs[key] = self._jitted(name, made)
        return self._programs[key]

    def _jitted(self, name: str, layer: Layer) -> Any:
        gathered, pinned = self._placement.update_output, self._placement.pinned

        def add(gradients: Sequence[Gradient], onto: Vectors) -> Vectors:
            known, gradients = computable((onto, gradients))
            return layer.pack([added(a, b) for a, b in zip(layer.unpack(known), gradients, strict=True)], known)

        def zeros() -> Vectors:
            return tuple(jnp.zeros(v.shape, v.dtype) for v in layer.vectors)

        if name == "add":
            return jax.jit(add, donate_argnums=1, out_shardings=gathered)
        if name == "clear":
            return jax.jit(lambda vectors: zeros(), donate_argnums=0, keep_unused=True, out_shardings=gathered)
        return jax.jit(zeros, out_shardings=pinned if name == "empty" else gathered)


def computable(host: Any) -> Any:
    """Host arrays as operands within a jitted function; on a CPU this placement is free of copies."""
    return jax.device_put(host, jax.memory.Space.Device)


def added(known: jax.Array, gradient: Gradient) -> jax.Array:
    """A gradient and another one, which may be rows of lookups."""
    return gradient.onto(known) if isinstance(gradient, RowGradient) else known + gradient


def delete_all(arrays: Sequence[jax.Array]) -> None:
    """Frees the buffers of arrays once what has been issued has read them."""
    for array in arrays:
        array.delete()
