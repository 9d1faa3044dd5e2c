"""Puts a new checkpoint in the place of an old one, so that at every moment one of them is there, whole.

    write scratch/writing -> fsync -> rename to scratch/fresh -> exchange with the target -> remove the old one

Where the file system cannot exchange two folders, the old one is renamed to `scratch/old` first. Until the new one has
its place, nothing is at the target; then `find` returns the newest whole checkpoint of the scratch folders beside it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import shutil
import warnings

from jaxferry.checkpoint import renames
from jaxferry.checkpoint.about import FILE, read_about, read_format
from jaxferry.checkpoint.arrays import FOLDER, folder_of
from jaxferry.checkpoint.scratch import Scratch, leftovers, locked_leftover, remove
from jaxferry.errors import CheckpointError, InputError

_OWN = frozenset({FILE.split("/")[0], FOLDER, "_CHECKPOINT_METADATA", "commit_success.txt"})
_ATTEMPTS = 100


def check_replaceable(target: pathlib.Path) -> bool:
    """Returns whether a checkpoint is at the path, which may be replaced; False if nothing is there.

    Raises:
      CheckpointError: if anything else is there.
    """
    while True:
        before = identity(target)
        if not os.path.lexists(target):
            return False
        try:
            if target.is_dir() and read_format(target) is not None:
                return True
            what = "is not a JaxFerry checkpoint"
        except InputError as error:
            what = f"is not a JaxFerry checkpoint that can be read ({error})"
        # Another process may replace it while it is read.
        if identity(target) == before:
            raise CheckpointError(f"{target} exists and {what}: choose another path")


def find(target: pathlib.Path) -> pathlib.Path:
    """Returns the folder to read: the path itself, or the newest whole checkpoint of an interrupted replacement."""
    if os.path.lexists(target):
        return target
    return next(iter(_whole_leftovers(target)), target)


def _whole_leftovers(target: pathlib.Path) -> list[pathlib.Path]:
    """Returns the newest whole checkpoint of each scratch folder beside a path, newest first."""
    whole: list[tuple[float, pathlib.Path]] = []
    for folder in leftovers(target):
        for candidate in (folder / "fresh", folder / "old"):
            with contextlib.suppress(OSError, InputError):
                if read_format(candidate) is not None:
                    whole.append(((candidate / FILE).stat().st_mtime, candidate))
                    break
    return [path for _, path in sorted(whole, reverse=True)]


def identity(folder: pathlib.Path) -> tuple[int, ...] | None:
    """Returns what changes when another folder takes the place of this one; None if there is none."""
    try:
        facts = os.stat(folder)
    except OSError:
        return None
    # The number alone may be given again to a new folder.
    return facts.st_dev, facts.st_ino, facts.st_ctime_ns


def publish(scratch: Scratch, target: pathlib.Path) -> None:
    """Moves the checkpoint in `scratch.writing` to the target, durably.

    What a user has put into the folder of the old checkpoint goes into that of the new one.

    Raises:
      CheckpointError: if something else than a checkpoint is at the target.
      OSError: if the file system refuses; the old checkpoint stays.
    """
    sync_tree(scratch.writing)
    complete(target)
    scratch.writing.rename(scratch.fresh)
    _sync(scratch.folder)
    try:
        _switch(scratch, target)
    except CheckpointError as error:
        if scratch.is_kept:
            raise CheckpointError(
                f"{error} (what was there is in {scratch.old}, the new one in {scratch.fresh})"
            ) from error
        raise
    _sync(target.parent)
    if scratch.old.exists():
        _carry(scratch.old, target)


def sweep(target: pathlib.Path) -> None:
    """Removes what dead processes left beside a checkpoint; a warning names it."""
    names = []
    for folder in leftovers(target):
        with locked_leftover(folder) as is_dead:
            if is_dead:
                remove(folder)
                names.append(folder.name)
    if names:
        warnings.warn(f"removed what interrupted saves of {target} left: {', '.join(names)}", stacklevel=2)


def sync_tree(folder: pathlib.Path) -> None:
    """Writes all files and folders below a folder to the disk."""
    for parent, _, files in os.walk(folder):
        for file in files:
            _sync(pathlib.Path(parent, file))
        _sync(pathlib.Path(parent))


def _sync(path: pathlib.Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some file systems cannot do this for folders.
        if error.errno not in (errno.EINVAL, errno.EBADF):
            raise
    finally:
        os.close(descriptor)


def complete(target: pathlib.Path) -> None:
    """Completes a replacement that a dead process left between its two renames."""
    if os.path.lexists(target):
        return
    for found in _whole_leftovers(target):
        with locked_leftover(found.parent) as is_dead, contextlib.suppress(FileExistsError, FileNotFoundError):
            if is_dead:
                renames.rename_new(found, target)
                return


def _switch(scratch: Scratch, target: pathlib.Path) -> None:
    """Moves `scratch.fresh` to the target, and what was there to `scratch.old`."""
    for _ in range(_ATTEMPTS):
        # Another process may make, replace or remove what is at the target at any time.
        is_there = check_replaceable(target)
        with contextlib.suppress(FileExistsError, FileNotFoundError):
            if not is_there:
                renames.rename_new(scratch.fresh, target)
                scratch.is_kept = False
                return
            _carry(target, scratch.fresh)
            if renames.exchange(scratch.fresh, target):
                _check_exchanged(scratch, target)
                return
            _move_in_two(scratch, target)
            return
    raise CheckpointError(f"{target} is made and removed by others again and again: choose another path")


def _check_exchanged(scratch: Scratch, target: pathlib.Path) -> None:
    """Takes an exchange back if another process has put something else there since it was checked."""
    try:
        check_replaceable(scratch.fresh)
    except CheckpointError as error:
        renames.exchange(scratch.fresh, target)
        raise CheckpointError(f"{target} exists and is not a JaxFerry checkpoint: choose another path") from error
    scratch.fresh.rename(scratch.old)


def _move_in_two(scratch: Scratch, target: pathlib.Path) -> None:
    """Replaces by two renames.

    Raises:
      FileExistsError: if another process has made the target in between.
    """
    if scratch.old.exists():
        # Taken in an attempt before; what is at the target now is newer.
        remove(scratch.old)
    target.rename(scratch.old)
    scratch.is_kept = True
    try:
        renames.rename_new(scratch.fresh, target)
    except OSError as error:
        if not isinstance(error, FileExistsError):
            renames.rename_new(scratch.old, target)
            scratch.is_kept = False
        raise
    scratch.is_kept = False


def foreign(checkpoint: pathlib.Path) -> list[pathlib.Path]:
    """Returns what users have put into the folder of a checkpoint."""
    own = set(_OWN)
    with contextlib.suppress(InputError):
        about = read_about(checkpoint)
        own |= {folder_of(process) for process in range(about.num_processes)}
    return [entry for entry in checkpoint.iterdir() if entry.name not in own]


def _carry(old: pathlib.Path, new: pathlib.Path) -> None:
    """Links what is not the checkpoint's own from one folder into another; copies where links cannot be made."""
    for entry in foreign(old):
        other = new / entry.name
        if os.path.lexists(other):
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.copytree(entry, other, symlinks=True, copy_function=_link)
        else:
            _link(str(entry), str(other))


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)
