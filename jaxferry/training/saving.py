"""A state to a checkpoint and back: what it holds, the state made of it again, saves beside training by a thread."""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import os
import sys
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np

from jaxferry import checkpoint
from jaxferry.engine import LossScale, Owner, TrainState
from jaxferry.errors import InputError, described, internal_errors
from jaxferry.optimizer import path_names
from jaxferry.partition import Layer, stored_struct
from jaxferry.processes import is_key
from jaxferry.settings import ThreadPool
from jaxferry.training.model import Model
from jaxferry.transport import deferred_interrupts


def content(
    state: TrainState, params: Any, extra: Mapping[str, Any], metric: float | None, copied: bool
) -> tuple[checkpoint.Checkpoint, bool]:
    """Returns the content of a checkpoint of a state, and whether it is a copy, which a thread may write.

    `params` is the model's tree of shapes. A copy is made if it is wanted (`copied`) and host memory can hold it;
    otherwise a warning says so.
    """
    try:
        masters, optimizer = state.stored(copied=copied)
        if copied:
            extra = {name: array if is_key(array) else np.array(array) for name, array in extra.items()}
    except MemoryError as error:
        if not copied:
            raise
        what = str(error) or "host memory is full"
        warnings.warn(f"save(wait=False) waits until the state is written: {what}", stacklevel=3)
        return content(state, params, extra, metric, copied=False)
    scale = state.loss_scale
    made = checkpoint.Checkpoint(
        step=state.updated_step,
        params=dict(zip(path_names(params), masters, strict=True)),
        dtypes=[str(leaf.dtype) for leaf in jax.tree.leaves(params)],
        dictionary_paths=checkpoint.dictionary_paths(params),
        optimizer=optimizer,
        loss_scale=[scale.value, scale.num_finite] if scale.is_dynamic else None,
        extra=extra,
        metric=metric,
    )
    return made, copied


def keep_of(keep_last: int | None, keep_best: int) -> checkpoint.Keep | None:
    """Which earlier checkpoints a save keeps; None if it is alone. Raises `InputError` if the numbers are wrong."""
    if keep_last is None and keep_best:
        raise InputError(f"keep_best needs keep_last, the number of checkpoints to keep anyway, got {keep_best}")
    return None if keep_last is None else checkpoint.Keep(keep_last, keep_best)


def content_of(extra: Mapping[str, Any]) -> str:
    """The names, dtypes and values of arrays and keys as a text."""
    arrays = {name: np.asarray(jax.random.key_data(a) if is_key(a) else a) for name, a in extra.items()}
    digests = {name: hashlib.sha256(array.tobytes()).hexdigest() for name, array in arrays.items()}
    return str([(name, str(extra[name].dtype), array.shape, digests[name]) for name, array in sorted(arrays.items())])


def restored(saved: checkpoint.Checkpoint, model: Model, layers: Sequence[Layer], owner: Owner) -> TrainState:
    """Reads a checkpoint into a new state.

    Raises:
      CheckpointError: if it does not match the model or the optimizer.
      HostMemoryError: if host memory cannot hold the model; nothing is allocated then.
    """
    expected = dict(zip(path_names(model.params), jax.tree.leaves(model.params), strict=True))
    checkpoint.check_coded(saved.params, saved.dtypes, expected, model.optimizer.avals)
    stored = {name: stored_struct(leaf) for name, leaf in expected.items()}
    checkpoint.check_matches("model", saved.params, stored)
    checkpoint.check_transformations(saved.optimizer, model.optimizer.state_shapes, expected)
    checkpoint.check_matches("optimizer", saved.optimizer, model.optimizer.state_shapes, check_dtypes=True)
    model.check_host_memory()
    masters = model.masters([saved.params[name] for name in expected])
    optimizer = model.optimizer_state(saved.optimizer)
    state = model.new_state(masters, layers, optimizer, saved.step, owner=owner)
    if saved.loss_scale is not None and state.loss_scale.is_dynamic:
        value, num_finite = saved.loss_scale
        state.loss_scale = LossScale(float(value), num_finite=int(num_finite))
    state.extra = {name: leaf.read() for name, leaf in saved.extra.items()}
    return state


_unreported: set[Future[None]] = set()


class BackgroundSaves:
    """Runs the saves of a training step in a thread; at most one is in progress."""

    def __init__(self) -> None:
        self._thread: ThreadPool | None = None
        self._last: Future[None] | None = None

    def start(self, write: Callable[[], None]) -> bool:
        """Starts a save, after `wait`. Returns False, with a warning, if the system cannot start a thread."""
        if self._thread is None:
            self._thread = ThreadPool(1, "checkpoint")
        try:
            self._last = self._thread.submit(write)
        except RuntimeError as error:
            self._thread = None
            warnings.warn(f"save(wait=False) waits until the state is written: {error}", stacklevel=3)
            return False
        _unreported.add(self._last)
        return True

    def settle(self) -> None:
        """Waits for the save in progress, if any; its error is raised by `wait`."""
        if self._last is not None:
            concurrent.futures.wait([self._last])

    def wait(self) -> None:
        """Waits for the save in progress, if any.

        Raises:
          CheckpointError: if it failed; later calls do not raise it again. InternalError if the mistake is JaxFerry's.
        """
        self.settle()
        last, self._last = self._last, None
        if last is not None:
            _unreported.discard(last)
            with internal_errors():
                last.result()


def finish() -> None:
    """Waits for all saves in progress at the end of the process; prints the errors that no call has raised."""
    # A second interrupt must not lose what the first one waits for.
    with contextlib.suppress(KeyboardInterrupt), deferred_interrupts():
        for save in list(_unreported):
            error = save.exception()
            if error is not None:
                print(f"error: {described(error)}", file=sys.stderr)


# A forked child has none of its parent's threads, and would wait for them at its end.
os.register_at_fork(after_in_child=_unreported.clear)
# Python ends the threads of `concurrent.futures`, which Orbax uses, before it waits for other threads and before
# `atexit`. Functions registered here are called in reverse order, so this one before that of `concurrent.futures`.
threading._register_atexit(finish)  # type: ignore[attr-defined]
