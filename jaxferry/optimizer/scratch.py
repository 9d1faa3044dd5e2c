"""A file for what host memory does not hold, and arrays in it.

The file has no name, so it goes with the process, however that ends. Its room is taken before anything is written.
Blocks are large and aligned, and pass the kernel's page cache by (O_DIRECT) where the file system can do that. Each has
a checksum in memory, so a flipped bit is an error when the block is read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import mmap
import os
import tempfile
import threading
import time
import weakref
import zlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxferry.errors import HostMemoryError, InputError, ScratchError, described
from jaxferry.optimizer.split_masters import LazyArray
from jaxferry.settings import ThreadPool
from jaxferry.units import format_bytes

_ALIGNMENT = 4096
_BLOCK_BYTES = 8 * 2**20
_NUM_THREADS = 4
_MEASURED_BYTES = 16 * 2**20


class Scratch:
    """A file in a folder; raises `InputError` if no file can be made there.

    Attributes:
      slot_bytes: the most memory that arrays take which are read, and those that are kept for them.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = os.path.abspath(os.fspath(folder))
        try:
            with tempfile.TemporaryFile(dir=self.folder, prefix="jaxferry-", buffering=0) as file:
                self._file = os.dup(file.fileno())
        except OSError as error:
            what = f"got {self.folder!r}: {described(error)}"
            raise InputError(f"scratch must be a folder to write to, {what}") from error
        weakref.finalize(self, os.close, self._file).atexit = False  # updates may run until the process ends
        with contextlib.suppress(OSError):  # of a file system in memory, say
            fcntl.fcntl(self._file, fcntl.F_SETFL, fcntl.fcntl(self._file, fcntl.F_GETFL) | os.O_DIRECT)
        self._end, self._free = 0, dict[int, list[int]]()
        self._lock, self._slots, self._own = threading.Lock(), threading.Lock(), threading.local()
        self._threads = ThreadPool(_NUM_THREADS, "jaxferry disk")
        self._spare: list[Any] = []
        self._lent_bytes = self.slot_bytes = 0

    def region(self, num_bytes: int) -> Region:
        """Takes room for so many bytes; raises `HostMemoryError` if the disk has none."""
        size = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        with self._lock:
            known = self._free.get(size)
            start = known.pop() if known else self._end
            if start == self._end:
                try:
                    os.posix_fallocate(self._file, start, size)
                except OSError as error:
                    with contextlib.suppress(OSError):
                        os.ftruncate(self._file, start)  # it may have taken what the disk had
                    what = f"has no room for a file of {format_bytes(start + size)}: {described(error)}"
                    raise HostMemoryError(f"scratch={self.folder!r} {what}") from error
                self._end += size
        made = Region(self, start, num_bytes)
        weakref.finalize(made, self._release, start, size).atexit = False
        return made

    def _release(self, start: int, size: int) -> None:
        self._free.setdefault(size, []).append(start)  # atomic; a finalizer must not lock

    def move(self, region: Region, start: int, memory: np.ndarray, is_read: bool) -> None:
        """Reads bytes of a region from `start` on into memory, or writes all of them.

        Raises `ScratchError` if the disk fails, or a block is not what was written.
        """
        transfer = self._read if is_read else self._write
        blocks = range(start // _BLOCK_BYTES, -(-(start + memory.size) // _BLOCK_BYTES))
        if len(blocks) == 1:
            transfer(region, blocks[0], start, memory)
        else:
            for done in [self._threads.submit(transfer, region, block, start, memory) for block in blocks]:
                done.result()

    def _bounce(self) -> mmap.mmap:
        """This thread's aligned memory for a block."""
        if not hasattr(self._own, "bounce"):
            self._own.bounce = mmap.mmap(-1, _BLOCK_BYTES)
        found: mmap.mmap = self._own.bounce
        return found

    def _read(self, region: Region, block: int, start: int, memory: np.ndarray) -> None:
        """Reads a whole block, to compare its checksum, and copies what is wanted of it."""
        low, size = region.block(block)
        self._all(os.preadv, size, region.start + low)
        content = np.frombuffer(self._bounce(), np.uint8, size)
        if zlib.crc32(content.data) != region.checksums[block]:
            raise ScratchError(f"the scratch file in {self.folder} is damaged: a block is not what was written")
        first, stop = max(start, low), min(start + memory.size, low + size)
        memory[first - start : stop - start] = content[first - low : stop - low]

    def _write(self, region: Region, block: int, start: int, memory: np.ndarray) -> None:
        low, size = region.block(block)
        content = np.frombuffer(self._bounce(), np.uint8, size)
        content[:] = memory[low : low + size]
        region.checksums[block] = zlib.crc32(content.data)
        self._all(os.pwritev, size, region.start + low)

    def _all(self, call: Callable[..., int], size: int, start: int) -> None:
        """Reads or writes so many bytes of this thread's block, up to the next place that is aligned."""
        done, num_bytes = 0, -(-size // _ALIGNMENT) * _ALIGNMENT
        with memoryview(self._bounce()) as view:
            while done < num_bytes:
                try:
                    num = call(self._file, [view[done:num_bytes]], start + done)
                except OSError as error:
                    raise ScratchError(f"the scratch file in {self.folder} failed: {error.strerror}") from error
                if num <= 0:
                    raise ScratchError(f"the scratch file in {self.folder} ends too early")
                done += num

    def slot(self, like: OnDiskArray, is_numpy: bool) -> Any:
        """An array of the same shape and dtype whose memory is kept, of NumPy's or JAX's; None if there is none."""
        wanted = is_numpy, like.shape, like.dtype
        with self._slots:
            self._lent_bytes += like.nbytes
            for number, array in enumerate(self._spare):
                if (isinstance(array, np.ndarray), tuple(array.shape), array.dtype) == wanted:
                    return self._spare.pop(number)
        return None

    def keep(self, array: Any, lent_bytes: int) -> None:
        """Keeps the memory of an array that is in the file now, in place of `lent_bytes` that `slot` has given.

        All that is kept and given takes `slot_bytes` at most.
        """
        with self._slots:
            self._lent_bytes -= lent_bytes
            if not (isinstance(array, jax.Array) and array.is_deleted()):
                self._spare.append(array)
            while self._spare and self._lent_bytes + sum(each.nbytes for each in self._spare) > self.slot_bytes:
                self._spare.pop(0)

    def seconds_a_byte(self) -> tuple[float, float]:
        """Measures what a byte takes from the file, and to it."""
        region, memory = self.region(_MEASURED_BYTES), np.ones(_MEASURED_BYTES, np.uint8)
        times = [time.perf_counter()]
        for is_read in (False, True):
            self.move(region, 0, memory, is_read)
            times.append(time.perf_counter())
        return (times[2] - times[1]) / _MEASURED_BYTES, (times[1] - times[0]) / _MEASURED_BYTES


@dataclasses.dataclass(frozen=True, eq=False)
class Region:
    """Bytes of a scratch file, which are free once nobody holds this; `checksums` are of its blocks.

    It may be the beginning of a `whole` one, whose bytes it has.
    """

    scratch: Scratch
    start: int
    num_bytes: int
    checksums: dict[int, int] = dataclasses.field(default_factory=dict)
    whole: Region | None = None

    def first(self, num_bytes: int) -> Region:
        """A region for fewer bytes in this one's room, of which nothing is read any more."""
        return Region(self.scratch, self.start, num_bytes, whole=self)

    def block(self, number: int) -> tuple[int, int]:
        """Where a block begins, and its bytes."""
        low = number * _BLOCK_BYTES
        return low, min(_BLOCK_BYTES, self.num_bytes - low)


class OnDiskArray(LazyArray):
    """An array in a scratch file, which NumPy reads."""

    def __init__(self, region: Region, shape: tuple[int, ...], dtype: Any) -> None:
        super().__init__(shape, np.dtype(dtype))
        self.region = region

    def elements(self, start: int, size: int) -> np.ndarray:
        """See `LazyArray`."""
        made = np.empty(size, self.dtype)
        self._move(start * self.itemsize, made, is_read=True)
        return made

    def read(self, into: np.ndarray) -> None:
        """Reads all elements."""
        self._move(0, into, is_read=True)

    def write(self, array: np.ndarray) -> None:
        """Writes all elements."""
        self._move(0, array, is_read=False)

    def _move(self, start: int, memory: np.ndarray, is_read: bool) -> None:
        region = self.region
        region.scratch.move(region, start, memory.reshape(-1).view(np.uint8), is_read)
