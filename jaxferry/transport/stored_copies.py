"""Copies of gradients to host memory that the native library has queued."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import jax

from jaxferry.native import NativeLibrary
from jaxferry.transport.held import delete_all
from jaxferry.transport.orphaned_copies import InFlight
from jaxferry.transport.pinned import Vectors

Waiter = Callable[[Sequence[jax.Array]], Sequence[jax.Array]]


class StoredCopy:
    """One gradient on its way to host memory.

    Args:
      native: the library that copies.
      vectors: where it goes, as returned by the program that has queued the copies.
      sources: the arrays that are copied.
      landed: a program that makes the device wait for copies of arrays, which it is donated, and returns them.
      in_flight: the transport's copies that have not ended; this one is among them until it has.

    Attributes:
      arrays: the vectors.
      gradient: returns the gradient that the copy is for, or None once nobody has it any more.
    """

    def __init__(
        self,
        native: NativeLibrary,
        vectors: Vectors,
        sources: Sequence[jax.Array],
        landed: Waiter,
        in_flight: InFlight,
    ) -> None:
        self.arrays = vectors
        self.gradient: Callable[[], object] = lambda: self
        self._native, self._sources, self._landed, self._in_flight = native, sources, landed, in_flight
        self._lock = threading.Lock()
        in_flight[id(self)] = (self, sources)

    def wait(self) -> None:
        """Waits on the host until the copy has ended, and frees its sources."""
        # After this, the copy is on its queue.
        jax.block_until_ready(self.arrays)
        addresses = [array.unsafe_buffer_pointer() for array in self.arrays]
        self._native.wait_for(addresses, [array.nbytes for array in self.arrays])
        self.forget()

    def settle(self) -> None:
        """See `CopyInFlight`: copies end in their order."""
        self.forget()

    def hold(self) -> None:
        """Makes the device wait for the copy before its next program, and frees the sources for that program."""
        if sources := self.take_sources():
            delete_all(self._landed(sources))

    def take_sources(self) -> Sequence[jax.Array]:
        """The arrays that are copied, for whoever waits for the copy and frees them; none if that is done."""
        with self._lock:
            taken, self._sources = self._sources, ()
        return taken

    def forget(self) -> None:
        """Frees the sources. The copy has ended, or the device waits for it and for what replaces the vectors."""
        delete_all(self.take_sources())
        self._in_flight.pop(id(self), None)


def hold_together(copies: Sequence[StoredCopy], landed: Waiter, keeps_freed: bool) -> None:
    """Makes the device wait for copies before its next program, and frees their sources for that program.

    Args:
      copies: the copies, in their order, in which they end.
      landed: as in `StoredCopy`.
      keeps_freed: whether freed memory stays as it is until the device has run what was issued before. Then the device
        waits for the last copy alone. A CPU's memory does not, so what a copy still reads goes to a program that waits.
    """
    taken = [copy.take_sources() for copy in copies]
    for sources in taken[-1:] if keeps_freed else _joined(taken):
        if sources:
            delete_all(landed(sources))
    for sources in taken[:-1] if keeps_freed else ():
        delete_all(sources)


def _joined(taken: list[Sequence[jax.Array]]) -> Iterator[list[jax.Array]]:
    """The sources of several copies together, so many that the numbers of arrays, and so of programs, are few."""
    left = [sources for sources in taken if sources]
    while left:
        num = 1 << (len(left).bit_length() - 1)
        yield [array for sources in left[:num] for array in sources]
        left = left[num:]
