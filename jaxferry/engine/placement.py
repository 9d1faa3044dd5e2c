"""Where arrays live: the device, its pinned host memory, and the CPU backend that runs the optimizer."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxferry.errors import InputError


@dataclasses.dataclass(frozen=True)
class Placement:
    """Shardings for all arrays of the engine, each over a mesh with a `data` axis (of size 1).

    Attributes:
      device: memory of the accelerator: loaded parameters, activations, gradients before their offload.
      pinned: host memory that the accelerator can reach: the compute copy of the parameters, arriving gradients.
      host: ordinary memory of the CPU backend: master parameters and optimizer state.
      host_compute: memory for scalars that jitted functions of the CPU backend return.
    """

    device: NamedSharding
    pinned: NamedSharding
    host: NamedSharding
    host_compute: NamedSharding

    @property
    def is_cpu(self) -> bool:
        """Whether the device is itself a CPU, so that the optimizer can access its pinned memory directly."""
        return self.platform == "cpu"

    @functools.cached_property
    def platform(self) -> str:
        """The device's platform: `cpu`, `gpu`, ..."""
        device: Any = next(iter(self.device.device_set))
        return str(device.platform)

    @property
    def device_kind(self) -> str:
        """The device's own name, such as `NVIDIA H200`."""
        device: Any = next(iter(self.device.device_set))
        return str(device.device_kind)

    def memory_facts(self) -> dict[str, int]:
        """The limit of the device's allocator in bytes, as a fact of measured profiles; nothing where there is none."""
        device: Any = next(iter(self.device.device_set))
        limit = (device.memory_stats() or {}).get("bytes_limit")
        return {} if limit is None else {"memory_limit_bytes": int(limit)}

    @property
    def update_output(self) -> NamedSharding:
        """Where the host update writes the compute copy: pinned memory if the CPU backend reaches it, else `host`."""
        return self.pinned if self.is_cpu else self.host


def make_placement(device: Any = None) -> Placement:
    """Makes the placement for one `jax.Device`, by default JAX's first.

    Raises:
      InputError: if `device` is not a device, if it has no pinned host memory, or if the CPU backend is disabled.
    """
    chosen: Any = jax.devices()[0] if device is None else device
    if not isinstance(chosen, jax.Device):
        raise InputError(f"device must be one of jax.devices(), or None for the first of them, got {device!r}")
    try:
        cpu = chosen if chosen.platform == "cpu" else jax.local_devices(backend="cpu")[0]
    except RuntimeError as error:
        raise InputError(
            "the host optimizer needs JAX's CPU backend, which JAX_PLATFORMS leaves out: add cpu to it, "
            'for instance JAX_PLATFORMS="cuda,cpu"'
        ) from error
    kinds = {memory.kind for memory in chosen.addressable_memories()}
    if "pinned_host" not in kinds:
        raise InputError(f"{chosen} has no pinned_host memory (it has {', '.join(sorted(kinds))})")

    def sharding(where: Any, kind: str) -> NamedSharding:
        return NamedSharding(Mesh(np.array([where]), ("data",)), PartitionSpec(), memory_kind=kind)

    return Placement(
        device=sharding(chosen, "device"),
        pinned=sharding(chosen, "pinned_host"),
        host=sharding(cpu, "unpinned_host"),
        host_compute=sharding(cpu, "device"),
    )
