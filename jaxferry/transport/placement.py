"""Where arrays live: the devices, their pinned host memory, and the CPU backend that runs the optimizer.

    one device:       vectors (pinned) --load--> parameters
    several devices:  vectors, a share each (pinned) --load--> shares --gather--> parameters, on each device

The batch, and the values that programs compute from it, are split over several devices (`Graph.split_axis`). With
several processes, each holds the shares of its own devices (`Ownership`). Layers that each process holds whole are
gathered within each process alone.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxferry.errors import InputError
from jaxferry.partition import Graph, Layer, Ownership, bits_of
from jaxferry.processes import joined_rows, merged, moved, spread
from jaxferry.transport.allocator import Allocator

DATA = "data"
"""The axis of a mesh along which devices share a batch; of the engine's own mesh, that of one process's devices."""
PROCESS = "process"  # the other axis of the engine's own mesh, if there are several processes


@dataclasses.dataclass(frozen=True)
class Placement:
    """Shardings for all arrays of the engine, over a mesh with a `data` axis.

    Attributes:
      device: memory of each accelerator: loaded parameters, gradients before their offload; and activations, of one.
      pinned: host memory that accelerators can reach: the compute copy of the parameters, arriving gradients. Several
        share each of these vectors (`partition.SharedLayer`); see `pinned_of`.
      host: ordinary memory of the CPU backend: master parameters and optimizer state.
      host_compute: memory for scalars that jitted functions of the CPU backend return.
    """

    device: NamedSharding
    pinned: NamedSharding
    host: NamedSharding
    host_compute: NamedSharding

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.device, self.pinned, self.host, self.host_compute))

    def __hash__(self) -> int:
        # Views of host memory are remembered by placement, and looked up for each update.
        return self._hash

    @property
    def is_cpu(self) -> bool:
        """Whether the device is one CPU, whose pinned memory the optimizer can access directly."""
        return self.platform == "cpu" and self.num_devices == 1

    @property
    def updates(self) -> bool:
        """Whether updates may run on the devices: they have memory of their own, and belong to one process."""
        return not self.is_cpu and self.num_processes == 1

    @property
    def num_devices(self) -> int:
        """The number of devices that share a batch."""
        return int(self.device.mesh.size)

    @property
    def num_processes(self) -> int:
        """The number of processes that the devices belong to."""
        return int(self.device.mesh.shape.get(PROCESS, 1))

    @functools.cached_property
    def ownership(self) -> Ownership:
        """The elements of each layer that this process holds in host memory."""
        if self.num_processes == 1:
            return Ownership(self.num_devices, self.num_devices)
        rows = [row[0].process_index for row in self.device.mesh.devices]
        num_own = self.num_devices // self.num_processes
        return Ownership(self.num_devices, num_own, num_own * rows.index(jax.process_index()))

    @property
    def process(self) -> int:
        """The number of this process among those of the mesh."""
        return self.ownership.first // self.ownership.num_own

    def pinned_of(self, layer: Layer) -> NamedSharding:
        """Host memory for the vectors of a layer."""
        return self._pinned_whole if layer.is_whole else self.pinned

    def shares_of(self, layer: Layer) -> NamedSharding:
        """Memory of the accelerators for vectors that they share: loaded ones, and gradients that leave."""
        return self.pinned_of(layer).with_memory_kind("device")

    def readable(self, layer: Layer) -> list[jax.ShapeDtypeStruct]:
        """The vectors in host memory from which programs read a layer's parameters without a load, with their places.

        If several processes share the layer's vectors, each has all of these, a row for each process's shares
        (`WholeCopies`).
        """
        vectors, where = self.ownership.shared(layer).vectors, self.pinned_of(layer)
        if not self.exchanges(layer):
            return [jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=where) for v in vectors]
        num, where = self.num_processes, NamedSharding(self.pinned.mesh, PartitionSpec(None, DATA))
        where = where.with_memory_kind("pinned_host")
        return [jax.ShapeDtypeStruct((num, v.size // num), v.dtype, sharding=where) for v in vectors]

    def exchanges(self, layer: Layer) -> bool:
        """Whether processes exchange their parts of a layer before its programs can read it in host memory."""
        return self.num_processes > 1 and not layer.is_whole

    def exchanged_bytes(self, layer: Layer) -> int:
        """Device memory that such an exchange needs: what a device has, and what it receives."""
        if not self.exchanges(layer):
            return 0
        vectors, own = self.ownership.shared(layer).vectors, self.ownership.num_own
        return sum((v.size // own + v.size // self.num_devices) * v.dtype.itemsize for v in vectors)

    @functools.cached_property
    def shared_device(self) -> NamedSharding:
        """Memory of the accelerators for vectors that all of them share."""
        return self.pinned.with_memory_kind("device")

    @functools.cached_property
    def _pinned_whole(self) -> NamedSharding:
        is_shared = PartitionSpec(DATA) if self.num_devices > 1 else PartitionSpec()
        return NamedSharding(self.pinned.mesh, is_shared, memory_kind="pinned_host")

    def merged(self, array: np.ndarray) -> np.ndarray:
        """Joins arrays of which each process has some elements, and zeros elsewhere; each process must call this."""
        if self.num_processes == 1:
            return array
        return merged(array, NamedSharding(self.device.mesh, PartitionSpec(PROCESS)))

    @functools.cached_property
    def pinned_alone(self) -> NamedSharding:
        """Host memory that this process's first accelerator can reach, for arrays that nothing splits."""
        return _alone(self.device.mesh.local_devices[0], "pinned_host")

    @functools.cached_property
    def own(self) -> NamedSharding:
        """Memory of each accelerator of this process."""
        if self.num_processes == 1:
            return self.device
        mesh = Mesh(np.array(self.device.mesh.local_devices), (DATA,), axis_types=(AxisType.Auto,))
        return NamedSharding(mesh, PartitionSpec(), memory_kind="device")

    def of(self, graph: Graph, aval: Any) -> NamedSharding:
        """Memory of the accelerators for the batch or a value that is computed from it."""
        axis = graph.split_axis(aval)
        if axis is None:
            return self.device
        mesh = self.device.mesh
        return NamedSharding(mesh, PartitionSpec(*[None] * axis, mesh.axis_names), memory_kind="device")

    def in_turn(self, made: Any) -> Any:
        """Waits for the results of a program that may exchange values, if the devices are several CPU devices.

        These run programs in a common pool of threads. Two such programs at a time could take all threads, each
        waiting for a part of itself that gets none.
        """
        return jax.block_until_ready(made) if self.takes_turns else made

    @property
    def takes_turns(self) -> bool:
        """See `in_turn`."""
        return self.platform == "cpu" and self.num_devices > 1

    def put(self, graph: Graph, number: int, array: Any) -> Any:
        """Moves the batch or a constant, a value of this number, to the accelerators.

        Of an array that is smaller than the value, each process has its own rows; others are the same in all
        processes.
        """
        aval = graph.avals[number]
        where = self.of(graph, aval)
        if self.num_processes == 1 or np.shape(array) == aval.shape:
            return spread(array, where)
        return joined_rows(array, where, NamedSharding(where.mesh, PartitionSpec(PROCESS)))

    def put_alike(self, array: Any) -> Any:
        """Moves an array that is the same in all processes to each accelerator."""
        return spread(array, self.device)

    def moved(self, arrays: Sequence[jax.Array], where: NamedSharding) -> list[jax.Array]:
        """Copies of arrays in another memory of the same accelerators."""
        return moved(arrays, [where] * len(arrays))

    @functools.cached_property
    def platform(self) -> str:
        """The device's platform: `cpu`, `gpu`, ..."""
        device: Any = self.device.mesh.local_devices[0]
        return str(device.platform)

    @property
    def device_kind(self) -> str:
        """The device's own name, such as `NVIDIA H200`."""
        device: Any = self.device.mesh.local_devices[0]
        return str(device.device_kind)

    def memory_facts(self) -> dict[str, int]:
        """The limit of the device's allocator in bytes, as a fact of measured profiles; nothing where there is none."""
        device: Any = self.device.mesh.local_devices[0]
        limit = (device.memory_stats() or {}).get("bytes_limit")
        return {} if limit is None else {"memory_limit_bytes": int(limit)}

    @functools.cached_property
    def allocator(self) -> Allocator | None:
        """The device's allocator if it is XLA's, which hands out more than programs ask for; see `allocator.py`."""
        if self.platform == "cpu" or not self.memory_facts():
            return None
        preallocates = os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "") not in ("0", "false", "False")
        return Allocator.PREALLOCATED if preallocates else Allocator.GROWING

    @property
    def update_output(self) -> NamedSharding:
        """Where the host update writes the compute copy: pinned memory if the CPU backend reaches it, else `host`."""
        return self.pinned if self.is_cpu else self.host


