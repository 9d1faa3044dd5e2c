"""Refuses work in a forked child, which has none of its parent's threads and would wait for them forever."""

from __future__ import annotations

import os

from jaxferry.errors import StateError


class Process:
    """The process in which this object was made."""

    def __init__(self) -> None:
        self._number = os.getpid()

    def check(self) -> None:
        """Raises StateError in another process, that is a forked child of this one."""
        if os.getpid() != self._number:
            raise StateError(
                "this training step and its states belong to the parent process, and a forked child has none of its "
                "threads: start processes by multiprocessing's 'spawn' or 'forkserver', and pass them NumPy arrays "
                "(state.params)"
            )
