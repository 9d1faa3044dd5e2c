"""Makes the mesh of a number of devices, for command lines."""

from __future__ import annotations

import contextlib
import os

import jax
from jax.sharding import Mesh

from jaxferry.errors import InputError

_VIRTUAL = "xla_force_host_platform_device_count"


def mesh_of(num_devices: int) -> Mesh | None:
    """Returns a mesh of this process's first devices with the axis `data`; None for one device.

    If it is called before JAX starts its backends, a machine without accelerator has as many virtual CPU devices.
    Scripts of users call `jax.make_mesh`.

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
    """Returns whether XLA_FLAGS sets the number of virtual CPU devices."""
    return _VIRTUAL in os.environ.get("XLA_FLAGS", "")