def check_passes(aval: Any, placement: Placement) -> None:
    """Raises `InputError` for a dtype that compiled programs do not take: JAX 0.10 on CPUs for less than 8 bits."""
    if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended) or bits_of(aval.dtype) >= 8:
        return
    if not _passes(np.dtype(aval.dtype), placement):
        raise InputError(
            f"the loss function passes {aval.str_short()} from one layer, or from the batch, to another, and JAX "
            f"{jax.__version__} gives compiled programs no arrays of that dtype: cast it to int8, or update JAX"
        )


@functools.cache
def _passes(dtype: np.dtype, placement: Placement) -> bool:
    program = jax.jit(lambda x: x.astype(np.float32), out_shardings=placement.own)
    struct = jax.ShapeDtypeStruct((8,), dtype, sharding=placement.own)
    try:
        program.trace(struct).lower().compile()(jax.device_put(np.zeros(8, dtype), placement.own))
    except ValueError:
        return False
    return True


def make_placement(device: Any = None, mesh: Any = None) -> Placement:
    """Makes the placement for one `jax.Device`, by default JAX's first, or for the devices of a mesh.

    Raises:
      InputError: if `device` is not a device or `mesh` no mesh of one axis, `data`; if processes have not equally many
        devices each, one after the other; if a device has no pinned host memory; or if the CPU backend is disabled.
    """
    chosen: Any = jax.devices()[0] if device is None else device
    if not isinstance(chosen, jax.Device):
        raise InputError(f"device must be one of jax.devices(), or None for the first of them, got {device!r}")
    devices = [chosen] if mesh is None else _devices_of(mesh, device)
    num_processes = len({each.process_index for each in devices})
    chosen = next(each for each in devices if each.process_index == jax.process_index())
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
    if num_processes > 1:
        by_process = np.array(devices).reshape(num_processes, -1)
        own = Mesh(by_process, (PROCESS, DATA), axis_types=(AxisType.Auto,) * 2)
    is_shared = PartitionSpec() if len(devices) == 1 else PartitionSpec(own.axis_names)
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
    of_devices = [each.process_index for each in devices]
    in_turn = list(dict.fromkeys(of_devices))
    if jax.process_index() not in in_turn:
        raise InputError(
            f"mesh has only devices of other processes, {in_turn}, and none of process {jax.process_index()}"
        )
    if [number for number in in_turn for _ in range(len(of_devices) // len(in_turn))] != of_devices:
        raise InputError(
            "mesh must have equally many devices of each process, one process after the other, got devices of "
            f"processes {', '.join(map(str, of_devices))}"
        )
    return devices
