"""Copies that are still under way when the transport that issued them is gone: a thread waits for their end.

Python's collector calls finalizers wherever Python allocates, up to 3.11 even in the middle of JAX's own code. There
JAX keeps the stack that it is noting in a buffer of the thread (jaxlib/traceback.cc), so a function of JAX that notes
one as well, as `jax.block_until_ready` does, spoils it, and Python crashes some time later. So a finalizer here calls
nothing of JAX, nor anything that takes a lock: it hands over.
"""

from __future__ import annotations

import atexit
import contextlib
import queue
import threading
import weakref
from typing import Any

import jax

from jaxferry.native import NativeLibrary

InFlight = dict[int, tuple[Any, Any]]
"""By any key, what holds arrays of a copy that nobody has waited for, and the vectors that it reads."""


class OrphanedCopies:
    """The thread that waits; it ends with the process, after all copies."""

    def __init__(self) -> None:
        self._left: queue.SimpleQueue[tuple[NativeLibrary, InFlight] | None] = queue.SimpleQueue()
        self._owners: list[tuple[weakref.finalize[Any, Any], NativeLibrary]] = []
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def watch(self, owner: object, native: NativeLibrary, in_flight: InFlight) -> None:
        """Has the copies that are under way waited for once their owner is gone, or the process ends."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="jaxferry left copies", daemon=True)
                self._thread.start()
                # After the library, which is loaded: at the end it comes before that frees what it has.
                atexit.register(self._end)
            finalizer = weakref.finalize(owner, self._left.put, (native, in_flight))
            finalizer.atexit = False
            self._owners = [known for known in self._owners if known[0].alive]
            self._owners.append((finalizer, native))

    def _run(self) -> None:
        while (left := self._left.get()) is not None:
            _wait_for_all(*left)
            del left

    def _end(self) -> None:
        for finalizer, native in self._owners:
            if finalizer.alive:
                native.finish()
                finalizer()
        self._left.put(None)
        if self._thread is not None:
            self._thread.join()


ORPHANED_COPIES = OrphanedCopies()


def _wait_for_all(native: NativeLibrary, in_flight: InFlight) -> None:
    if in_flight:
        with contextlib.suppress(RuntimeError):  # of a load that has failed nothing is under way
            # Then all that was issued has been put onto its queue.
            jax.block_until_ready([held.arrays for held, _ in list(in_flight.values())])
        native.synchronize()
        in_flight.clear()
