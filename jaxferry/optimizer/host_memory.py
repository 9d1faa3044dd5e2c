"""How much host memory the process may still take, and whether training needs more.

Without the check, too little memory shows as an error of the allocator, an abort of XLA, or a kill by the kernel, hours
into a run. Sources: proc_meminfo(5), proc_pid_statm(5), getrlimit(2), and Linux's documentation of control groups.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import pathlib
import resource
import sys
from collections.abc import Iterator, Mapping

from jaxferry.errors import HostMemoryError, InputError
from jaxferry.native import groups, read_lines
from jaxferry.units import format_apart, format_bytes, parse_bytes

VARIABLE = "JAXFERRY_HOST_MEMORY"
"""The environment variable that names the host memory that training may take, or `off` for no check."""

PINNED_VARIABLE = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
"""XLA's environment variable for the most pinned host memory that a process may take on GPUs."""
_DEFAULT_PINNED_GB = 64
_FIRST_REGION_BYTES = 2**21
SLOTS = "slots for the disk"
PINNED = ("compute copy", "gradients", "sums of gradients", "copies to read in place", "saved activations")
"""What of a training step's host memory is pinned, for any plan."""

_ROOT = pathlib.Path("/")

# From mallopt(3): glibc's smallest and largest threshold from which blocks are mapped apart, and returned when freed.
_MALLOPT = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_SMALLEST_MAPPED, _LARGEST_MAPPED = 1 << 17, 1 << 25
_OF_USER = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")
_thresholds: dict[str, int | None] = {"mapped": None}

_UNLIMITED = 1 << 60
"""Limits from here on are none; control groups of version 1 write the largest page number times the page's size."""

_OF_PROCESS = (
    (resource.RLIMIT_AS, 0, "address space of the process, ulimit -v"),
    (resource.RLIMIT_DATA, 5, "data of the process, ulimit -d"),
)
"""Limits of the process, each with the field of `statm` that counts against it."""


@dataclasses.dataclass(frozen=True)
class _Names:
    """Names of a control group's files.

    Beyond `memory.max` the kernel ends processes, beyond `memory.high` it slows them down to a crawl. `taken` is
    without swap. `reclaimable` are counts of `memory.stat`: the kernel gives this memory back before it refuses any,
    as `MemAvailable` of the machine assumes; pages of a file that was read twice are active. Version 1 does not tell
    its slab.
    """

    limits: tuple[str, ...]
    taken: str
    reclaimable: tuple[str, ...]


_OF_GROUP = {
    1: _Names(("memory.limit_in_bytes",), "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")),
    2: _Names(("memory.max", "memory.high"), "memory.current", ("active_file", "inactive_file", "slab_reclaimable")),
}


@dataclasses.dataclass(frozen=True)
class Limit:
    """Host memory that the process may still take, and who says so in words."""

    num_bytes: int
    source: str


def limits(root: pathlib.Path = _ROOT) -> list[Limit]:
    """All limits that the process knows, smallest first; none elsewhere. Folder `root` holds `proc` and `sys`."""
    found: list[Limit] = []
    for source in (_of_machine, _of_control_groups, _of_process):
        with contextlib.suppress(ValueError, IndexError):  # a file in another form says nothing
            found.extend(source(root))
    return sorted(found, key=lambda limit: limit.num_bytes)


def less_state(has_disk: bool = False) -> str:
    """How the user makes masters and optimizer state smaller in host memory."""
    disk = "" if has_disk else "keep optimizer state on a disk (scratch=), "
    return f"freeze parameters (trainable=), {disk}or take an optimizer with less"


def check(
    needed: Mapping[str, int],
    what: str = "training",
    remedy: str = less_state(),
    held_bytes: int = 0,
    existing_bytes: int = 0,
) -> None:
    """Checks that there is enough host memory, before any is allocated.

    `needed` has bytes by what they are for, of which `existing_bytes` are allocated already. `what` needs them, and
    `remedy` is what the user can do besides freeing memory. `held_bytes` are what training takes besides: they count
    against `JAXFERRY_HOST_MEMORY`; the other limits tell what is left beside them.

    Raises:
      HostMemoryError: if there is too little; it names the number, the limit, and remedies.
      InputError: if `JAXFERRY_HOST_MEMORY` is neither a size nor `off`.
    """
    known, total = _left(held_bytes, existing_bytes), sum(needed.values())
    if not known or total <= known[0].num_bytes:
        return
    parts = ", ".join(f"{name} {format_bytes(num_bytes)}" for name, num_bytes in needed.items() if num_bytes)
    needs, left = format_apart(total, known[0].num_bytes)
    raise HostMemoryError(
        f"{what} needs {needs} of host memory ({parts}), but only {left} "
        f"are available ({known[0].source}): free or add memory, raise the limit, {remedy}; "
        f"{VARIABLE}=off checks nothing"
    )


def _left(held_bytes: int, existing_bytes: int = 0) -> list[Limit]:
    """What is left of each limit, see `check`."""
    text = os.environ.get(VARIABLE, "")
    if text == "off":
        return []
    if text:
        left_bytes = max(parse_bytes(text, VARIABLE) - held_bytes, 0)
        held = f"={text}, of which training takes {format_bytes(held_bytes)}" if held_bytes else ""
        return [Limit(left_bytes, f"{VARIABLE}{held}")]
    return [dataclasses.replace(limit, num_bytes=limit.num_bytes + existing_bytes) for limit in limits()]


def left_bytes(needed_bytes: int, held_bytes: int) -> int | None:
    """The bytes that are left beside these, see `check`; None if there is no limit."""
    known = _left(held_bytes)
    return max(known[0].num_bytes - needed_bytes, 0) if known else None


