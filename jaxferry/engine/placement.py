"""Where arrays live: the devices, their pinned host memory, and the CPU backend that runs the optimizer.

    one device:       vectors (pinned) --load--> parameters
    several devices:  vectors, a share each (pinned) --load--> shares --gather--> parameters, on each device

The batch, and the values that programs compute from it, are split over several devices (`Graph.split_axis`).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxferry.errors import InputError
from jaxferry.partition.graph import Graph

DATA = "data"
"""The axis of a mesh along which devices share a batch."""


@dataclasses.dataclass(frozen=True)
class Placement:
    """Shardings for all arrays of the engine, over a mesh with a `data` axis.

    Attributes:
      device: memory of each accelerator: loaded parameters, gradients before their offload; and activations, of one.
      pinned: host memory that accelerators can reach: the compute copy of the parameters, arriving gradients. Several
        share each of these vectors (`partition.SharedLayer`).
      host: ordinary memory of the CPU backend: master parameters and optimizer state.
      host_compute: memory for scalars that jitted functions of the CPU backend return.
    """

    device: NamedSharding
    pinned: NamedSharding
    host: NamedSharding
    host_compute: NamedSharding

    @property
    def is_cpu(self) -> bool:
        """Whether the device is itself a CPU, so that the optimizer can access its pinned memory directly.

        Several CPU devices are driven as accelerators are.
        """
        return self.platform == "cpu" and self.num_devices == 1

    @property
    def updates(self) -> bool:
        """Whether updates may run on the device: it has memory of its own, and shares no parameters with others."""
        return not self.is_cpu and self.num_devices == 1

    @property
    def num_devices(self) -> int:
        """The number of devices that share a batch."""
        return int(self.device.mesh.size)

    @functools.cached_property
    def shares(self) -> NamedSharding:
        """Memory of the accelerators for vectors that they share: loaded ones, and gradients that leave."""
        return self.pinned.with_memory_kind("device")

    @functools.cached_property
    def pinned_alone(self) -> NamedSharding:
        """Host memory that the first accelerator can reach, for arrays that nothing splits."""
        return _alone(self.device.mesh.devices.flat[0], "pinned_host")

    def of(self, graph: Graph, aval: Any) -> NamedSharding:
        """Memory of the accelerators for the batch or a value that is computed from it."""
        axis = graph.split_axis(aval)
        if axis is None:
            return self.device
        return NamedSharding(self.device.mesh, PartitionSpec(*[None] * axis, DATA), memory_kind="device")

    def in_turn(self, made: Any) -> Any:
        """Waits for the results of a program that may exchange values, if the devices are several CPU devices.

        These run programs in a common pool of threads. Two such programs at a time could take all threads, each waiting
        for a part of itself that gets none.
        """
        return jax.block_until_ready(made) if self.platform == "cpu" and self.num_devices > 1 else made

    def put(self, graph: Graph, number: int, array: Any) -> Any:
        """Moves the batch or a constant, a value of this number, to the accelerators."""
        return jax.device_put(array, self.of(graph, graph.avals[number]))

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


def make_placement(device: Any = None, mesh: Any = None) -> Placement:
    """Makes the placement for one `jax.Device`, by default JAX's first, or for the devices of a mesh.

    Raises:
      InputError: if `device` is not a device or `mesh` no mesh of one axis, `data`; if a device has no pinned host
        memory or is of another process; or if the CPU backend is disabled.
    """
    chosen: Any = jax.devices()[0] if device is None else device
    if not isinstance(chosen, jax.Device):
        raise InputError(f"device must be one of jax.devices(), or None for the first of them, got {device!r}")
    devices = [chosen] if mesh is None else _devices_of(mesh, device)
    chosen = devices[0]
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

    # Programs know nothing of explicit axes, whatever the given mesh has.
    own = Mesh(np.array(devices), (DATA,), axis_types=(AxisType.Auto,))
    is_shared = PartitionSpec(DATA) if len(devices) > 1 else PartitionSpec()
    return Placement(
        device=NamedSharding(own, PartitionSpec(), memory_kind="device"),
        pinned=NamedSharding(own, is_shared, memory_kind="pinned_host"),
        host=_alone(cpu, "unpinned_host"),
        host_compute=_alone(cpu, "device"),
    )


def _alone(device: Any, kind: str) -> NamedSharding:
    mesh = Mesh(np.array([device]), (DATA,), axis_types=(AxisType.Auto,))
    return NamedSharding(mesh, PartitionSpec(), memory_kind=kind)


def _devices_of(mesh: Any, device: Any) -> list[Any]:
    if device is not None:
        raise InputError("device and mesh are given both: a mesh names its devices")
    if not isinstance(mesh, Mesh):
        raise InputError(f'mesh must be a jax.sharding.Mesh, such as jax.make_mesh((8,), ("data",)), got {mesh!r}')
    if tuple(mesh.axis_names) != (DATA,):
        raise InputError(f"mesh must have one axis, {DATA!r}, got {', '.join(map(repr, mesh.axis_names))}")
    devices = list(mesh.devices.flat)
    if not devices or len(set(devices)) < len(devices):
        raise InputError(f"mesh must have devices, each once, got {', '.join(map(str, devices)) or 'none'}")
    if AxisType.Manual in mesh.axis_types:
        raise InputError(f"the axis {DATA!r} of mesh must be automatic or explicit, got a manual one")
    elsewhere = [str(each) for each in devices if each.process_index != jax.process_index()]
    if elsewhere:
        raise InputError(f"mesh has devices of other processes ({', '.join(elsewhere)}): train on those of this one")
    return devices
