"""How much host memory the process may still take, and whether training needs more.

Without the check, too little memory shows as an error of the allocator, an abort of XLA, or a kill by the kernel, hours
into a run. Sources: proc_meminfo(5), proc_pid_statm(5), getrlimit(2), and Linux's documentation of control groups.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import resource
from collections.abc import Iterator, Mapping

from jaxferry.errors import HostMemoryError
from jaxferry.units import format_bytes, parse_bytes

VARIABLE = "JAXFERRY_HOST_MEMORY"
"""The environment variable that names the host memory that training may take, or `off` for no check."""

_ROOT = pathlib.Path("/")
_UNLIMITED = 1 << 60
"""Limits from here on are none; control groups of version 1 write the largest page number times the page's size."""


@dataclasses.dataclass(frozen=True)
class Limit:
    """Host memory that the process may still take.

    Attributes:
      num_bytes: how much.
      source: who says so, in words.
    """

    num_bytes: int
    source: str


def limits(root: pathlib.Path = _ROOT) -> list[Limit]:
    """All limits that the process knows, smallest first; empty on systems without them.

    Args:
      root: the folder that holds `proc` and `sys`.
    """
    found: list[Limit] = []
    for source in (_of_machine, _of_control_groups, _of_process):
        with contextlib.suppress(ValueError, IndexError):  # a file in another form says nothing
            found.extend(source(root))
    return sorted(found, key=lambda limit: limit.num_bytes)


def check(needed: Mapping[str, int]) -> None:
    """Checks that there is enough host memory, before any is allocated.

    Args:
      needed: bytes by what they are for.

    Raises:
      HostMemoryError: if there is too little; it names the number, the limit, and remedies.
      InputError: if `JAXFERRY_HOST_MEMORY` is neither a size nor `off`.
    """
    given = os.environ.get(VARIABLE, "")
    if given == "off":
        return
    known = [Limit(parse_bytes(given, VARIABLE), VARIABLE)] if given else limits()
    total = sum(needed.values())
    if not known or total <= known[0].num_bytes:
        return
    parts = ", ".join(f"{name} {format_bytes(num_bytes)}" for name, num_bytes in needed.items() if num_bytes)
    raise HostMemoryError(
        f"training needs {format_bytes(total)} of host memory ({parts}), but only {format_bytes(known[0].num_bytes)} "
        f"are available ({known[0].source}): free or add memory, raise the limit, freeze parameters (trainable=), or "
        f"take an optimizer with less state; {VARIABLE}=off checks nothing"
    )


def _of_machine(root: pathlib.Path) -> Iterator[Limit]:
    for line in _lines(root / "proc/meminfo"):
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            yield Limit(1024 * int(value.split()[0]), "MemAvailable of the machine")


def _of_process(root: pathlib.Path) -> Iterator[Limit]:
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    sizes = _lines(root / "proc/self/statm")
    if soft != resource.RLIM_INFINITY and sizes:
        taken = int(sizes[0].split()[0]) * resource.getpagesize()
        yield Limit(max(soft - taken, 0), "address space of the process, ulimit -v")


def _of_control_groups(root: pathlib.Path) -> Iterator[Limit]:
    for line in _lines(root / "proc/self/cgroup"):
        fields = line.split(":", 2)
        if len(fields) < 3:
            continue
        _, controllers, path = fields
        if controllers == "":
            mount, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            mount = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        # In a container the path may be one of the host's, and the mount the container's own group.
        for folder in dict.fromkeys([mount / path.lstrip("/"), *(mount / path.lstrip("/")).parents]):
            if folder.is_relative_to(mount):
                yield from _of_group(folder, *names)


def _of_group(folder: pathlib.Path, most: str, taken: str, cached: str) -> Iterator[Limit]:
    limit, usage = _lines(folder / most), _lines(folder / taken)
    is_known = limit and usage and limit[0].isdigit() and usage[0].isdigit()
    if not is_known or int(limit[0]) >= _UNLIMITED:
        return
    # The kernel gives files' pages back before it refuses memory.
    counts = [line.split() for line in _lines(folder / "memory.stat")]
    reclaimable = sum(int(count[1]) for count in counts if len(count) == 2 and count[0] == cached)
    left = int(limit[0]) - int(usage[0]) + reclaimable
    yield Limit(max(left, 0), f"{most} of the control group")


def _lines(path: pathlib.Path) -> list[str]:
    try:
        return path.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return []
