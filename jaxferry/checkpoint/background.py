"""Saves in the background: a thread writes a copy of the state while training goes on."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import sys
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import Future

from jaxferry.errors import described, internal_errors
from jaxferry.settings import ThreadPool
from jaxferry.transport import deferred_interrupts

_unreported: set[Future[None]] = set()


class BackgroundSaves:
    """Runs the saves of a training step in a thread; at most one is in progress."""

    def __init__(self) -> None:
        self._thread: ThreadPool | None = None
        self._last: Future[None] | None = None

    def start(self, write: Callable[[], None]) -> bool:
        """Starts a save, after `wait`. Returns False, with a warning, if the system cannot start a thread."""
        if self._thread is None:
            self._thread = ThreadPool(1, "checkpoint")
        try:
            self._last = self._thread.submit(write)
        except RuntimeError as error:
            self._thread = None
            warnings.warn(f"save(wait=False) waits until the state is written: {error}", stacklevel=3)
            return False
        _unreported.add(self._last)
        return True

    def settle(self) -> None:
        """Waits for the save in progress, if any; its error is raised by `wait`."""
        if self._last is not None:
            concurrent.futures.wait([self._last])

    def wait(self) -> None:
        """Waits for the save in progress, if any.

        Raises:
          CheckpointError: if it failed; later calls do not raise it again. InternalError if the mistake is JaxFerry's.
        """
        self.settle()
        last, self._last = self._last, None
        if last is not None:
            _unreported.discard(last)
            with internal_errors():
                last.result()


def finish() -> None:
    """Waits for all saves in progress at the end of the process; prints the errors that no call has raised."""
    # A second interrupt must not lose what the first one waits for.
    with contextlib.suppress(KeyboardInterrupt), deferred_interrupts():
        for save in list(_unreported):
            error = save.exception()
            if error is not None:
                print(f"error: {described(error)}", file=sys.stderr)


# A forked child has none of its parent's threads, and would wait for them at its end.
os.register_at_fork(after_in_child=_unreported.clear)
# Python ends the threads of `concurrent.futures`, which Orbax uses, before it waits for other threads and before
# `atexit`. Functions registered here are called in reverse order, so this one before that of `concurrent.futures`.
threading._register_atexit(finish)  # type: ignore[attr-defined]
