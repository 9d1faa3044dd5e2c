"""Layers on their way between host and device: flat vectors there, parameters of their own shapes here.

    pinned vectors --load--> device parameters ... gradients --store--> pinned vectors

Both are asynchronous. On an accelerator a load is one `jax.device_put`, cut into parameters when the first program
needs them, so that this cut does not hold up the programs before it. Where the device is a CPU, copy and cut are one
pass, and gradients are written into host buffers that exist already.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxferry.engine.placement import Placement
from jaxferry.partition import Gradient, Layer, RowGradient

Vectors = tuple[jax.Array, ...]


@dataclasses.dataclass
class DeviceLayer:
    """The device copy of a layer.

    Attributes:
      num_bytes: its size.
    """

    num_bytes: int
    _arrays: Sequence[jax.Array]
    _unpack: Callable[[Sequence[jax.Array]], list[jax.Array]] | None

    def parameters(self) -> list[jax.Array]:
        """The parameters in the order of the layer's leaves."""
        if self._unpack is not None:
            vectors, self._arrays = self._arrays, self._unpack(self._arrays)
            self._unpack = None
            _delete(vectors)
        return list(self._arrays)

    def delete(self) -> None:
        """Frees the buffers once the programs that were given them have run."""
        _delete(self._arrays)


class Transfers:
    """Moves layers and their gradients.

    Args:
      placement: where they come from and go to.
      layers: the layers.

    Attributes:
      device_bytes: bytes of parameters on the device now.
      peak_device_bytes: the most that they have been since `reset_peak`.
    """

    def __init__(self, placement: Placement, layers: Sequence[Layer]) -> None:
        self._placement, self._layers = placement, list(layers)
        self._programs: dict[Any, Any] = {}
        self._spare: dict[int, list[Vectors]] = {}
        self.device_bytes = 0
        self.peak_device_bytes = 0

    def reset_peak(self) -> None:
        """Starts a new measurement of the peak."""
        self.peak_device_bytes = self.device_bytes

    def load(self, layer: int, vectors: Vectors) -> DeviceLayer:
        """Starts the copy of a layer's parameters from pinned memory into new device buffers."""
        size = sum(v.nbytes for v in vectors)
        self.device_bytes += size
        self.peak_device_bytes = max(self.peak_device_bytes, self.device_bytes)
        unpack = self._program("unpack", layer)
        if self._placement.is_cpu:
            return DeviceLayer(size, unpack(vectors), None)
        return DeviceLayer(size, [jax.device_put(v, self._placement.device) for v in vectors], unpack)

    def drop(self, held: DeviceLayer) -> None:
        """Frees a device copy once the programs that were given it have run."""
        self.device_bytes -= held.num_bytes
        held.delete()

    def store(self, layer: int, gradients: Sequence[Gradient], onto: Vectors | None = None) -> Vectors:
        """Starts the copy of a layer's gradients to the host, where the optimizer can read them, and frees theirs.

        Args:
          layer: the layer.
          gradients: one for each of its parameters, on the device.
          onto: what an earlier use of the layer has stored, to which these are added; it is given away.
        """
        if self._placement.is_cpu:
            spare = self._spare.setdefault(layer, [])
            into = onto or (spare.pop() if spare else self._program("empty", layer)())
            stored: Vectors = self._program("add" if onto else "store", layer)(gradients, into)
        elif all(isinstance(gradient, RowGradient) for gradient in gradients):
            rows = jax.device_put(gradients, self._placement.host)
            stored = self._program("add", layer)(rows, onto or self._program("empty", layer)())
        else:
            packed = self._program("pack", layer)(gradients)
            pinned = [jax.device_put(v, self._placement.pinned) for v in packed]
            stored = tuple(jax.device_put(v, self._placement.host) for v in pinned)
            stored = self._program("sum", layer)(onto, stored) if onto else stored
            _delete(packed)
        _delete(jax.tree.leaves(gradients))
        return stored

    def recycle(self, layer: int, gradients: Vectors) -> None:
        """Takes back host vectors of gradients that the optimizer has been given, to be written again."""
        if self._placement.is_cpu and gradients:
            self._spare.setdefault(layer, []).append(gradients)

    def _program(self, name: str, layer: int) -> Any:
        made = self._layers[layer]
        key = (name, made.layout)
        if key not in self._programs:
            self._programs[key] = self._jitted(name, made)
        return self._programs[key]

    def _jitted(self, name: str, layer: Layer) -> Any:
        device, gathered = self._placement.device, self._placement.update_output

        def unpack(vectors: Vectors) -> list[jax.Array]:
            return layer.unpack(_computable(vectors))

        def store(gradients: Sequence[Gradient], into: Vectors) -> Vectors:
            return layer.pack(_dense(gradients), _computable(into))

        def add(gradients: Sequence[Gradient], onto: Vectors) -> Vectors:
            known, gradients = _computable((onto, gradients))
            return layer.pack([_added(a, b) for a, b in zip(layer.unpack(known), gradients, strict=True)], known)

        def pack(gradients: Sequence[Gradient]) -> Vectors:
            return layer.pack(_dense(gradients))

        def total(onto: Vectors, stored: Vectors) -> Vectors:
            return tuple(a + b for a, b in zip(*_computable((onto, stored)), strict=True))

        def empty() -> Vectors:
            return tuple(jnp.zeros(v.shape, v.dtype) for v in layer.vectors)

        made = {
            "unpack": lambda: jax.jit(unpack, out_shardings=device),
            "store": lambda: jax.jit(store, donate_argnums=1, out_shardings=gathered),
            "add": lambda: jax.jit(add, donate_argnums=1, out_shardings=gathered),
            "sum": lambda: jax.jit(total, donate_argnums=0, out_shardings=gathered),
            "empty": lambda: jax.jit(empty, out_shardings=gathered),
            "pack": lambda: jax.jit(pack, out_shardings=device),
        }
        return made[name]()


def _computable(host: Any) -> Any:
    """Host arrays as operands within a jitted function; on a CPU this placement is free of copies."""
    return jax.device_put(host, jax.memory.Space.Device)


def _dense(gradients: Sequence[Gradient]) -> list[jax.Array]:
    return [g.dense() if isinstance(g, RowGradient) else g for g in gradients]


def _added(known: jax.Array, gradient: Gradient) -> jax.Array:
    return gradient.onto(known) if isinstance(gradient, RowGradient) else known + gradient


def _delete(arrays: Sequence[jax.Array]) -> None:
    for array in arrays:
        array.delete()
