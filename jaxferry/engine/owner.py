"""Who may use a training step and its states: the process that made them, and one of its threads at a time.

A forked child has none of its parent's threads, and would wait for them forever. Two threads that run steps of one
state would wait for each other's tasks; one that reads a state would meet arrays that an update of the other donated.
The user runs under settings of JAX of its own, which the owner leaves meanwhile (`settings`).
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from jaxferry.errors import StateError
from jaxferry.settings import own_settings


class Owner:
    """The process in which this object was made, and the thread in an entry of the training step or of a state."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._lock = threading.RLock()
        self._user: tuple[str, str] | None = None

    def check(self) -> None:
        """Raises StateError in another process, that is a forked child of this one."""
        if os.getpid() != self._process:
            raise StateError(
                "this training step and its states belong to the parent process, and a forked child has none of its "
                "threads: start processes by multiprocessing's 'spawn' or 'forkserver', and pass them NumPy arrays "
                "(state.params)"
            )

    @contextlib.contextmanager
    def using(self, entry: str) -> Iterator[None]:
        """Reserves step and states for the calling thread while the block runs, under the engine's settings of JAX.

        It never waits for another thread.

        Args:
          entry: the name of the entry, for the error in another thread.

        Raises:
          StateError: if another thread is in an entry, or this is a forked child.
          InputError: if a setting of JAX's forbids every program.
        """
        self.check()
        if not self._lock.acquire(blocking=False):
            thread, running = self._user or ("another", "another entry")
            raise StateError(
                f"thread {threading.current_thread().name!r} called {entry} while thread {thread!r} was in {running}: "
                "one thread at a time may use a training step and its states; call them from one thread or under a "
                "lock of your own (save(wait=False) writes beside steps; another train_step may run beside this one)"
            )
        before = self._user
        try:
            self._user = before or (threading.current_thread().name, entry)
            with own_settings():
                yield
        finally:
            self._user = before
            self._lock.release()


class _Owned(Protocol):
    @property
    def owner(self) -> Owner: ...


_Self = TypeVar("_Self", bound=_Owned)
_Given = ParamSpec("_Given")
_Made = TypeVar("_Made")


def by_one_thread(entry: Callable[Concatenate[_Self, _Given], _Made]) -> Callable[Concatenate[_Self, _Given], _Made]:
    """Makes a method an entry of its object's `owner`."""

    @functools.wraps(entry)
    def call(self: _Self, *args: _Given.args, **kwargs: _Given.kwargs) -> _Made:
        with self.owner.using(entry.__qualname__):
            return entry(self, *args, **kwargs)

    return call
