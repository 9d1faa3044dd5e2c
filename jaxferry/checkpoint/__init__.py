"""Checkpoints through Orbax: master parameters and optimizer state by path, independent of the partition.

A checkpoint is a folder. It records no modes, layers or devices, so a run may continue under another plan or budget.

    NAME/about/metadata   what the arrays are, and their digests (`about`, `digests`)
    NAME/arrays/          the arrays (`arrays`); of several processes, those of the first
    NAME/arrays-1/ ...    the elements that the others own (`together`)

`scratch` and `replacement` put a new checkpoint in the place of an old one, `series` keeps several in one folder,
`background` saves while training goes on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar, overload

import jax
import numpy as np

from jaxferry.checkpoint.about import FILE, WITHOUT_DIGESTS, About, read_about, write_about
from jaxferry.checkpoint.arrays import describe, write_arrays
from jaxferry.checkpoint.background import BackgroundSaves
from jaxferry.checkpoint.content import Checkpoint, check_coded, check_extra, check_matches, dictionary_paths
from jaxferry.checkpoint.leaves import StoredKey, StoredLeaf, cannot_read, stored_leaves
from jaxferry.checkpoint.paths import local_path, reason
from jaxferry.checkpoint.replacement import check_replaceable, find, identity, publish, sweep
from jaxferry.checkpoint.scratch import is_scratch, leftovers, scratch_beside
from jaxferry.checkpoint.series import (
    Keep,
    SavedCheckpoint,
    check_metric,
    list_in,
    newest_in,
    next_time_s,
    path_in,
    prune,
)
from jaxferry.checkpoint.together import pieces_of_others, with_pieces, write_own
from jaxferry.checkpoint.transformations import check_transformations
from jaxferry.errors import CheckpointError, InputError, JaxFerryError
from jaxferry.optimizer.pieces import Owned, Stacked, is_key
from jaxferry.processes.all_processes import Messages
from jaxferry.transport.interrupts import deferred_interrupts

__all__ = [
    "BackgroundSaves",
    "Checkpoint",
    "Keep",
    "SavedCheckpoint",
    "StoredLeaf",
    "check_coded",
    "check_extra",
    "check_matches",
    "check_metric",
    "check_target",
    "check_transformations",
    "dictionary_paths",
    "list_checkpoints",
    "load",
    "local_path",
    "save",
]

Path = str | os.PathLike[str]
Made = TypeVar("Made")

_ATTEMPTS = 100


def save(checkpoint: Checkpoint, path: Path, keep: Keep | None = None, messages: Messages | None = None) -> None:
    """Writes a checkpoint; an existing one is replaced once the new one is complete and on the disk.

    Args:
      checkpoint: the content.
      path: the checkpoint's folder; with `keep`, the folder above it, in which it is named by its step.
      keep: which other checkpoints of that folder to keep.
      messages: of the processes that write it together, each of which calls this; None for one.

    Raises:
      CheckpointError: if the path is not a local one, exists and is not a checkpoint, or cannot be written. What was
        there stays as it was.
    """
    if messages is not None and messages.process:
        folder = pathlib.Path(messages.hear("folder", 0))
        with deferred_interrupts():
            messages.do("wrote", lambda: write_own(_arrays_of(checkpoint), folder, messages.process))
            messages.hear("done", 0)
        return
    with contextlib.nullcontext() if messages is None else messages.telling("done", "folder"):
        _save(checkpoint, path, keep, messages)


def _save(checkpoint: Checkpoint, path: Path, keep: Keep | None, messages: Messages | None) -> None:
    target = _target(path, checkpoint.step, keep)
    # Interrupts are deferred: Orbax's own threads cannot be stopped and would continue to write.
    with deferred_interrupts(), _told(target):
        check_replaceable(target)
        with scratch_beside(target) as scratch:
            scratch.writing.mkdir()
            saved_at_s = time.time() if keep is None else next_time_s(target.parent)
            _write(checkpoint, scratch.writing, saved_at_s, messages)
            publish(scratch, target)
        sweep(target)
        if keep is not None:
            prune(target.parent, keep)


def check_target(path: Path, step: int = 0, keep: Keep | None = None) -> None:
    """Checks that a step's checkpoint can be written to a path, and makes its parent folders.

    Raises:
      CheckpointError: if the path is not a local one, exists and is not a checkpoint, or cannot be written.
    """
    target = _target(path, step, keep)
    with _told(target):
        check_replaceable(target)
        with scratch_beside(target):
            pass


def _target(path: Path, step: int, keep: Keep | None) -> pathlib.Path:
    """Returns the absolute path of a step's checkpoint."""
    target = local_path(path)
    if keep is None:
        return target
    if (target / FILE).exists() or (target.exists() and not target.is_dir()):
        what = "is one checkpoint" if target.is_dir() else "is a file"
        raise CheckpointError(f"{path} {what}, not a folder for several: choose another path, or omit keep_last")
    return path_in(target, step)


def list_checkpoints(folder: Path) -> list[SavedCheckpoint]:
    """Returns the checkpoints that `step.save(..., keep_last=...)` has left in a folder, oldest first.

    Warns:
      UserWarning: if one cannot be read; it is left out.
    """
    return list_in(local_path(folder))


