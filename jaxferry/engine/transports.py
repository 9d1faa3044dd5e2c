"""Which transport moves layers: `ferry` where the native library is, else `device_put`."""

from __future__ import annotations

from collections.abc import Sequence

from jaxferry.engine.ferry import Ferry
from jaxferry.engine.placement import Placement
from jaxferry.engine.transfers import DevicePut, Transport
from jaxferry.errors import InputError
from jaxferry.native.library import is_available, status
from jaxferry.partition import Layer

TRANSPORTS: dict[str, type[Transport]] = {"ferry": Ferry, "device_put": DevicePut}


def choose_transport(name: str | None, placement: Placement) -> str:
    """The transport to use: `name`, or by default `ferry` if the native library is there for the device.

    Raises:
      InputError: if there is no such transport, or `ferry` is asked for and its library is not there.
    """
    if name is None:
        return "ferry" if is_available(placement.platform) else "device_put"
    if name not in TRANSPORTS:
        raise InputError(f"transport must be one of {', '.join(TRANSPORTS)}, got {name!r}")
    if name == "ferry" and not is_available(placement.platform):
        raise InputError(f"transport 'ferry' needs the native library: {status(placement.platform).message}")
    return name


def make_transport(name: str, placement: Placement, layers: Sequence[Layer]) -> Transport:
    """A transport for these layers; `name` as `choose_transport` gives it."""
    return TRANSPORTS[name](placement, layers)
