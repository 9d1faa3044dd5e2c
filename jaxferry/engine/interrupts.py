"""Keeps an interrupt from falling between the updates of one step."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any


@contextlib.contextmanager
def deferred_interrupts() -> Iterator[list[Any]]:
    """Holds SIGINT back while the block runs and delivers it at the end; outside the main thread it does nothing.

    Yields a list that is empty until there is one.

    A step's updates change the state layer by layer. Once the first is under way the others follow, which takes less
    than a step; then the interrupt is raised, and the state is that after the step.
    """
    if threading.current_thread() is not threading.main_thread():
        yield []
        return
    received: list[tuple[int, FrameType | None]] = []
    previous = signal.signal(signal.SIGINT, lambda number, frame: received.append((number, frame)))
    try:
        yield received
    finally:
        signal.signal(signal.SIGINT, previous if previous is not None else signal.default_int_handler)
        if received and callable(previous):
            previous(*received[0])
