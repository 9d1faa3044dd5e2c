"""Checks that the processes of a training agree, messages between them, and the end of one that hangs.

JAX's coordination service ends all processes once one is dead, that is, sends no heartbeats. A process that is alive
but stuck, in a data loader for instance, still sends them, and the others would wait for it in a collective for ever.
So a thread of each process publishes how many steps and evaluations its process has begun. If a call waits too long for
a process that has begun fewer, the thread names that process and ends its own, as JAX does: no collective can be
cancelled.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import distributed
from jax.experimental import multihost_utils

from jaxferry.errors import CheckpointError, InputError, JaxFerryError
from jaxferry.processes.global_arrays import is_key

_MESSAGE_CHARACTERS = 2000
_SAMPLES = 64
_TIMEOUT_S = 6 * 3600  # how long a process waits for a message: another one may be writing a checkpoint


def check_same(what: str, content: str) -> None:
    """Checks that all processes have the same; each must call this.

    If one has another content, every process raises an `InputError` with the processes that differ from the first.
    """
    own = np.frombuffer(hashlib.sha256(content.encode()).digest(), np.uint8)
    found = multihost_utils.process_allgather(own)
    other = [number for number, digest in enumerate(found) if not np.array_equal(digest, found[0])]
    if other:
        raise InputError(
            f"the processes differ in {what}: {', '.join(map(str, other))} from process 0. All must run the same code "
            "with the same options, packages and kinds of device, on batches of the same shapes"
        )


def check_same_values(what: str, leaves: Sequence[Any]) -> None:
    """Checks as `check_same` does, by a sample of each array, that all processes have the same values.

    Arrays that a process has in part, and lazy ones, are left out.
    """
    samples = []
    for leaf in leaves:
        if isinstance(leaf, np.ndarray) or (isinstance(leaf, jax.Array) and leaf.is_fully_addressable):
            array = jax.random.key_data(leaf) if is_key(leaf) else leaf
            samples.append(array.reshape(-1)[:: max(array.size // _SAMPLES, 1)][:_SAMPLES])
    check_same(what, " ".join(np.asarray(sample).tobytes().hex() for sample in samples))


def largest(numbers: Sequence[float]) -> list[float]:
    """Returns the largest of each number in any process, in single precision; each must call this."""
    found = np.asarray(multihost_utils.process_allgather(np.asarray(numbers, np.float32)))
    return [float(most) for most in found.reshape(-1, len(numbers)).max(axis=0)]


class Messages:
    """Short messages between processes for one purpose, in order; any thread may send and receive.

    Unlike a barrier of Orbax, at which the others wait for minutes, a failed process reports its error at once.
    """

    def __init__(self, purpose: str, process: int, num_processes: int) -> None:
        self._purpose, self.process, self.num_processes = purpose, process, num_processes
        self._sent: set[str] = set()

    def send(self, what: str, text: str, is_error: bool = False) -> None:
        """Sends a text, or an error, to the others; once for each `what`."""
        self._sent.add(what)
        content = json.dumps({"error" if is_error else "text": text[:_MESSAGE_CHARACTERS]})
        coordination_client().key_value_set(self._key(what, self.process), content)

    def receive(self, what: str, process: int) -> str:
        """Waits for what another process sends; raises `CheckpointError` if that process has failed."""
        found = json.loads(coordination_client().blocking_key_value_get(self._key(what, process), 1000 * _TIMEOUT_S))
        if "error" in found:
            raise CheckpointError(f"process {process}: {found['error']}")
        return str(found["text"])

    @contextlib.contextmanager
    def reporting(self, *what: str) -> Iterator[None]:
        """Sends the end of the block under the first name; an error under all names. What has been sent stays."""
        try:
            yield
        except BaseException as error:
            for name in set(what) - self._sent:
                self.send(name, f"{error}" if isinstance(error, JaxFerryError) else repr(error), is_error=True)
            raise
        if what[0] not in self._sent:
            self.send(what[0], "")

    def _key(self, what: str, process: int) -> str:
        return f"jaxferry/{self._purpose}/{what}/{process}"


@contextlib.contextmanager
def agreeing(messages: Messages | None) -> Iterator[dict[str, str]]:
    """Gives the block a dictionary; where it fails in one process, or they store other texts in it, all raise.

    Raises:
      CheckpointError: if the block has failed in another process.
      InputError: if the texts differ. It names the processes, and the key of what differs.
    """
    said = dict[str, str]()
    if messages is None:
        yield said
        return
    with messages.reporting("said"):
        yield said
        digests = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in said.items()}
        messages.send("said", json.dumps(digests))
    found = [json.loads(messages.receive("said", process)) for process in range(messages.num_processes)]
    for name in said:
        other = [number for number, digests in enumerate(found) if digests[name] != found[0][name]]
        if other:
            raise InputError(f"the processes differ in {name}: {', '.join(map(str, other))} from process 0")


def messages_of(purpose: str, process: int, num_processes: int) -> Messages | None:
    """Returns messages for the next purpose of this name; None for one process.

    All processes must ask for purposes in the same order.
    """
    return None if num_processes == 1 else Messages(f"{purpose} {next(_NUMBERS)}", process, num_processes)


_NUMBERS = itertools.count()


def coordination_client() -> Any:
    """Returns JAX's client of the coordination service, which `jax.distributed.initialize` makes without a name."""
    return distributed.global_state.client


_PREFIX = "jaxferry/progress"
_EXIT_STATUS = 70
_MAX_INTERVAL_S = 10.0  # the longest time between two publications


class Progress:
    """Counts the calls that all processes of a training make together; `since_s` is when the current one began."""

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
    """Starts the thread that publishes this process's progress, and ends the process if another one hangs."""

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
