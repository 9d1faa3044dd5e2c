"""Keeps an interrupt from falling between the updates of one step."""

from __future__ import annotations

import collections
import signal
import threading
from types import FrameType
from typing import Any


class deferred_interrupts:
    """Holds SIGINT back while the block runs and hands it at the end to the handler that there was before.

    A step's updates change the state layer by layer. Once the first is under way the others follow, which takes less
    than a step; then the handler is called, and the state is that after the step. What it raises (`KeyboardInterrupt`,
    if it is Python's own) comes out of the block; if it returns, nothing happens.

    Outside the main thread, and where no Python function handles SIGINT, it does nothing.
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
        """Calls the handler for what has been held back so far; whether it has raised, which the block then ends with.

        To be called where the block may be left; the handler finds SIGINT as it is within the block.
        """
        while self._received and self._error is None:
            try:
                self._previous(*self._received.popleft())
            except BaseException as error:  # noqa: BLE001 - raised at the end of the block
                self._error = error
        return self._error is not None
