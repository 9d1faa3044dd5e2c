"""`jaxferry doctor`: reports the capabilities of this machine and installation."""

import dataclasses
import importlib.metadata
import os
import platform
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import typer

from jaxferry import host_memory
from jaxferry.cli import COMMANDS
from jaxferry.cli.common import AsJson, print_json, print_report
from jaxferry.errors import InputError, NativeError
from jaxferry.native import run_self_test, status
from jaxferry.native.library import ffi_version
from jaxferry.native.self_test import shortest_s
from jaxferry.units import format_bytes, parse_bytes

PINNED_LIMIT_VARIABLE = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"

_DEFAULT_PINNED_LIMIT_GB = 64
_PACKAGES = ("jaxferry", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "scipy")


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("doctor", help=COMMANDS["doctor"])(doctor)


def doctor(
    link_size: Annotated[
        str, typer.Option(metavar="SIZE", help="Bytes to transfer when measuring the link and in the self-test.")
    ] = "64MiB",
    as_json: AsJson = False,
) -> None:
    """Prints versions, devices and their memories, native libraries, link speed, and the limits of host memory.

    Runs the native library's self-test on the first device, and prints each result and rate.
    """
    num_bytes = parse_bytes(link_size, "--link-size")
    if num_bytes == 0:
        raise InputError(f"--link-size must be positive, got {link_size}")
    found = examine(num_bytes)
    if as_json:
        print_json(found)
    else:
        print_report(*_lines(found))


def examine(link_bytes: int) -> dict[str, Any]:
    """Returns what the command prints, as JSON.

    Args:
      link_bytes: bytes to transfer when measuring the link between the first device and its pinned host memory, and
        in each check of the self-test there.

    Raises:
      InputError: if JAX has no device, for example because JAX_PLATFORMS names a platform that the machine lacks; if
        the environment's limit of pinned memory is not a number.
    """
    pinned_limit = _pinned_limit()
    try:
        devices = jax.devices()
    except RuntimeError as error:
        raise InputError(
            f"JAX finds no device (JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '')!r}): {error}"
        ) from error
    return {
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in _PACKAGES},
        "ffi_version": _ffi_version(),
        "devices": [_describe(device) for device in devices],
        "libraries": [_library(name) for name in ("cpu", "cuda")],
        "link": _measure_link(devices[0], link_bytes),
        "self_test": _self_test(devices[0], link_bytes),
        "pinned_limit": pinned_limit,
        "host_memory": [dataclasses.asdict(limit) for limit in host_memory.limits()],
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _ffi_version() -> str | None:
    try:
        return "{}.{}".format(*ffi_version())
    except NativeError:
        return None


def _describe(device: jax.Device) -> dict[str, Any]:
    statistics = device.memory_stats() or {}
    return {
        "id": device.id,
        "platform": device.platform,
        "kind": device.device_kind,
        "memory_kinds": sorted(memory.kind for memory in device.addressable_memories()),
        "memory_bytes": statistics.get("bytes_limit"),
    }


def _library(name: str) -> dict[str, Any]:
    found = status(name)
    path = None if found.path is None else str(found.path)
    return dataclasses.asdict(found) | {"path": path, "build_info": dict(found.build_info)}


def _measure_link(device: jax.Device, num_bytes: int) -> dict[str, Any]:
    """Measures bytes per second from pinned host memory to the device and back: the best of a few device_puts."""
    kinds = {memory.kind for memory in device.addressable_memories()}
    if "pinned_host" not in kinds:
        return {"bytes": num_bytes, "load_bytes_per_s": None, "store_bytes_per_s": None}
    on_device = jax.sharding.SingleDeviceSharding(device)
    on_host = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    array = jax.device_put(jnp.zeros(num_bytes, jnp.uint8), on_device)
    there = jax.device_put(array, on_host)
    load_s, store_s = _copy_s(there, on_device), _copy_s(array, on_host)
    return {"bytes": num_bytes, "load_bytes_per_s": num_bytes / load_s, "store_bytes_per_s": num_bytes / store_s}


