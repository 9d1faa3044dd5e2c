"""Meshes: that of a number of devices, for command lines, and that of `jax.set_mesh`, which the engine leaves."""

from __future__ import annotations

import contextlib
import contextvars
import os
from collections.abc import Iterator

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxferry.errors import InputError

_VIRTUAL = "xla_force_host_platform_device_count"
_LEFT: contextvars.ContextVar[Mesh | None] = contextvars.ContextVar("left mesh", default=None)


def mesh_of(num_devices: int) -> Mesh | None:
    """Returns a mesh of this process's first devices with the axis `data`; None for one device.

    If it is called before JAX starts its backends, a machine without accelerator has as many virtual CPU devices. A
    script of one's own calls `jax.make_mesh`.

    Raises:
      InputError: if there are fewer devices.
    """
    if num_devices == 1:
        return None
    if not are_virtual():
        with contextlib.suppress(RuntimeError):  # the backends have started
            jax.config.update("jax_num_cpu_devices", num_devices)
    found = jax.local_devices()
    if len(found) < num_devices:
        raise InputError(f"--devices must be at most {len(found)}, the devices of this machine, got {num_devices}")
    return jax.make_mesh((num_devices,), ("data",), devices=found[:num_devices])


def are_virtual() -> bool:
    """Whether XLA_FLAGS sets the number of virtual CPU devices."""
    return _VIRTUAL in os.environ.get("XLA_FLAGS", "")


@contextlib.contextmanager
def outside_mesh() -> Iterator[None]:
    """Leaves the mesh of `jax.set_mesh`, if one is set: the engine's arrays and programs name their own."""
    if jax.sharding.get_abstract_mesh().empty:
        yield
        return
    token = _LEFT.set(jax.sharding.get_mesh())
    try:
        with jax.set_mesh(Mesh(np.empty((), dtype=object), ())):
            yield
    finally:
        _LEFT.reset(token)


@contextlib.contextmanager
def automatic_mesh() -> Iterator[None]:
    """Enters the mesh that `outside_mesh` has left if its axes are automatic, so that models may name them.

    Explicit axes would be part of the types of a model's values.
    """
    left = _LEFT.get()
    if left is None or any(axis is not AxisType.Auto for axis in left.axis_types):
        yield
        return
    with jax.set_mesh(left):
        yield
