"""The transport of plain JAX: copies by `jax.device_put`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from jaxferry.engine.placement import Placement
from jaxferry.engine.trace.marks import TaskMark
from jaxferry.engine.transport.base import (
    DeviceLayer,
    HostGradient,
    Transport,
    Vectors,
    computable,
    delete_all,
    split,
)
from jaxferry.partition import Gradient, Layer, RowGradient


class DevicePut(Transport):
    """Copies by JAX itself.

    On an accelerator a load is one `jax.device_put`. The flat vectors are split into parameters only when the first
    program needs them, so that the split does not delay earlier programs. If the device is a CPU, copy and split are
    one pass, and gradients are written into existing host buffers.
    """

    def __init__(self, placement: Placement, layers: Sequence[Layer]) -> None:
        super().__init__(placement, layers)
        # The flat vectors exist beside the parameters split from them, and beside the gradients packed into them.
        self.staging_bytes = 0 if placement.is_cpu else 2 * max(layer.num_bytes for layer in layers)

    def store(
        self,
        layer: int,
        gradients: Sequence[Gradient],
        onto: HostGradient | None = None,
        mark: TaskMark | None = None,
    ) -> HostGradient:
        """See `Transport.store`."""
        if self._placement.is_cpu:
            if onto is None:
                stored = HostGradient(self.program("store", layer)(gradients, self.destinations(layer)), True)
            else:
                stored = self._store_rows(layer, gradients, onto, mark)
        elif all(isinstance(gradient, RowGradient) for gradient in gradients):
            stored = self._store_rows(layer, gradients, onto, mark)
        else:
            packed = self.program("pack", layer)(gradients)
            pinned = tuple(jax.device_put(v, self._placement.pinned) for v in packed)
            if mark is not None:
                mark.watch(pinned)
            delete_all(packed)
            stored = HostGradient(pinned, False, is_reusable=False)
            if onto is not None:
                stored = self.add_on_host(layer, onto, stored)
        delete_all(jax.tree.leaves(gradients))
        return stored

    def _load(self, layer: int, size: int, vectors: Vectors, mark: TaskMark | None) -> DeviceLayer:
        unpack = self.program("unpack", layer)
        if self._placement.is_cpu:
            return DeviceLayer(layer, size, unpack(vectors))

        def arrive(arrays: Sequence[jax.Array]) -> Sequence[jax.Array]:
            cut: Sequence[jax.Array] = unpack(arrays)
            delete_all(arrays)
            return cut

        copies = [jax.device_put(v, self._placement.device) for v in vectors]
        if mark is not None:
            mark.watch(copies)
        return DeviceLayer(layer, size, copies, arrive)

    def _jitted(self, name: str, layer: Layer) -> Any:
        device, gathered = self._placement.device, self._placement.update_output

        def unpack(vectors: Vectors) -> list[jax.Array]:
            return layer.unpack(computable(vectors))

        def store(gradients: Sequence[Gradient], into: Vectors) -> Vectors:
            return layer.pack(_dense(split(layer, gradients)), computable(into))

        def pack(gradients: Sequence[Gradient]) -> Vectors:
            return layer.pack(_dense(split(layer, gradients)))

        made = {
            "unpack": lambda: jax.jit(unpack, out_shardings=device),
            "store": lambda: jax.jit(store, donate_argnums=1, out_shardings=gathered),
            "pack": lambda: jax.jit(pack, out_shardings=device),
        }
        return made[name]() if name in made else super()._jitted(name, layer)


def _dense(gradients: Sequence[Gradient]) -> list[jax.Array]:
    return [g.dense() if isinstance(g, RowGradient) else g for g in gradients]