def pinned_limit(root: pathlib.Path = _ROOT) -> Limit:
    """XLA's limit of pinned host memory on GPUs; raises `InputError` for one that is no number.

    Under WSL2, Windows has another one, which it does not state.
    """
    text = os.environ.get(PINNED_VARIABLE)
    if text is not None and not text.strip().isdecimal():
        raise InputError(f"{PINNED_VARIABLE} must be a whole number of GiB, got {text!r}")
    num_gb = _DEFAULT_PINNED_GB if text is None else int(text)
    is_wsl = "microsoft" in "".join(read_lines(root / "proc/version")).lower()
    windows = "; under WSL2, Windows may pin less" if is_wsl else ""
    return Limit(num_gb << 30, f"{'default' if text is None else PINNED_VARIABLE}{windows}")


def pinned_bytes(needed: Mapping[str, int], streamed_bytes: int = 0) -> int:
    """Returns the bytes of a step's host memory that are pinned on a GPU, with what streams through the GPU."""
    return sum(needed.get(name, 0) for name in PINNED) + streamed_bytes


def pinned_problem(num_bytes: int) -> str:
    """Why XLA's pool of pinned memory is too small for so many bytes, with the remedy; empty if it is not."""
    limit = pinned_limit()
    if num_bytes <= limit.num_bytes:
        return ""
    needs, there = format_apart(num_bytes, limit.num_bytes)
    return (
        f"{needs} of host memory must be pinned, and XLA pins up to {there} ({limit.source}): "
        f"set {_with_limit_for(num_bytes)} or more before the process starts"
    )


def pinned_pool_bytes(num_bytes: int) -> int:
    """What XLA's pool of pinned memory takes from the machine for so many bytes that are asked for.

    Each region of the pool is twice as large as the one before, up to the limit (`BFCAllocator::Extend` of XLA).
    """
    taken, region = 0, _FIRST_REGION_BYTES
    while taken < num_bytes:
        taken, region = taken + region, 2 * region
    return max(min(taken, pinned_limit().num_bytes), num_bytes)


def unused_of_pool(num_bytes: int) -> int:
    """What XLA's pool of pinned memory takes beyond so many bytes that are asked for."""
    return pinned_pool_bytes(num_bytes) - num_bytes


def pinned_advice(num_bytes: int) -> str:
    """How to keep XLA's pool from growing far beyond so many bytes; empty if it does not."""
    spare_bytes = unused_of_pool(num_bytes)
    if spare_bytes < 2**30:
        return ""
    return f"{_with_limit_for(num_bytes)} keeps XLA from pinning {format_bytes(spare_bytes)} more"


def check_pinned(num_bytes: int) -> None:
    """Raises `HostMemoryError` unless XLA will pin so many bytes for a training step on a GPU."""
    problem = pinned_problem(num_bytes)
    if problem and os.environ.get(VARIABLE) != "off":
        raise HostMemoryError(f"{problem}; {VARIABLE}=off checks nothing")


def _with_limit_for(num_bytes: int) -> str:
    return f"{PINNED_VARIABLE}={-(-num_bytes // 2**30)}"


def return_freed_blocks() -> None:
    """Makes the C library return large blocks to the system as soon as they are freed, from now on.

    It stops to do so once a large block has been freed, and puts later ones into heaps of each thread: then a state
    that is made after such frees, as after reading files, lies between holes that the process keeps. Call this before
    a state is made, and `reuse_freed_blocks` when all of its memory exists. Thresholds that the environment sets
    (mallopt(3): `MALLOC_MMAP_THRESHOLD_` and others) stay.
    """
    _set_thresholds(_SMALLEST_MAPPED, _SMALLEST_MAPPED)


def reuse_freed_blocks() -> None:
    """Makes the C library keep freed blocks for later ones again, which is faster; see `return_freed_blocks`."""
    if _thresholds["mapped"] == _SMALLEST_MAPPED:
        _set_thresholds(_LARGEST_MAPPED, 2 * _LARGEST_MAPPED)


def _set_thresholds(mapped: int, trimmed: int) -> None:
    # Only glibc has these thresholds, and they are of the whole process.
    is_given = any(name in os.environ for name in _OF_USER)
    if _MALLOPT is not None and not is_given and _thresholds["mapped"] != mapped:
        _MALLOPT(_M_MMAP_THRESHOLD, mapped)
        _MALLOPT(_M_TRIM_THRESHOLD, trimmed)
        _thresholds["mapped"] = mapped


def _of_machine(root: pathlib.Path) -> Iterator[Limit]:
    for line in read_lines(root / "proc/meminfo"):
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            yield Limit(1024 * int(value.split()[0]), "MemAvailable of the machine")


def _of_process(root: pathlib.Path) -> Iterator[Limit]:
    sizes = [int(size) for size in " ".join(read_lines(root / "proc/self/statm")).split()]
    for most, number, source in _OF_PROCESS:
        soft, _ = resource.getrlimit(most)
        if soft != resource.RLIM_INFINITY and sizes:
            yield Limit(max(soft - sizes[number] * resource.getpagesize(), 0), source)


def _of_control_groups(root: pathlib.Path) -> Iterator[Limit]:
    for group in groups("memory", root):
        names = _OF_GROUP[group.version]
        taken = group.first_line(names.taken)
        if not taken.isdigit():
            continue
        counts = group.statistics("memory.stat")
        free = min(sum(counts.get(name, 0) for name in names.reclaimable), int(taken))
        for name in names.limits:
            most = group.first_line(name)
            if most.isdigit() and int(most) < _UNLIMITED:
                yield Limit(max(int(most) - int(taken) + free, 0), f"{name} of the control group")