def _copy_s(array: jax.Array, where: jax.sharding.Sharding) -> float:
    def copy() -> None:
        jax.device_put(array, where, may_alias=False).block_until_ready()

    copy()
    return shortest_s(copy)


def _self_test(device: jax.Device, num_bytes: int) -> dict[str, Any]:
    """Returns each check's result; none, and why, if the device has no library that can be used."""
    found: dict[str, Any] = {"device": device.id, "bytes": num_bytes, "message": None, "checks": []}
    try:
        results = run_self_test(device, num_bytes=num_bytes, measures=True)
    except (InputError, NativeError) as error:
        return found | {"message": str(error)}
    return found | {"checks": [dataclasses.asdict(result) | {"passed": result.passed} for result in results]}


def _pinned_limit() -> dict[str, Any]:
    """Returns XLA's limit of pinned host memory on a GPU, in bytes, and its source."""
    text = os.environ.get(PINNED_LIMIT_VARIABLE)
    if text is None:
        return {"bytes": _DEFAULT_PINNED_LIMIT_GB * 2**30, "source": "default"}
    try:
        return {"bytes": int(text) * 2**30, "source": PINNED_LIMIT_VARIABLE}
    except ValueError as error:
        raise InputError(f"{PINNED_LIMIT_VARIABLE} must be a whole number of GiB, got {text!r}") from error


def _lines(found: dict[str, Any]) -> list[str]:
    versions = ", ".join(f"{name} {version or '(not installed)'}" for name, version in found["versions"].items())
    link, limit = found["link"], found["pinned_limit"]
    return [
        f"versions   {versions}; XLA FFI {found['ffi_version'] or '(no headers)'}",
        *(f"device {device['id']}   {_device_line(device)}" for device in found["devices"]),
        *(f"library    {_library_line(library)}" for library in found["libraries"]),
        f"link       load {_speed(link['load_bytes_per_s'])}, store {_speed(link['store_bytes_per_s'])}"
        f" (device_put of {format_bytes(link['bytes'])}, device 0)",
        *(f"self-test  {line}" for line in _self_test_lines(found["self_test"])),
        f"pinned     up to {format_bytes(limit['bytes'])} on a GPU ({limit['source']}; set {PINNED_LIMIT_VARIABLE})",
        *(f"host       {format_bytes(each['num_bytes'])} left: {each['source']}" for each in found["host_memory"]),
    ]


def _device_line(device: dict[str, Any]) -> str:
    memory = "" if device["memory_bytes"] is None else f", {format_bytes(device['memory_bytes'])}"
    return f"{device['platform']} {device['kind']}{memory}; memory kinds {', '.join(device['memory_kinds'])}"


def _library_line(library: dict[str, Any]) -> str:
    if not library["is_available"]:
        return f"{library['platform']}: {library['message']}"
    return f"{library['platform']}: {library['path']}: {library['message']}"


def _self_test_lines(self_test: dict[str, Any]) -> list[str]:
    if self_test["message"] is not None:
        return [f"not run: {self_test['message']}"]
    return [f"{check['name']}: {_check_line(check, self_test)}" for check in self_test["checks"]]


def _check_line(check: dict[str, Any], self_test: dict[str, Any]) -> str:
    where = f"device {self_test['device']}"
    if not check["passed"]:
        return f"failed: {check['message']} ({where})"
    if check["bytes_per_s"] is None:
        return f"passed ({where})"
    return f"passed, {_speed(check['bytes_per_s'])} ({format_bytes(self_test['bytes'])}, {where})"


def _speed(bytes_per_s: float | None) -> str:
    return "not measured: no pinned host memory" if bytes_per_s is None else f"{bytes_per_s / 1e9:.2f} GB/s"
