"""What the processes of one training do together, other than compute."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import distributed
from jax.experimental import multihost_utils

from jaxferry.errors import CheckpointError, InputError
from jaxferry.processes.global_arrays import is_key

_MESSAGE_CHARACTERS = 2000
_SAMPLES = 64
_TIMEOUT_S = 6 * 3600
"""How long a process waits for a message: the others may be writing a checkpoint."""


def check_same(what: str, content: str) -> None:
    """Checks that all processes have the same; each must call this.

    Args:
      what: names the content in the error.
      content: what must be the same.

    Raises:
      InputError: in every process, if one has another content. It names the processes that differ from the first.
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
    """Checks by a sample of each array that all processes have the same values; each must call this.

    Arrays that a process has in part, and lazy ones, are left out.

    Args:
      what: names the arrays in the error.
      leaves: the arrays.

    Raises:
      InputError: as for `check_same`.
    """
    local = [leaf for leaf in leaves if isinstance(leaf, jax.Array) and leaf.is_fully_addressable]
    arrays = [*_sample(local), *_sample([leaf for leaf in leaves if isinstance(leaf, np.ndarray)])]
    check_same(what, " ".join(np.asarray(array).tobytes().hex() for array in arrays))


def _sample(leaves: Sequence[Any]) -> list[Any]:
    def few(array: Any) -> Any:
        return array.reshape(-1)[:: max(array.size // _SAMPLES, 1)][:_SAMPLES]

    return list(map(few, jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, list(leaves))))


def slowest(seconds: Sequence[float]) -> list[float]:
    """The largest of each figure in any process, in single precision; each must call this."""
    found = np.asarray(multihost_utils.process_allgather(np.asarray(seconds, np.float32)))
    return [float(most) for most in found.reshape(-1, len(seconds)).max(axis=0)]


class Messages:
    """Short messages between processes for one purpose, in order; any thread may send and receive.

    Args:
      purpose: a name that no other messages have.
      process: the number of this process.
      num_processes: how many there are.
    """

    def __init__(self, purpose: str, process: int, num_processes: int) -> None:
        self._purpose, self.process, self.num_processes = purpose, process, num_processes
        self._told: set[str] = set()

    def tell(self, what: str, text: str, is_error: bool = False) -> None:
        """Tells the others something once."""
        self._told.add(what)
        content = json.dumps({"error" if is_error else "text": text[:_MESSAGE_CHARACTERS]})
        coordination_client().key_value_set(self._key(what, self.process), content)

    def hear(self, what: str, process: int) -> str:
        """Waits for what another process tells.

        Raises:
          CheckpointError: if that process has failed.
        """
        found = json.loads(coordination_client().blocking_key_value_get(self._key(what, process), 1000 * _TIMEOUT_S))
        if "error" in found:
            raise CheckpointError(f"process {process}: {found['error']}")
        return str(found["text"])

    def do(self, what: str, action: Callable[[], None]) -> None:
        """Does something, and tells the others that it is done, or the error."""
        with self.telling(what):
            action()

    @contextlib.contextmanager
    def telling(self, *what: str) -> Iterator[None]:
        """Tells the others the end of the block by the first name; an error by all names that have not been told."""
        try:
            yield
        except BaseException as error:
            for name in set(what) - self._told:
                self.tell(name, f"{error}" if isinstance(error, CheckpointError) else repr(error), is_error=True)
            raise
        self.tell(what[0], "")

    def _key(self, what: str, process: int) -> str:
        return f"jaxferry/{self._purpose}/{what}/{process}"


def messages_of(purpose: str, process: int, num_processes: int) -> Messages | None:
    """Messages for the next purpose of this name, which all processes have in the same order; None for one process."""
    return None if num_processes == 1 else Messages(f"{purpose} {next(_NUMBERS)}", process, num_processes)


_NUMBERS = itertools.count()


def coordination_client() -> Any:
    """JAX's client of the coordination service, which `jax.distributed.initialize` makes; it has no public name."""
    return distributed.global_state.client
