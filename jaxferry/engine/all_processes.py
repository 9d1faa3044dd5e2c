"""What the processes of one training do together, other than compute."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxferry.errors import CheckpointError, InputError

_MESSAGE_BYTES = 2000
_SAVE_TIMEOUT_S = 6 * 3600


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


def first_writes(write: Callable[[], None]) -> None:
    """Lets the first process write while the others wait; each must call this.

    Raises:
      CheckpointError: in every process, if it fails.
    """
    error: CheckpointError | None = None
    if jax.process_index() == 0:
        try:
            write()
        except CheckpointError as failure:
            error = failure
    import orbax.checkpoint

    # No collective: those have short timeouts, and a save may take minutes.
    orbax.checkpoint.multihost.sync_global_processes("jaxferry save", timeout=_SAVE_TIMEOUT_S)
    message = np.zeros(_MESSAGE_BYTES, np.uint8)
    text = str(error).encode()[:_MESSAGE_BYTES] if error is not None else b""
    message[: len(text)] = np.frombuffer(text, np.uint8)
    told = bytes(multihost_utils.broadcast_one_to_all(message)).rstrip(b"\0").decode(errors="replace")
    if error is not None:
        raise error
    if told:
        raise CheckpointError(f"process 0: {told}")