@overload
def load(path: Path) -> Checkpoint: ...
@overload
def load(path: Path, use: Callable[[Checkpoint], Made]) -> Made: ...
def load(path: Path, use: Callable[[Checkpoint], Any] | None = None) -> Any:
    """Reads a checkpoint; from a folder of several, the one that was saved last.

    While another process replaces the checkpoint, this reads the old or the new one.

    Args:
      path: the folder.
      use: told the content, with a `StoredLeaf` or a `StoredKey` in place of each array, reads what it wants of them,
        and returns what this shall return. It is called again if the checkpoint is replaced meanwhile. None reads all
        arrays into host memory.

    Raises:
      CheckpointError: if there is no checkpoint, or it is damaged; the message names the leaf and the file.
    """
    target = local_path(path)
    for _ in range(_ATTEMPTS):
        folder = _current(target)
        before = identity(folder)
        error: JaxFerryError | None = None
        made = None
        try:
            made = (use or _read)(_content(folder, path))
        except JaxFerryError as failure:
            error = failure
        # The files of a checkpoint that is replaced while it is read may belong to both.
        if _current(target) == folder and identity(folder) == before:
            break
    if error is not None:
        raise error
    if folder != target and is_scratch(folder.parent):
        warnings.warn(f"{path} is missing; an interrupted save left {folder}, which was read instead", stacklevel=2)
    return made


def _current(target: pathlib.Path) -> pathlib.Path:
    """Returns the folder to read for a path."""
    return find(target) if (target / FILE).exists() else find(newest_in(target) or target)


def _arrays_of(checkpoint: Checkpoint) -> dict[str, dict[str, Any]]:
    parts = {"params": checkpoint.params, "optimizer": checkpoint.optimizer, "extra": checkpoint.extra}
    return {part: {name: _plain(leaf) for name, leaf in leaves.items()} for part, leaves in parts.items()}


def _write(checkpoint: Checkpoint, folder: pathlib.Path, saved_at_s: float, messages: Messages | None) -> None:
    arrays = _arrays_of(checkpoint)
    if messages is not None:
        messages.tell("folder", os.fspath(folder))
    write_arrays(arrays, folder)
    others = [] if messages is None else pieces_of_others(folder, messages)
    params, optimizer, extra = (with_pieces(p, describe(leaves), leaves, others) for p, leaves in arrays.items())
    keys = {name: leaf for name, leaf in checkpoint.optimizer.items() if is_key(leaf)}
    about = About(
        step=checkpoint.step,
        params=params,
        dtypes=checkpoint.dtypes,
        dictionary_paths=checkpoint.dictionary_paths,
        optimizer=optimizer,
        loss_scale=checkpoint.loss_scale,
        optimizer_keys={name: str(jax.random.key_impl(key)) for name, key in keys.items()},
        extra=extra,
        metric=checkpoint.metric,
        saved_at_s=saved_at_s,
        is_in_pieces=messages is not None,
    )
    write_about(about, folder)


def _content(folder: pathlib.Path, path: Path) -> Checkpoint:
    """Returns a checkpoint's content; none of its arrays has been read."""
    if not (folder / FILE).is_file():
        others = ", ".join(str(other) for other in leftovers(folder))
        of_saves = f"; interrupted saves left {others}, which hold no whole one" if others else ""
        raise CheckpointError(f"{path} is not a JaxFerry checkpoint{of_saves}")
    try:
        about = read_about(folder)
    except (CheckpointError, InputError, OSError, ValueError, TypeError, MemoryError) as error:
        raise cannot_read(path, error) from error
    leaves = stored_leaves(about, folder, path)
    keys = {name: StoredKey(leaves["optimizer"][name], kind) for name, kind in about.optimizer_keys.items()}
    if not about.has_digests:
        warnings.warn(
            f"{path} has format {WITHOUT_DIGESTS!r}, without digests: damage to its arrays goes unnoticed; save it "
            "again to add them",
            stacklevel=2,
        )
    return Checkpoint(
        step=about.step,
        params=leaves["params"],
        dtypes=about.dtypes,
        dictionary_paths=about.dictionary_paths,
        optimizer={**leaves["optimizer"], **keys},
        loss_scale=about.loss_scale,
        extra=leaves["extra"],
        metric=about.metric,
    )


def _read(content: Checkpoint) -> Checkpoint:
    """Returns the content with all arrays in host memory."""

    def read(leaves: Mapping[str, Any]) -> dict[str, Any]:
        return {name: leaf.read() for name, leaf in leaves.items()}

    return dataclasses.replace(
        content, params=read(content.params), optimizer=read(content.optimizer), extra=read(content.extra)
    )


def _plain(leaf: Any) -> Any:
    """Returns a leaf as NumPy memory, without a copy; parts of a `Stacked` stay apart."""
    if isinstance(leaf, Stacked):
        return Stacked(tuple(np.asarray(part) for part in leaf.parts), leaf.axis)
    if isinstance(leaf, Owned):
        return dataclasses.replace(leaf, parts={span: np.asarray(part) for span, part in leaf.parts.items()})
    return np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf)


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    """Turns errors of the block into those of a path that cannot be written."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        is_short = isinstance(error, MemoryError) or "start new thread" in str(error)
        remedy = "free host memory, or raise ulimit -v and -u" if is_short else "make room, or choose another path"
        raise CheckpointError(f"cannot write to {path}: {reason(error)}; {remedy}") from error
