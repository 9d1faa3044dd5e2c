"""Checkpoints through Orbax: master parameters and optimizer state by path, independent of the partition.

A checkpoint is a folder. It records no modes, layers or devices, so a run may continue under another plan or budget.

    NAME/about/metadata   what the arrays are, and their digests (`about`, `digests`)
    NAME/arrays/          the arrays (`arrays`)

`scratch` and `replacement` put a new checkpoint in the place of an old one.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jaxferry.engine.host.checkpoint.about import FILE, WITHOUT_DIGESTS, About, read_about, write_about
from jaxferry.engine.host.checkpoint.arrays import describe, read_arrays, write_arrays
from jaxferry.engine.host.checkpoint.content import Checkpoint, check_extra, check_matches, dictionary_paths, is_key
from jaxferry.engine.host.checkpoint.paths import local_path, reason
from jaxferry.engine.host.checkpoint.replacement import check_replaceable, find, identity, publish, sweep
from jaxferry.engine.host.checkpoint.scratch import leftovers, scratch_beside
from jaxferry.engine.host.pieces import Stacked
from jaxferry.engine.interrupts import deferred_interrupts
from jaxferry.errors import CheckpointError, InputError

__all__ = ["Checkpoint", "check_extra", "check_matches", "check_target", "dictionary_paths", "load", "save"]

Path = str | os.PathLike[str]

_ATTEMPTS = 100


def save(checkpoint: Checkpoint, path: Path) -> None:
    """Writes a checkpoint; an existing one is replaced once the new one is complete and on the disk.

    Raises:
      CheckpointError: if the path is not a local one, exists and is not a checkpoint, or cannot be written. What was
        there stays as it was.
    """
    target = local_path(path)
    # Interrupts are deferred: Orbax's own threads cannot be stopped and would continue to write.
    with deferred_interrupts(), _told(path):
        check_replaceable(target)
        with scratch_beside(target) as scratch:
            scratch.writing.mkdir()
            _write(checkpoint, scratch.writing)
            publish(scratch, target)
        sweep(target)


def check_target(path: Path) -> None:
    """Checks that a checkpoint can be written to a path, and makes its parent folders.

    Raises:
      CheckpointError: if the path is not a local one, exists and is not a checkpoint, or cannot be written.
    """
    target = local_path(path)
    with _told(path):
        check_replaceable(target)
        with scratch_beside(target):
            pass


def load(path: Path) -> Checkpoint:
    """Reads a checkpoint into host memory.

    While another process replaces the checkpoint, this reads the old or the new one.

    Raises:
      CheckpointError: if there is no checkpoint, or it is damaged; the message names the leaf and the file.
    """
    target = local_path(path)
    for _ in range(_ATTEMPTS):
        folder = find(target)
        before = identity(folder)
        try:
            loaded, error = _load(folder, path), None
        except CheckpointError as failure:
            loaded, error = None, failure
        # The files of a checkpoint that is replaced while it is read may belong to both.
        if find(target) == folder and identity(folder) == before:
            break
    if error is not None:
        raise error
    assert loaded is not None
    if folder != target:
        warnings.warn(f"{path} is missing; an interrupted save left {folder}, which was read instead", stacklevel=2)
    return loaded


def _write(checkpoint: Checkpoint, folder: pathlib.Path) -> None:
    params, optimizer, extra = (
        {name: _plain(leaf) for name, leaf in leaves.items()}
        for leaves in (checkpoint.params, checkpoint.optimizer, checkpoint.extra)
    )
    keys = {name: leaf for name, leaf in checkpoint.optimizer.items() if is_key(leaf)}
    about = About(
        step=checkpoint.step,
        params=describe(params),
        dtypes=checkpoint.dtypes,
        dictionary_paths=checkpoint.dictionary_paths,
        optimizer=describe(optimizer),
        loss_scale=checkpoint.loss_scale,
        optimizer_keys={name: str(jax.random.key_impl(key)) for name, key in keys.items()},
        extra=describe(extra),
    )
    write_arrays({"params": params, "optimizer": optimizer, "extra": extra}, folder)
    write_about(about, folder)


def _load(folder: pathlib.Path, path: Path) -> Checkpoint:
    if not (folder / FILE).is_file():
        others = ", ".join(str(other) for other in leftovers(folder))
        of_saves = f"; interrupted saves left {others}, which hold no whole one" if others else ""
        raise CheckpointError(f"{path} is not a JaxFerry checkpoint{of_saves}")
    try:
        about = read_about(folder)
        arrays = read_arrays(about, folder)
        for name, kind in about.optimizer_keys.items():
            arrays["optimizer"][name] = jax.random.wrap_key_data(arrays["optimizer"][name], impl=kind)
    except (CheckpointError, InputError, OSError, ValueError, TypeError, MemoryError) as error:
        what = str(error) if isinstance(error, CheckpointError | InputError) else reason(error)
        raise CheckpointError(f"{path} cannot be read: {what}; restore another checkpoint") from error
    if not about.has_digests:
        warnings.warn(
            f"{path} has format {WITHOUT_DIGESTS!r}, without digests: damage to its arrays goes unnoticed; save it "
            "again to add them",
            stacklevel=2,
        )
    return Checkpoint(
        step=about.step,
        params=arrays["params"],
        dtypes=about.dtypes,
        dictionary_paths=about.dictionary_paths,
        optimizer=arrays["optimizer"],
        loss_scale=about.loss_scale,
        extra=arrays["extra"],
    )


def _plain(leaf: Any) -> Any:
    """Returns a leaf as NumPy memory, without a copy; parts of a `Stacked` stay apart."""
    if isinstance(leaf, Stacked):
        return Stacked(tuple(np.asarray(part) for part in leaf.parts), leaf.axis)
    return np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf)


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    """Turns errors of the block into those of a path that cannot be written."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"cannot write to {path}: {reason(error)}; make room, or choose another path") from error
