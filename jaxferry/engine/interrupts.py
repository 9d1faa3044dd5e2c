"""Defers interrupts, so that none falls between the updates of one step."""

from __future__ import annotations

import collections
import signal
import threading
from types import FrameType
from typing import Any


class deferred_interrupts:
    """Defers SIGINT while the block runs, then calls the previous handler.

    A step's updates change the state layer by layer. Once the first has begun, the others must follow, which takes less
    than a step. Then the handler is called, and the state is that after the step. If the handler raises (Python's own
    raises `KeyboardInterrupt`), the block raises the same; if it returns, execution continues.

    Outside the main thread, or if no Python function handles SIGINT, this does nothing.
    """

    def __init__(self) -> None:
        self._received: collections.deque[tuple[int, FrameType | None]] = collections.deque()
        self._previous: Any = None
        self._error: BaseException | None = None

    def __enter__(self) -> deferred_interrupts:
        if threading.current_thread() is threading.main_thread() and callable(signal.getsignal(signal.SIGINT)):
            self._previous = signal.signal(signal.SIGINT, lambda number, frame: self._received.append((number, frame)))
        return self

    def __exit__(self, *error: object) -> None:
        if self._previous is None:
            return
        signal.signal(signal.SIGINT, self._previous)
        if self.are_raised() and self._error is not None:
            raise self._error

    def are_raised(self) -> bool:
        """Calls the handler for the signals deferred so far; returns whether it has raised.

        Its exception is raised at the end of the block, so call this where the block may be left. While the handler
        runs, SIGINT is still deferred.
        """
        while self._received and self._error is None:
            try:
                self._previous(*self._received.popleft())
            except BaseException as error:  # noqa: BLE001 - raised at the end of the block
                self._error = error
        return self._error is not None
