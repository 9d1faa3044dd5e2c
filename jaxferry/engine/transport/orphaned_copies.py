"""Waits in a thread for copies that are still in flight when the transport that issued them is deleted.

Python's garbage collector calls finalizers wherever Python allocates; up to 3.11 that includes JAX's own code. While
JAX records a stack, it keeps it in a buffer of the thread (jaxlib/traceback.cc). A JAX function that records one too,
such as `jax.block_until_ready`, corrupts that buffer, and Python crashes some time later. So a finalizer here calls no
JAX function and nothing that takes a lock: it hands the copies over to the thread.
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
"""By any key, the holder of the target arrays of a copy in flight, and the vectors that it reads."""


class OrphanedCopies:
    """Owns the thread that waits; the thread ends with the process, after all copies."""

    def __init__(self) -> None:
        self._left: queue.SimpleQueue[tuple[NativeLibrary, InFlight] | None] = queue.SimpleQueue()
        self._owners: list[tuple[weakref.finalize[Any, Any], NativeLibrary]] = []
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def watch(self, owner: object, native: NativeLibrary, in_flight: InFlight) -> None:
        """Ensures that copies in flight are waited for when their owner is deleted or the process ends."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="jaxferry left copies", daemon=True)
                self._thread.start()
                # Registered after the library is loaded, so it runs before the library frees its resources.
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
        with contextlib.suppress(RuntimeError):  # a failed load has no copies in flight
            # After this, every issued copy is on its queue.
            jax.block_until_ready([held.arrays for held, _ in list(in_flight.values())])
        native.synchronize()
        in_flight.clear()
