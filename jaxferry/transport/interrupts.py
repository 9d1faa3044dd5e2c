"""Defers signals, so that none falls between the updates of one step; turns a termination into a chance to save."""

from __future__ import annotations

import collections
import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

_SIGNALS = tuple(sorted(int(number) for number in signal.valid_signals()))

Handler = Callable[[int, FrameType | None], Any]


class deferred_interrupts:
    """Defers every signal that a Python function handles while the block runs, then calls the previous handlers.

    A step's updates change the state layer by layer. Once the first has begun, the others must follow, which takes less
    than a step. Then the handlers are called, and the state is that after the step. If a handler raises (Python's own
    for SIGINT raises `KeyboardInterrupt`, and one for SIGTERM often calls `sys.exit`), the block raises the same; if it
    returns, execution continues.

    Outside the main thread, where no Python function handles signals, this does nothing.
    """

    def __init__(self) -> None:
        self._error: BaseException | None = None
        self._is_in_main = threading.get_ident() == threading.main_thread().ident
        if self._is_in_main:
            self._received: collections.deque[tuple[int, FrameType | None]] = collections.deque()
            self._handlers: dict[int, Handler] = {}
            self._deferred: set[int] = set()

    def __enter__(self) -> deferred_interrupts:
        if not self._is_in_main:
            return self
        try:
            for number in _SIGNALS:
                handler = signal.getsignal(number)
                if callable(handler):
                    self._handlers[number] = handler
                    self._deferred.add(number)
                    signal.signal(number, self._receive)
        except BaseException:
            # A signal that was not deferred yet: its handler has raised.
            self._restore()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        if not self._is_in_main:
            return
        self.are_raised()
        self._restore()
        if self.are_raised() and self._error is not None:
            raise self._error

    def are_raised(self) -> bool:
        """Calls the handlers of the signals deferred so far; returns whether one has raised.

        Its exception is raised at the end of the block, so call this where the block may be left.
        """
        while self._is_in_main and self._received and self._error is None:
            number, frame = self._received.popleft()
            try:
                self._handlers[number](number, frame)
            except BaseException as error:  # noqa: BLE001 - raised at the end of the block
                self._error = error
        return self._error is not None

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received.append((number, frame))

    def _restore(self) -> None:
        """Restores the handlers, except those that a handler has replaced."""
        try:
            while self._deferred:
                number = next(iter(self._deferred))
                if signal.getsignal(number) == self._receive:
                    signal.signal(number, self._handlers[number])
                self._deferred.discard(number)
        finally:
            if self._deferred:  # a handler that is restored already has raised
                self._restore()


class Terminated(KeyboardInterrupt):
    """SIGTERM arrived: the machine is about to be taken away. Schedulers know the exit status `status`."""

    status = 128 + signal.SIGTERM


@contextlib.contextmanager
def raising_terminated() -> Iterator[None]:
    """Raises `Terminated` for the first SIGTERM in the block, between two steps; later ones do not disturb the saving.

    Does nothing outside the main thread, or if SIGTERM is handled or ignored already.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    has_raised = False

    def terminate(number: int, frame: FrameType | None) -> None:
        nonlocal has_raised
        if not has_raised:
            has_raised = True
            raise Terminated

    signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
