"""`jaxferry doctor` and `build-native`: what this machine and installation can do, and the libraries built for it."""

import ctypes
import dataclasses
import os
import pathlib
import platform
import resource
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from typer import Option

from jaxferry.cli.common import AsJson, print_result, progress
from jaxferry.costs import JAX_SHARE, JAX_SHARE_VARIABLE
from jaxferry.errors import InputError, NativeError
from jaxferry.native import Build, build_library, cpus, ffi_version, read_lines, run_self_test, shortest_s, status
from jaxferry.optimizer import PINNED_VARIABLE, Scratch, host_memory
from jaxferry.training import installed_version
from jaxferry.units import format_bytes, parse_bytes

_XLA_THREADS = "tf_XLAEigen"
_BLAS_FUNCTIONS = ("scipy_openblas_get_num_threads", "scipy_openblas_get_num_threads64_", "openblas_get_num_threads")
_BLAS_VARIABLES = ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS")
_PACKAGES = ("jaxferry", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "scipy")
_PLATFORMS = {"cpu": ("cpu",), "cuda": ("cuda",), "all": ("cpu", "cuda")}


def doctor(
    link_size: Annotated[
        str, Option(metavar="SIZE", help="Bytes to transfer when measuring the link and in the self-test.")
    ] = "64MiB",
    scratch: Annotated[
        pathlib.Path | None, Option(metavar="DIR", help="A folder for optimizer state, whose disk is measured.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print devices, memories, libraries, the link's speed and a self-test.

    Prints CPUs, threads and limits of host memory too. Runs the native library's self-test on the first device, and
    prints each result and rate.
    """
    num_bytes = parse_bytes(link_size, "--link-size")
    if num_bytes == 0:
        raise InputError(f"--link-size must be positive, got {link_size}")
    disk = None if scratch is None else Scratch(scratch)  # refused at once, if it is no folder
    found = examine(num_bytes)
    if disk is not None:
        read_s, write_s = disk.seconds_a_byte()
        found["scratch"] = {"folder": str(scratch), "read_bytes_per_s": 1 / read_s, "write_bytes_per_s": 1 / write_s}
    print_result(as_json, found, *_lines(found))


def build_native(
    platform: Annotated[
        str, Option(metavar="|".join(_PLATFORMS), help="Platform to build for; all builds what it can.")
    ] = "all",
    as_json: AsJson = False,
) -> None:
    """Build the native libraries for the installed jaxlib.

    Prints the tools used. Fails if no library can be built.
    """
    if platform not in _PLATFORMS:
        raise InputError(f"--platform must be one of {', '.join(_PLATFORMS)}, got {platform!r}")
    builds: list[Build] = []
    failures: dict[str, NativeError] = {}
    with progress("building") as report:
        for name in _PLATFORMS[platform]:
            report(name)
            try:
                builds.append(build_library(name))
            except NativeError as error:
                failures[name] = error
    if not builds:
        raise NativeError("; ".join(str(failure) for failure in failures.values()))
    lines = [str(failure) for failure in failures.values()]
    for build in reversed(builds):
        nvcc = [] if build.nvcc is None else [f"  nvcc      {build.nvcc}"]
        headers = f"  headers   {build.headers} (jaxlib {build.jaxlib})"
        lines = [f"{build.platform}: {build.path}", f"  compiler  {build.compiler}", *nvcc, headers, *lines]
    failed = [{"platform": name, "message": str(failure)} for name, failure in failures.items()]
    built = [dataclasses.asdict(build) | {"path": str(build.path)} for build in builds]
    print_result(as_json, {"built": built, "failed": failed}, *lines)


def examine(link_bytes: int) -> dict[str, Any]:
    """Returns what the command prints, as JSON; raises `InputError` if JAX has no device, or a limit is no number."""
    pinned, (locked, _) = host_memory.pinned_limit(), resource.getrlimit(resource.RLIMIT_MEMLOCK)
    try:
        devices = jax.devices()
    except RuntimeError as error:
        raise InputError(
            f"JAX finds no device (JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '')!r}): {error}"
        ) from error
    return {
        "versions": {"python": platform.python_version()} | {name: installed_version(name) for name in _PACKAGES},
        "ffi_version": _ffi_version(),
        "devices": [
            {
                "id": device.id,
                "platform": device.platform,
                "kind": device.device_kind,
                "memory_kinds": sorted(memory.kind for memory in device.addressable_memories()),
                "memory_bytes": (device.memory_stats() or {}).get("bytes_limit"),
            }
            for device in devices
        ],
        "libraries": [
            dataclasses.asdict(found) | {"path": found.path and str(found.path), "build_info": dict(found.build_info)}
            for found in map(status, _PLATFORMS["all"])
        ],
        "link": _measure_link(devices[0], link_bytes),
        "self_test": _self_test(devices[0], link_bytes),
        "pinned_limit": {"bytes": pinned.num_bytes, "source": pinned.source},
        "locked_limit_bytes": None if locked == resource.RLIM_INFINITY else locked,
        "cpus": _cpus(),
        "host_memory": [dataclasses.asdict(limit) for limit in host_memory.limits()],
    }


def _ffi_version() -> str | None:
    try:
        return "{}.{}".format(*ffi_version())
    except NativeError:
        return None


def _measure_link(device: jax.Device, num_bytes: int) -> dict[str, Any]:
    """Measures bytes per second from pinned host memory to the device and back: the best of a few device_puts."""
    found: dict[str, Any] = {"bytes": num_bytes, "load_bytes_per_s": None, "store_bytes_per_s": None}
    if "pinned_host" in {memory.kind for memory in device.addressable_memories()}:
        on_device = jax.sharding.SingleDeviceSharding(device)
        on_host = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
        array = jax.device_put(jnp.zeros(num_bytes, jnp.uint8), on_device)
        for name, each, where in (("load", jax.device_put(array, on_host), on_device), ("store", array, on_host)):

            def copy(each: jax.Array = each, where: jax.sharding.Sharding = where) -> None:
                jax.device_put(each, where, may_alias=False).block_until_ready()

            found[f"{name}_bytes_per_s"] = num_bytes / shortest_s(copy)
    return found


def _self_test(device: jax.Device, num_bytes: int) -> dict[str, Any]:
    """Returns each check's result; none, and why, if the device has no library that can be used."""
    found: dict[str, Any] = {"device": device.id, "bytes": num_bytes, "message": None, "checks": []}
    try:
        results = run_self_test(device, num_bytes=num_bytes, measures=True)
    except (InputError, NativeError) as error:
        return found | {"message": str(error)}
    return found | {"checks": [dataclasses.asdict(result) | {"passed": result.passed} for result in results]}


def _cpus() -> dict[str, Any]:
    """Returns how many CPUs the process may use and why, its NUMA nodes, and the sizes of thread pools."""
    threads, source = cpus.num_host_threads()
    return {
        "num_cpus": cpus.num_cpus(),
        "limits": [dataclasses.asdict(limit) for limit in cpus.limits()],
        "numa_nodes": [dataclasses.asdict(node) for node in cpus.numa_nodes()],
        "host_threads": {"num_threads": threads, "source": source},
        "pools": _pools(),
    }


def _pools() -> list[dict[str, Any]]:
    """Returns the pools of XLA's CPU backend, which runs updates that the native library does not, and of OpenBLAS."""
    jax.block_until_ready(jax.device_put(jnp.zeros(()), jax.local_devices(backend="cpu")[0]))
    names = [next(iter(read_lines(path)), "") for path in pathlib.Path("/proc/self/task").glob("*/comm")]
    num = sum(name.startswith(_XLA_THREADS) for name in names)
    source = "NPROC" if os.environ.get("NPROC") else "affinity of the process; NPROC sets another"
    found: list[dict[str, Any]] = [{"name": "XLA's CPU backend", "num_threads": num or None, "source": source}]
    files = {line.split()[-1] for line in read_lines(pathlib.Path("/proc/self/maps")) if "openblas" in line}
    variable = next((name for name in _BLAS_VARIABLES if os.environ.get(name)), None)
    for file in sorted(files):
        library = ctypes.CDLL(file)
        counts = [getattr(library, name)() for name in _BLAS_FUNCTIONS if hasattr(library, name)]
        if counts:
            source = variable or "affinity of the process; OPENBLAS_NUM_THREADS sets another"
            found.append({"name": f"OpenBLAS ({pathlib.Path(file).name})", "num_threads": counts[0], "source": source})
    return found


def _lines(found: dict[str, Any]) -> list[str]:
    versions = ", ".join(f"{name} {version or '(not installed)'}" for name, version in found["versions"].items())
    share = f"JAX's share, {JAX_SHARE:.0%} unless {JAX_SHARE_VARIABLE} is set"
    link, limit, locked = found["link"], found["pinned_limit"], found["locked_limit_bytes"]
    return [
        f"versions   {versions}; XLA FFI {found['ffi_version'] or '(no headers)'}",
        *(
            f"device {device['id']}   {device['platform']} {device['kind']}"
            + ("" if device["memory_bytes"] is None else f", {format_bytes(device['memory_bytes'])} ({share})")
            + f"; memory kinds {', '.join(device['memory_kinds'])}"
            for device in found["devices"]
        ),
        *(
            f"library    {each['platform']}{': ' + each['path'] if each['is_available'] else ''}: {each['message']}"
            for each in found["libraries"]
        ),
        f"link       load {_speed(link['load_bytes_per_s'])}, store {_speed(link['store_bytes_per_s'])}"
        f" (device_put of {format_bytes(link['bytes'])}, device 0)",
        *(f"self-test  {line}" for line in _self_test_lines(found["self_test"])),
        f"pinned     up to {format_bytes(limit['bytes'])} on a GPU ({limit['source']}; set {PINNED_VARIABLE}); "
        f"ulimit -l {'unlimited' if locked is None else format_bytes(locked)}",
        *(f"cpus       {line}" for line in _cpu_lines(found["cpus"])),
        *(f"host       {format_bytes(each['num_bytes'])} left: {each['source']}" for each in found["host_memory"]),
        *(
            f"scratch    read {_speed(disk['read_bytes_per_s'])}, write {_speed(disk['write_bytes_per_s'])}"
            f" ({disk['folder']})"
            for disk in ([found["scratch"]] if "scratch" in found else [])
        ),
    ]


def _cpu_lines(found: dict[str, Any]) -> list[str]:
    num, threads = found["num_cpus"], found["host_threads"]
    limits = ", ".join(f"{limit['num_cpus']:g}: {limit['source']}" for limit in found["limits"])
    nodes = ", ".join(
        f"node {node['number']} with {node['num_cpus']} of them{'' if node['is_allowed'] else ' (memory not allowed)'}"
        for node in found["numa_nodes"]
    )
    pools = [
        f"{pool['num_threads'] or 'unknown number of'} threads of {pool['name']} ({pool['source']})"
        + (f": more than {num} CPUs" if (pool["num_threads"] or 0) > num else "")
        for pool in found["pools"]
    ]
    return [
        f"{num} may be used ({limits})",
        f"NUMA: {nodes or 'not known'}",
        f"{threads['num_threads']} threads of host steps ({threads['source']}; {cpus.VARIABLE} sets another)",
        *pools,
    ]


def _self_test_lines(self_test: dict[str, Any]) -> list[str]:
    if self_test["message"] is not None:
        return [f"not run: {self_test['message']}"]
    where, lines = f"device {self_test['device']}", []
    for check in self_test["checks"]:
        result = "passed" if check["passed"] else f"failed: {check['message']}"
        if check["passed"] and check["bytes_per_s"] is not None:
            result += f", {_speed(check['bytes_per_s'])} ({format_bytes(self_test['bytes'])}, {where})"
        else:
            result += f" ({where})"
        lines.append(f"{check['name']}: {result}")
    return lines


def _speed(bytes_per_s: float | None) -> str:
    return "not measured: no pinned host memory" if bytes_per_s is None else f"{bytes_per_s / 1e9:.2f} GB/s"
