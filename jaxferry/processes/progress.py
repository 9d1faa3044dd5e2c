"""Detects a process that hangs.

JAX's coordination service ends all processes once one is dead, that is, sends no heartbeats. A process that is alive
but stuck, in a data loader for instance, still sends them, and the others would wait for it in a collective for ever.
So a thread of each process publishes how many steps and evaluations its process has begun. If a call waits too long for
a process that has begun fewer, the thread names that process and ends its own, as JAX does: no collective can be
cancelled.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

_PREFIX = "jaxferry/progress"
_EXIT_STATUS = 70
_MAX_INTERVAL_S = 10.0
"""The longest time between two publications."""


class Progress:
    """Counts the calls that all processes of a training make together.

    Attributes:
      num_begun: the number of calls begun.
      since_s: when the current call began, by the monotonic clock; None outside of calls.
    """

    def __init__(self) -> None:
        self.num_begun, self.since_s = 0, None  # type: tuple[int, float | None]
        self._depth = 0

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Counts the block as one call; calls within it are part of it."""
        if not self._depth:
            self.num_begun += 1
            self.since_s = time.monotonic()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                self.since_s = None


PROGRESS = Progress()


def watch(client: Any, process: int, timeout_s: float) -> None:
    """Starts the thread that publishes this process's progress, and ends the process if another one hangs.

    Args:
      client: JAX's client of the coordination service.
      process: the number of this process.
      timeout_s: how long a call may wait for a process that has not begun it.
    """

    def run() -> None:
        while True:
            client.key_value_set(f"{_PREFIX}/{process}", str(PROGRESS.num_begun), allow_overwrite=True)
            if (message := _stuck(client, timeout_s)) is not None:
                print(f"error: {message}", file=sys.stderr, flush=True)
                # Other threads wait in collectives, so Python's own end would wait for them.
                os._exit(_EXIT_STATUS)
            time.sleep(min(timeout_s / 10, _MAX_INTERVAL_S))

    threading.Thread(target=run, name="jaxferry progress", daemon=True).start()


def _stuck(client: Any, timeout_s: float) -> str | None:
    """Returns a message that names the processes for which this one has waited too long; None if there are none."""
    begun, since_s = PROGRESS.num_begun, PROGRESS.since_s
    if since_s is None or time.monotonic() - since_s < timeout_s:
        return None
    published = {int(key.rpartition("/")[2]): int(value) for key, value in client.key_value_dir_get(_PREFIX)}
    behind = {process: num for process, num in sorted(published.items()) if num < begun}
    if not behind or PROGRESS.num_begun != begun:
        return None
    which = ", ".join(f"process {process}, which has begun {num}" for process, num in behind.items())
    return (
        f"step or evaluation {begun} has waited {timeout_s:.0f} s for {which}: this process ends; start all again from "
        "the last checkpoint (hang_timeout_s= of jaxferry.distributed.start sets the time)"
    )
