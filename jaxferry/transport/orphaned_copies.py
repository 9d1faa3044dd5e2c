"""Waits in a thread for what the device still does with pinned memory whose owner is deleted.

The owner is a transport with copies in flight, or a training state whose compute copy issued programs still read: the
runtime frees pinned memory with its last reference, whatever the device does with it.

Python's garbage collector calls finalizers wherever Python allocates; up to 3.11 that includes JAX's own code. While
JAX records a stack, it keeps it in a buffer of the thread (jaxlib/traceback.cc). A JAX function that records one too,
such as `jax.block_until_ready`, corrupts that buffer, and Python crashes some time later. So a finalizer here calls no
JAX function and nothing that takes a lock: it hands the copies over to the thread.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import queue
import threading
import weakref
from typing import Any

import jax
import jax.numpy as jnp

from jaxferry.native import NativeLibrary
from jaxferry.settings import with_own_settings
from jaxferry.transport.placement import Placement

InFlight = dict[int, tuple[Any, Any]]
"""By any key, the holder of the target arrays of a copy in flight, and the vectors that it reads."""


class OrphanedCopies:
    """Owns the thread that waits; the thread ends with the process, after all copies."""

    def __init__(self) -> None:
        self._left: queue.SimpleQueue[tuple[Any, Any] | None] = queue.SimpleQueue()
        self._owners: list[tuple[weakref.finalize[Any, Any], NativeLibrary]] = []
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def watch(self, owner: object, native: NativeLibrary, in_flight: InFlight) -> None:
        """Ensures that copies in flight are waited for when their owner is deleted or the process ends."""
        with self._lock:
            self._start()
            finalizer = weakref.finalize(owner, self._left.put, (native, in_flight))
            finalizer.atexit = False
            self._owners = [known for known in self._owners if known[0].alive]
            self._owners.append((finalizer, native))

    def keep(self, owner: object, placement: Placement, vectors: Any) -> None:
        """Ensures that pinned memory outlives the programs that its owner has issued.

        Args:
          owner: the owner; once it is deleted, the thread waits for the device before it drops the memory.
          placement: where arrays live; on a CPU, the runtime itself waits.
          vectors: arrays, or any object that holds them.
        """
        if not placement.is_cpu:
            with self._lock:
                self._start()
                weakref.finalize(owner, self._left.put, (placement, vectors)).atexit = False

    def drop(self, placement: Placement, vectors: Any) -> None:
        """Drops pinned memory once the device has run what has been issued so far."""
        if not placement.is_cpu:
            with self._lock:
                self._start()
            self._left.put((placement, vectors))

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(
                target=with_own_settings(self._run), name="jaxferry left copies", daemon=True
            )
            self._thread.start()
            # Registered after the library is loaded, so it runs before the library frees its resources.
            atexit.register(self._end)

    def _run(self) -> None:
        while (left := self._left.get()) is not None:
            if isinstance(left[0], Placement):
                _wait_for_device(left[0])
            else:
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


def _wait_for_device(placement: Placement) -> None:
    """Returns when the device has run everything that was issued before."""
    with contextlib.suppress(Exception):  # what has failed reads nothing any more
        _probe(placement)().block_until_ready()
    # Copies, and programs of several CPU devices, may overtake the probe. What others drop meanwhile must go, so there
    # is never a reference to more than one array.
    for reference in list(map(weakref.ref, jax.live_arrays(placement.platform))):
        if (array := reference()) is not None:
            with contextlib.suppress(Exception):
                array.block_until_ready()
        del array


@functools.cache
def _probe(placement: Placement) -> Any:
    return jax.jit(lambda: jnp.zeros((), jnp.int8), out_shardings=placement.own)


def _wait_for_all(native: NativeLibrary, in_flight: InFlight) -> None:
    if in_flight:
        with contextlib.suppress(RuntimeError):  # a failed load has no copies in flight
            # After this, every issued copy is on its queue.
            jax.block_until_ready([held.arrays for held, _ in list(in_flight.values())])
        native.synchronize()
        in_flight.clear()
