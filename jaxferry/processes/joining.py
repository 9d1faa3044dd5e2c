"""How long processes wait for each other when they start, and what they say if some do not come.

JAX's coordination service, in process 0, knows who has come. It names the others if it gives up before its clients do,
but JAX sets no such time for it. If process 0 itself does not come, nobody knows anything; a timer says so.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

from jax._src import distributed

from jaxferry.processes.progress import end_process

_LATER_S = 5
"""How much longer a process waits for the first one's answer."""


@contextlib.contextmanager
def joining_within(timeout_s: int) -> Iterator[int]:
    """Ends the process if the block, which joins the others, takes longer.

    Args:
      timeout_s: seconds.

    Yields:
      The seconds that JAX's clients may wait, which is longer.
    """
    timer = threading.Timer(timeout_s + _LATER_S, lambda: end_process(_message(timeout_s)))
    timer.daemon = True
    timer.start()
    try:
        with _registering_within(timeout_s):
            yield timeout_s + 2 * _LATER_S
    finally:
        timer.cancel()


def _message(timeout_s: int) -> str:
    where = distributed.global_state.coordinator_address
    return (
        f"this process has waited {timeout_s + _LATER_S} s to join the others of its job, but process 0 has not "
        f"answered{f' at {where}' if where else ''}: this process ends (join_timeout_s= of "
        "jaxferry.distributed.start, or --join-timeout, sets the time)"
    )


@contextlib.contextmanager
def _registering_within(timeout_s: int) -> Iterator[None]:
    """Makes coordination services that name who has not come in time; they have no public name."""
    library: Any = distributed._jax
    made = library.get_distributed_runtime_service
    library.get_distributed_runtime_service = functools.partial(made, cluster_register_timeout=timeout_s)
    try:
        yield
    finally:
        library.get_distributed_runtime_service = made
