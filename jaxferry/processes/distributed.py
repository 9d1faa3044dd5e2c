"""Training by several processes: how a script starts, and how it passes batches to a step and reads results.

    mesh = distributed.start()
    step = jaxferry.train_step(loss_fn, optimizer, mesh=mesh)
    state, metrics = step(state, distributed.own_rows(batch))

With one process, all of these leave arrays as they are.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax._src import distributed
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxferry.errors import InputError
from jaxferry.processes.all_processes import coordination_client, watch
from jaxferry.processes.global_arrays import has_rows, is_global, is_key, spread

JOIN_TIMEOUT_S = 300  # how long processes wait for each other at the start by default
_VIRTUAL = "xla_force_host_platform_device_count"  # the flag that sets the number of virtual CPU devices
_MOST_DEVICES = 1024  # far more than a machine has; XLA takes minutes to make some thousand virtual ones
_ANSWER_S = 5  # how much longer a process waits for the answer of the first one, which names the missing processes
_NUMBERS = {"num_processes": "JAX_NUM_PROCESSES", "process_id": "JAX_PROCESS_ID"}


def mesh_of(num_devices: int) -> Mesh | None:
    """Returns a mesh of this process's first devices with the axis `data`; None for one device.

    If it is called before JAX starts its backends, a machine without accelerator has as many virtual CPU devices.
    Scripts of users call `jax.make_mesh`. Raises `InputError` if there are fewer devices.
    """
    if num_devices == 1:
        return None
    if num_devices > _MOST_DEVICES:
        raise InputError(f"--devices must be at most {_MOST_DEVICES:,}, got {num_devices:,}")
    if _VIRTUAL not in os.environ.get("XLA_FLAGS", ""):
        with contextlib.suppress(RuntimeError):  # the backends have started
            jax.config.update("jax_num_cpu_devices", num_devices)
    found = jax.local_devices()
    if len(found) < num_devices:
        raise InputError(f"--devices must be at most {len(found)}, the devices of this machine, got {num_devices}")
    return jax.make_mesh((num_devices,), ("data",), devices=found[:num_devices])


def start(
    num_cpu_devices: int | None = None,
    *,
    join_timeout_s: int = JOIN_TIMEOUT_S,
    heartbeat_timeout_s: int = 100,
    hang_timeout_s: float = 1800.0,
) -> Mesh:
    """Joins the processes of a job, and returns the mesh of all their devices with the axis `data`.

    It is called before anything else uses JAX. `jax.distributed.initialize` finds the processes under SLURM, Open MPI
    and Kubernetes (GKE); elsewhere JAX_COORDINATOR_ADDRESS (`HOST:PORT` of the first process), JAX_NUM_PROCESSES and
    JAX_PROCESS_ID name them.

    Args:
      num_cpu_devices: number of virtual CPU devices of each process, where there is no accelerator; None for one, or as
        many as XLA_FLAGS says.
      join_timeout_s: how long the processes wait for each other here. Then JAX ends those that have come, and names the
        missing ones (`Some timed out task names`); if the first process is missing, JAX ends them a few seconds later
        without a name (`DEADLINE_EXCEEDED`, `RegisterTask`).
      heartbeat_timeout_s: a process that sends no heartbeat for so long counts as dead. JAX then ends the others, with
        an error that names it.
      hang_timeout_s: how long a step or an evaluation waits for a process that is alive but has not begun it. The
        waiting processes then end with status 70 and an error that names it.

    Raises:
      InputError: if `join_timeout_s` is below 1, the processes cannot be found, or JAX is in use already.
    """
    if join_timeout_s < 1:
        raise InputError(f"join_timeout_s must be 1 or more seconds, got {join_timeout_s}")
    if num_cpu_devices is not None or _VIRTUAL not in os.environ.get("XLA_FLAGS", ""):
        with contextlib.suppress(RuntimeError):  # the backends have started; JAX says so below
            jax.config.update("jax_num_cpu_devices", num_cpu_devices or 1)
    try:
        numbers: dict[str, Any] = {name: int(os.environ[key]) for name, key in _NUMBERS.items() if key in os.environ}
        with _naming_the_missing(join_timeout_s):
            jax.distributed.initialize(
                **numbers,
                heartbeat_timeout_seconds=heartbeat_timeout_s,
                initialization_timeout=join_timeout_s + _ANSWER_S,
            )
    except (RuntimeError, ValueError) as error:
        raise InputError(
            f"the processes of this job cannot be found: {str(error).rstrip('.')}. Outside SLURM, Open MPI and "
            "Kubernetes, set JAX_COORDINATOR_ADDRESS=HOST:PORT, JAX_NUM_PROCESSES and JAX_PROCESS_ID"
        ) from error
    watch(coordination_client(), jax.process_index(), hang_timeout_s)
    return jax.make_mesh((jax.device_count(),), ("data",))


@contextlib.contextmanager
def _naming_the_missing(timeout_s: int) -> Iterator[None]:
    """Makes JAX's coordination service give up before its clients do, which name nobody; it has no public option."""
    library: Any = distributed._jax
    made = library.get_distributed_runtime_service
    library.get_distributed_runtime_service = functools.partial(made, cluster_register_timeout=timeout_s)
    try:
        yield
    finally:
        library.get_distributed_runtime_service = made


def is_first() -> bool:
    """Returns whether this is the first process, which prints and writes files."""
    return jax.process_index() == 0


def own_rows(batch: Any) -> Any:
    """Returns this process's rows, a part of the first axis, of each array of a batch that all processes have.

    Raises `InputError` if the processes do not divide an array's rows.
    """
    number, count = jax.process_index(), jax.process_count()

    def part(leaf: Any) -> Any:
        if count == 1 or is_global(leaf) or not has_rows(leaf):
            return leaf
        if leaf.shape[0] % count:
            raise InputError(f"a batch of {leaf.shape[0]} rows is not divided by {count} processes")
        rows = leaf.shape[0] // count
        return leaf[number * rows : (number + 1) * rows]

    return jax.tree.map(part, batch)


def alike(tree: Any) -> Any:
    """Marks arrays that are the same in all processes, such as running statistics, as whole for a step."""
    if jax.process_count() == 1:
        return tree
    where = NamedSharding(jax.make_mesh((jax.device_count(),), ("data",)), PartitionSpec())
    return jax.tree.map(lambda leaf: spread(leaf, where), tree)


def whole(tree: Any) -> Any:
    """Returns results of a step as NumPy arrays, with the rows of all processes; each process must call this.

    PRNG keys become keys of this process's first device.
    """

    def gathered(leaf: Any) -> Any:
        if is_key(leaf):
            return jax.random.wrap_key_data(gathered(jax.random.key_data(leaf)), impl=jax.random.key_impl(leaf))
        if is_global(leaf) and not leaf.is_fully_replicated:
            return multihost_utils.process_allgather(leaf, tiled=True)
        return np.asarray(leaf)

    return jax.tree.map(gathered, tree)
