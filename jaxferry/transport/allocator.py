"""A model of XLA's allocator for device memory, which takes more than programs ask for.

"Best fit with coalescing" (XLA, xla/tsl/framework/bfc_allocator.cc) rounds each request up to 256 bytes, takes the
smallest free chunk that holds it, and splits that chunk only if at least half of it, or 128 MiB, would be left. So a
chunk of up to twice the request may be in use, and the allocator reports more than the sum of a step's buffers. Which
chunks are free depends on when copies end, so the model runs several times, with random times.
"""

from __future__ import annotations

import bisect
import dataclasses
import enum
import random
from collections.abc import Sequence

_ROUNDING_BYTES = 256
_LARGEST_REST_BYTES = 128 * 2**20
_FIRST_REGION_BYTES = 2 * 2**20
_NUM_RUNS = 8
_NUM_STEPS = 3


class Allocator(enum.Enum):
    """How XLA's allocator takes memory from a GPU; JAX preallocates unless XLA_PYTHON_CLIENT_PREALLOCATE=false."""

    PREALLOCATED = "preallocated"
    GROWING = "growing"


_SAFETY = {Allocator.PREALLOCATED: 2, Allocator.GROWING: 3}
"""How much more than in the model is left for unsplit chunks. In some 20 random plans on XLA's own allocator, up to 1.7
times as much as in the model was unsplit where it preallocates, and up to 2.0 times as much where it grows."""


_SPARE_BYTES = 2**16  # for scalars and tables of addresses, of which each takes 256 bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Buffer:
    """A request for `num_bytes` of device memory within one step.

    Times are integers that order the events of a step; those below 0 lie in the step before, and those from the step's
    length on in the next one. At equal times, memory is freed before any is requested. `start` and `end` are the
    earliest and the latest times of the request and of its end.
    """

    num_bytes: int
    start: tuple[int, int]
    end: tuple[int, int]


class BestFit:
    """XLA's allocator.

    It takes memory from the device in regions that grow (`kind`), or has one region without end here.

    `in_use` are the bytes of all chunks that are handed out, `requested` those that were asked for.
    """

    def __init__(self, kind: Allocator = Allocator.PREALLOCATED) -> None:
        self._next_region, self._top = _FIRST_REGION_BYTES, 0
        self._free: list[tuple[int, int]] = []
        self._size_at: dict[int, int] = {}
        self._start_of_end: dict[int, int] = {}
        self._taken: dict[int, tuple[int, int]] = {}
        self.in_use = self.requested = 0
        if kind is Allocator.PREALLOCATED:
            self._put(0, 1 << 62)

    def allocate(self, num_bytes: int) -> int:
        """Returns the address of a chunk for so many bytes."""
        needed = max(-(-num_bytes // _ROUNDING_BYTES), 1) * _ROUNDING_BYTES
        index = bisect.bisect_left(self._free, (needed, -1))
        if index == len(self._free):
            self._extend(needed)
            index = bisect.bisect_left(self._free, (needed, -1))
        size, address = self._free[index]
        self._remove(address)
        if size >= 2 * needed or size - needed >= _LARGEST_REST_BYTES:
            self._put(address + needed, size - needed)
            size = needed
        self._taken[address] = size, num_bytes
        self.in_use += size
        self.requested += num_bytes
        return address

    def free(self, address: int) -> None:
        """Frees a chunk, and joins it with free neighbours."""
        size, num_bytes = self._taken.pop(address)
        self.in_use -= size
        self.requested -= num_bytes
        if address + size in self._size_at:
            size += self._remove(address + size)
        if address in self._start_of_end:
            address = self._start_of_end[address]
            size += self._remove(address)
        self._put(address, size)

    def _extend(self, needed: int) -> None:
        """Takes another region from the device: twice the last one, or as often as it takes."""
        doubles = needed <= self._next_region
        while needed > self._next_region:
            self._next_region *= 2
        self._put(self._top, self._next_region)
        # Regions have no common border, so that their chunks are never joined.
        self._top += self._next_region + 1
        if doubles:
            self._next_region *= 2

    def _put(self, address: int, size: int) -> None:
        bisect.insort(self._free, (size, address))
        self._size_at[address], self._start_of_end[address + size] = size, address

    def _remove(self, address: int) -> int:
        size = self._size_at.pop(address)
        del self._start_of_end[address + size]
        del self._free[bisect.bisect_left(self._free, (size, address))]
        return size


def unsplit_bytes(buffers: Sequence[Buffer], step_length: int, kind: Allocator) -> int:
    """Returns the memory to leave for what XLA's allocator hands out beyond the requests of a step, in bytes.

    This is a multiple of the most that runs of the model show: on a device, orders vary more than in these. Where
    memory grows, a whole region that earlier programs have left may be the chunk of a request.
    """
    found = _SAFETY[kind] * max(_run(buffers, step_length, kind, run) for run in range(_NUM_RUNS))
    if kind is Allocator.GROWING:
        found = max(found, *map(_rest_of_region, {buffer.num_bytes for buffer in buffers}))
    return _SPARE_BYTES + found


def _rest_of_region(num_bytes: int) -> int:
    """The bytes beyond a request of the smallest region that holds it, if that is handed out whole."""
    allocator = BestFit(Allocator.GROWING)
    allocator.allocate(num_bytes)
    return allocator.in_use - num_bytes


def _run(buffers: Sequence[Buffer], step_length: int, kind: Allocator, run: int) -> int:
    """The most bytes beyond the requests in one run; the first has the latest times, the second the earliest."""
    generator = random.Random(run)

    def time_in(bounds: tuple[int, int]) -> int:
        first, last = bounds
        return last if run == 0 or first >= last else first if run == 1 else generator.randint(first, last)

    events: list[tuple[int, int, int]] = []
    sizes: list[int] = []
    for step in range(_NUM_STEPS):
        for buffer in (each for each in buffers if each.num_bytes):
            start = time_in(buffer.start)
            end = max(time_in(buffer.end), start + 1)
            events += [(start + step * step_length, 1, len(sizes)), (end + step * step_length, 0, len(sizes))]
            sizes.append(buffer.num_bytes)
    allocator, addresses, most = BestFit(kind), dict[int, int](), 0
    for _, is_start, index in sorted(events):
        if is_start:
            addresses[index] = allocator.allocate(sizes[index])
            most = max(most, allocator.in_use - allocator.requested)
        else:
            allocator.free(addresses.pop(index))
    return most
