"""Chooses the transport: `ferry` if the native library can be used on the device, else `device_put`."""

from __future__ import annotations

from collections.abc import Sequence

from jaxferry.errors import InputError
from jaxferry.native.operations import DTYPES
from jaxferry.native.self_test import is_usable, unusable_reason
from jaxferry.partition import Layer
from jaxferry.transport.base import Transport
from jaxferry.transport.device_put import DevicePut
from jaxferry.transport.ferry import Ferry
from jaxferry.transport.placement import Placement

TRANSPORTS: dict[str, type[Transport]] = {"ferry": Ferry, "device_put": DevicePut}


def choose_transport(name: str | None, placement: Placement, layers: Sequence[Layer] = ()) -> str:
    """Returns the transport's name: `name`, or by default `ferry` if the native library can be used on the device.

    On a GPU, the process's first call that may choose `ferry` runs the library's self-test.

    Args:
      name: the user's choice; None for the default.
      placement: where arrays live.
      layers: the layers to move, if known; the default for gradients in float64 is `device_put`.

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


def make_transport(name: str, placement: Placement, layers: Sequence[Layer], accumulates: bool = False) -> Transport:
    """Makes a transport for these layers; `name` is a result of `choose_transport`, the others as for `Transport`."""
    return TRANSPORTS[name](placement, layers, accumulates)
