"""The hidden folder in which a save prepares a checkpoint, and those that dead processes left.

    .NAME.jaxferry-save-XXXXXXXX/
      lock       locked while the process that saves is alive
      writing/   the new checkpoint while it is written
      fresh/     the new checkpoint, whole and on the disk
      old/       the replaced checkpoint

A scratch folder lies beside its checkpoint, so that a rename moves one to the other. Its lock ends with its process,
however that ends; a folder whose lock is free is a leftover, and the next save removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import shutil
import tempfile
import time
from collections.abc import Iterator

from jaxferry.checkpoint.about import FILE

MARK = ".jaxferry-save-"
"""Between the names of a checkpoint and of its scratch folder."""
_REMOVALS = 50
_BETWEEN_REMOVALS_S = 0.1
_QUIET_S = 1.0
"""How long a folder must stay away after an error: threads of TensorStore may still write, and make it anew."""


class Scratch:
    """A scratch folder that this process owns.

    Attributes:
      folder: the scratch folder.
      writing: where to write the new checkpoint.
      fresh: its path once it is whole.
      old: where the replaced checkpoint goes.
      is_kept: whether the folder outlives the save, because it holds what exists nowhere else.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.writing, self.fresh, self.old = (folder / name for name in ("writing", "fresh", "old"))
        self.is_kept = False


@contextlib.contextmanager
def scratch_beside(target: pathlib.Path) -> Iterator[Scratch]:
    """Makes a scratch folder, and the folders above it; removes it at the end.

    Folders above it that did not exist are removed as well if the block raises.

    Raises:
      OSError: if it cannot be made.
    """
    missing = [parent for parent in target.parents if not parent.exists()]
    lock = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        while lock is None:
            # Another process may take it for a leftover before it is locked.
            folder = pathlib.Path(tempfile.mkdtemp(prefix=f".{target.name}{MARK}", dir=target.parent))
            try:
                lock = _lock(folder, is_needed=False)
            except OSError:
                remove(folder)
                raise
        scratch = Scratch(folder)
        has_failed = True
        try:
            yield scratch
            has_failed = False
        finally:
            if not scratch.is_kept:
                remove(folder, has_failed)
            os.close(lock)
    except BaseException:
        for parent in missing:
            with contextlib.suppress(OSError):
                parent.rmdir()
        raise


def leftovers(target: pathlib.Path) -> list[pathlib.Path]:
    """Returns the scratch folders beside a checkpoint, whether their processes are alive or not."""
    try:
        return sorted(path for path in target.parent.iterdir() if path.name.startswith(f".{target.name}{MARK}"))
    except OSError:
        return []


def is_scratch(folder: pathlib.Path) -> bool:
    """Whether a folder is a scratch folder."""
    return folder.name.startswith(".") and MARK in folder.name


@contextlib.contextmanager
def locked_leftover(folder: pathlib.Path) -> Iterator[bool]:
    """Locks a leftover for the block; yields whether its process is dead."""
    try:
        lock = _lock(folder, is_needed=True)
    except OSError:
        lock = None
    try:
        yield lock is not None
    finally:
        if lock is not None:
            os.close(lock)


def remove(folder: pathlib.Path, has_failed: bool = False) -> None:
    """Removes a scratch folder, or a checkpoint in it; what is left at any moment is not read as a checkpoint.

    Args:
      folder: the folder.
      has_failed: whether writing to it has failed, so that threads may go on writing for a moment.
    """
    for checkpoint in (folder, folder / "fresh", folder / "old"):
        with contextlib.suppress(OSError):
            (checkpoint / FILE).unlink()
    wanted_s, gone_s = _QUIET_S if has_failed else 0.0, time.monotonic()
    for _ in range(_REMOVALS):
        if folder.exists():
            shutil.rmtree(folder, ignore_errors=True)
            gone_s = time.monotonic()
        if not folder.exists() and time.monotonic() - gone_s >= wanted_s:
            return
        time.sleep(_BETWEEN_REMOVALS_S)


def _lock(folder: pathlib.Path, is_needed: bool) -> int | None:
    """Returns a file descriptor that holds the folder's lock; None if another process holds it, or has removed it.

    Where the file system has no locks, the folder's owner goes on without one, and no one takes it for a leftover.
    """
    file = folder / "lock"
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        return None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except OSError:
            if is_needed:
                raise
        if os.path.samestat(os.fstat(descriptor), os.stat(file)):
            return descriptor
    except FileNotFoundError:
        pass
    except OSError:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None
