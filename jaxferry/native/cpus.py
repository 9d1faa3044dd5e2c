"""How many CPUs the process may use, and how many threads work in host memory.

A machine's own number misleads under `taskset`, a job scheduler, or a container's quota: more threads than CPUs take
turns, and the slowest one ends the work. A limit of any control group above the process's own counts too. Sources:
sched_setaffinity(2), cpuset(7), cgroups(7), Linux's documentation of control groups, versions 1 and 2.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import pathlib
from collections.abc import Iterator

from jaxferry.errors import InputError

_MOUNT = "sys/fs/cgroup"


@dataclasses.dataclass(frozen=True)
class Group:
    """A control group: the folder of its files, and the version of its interface, 1 or 2, which names them."""

    folder: pathlib.Path
    version: int

    def first_line(self, name: str) -> str:
        """Returns the first line of a file; empty if there is none."""
        return next(iter(read_lines(self.folder / name)), "")

    def statistics(self, name: str) -> dict[str, int]:
        """Returns the numbers of a file with a name and a number a line."""
        fields = [line.split() for line in read_lines(self.folder / name)]
        return {field[0]: int(field[1]) for field in fields if len(field) == 2 and field[1].isdigit()}


def groups(controller: str, root: pathlib.Path) -> Iterator[Group]:
    """Yields the process's groups of a controller, each followed by those above it."""
    mount = root / _MOUNT
    for line in read_lines(root / "proc/self/cgroup"):
        fields = line.split(":", 2)
        if len(fields) < 3:
            continue
        _, controllers, path = fields
        if controllers == "":
            mounts, version = [mount, mount / "unified"], 2
        elif controller in controllers.split(","):
            mounts, version = [mount / name for name in dict.fromkeys([controller, controllers])], 1
        else:
            continue
        # In a container the path may be one of the host's, and the mount the container's own group.
        for base in mounts:
            own = base / path.lstrip("/")
            yield from (Group(folder, version) for folder in [own, *own.parents] if folder.is_relative_to(base))


def read_lines(path: pathlib.Path) -> list[str]:
    """Returns the lines of a file; none if it cannot be read."""
    try:
        return path.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return []


VARIABLE = "JAXFERRY_HOST_THREADS"
"""The environment variable that sets the number of threads of the native library's host steps."""

_ROOT = pathlib.Path("/")
_NODES = "sys/devices/system/node"


@dataclasses.dataclass(frozen=True)
class CpuLimit:
    """CPUs that the process may use at a time, of which a quota may be a fraction, and who says so in words."""

    num_cpus: float
    source: str


@dataclasses.dataclass(frozen=True)
class NumaNode:
    """A node of memory, by the kernel's number, with how many of the process's CPUs are next to it."""

    number: int
    num_cpus: int
    is_allowed: bool


def limits(root: pathlib.Path = _ROOT) -> list[CpuLimit]:
    """Returns all limits that the process knows, smallest first; folder `root` holds `proc` and `sys`."""
    found = [CpuLimit(os.cpu_count() or 1, "CPUs of the machine")]
    if (allowed := _affinity()) is not None:
        found.append(CpuLimit(len(allowed), "affinity of the process: taskset, cpuset or job scheduler"))
    for group in groups("cpu", root):
        with contextlib.suppress(ValueError):  # a file in another form says nothing
            found.extend(_quota(group))
    return sorted(found, key=lambda limit: limit.num_cpus)


def num_cpus(root: pathlib.Path = _ROOT) -> int:
    """Returns the number of CPUs that the process may use at once: the smallest limit, a fraction rounded up."""
    return max(1, math.ceil(limits(root)[0].num_cpus))


def num_host_threads(root: pathlib.Path = _ROOT) -> tuple[int, str]:
    """Returns the number of threads that share a host step, including its caller, and who says so in words.

    Raises:
      InputError: if `JAXFERRY_HOST_THREADS` is not a number of threads.
    """
    text = os.environ.get(VARIABLE, "")
    if not text:
        return num_cpus(root), limits(root)[0].source
    try:
        wanted = int(text)
    except ValueError:
        wanted = 0
    if wanted < 1:
        raise InputError(f"{VARIABLE} must be a whole number of threads, 1 or more, got {text!r}: correct or unset it")
    return wanted, VARIABLE


def numa_nodes(root: pathlib.Path = _ROOT) -> list[NumaNode]:
    """Returns the machine's NUMA nodes in order; none on systems that do not tell them."""
    allowed, memory = _affinity(), None
    for line in read_lines(root / "proc/self/status"):
        name, _, value = line.partition(":")
        if name == "Mems_allowed_list":
            memory = _numbers(value)
    found = []
    for folder in (root / _NODES).glob("node[0-9]*"):
        cpus = _numbers(next(iter(read_lines(folder / "cpulist")), ""))
        number = int(folder.name.removeprefix("node"))
        own = cpus if allowed is None else cpus & allowed
        found.append(NumaNode(number, len(own), memory is None or number in memory))
    return sorted(found, key=lambda node: node.number)


def _affinity() -> set[int] | None:
    return set(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None


def _quota(group: Group) -> Iterator[CpuLimit]:
    if group.version == 2:
        name = "cpu.max"
        quota, period = [*group.first_line(name).split(), "", ""][:2]
    else:
        name = "cpu.cfs_quota_us"
        quota, period = group.first_line(name), group.first_line("cpu.cfs_period_us")
    # Without a quota they read "max" and -1.
    if quota.isdigit() and int(period) > 0:
        yield CpuLimit(int(quota) / int(period), f"{name} of the control group")


def _numbers(text: str) -> set[int]:
    """The numbers of a kernel's list such as "0-3,8"."""
    spans = [part.partition("-")[::2] for part in text.strip().split(",") if part]
    return {number for first, last in spans for number in range(int(first), int(last or first) + 1)}
