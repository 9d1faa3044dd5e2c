"""Copies of gradients to host memory that the native library has queued."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import jax

from jaxferry.engine.host.pinned import Vectors
from jaxferry.engine.transport.base import delete_all
from jaxferry.engine.transport.orphaned_copies import InFlight
from jaxferry.native import NativeLibrary

Waiter = Callable[[Sequence[jax.Array]], Sequence[jax.Array]]


class StoredCopy:
    """One gradient on its way to host memory.

    Args:
      native: the library that copies.
      vectors: where it goes, as returned by the program that has queued the copies.
      sources: the arrays that are copied.
      wait: a program that makes the device wait for copies of these arrays, and returns the arrays.
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
        wait: Waiter,
        in_flight: InFlight,
    ) -> None:
        self.arrays = vectors
        self.gradient: Callable[[], object] = lambda: self
        self._native, self._sources, self._wait, self._in_flight = native, sources, wait, in_flight
        self._lock = threading.Lock()
        in_flight[id(self)] = (self, sources)

    def wait(self) -> None:
        """Waits on the host until the copy has ended, and frees its sources."""
        # After this, the copy is on its queue.
        for array in self.arrays:
            array.block_until_ready()
        addresses = [array.unsafe_buffer_pointer() for array in self.arrays]
        self._native.wait_for(addresses, [array.nbytes for array in self.arrays])
        self.forget()

    def settle(self) -> None:
        """See `CopyInFlight`: copies end in their order."""
        self.forget()

    def hold(self) -> None:
        """Makes the device wait for the copy before its next program, and frees the sources for that program."""
        with self._lock:
            if self._sources:
                delete_all(self._wait(self._sources))
                self._sources = ()

    def forget(self) -> None:
        """Frees the sources. The copy has ended, or the device waits for it and for what replaces the vectors."""
        with self._lock:
            delete_all(self._sources)
            self._sources = ()
        self._in_flight.pop(id(self), None)
