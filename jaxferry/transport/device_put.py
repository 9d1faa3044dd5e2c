"""The transport of the runtime alone, and the choice between it and `ferry`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxferry.errors import InputError
from jaxferry.native import DTYPES, is_usable, twins, unusable_reason
from jaxferry.partition import Gradient, Layer, RowGradient
from jaxferry.transport.base import Transport, split
from jaxferry.transport.copies import CopyInFlight, DeviceLayer, HostGradient, PutCopy, delete_all
from jaxferry.transport.ferry import Ferry
from jaxferry.transport.marks import TaskMark
from jaxferry.transport.pinned import Vectors, as_numpy, can_view
from jaxferry.transport.placement import Placement


class DevicePut(Transport):
    """Copies by JAX itself.

    On an accelerator a load is one `jax.device_put`. The flat vectors are split into parameters only when the first
    program needs them, so that the split does not delay earlier programs. If the device is a CPU, copy and split are
    one pass, and gradients are written into existing host buffers.

    The issuing thread waits for a load before its first reader, and for offloads whose memory the next program needs:
    memory that a copy of the runtime still reads is freed late (`PutCopy`). `Ferry` has no such waits.
    """

    def __init__(self, placement: Placement, layers: Sequence[Layer], accumulates: bool = False) -> None:
        super().__init__(placement, layers, accumulates)
        # The flat vectors exist beside the parameters split from them, and beside the gradients packed into them.
        most = max(
            -(-max(layer.num_bytes, sums.num_bytes) // placement.ownership.num_shares(layer))
            for layer, sums in zip(layers, self._sums if accumulates else self._gradients, strict=True)
        )
        self.staging_bytes = 0 if placement.is_cpu else 2 * most

    @property
    def adds_on_host(self) -> bool:
        """See `Transport`."""
        return True

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
        have_rows = any(isinstance(gradient, RowGradient) for gradient in gradients)
        if self._placement.is_cpu:
            if onto is None and not have_rows:
                is_wide = is_sum or widens
                into = self.destinations(layer, is_sum=is_wide) if into is None else into
                stored = HostGradient(self.program("store", layer, is_wide)(gradients, into), True)
                delete_all(jax.tree.leaves(gradients))
                return stored
            return self._store_rows(layer, gradients, onto, mark, widens)
        if all(isinstance(gradient, RowGradient) for gradient in gradients):
            return self._store_rows(layer, gradients, onto, mark, widens)
        packed = self.program("pack", layer, is_sum)(gradients)
        delete_all(jax.tree.leaves(gradients))
        pinned = tuple(self._placement.moved(packed, self._placement.pinned_of(self._layers[layer])))
        if mark is not None:
            mark.watch(pinned)
        stored = HostGradient(pinned, False, PutCopy(packed, pinned), is_reusable=False)
        if into is not None and [v.size for v in into] != [v.size for v in pinned]:
            stored = self._put_into(layer, stored, into)
        if onto is not None or (widens and not is_sum):
            stored = self.add_on_host(layer, onto, stored)
        return stored

    def _taken(self, is_written: bool, is_summed: bool, widens: bool) -> Sequence[bool]:
        """See `Transport`; a copy of the runtime makes vectors of its own."""
        taken = super()._taken(is_written, is_summed, widens)
        return taken if is_written else [is_sum for is_sum in taken if is_sum and not is_summed]

    def _put_into(self, layer: int, pieces: HostGradient, into: Vectors) -> HostGradient:
        """Copies pieces in pinned memory into parts of vectors there; waits for them if the CPU cannot reach these."""
        if can_view(self._placement):
            copy = _PartCopy(self._layers[layer], pieces, into)
            return HostGradient(into, False, copy, is_reusable=False)
        whole = [np.array(vector) for vector in into]
        _put_together(self._layers[layer], [np.asarray(piece) for piece in pieces.vectors], whole)
        return HostGradient(tuple(jax.device_put(v, self._placement.pinned) for v in whole), False, is_reusable=False)

    def _load(self, layer: int, size: int, vectors: Vectors, mark: TaskMark | None) -> DeviceLayer:
        unpack = self.program("unpack", layer)
        if self._placement.is_cpu:
            return DeviceLayer(layer, size, unpack(vectors))

        def arrive(arrays: Sequence[jax.Array]) -> Sequence[jax.Array]:
            # Deleted before its copy has ended, a vector would be freed late (see `PutCopy`), beside its parameters.
            jax.block_until_ready(arrays)
            cut: Sequence[jax.Array] = self._placement.in_turn(unpack(arrays))
            delete_all(arrays)
            return cut

        copies = self._placement.moved(vectors, self._placement.shares_of(self._layers[layer]))
        if mark is not None:
            mark.watch(copies)
        return DeviceLayer(layer, size, copies, arrive)

    def _jitted(self, name: str, layer: Layer) -> Any:
        device, gathered = self._placement.device, self._placement.update_output

        def unpack(vectors: Vectors) -> list[jax.Array]:
            return layer.unpack(twins.to_device(vectors))

        def store(gradients: Sequence[Gradient], into: Vectors) -> Vectors:
            return layer.pack(split(layer, gradients), twins.to_device(into))

        def pack(gradients: Sequence[Gradient]) -> Vectors:
            arrays = [gradient for gradient in gradients if not isinstance(gradient, RowGradient)]
            if len(arrays) == len(gradients):
                return layer.pack_joined(arrays)
            return layer.pack([g.dense() if isinstance(g, RowGradient) else g for g in gradients])

        made = {
            "unpack": lambda: jax.jit(unpack, out_shardings=device),
            "store": lambda: jax.jit(store, donate_argnums=1, out_shardings=gathered),
            "pack": lambda: jax.jit(pack, out_shardings=self._placement.shares_of(layer)),
        }
        return made[name]()


class _PartCopy(CopyInFlight):
    """A copy into parts of vectors: the pieces arrive in pinned memory of their own, and the CPU puts them together."""

    def __init__(self, layer: Layer, pieces: HostGradient, into: Vectors) -> None:
        self._layer, self._pieces, self._into = layer, pieces, into

    def wait(self) -> None:
        if self._pieces.copy is not None:
            self._pieces.copy.wait()
        _put_together(self._layer, list(map(as_numpy, self._pieces.vectors)), list(map(as_numpy, self._into)))


def _put_together(layer: Layer, pieces: Sequence[np.ndarray], into: Sequence[np.ndarray]) -> None:
    """Writes the leaves of a layer to their offsets; `pieces` hold nothing else, in the order of the offsets."""
    filled = [0] * len(into)
    for leaf in sorted(layer.leaves, key=lambda leaf: leaf.offset):
        start = filled[leaf.vector]
        into[leaf.vector][leaf.offset : leaf.offset + leaf.size] = pieces[leaf.vector][start : start + leaf.size]
        filled[leaf.vector] += leaf.size


TRANSPORTS: dict[str, type[Transport]] = {"ferry": Ferry, "device_put": DevicePut}


def choose_transport(name: str | None, placement: Placement, layers: Sequence[Layer] = ()) -> str:
    """Returns the transport's name: `name`, or by default `ferry` if the native library can be used on the device.

    On a GPU, the process's first call that may choose `ferry` runs the library's self-test. For gradients in float64
    the default is `device_put`.

    Raises:
      InputError: if there is no such transport, or `ferry` is chosen without its library, with one that fails its
        self-test, or with gradients of a dtype that it does not support.
    """
    others = {vector.dtype for layer in layers for vector in layer.trained.vectors}.difference(DTYPES)
    device, *others_sharing = placement.device.mesh.devices.flat
    if others_sharing:
        if name == "ferry":
            raise InputError("transport 'ferry' moves the layers of one device, and the mesh has several")
        name = "device_put"
    if name is None:
        return "ferry" if is_usable(device) and not others else "device_put"
    if name not in TRANSPORTS:
        raise InputError(f"transport must be one of {', '.join(TRANSPORTS)}, got {name!r}")
    if name == "ferry" and (reason := unusable_reason(device)) is not None:
        raise InputError(f"transport 'ferry' needs the native library: {reason}")
    if name == "ferry" and others:
        known, unknown = (", ".join(sorted(map(str, dtypes))) for dtypes in (DTYPES, others))
        raise InputError(f"transport 'ferry' moves gradients in {known}, not in {unknown}")
    return name


def transport_like(transport: Transport, placement: Placement, layers: Sequence[Layer]) -> Transport:
    """Makes a transport of the same kind for other layers; `device_put` if the library does not know their dtypes."""
    others = {vector.dtype for layer in layers for vector in layer.vectors}.difference(DTYPES)
    return (DevicePut if others else type(transport))(placement, layers)


def make_transport(
    name: str, placement: Placement, layers: Sequence[Layer], accumulates: bool = False, pools: bool = False
) -> Transport:
    """Makes a transport for these layers; `name` is a result of `choose_transport`, the others as for `Transport`."""
    made = TRANSPORTS[name](placement, layers, accumulates)
    made.pools = pools
    return made
