"""The folders of checkpoints: numbered saves, of which the newest counts, and several checkpoints of one run.

    NAME/save_7/                    a whole save on the disk; the highest number is the checkpoint
    .NAME.jaxferry-save-XXXXXXXX/   a save in progress: `lock`, held while its process lives, and the new save

    FOLDER/00000100/save_0/         one of several checkpoints of a run, by step

One rename publishes a save, as in Orbax's `CheckpointManager`, which can read these folders (`step_prefix="save"`). The
manager cannot write them as promised: it does not sync files to the disk, removes what other living processes write,
leaves a failed save on a full disk, and keeps the highest steps, not the last saves.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import math
import os
import pathlib
import re
import shutil
import tempfile
import time
import warnings
from collections.abc import Iterator

from jaxferry.checkpoint.about import FILE, read_about, read_format
from jaxferry.checkpoint.arrays import FOLDER, folder_of, reason
from jaxferry.errors import CheckpointError, InputError

_MARK = ".jaxferry-save-"  # between the names of a checkpoint and of the folder of a save in progress
_SAVE = re.compile(r"save_(\d+)")
_STEP = re.compile(rf"\.?(\d{{8,}})(?:{re.escape(_MARK)}\w+)?")
# `pathlib` shortens "gs://bucket" to "gs:/bucket".
_REMOTE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
_ATTEMPTS = 100
_REMOVALS = 50
_BETWEEN_REMOVALS_S = 0.1
_QUIET_S = 1.0
"""How long a folder must stay away after an error: threads of TensorStore may still write, and create it again."""


def local_path(path: str | bytes | os.PathLike[str]) -> pathlib.Path:
    """Returns the absolute path of a local folder, symbolic links followed; raises `CheckpointError` for others."""
    try:
        shown = os.fsdecode(path)
    except TypeError as error:
        raise CheckpointError(f"the path of a checkpoint must be a string or a path, got {path!r}") from error
    if _REMOTE.match(shown):
        raise CheckpointError(
            f"{shown} is remote storage, and checkpoints are local folders: save to a local path and copy the folder "
            f"(a local path of this name is ./{shown})"
        )
    try:
        absolute = pathlib.Path(os.getcwd(), shown)
        for part in [absolute, *absolute.parents]:
            if part.is_symlink() and not part.exists():
                raise CheckpointError(
                    f"{shown} cannot be used: {part} is a symbolic link to {os.readlink(part)}, which does not exist"
                )
        return pathlib.Path(os.path.realpath(absolute))
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{shown!r} cannot be used as a path: {reason(error)}; choose another path") from error


def newest_save(target: pathlib.Path) -> pathlib.Path | None:
    """Returns the folder of a checkpoint's newest save; None if there is none.

    A checkpoint of an earlier version, and a save itself, have `about` and `arrays` at the path.
    """
    for number in reversed(_numbers(target)):
        if os.path.lexists(target / f"save_{number}" / FILE):
            return target / f"save_{number}"
    return target if os.path.lexists(target / FILE) else None


def _numbers(target: pathlib.Path) -> list[int]:
    try:
        return sorted(int(match[1]) for entry in os.listdir(target) if (match := _SAVE.fullmatch(entry)))
    except OSError:
        return []


def check_replaceable(target: pathlib.Path) -> None:
    """Checks that a checkpoint or nothing is at a path; raises CheckpointError if anything else is there."""
    while os.path.lexists(target):
        newest, what = newest_save(target), "is not a JaxFerry checkpoint"
        try:
            if newest is not None and read_format(newest) is not None:
                return
        except InputError as error:
            what += f" that can be read ({error})"
        # Another process may replace the save while it is read.
        if newest == newest_save(target):
            raise CheckpointError(f"{target} exists and {what}: choose another path")


@contextlib.contextmanager
def new_save(target: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields an empty folder; publishes what the block writes as the newest save of a checkpoint, removes older ones.

    At every moment the path holds a whole save: the older one until the new one is on the disk, then the new one.
    Files of the user in the checkpoint's folder stay. Raises `CheckpointError` if something else is at the path, and
    OSError if the file system refuses; what was there stays.
    """
    check_replaceable(target)
    with _scratch_beside(target) as scratch:
        written = scratch / "new" / "save_0"
        written.mkdir(parents=True)
        yield written
        for parent, _, files in os.walk(scratch / "new"):
            for name in (*files, ""):
                _sync(os.path.join(parent, name))
        number = _publish(written, target)
        _sync(target)
        _sync(target.parent)
        _take_older(target, number, scratch)
    _sweep(target)


def check_writable(target: pathlib.Path) -> None:
    """Checks that a save can be written at a path, and creates the folders above it; raises as `new_save` does."""
    check_replaceable(target)
    with _scratch_beside(target):
        pass


def _publish(written: pathlib.Path, target: pathlib.Path) -> int:
    """Moves a new save to its place; returns its number."""
    for _ in range(_ATTEMPTS):
        # Another process may create, replace or remove the checkpoint at any time.
        check_replaceable(target)
        number = max(_numbers(target), default=-1) + 1
        try:
            if number or target.exists():
                written.rename(target / f"save_{number}")
            else:
                written.parent.rename(target)
            return number
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOENT):
                raise
    raise CheckpointError(f"{target} is made and removed by others again and again: choose another path")


def _take_older(target: pathlib.Path, number: int, scratch: pathlib.Path) -> None:
    """Moves older saves into a folder that will be removed; so no save at the path is ever half removed."""
    older = [f"save_{each}" for each in _numbers(target) if each < number]
    older = [name for name in older if os.path.lexists(target / name / FILE)]
    # Of an earlier version; `about` is last, so that the next save continues if this process dies.
    older += [*_own_arrays(target), FILE.split("/")[0]] if os.path.lexists(target / FILE) else []
    for name in older:
        # Another process may have taken it.
        with contextlib.suppress(FileNotFoundError):
            (target / name).rename(scratch / name)


def _own_arrays(save: pathlib.Path) -> list[str]:
    try:
        return [folder_of(process) for process in range(read_about(save).num_processes)]
    except InputError:
        return [FOLDER]


def _sync(path: str | pathlib.Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some file systems cannot do this for folders.
        if error.errno not in (errno.EINVAL, errno.EBADF):
            raise
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _scratch_beside(target: pathlib.Path) -> Iterator[pathlib.Path]:
    """Creates a hidden folder beside a checkpoint, and those above; removes it, after an error also new ones above."""
    missing = [parent for parent in target.parents if not parent.exists()]
    has_failed = True
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        lock = None
        while lock is None:
            # Another process may take it for a leftover before it is locked.
            folder = pathlib.Path(tempfile.mkdtemp(prefix=f".{target.name}{_MARK}", dir=target.parent))
            try:
                lock = _lock(folder, is_needed=False)
            except OSError:
                _remove(folder)
                raise
        try:
            yield folder
            has_failed = False
        finally:
            _remove(folder, has_failed)
            os.close(lock)
    finally:
        for parent in missing if has_failed else ():
            with contextlib.suppress(OSError):
                parent.rmdir()


def leftovers(target: pathlib.Path) -> list[pathlib.Path]:
    """Returns the folders of saves in progress beside a checkpoint, whether their processes live or not."""
    try:
        return sorted(path for path in target.parent.iterdir() if path.name.startswith(f".{target.name}{_MARK}"))
    except OSError:
        return []


def _sweep(target: pathlib.Path) -> None:
    """Removes what dead processes left beside a checkpoint; a warning names it."""
    names = []
    for folder in leftovers(target):
        with contextlib.suppress(OSError):
            lock = _lock(folder, is_needed=True)
            if lock is not None:
                _remove(folder)
                os.close(lock)
                names.append(folder.name)
    if names:
        warnings.warn(f"removed what interrupted saves of {target} left: {', '.join(names)}", stacklevel=2)


def _remove(folder: pathlib.Path, has_failed: bool = False) -> None:
    """Removes a folder; after a failed write, also what threads write to it a moment later."""
    wanted_s, gone_s = _QUIET_S if has_failed else 0.0, time.monotonic()
    for _ in range(_REMOVALS):
        if folder.exists():
            shutil.rmtree(folder, ignore_errors=True)
            gone_s = time.monotonic()
        if not folder.exists() and time.monotonic() - gone_s >= wanted_s:
            return
        time.sleep(_BETWEEN_REMOVALS_S)


def _lock(folder: pathlib.Path, is_needed: bool) -> int | None:
    """Returns a file descriptor that holds a folder's lock; None if another process holds it, or has removed it.

    Where the file system has no locks, the folder's owner continues without one, and no process removes leftovers.
    """
    file = folder / "lock"
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        return None
    is_locked = False
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        except OSError:
            if is_needed:
                raise
        # The folder may have been removed meanwhile.
        with contextlib.suppress(FileNotFoundError):
            is_locked = os.path.samestat(os.fstat(descriptor), os.stat(file))
        return descriptor if is_locked else None
    finally:
        if not is_locked:
            os.close(descriptor)


@dataclasses.dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint in a folder: `path` is for `step.restore`, `saved_at_s` seconds since 1970.

    `metric` is the one given when it was saved; None if there was none, or it was not finite.
    """

    path: pathlib.Path
    step: int
    saved_at_s: float
    metric: float | None


@dataclasses.dataclass(frozen=True)
class Keep:
    """Which checkpoints of a folder to keep: the last saves, at least 1, and those with the lowest metrics."""

    last: int
    best: int = 0

    def __post_init__(self) -> None:
        for name, value, least in (("keep_last", self.last, 1), ("keep_best", self.best, 0)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise InputError(f"{name} must be a whole number of at least {least}, got {value!r}")

    def of(self, checkpoints: list[SavedCheckpoint]) -> set[pathlib.Path]:
        """Returns the paths to keep of checkpoints, which are ordered by time."""
        rated = sorted((c.metric, -i) for i, c in enumerate(checkpoints) if c.metric is not None)
        best = [checkpoints[-i] for _, i in rated[: self.best]]
        return {checkpoint.path for checkpoint in [*checkpoints[-self.last :], *best]}


def path_in(folder: pathlib.Path, step: int) -> pathlib.Path:
    """Returns the path of a step's checkpoint."""
    return folder / f"{step:08d}"


def list_in(folder: pathlib.Path, warns: bool = True) -> list[SavedCheckpoint]:
    """Returns the checkpoints of a folder by the time of their save, oldest first.

    After a return to an older checkpoint, the newest is thus the last save of the run that continues. A checkpoint
    that is not named by its step is the user's own; one that cannot be read causes a warning. Both are left out.
    """
    found = []
    for path in _paths(folder):
        if (save := newest_save(path)) is None:
            continue
        try:
            about = read_about(save)
        except InputError as error:
            # Another process may have removed it.
            if warns and path.exists():
                warnings.warn(f"{path} is left out: {error}", stacklevel=2)
            continue
        if path == path_in(folder, about.content.step):
            found.append(SavedCheckpoint(path, about.content.step, about.saved_at_s, about.content.metric))
    return sorted(found, key=lambda checkpoint: (checkpoint.saved_at_s, checkpoint.step))


def next_time_s(folder: pathlib.Path) -> float:
    """Returns the time of a save that begins now: later than all before, even if a clock was set back."""
    return max([time.time(), *(math.nextafter(other.saved_at_s, math.inf) for other in list_in(folder, warns=False))])


def newest_in(folder: pathlib.Path) -> pathlib.Path | None:
    """Returns the newest checkpoint of a folder, None if it has none; raises `CheckpointError` if all are damaged."""
    if not _paths(folder):
        return None
    checkpoints = list_in(folder)
    if not checkpoints:
        raise CheckpointError(f"{folder} holds no checkpoint that can be read")
    return checkpoints[-1].path


def prune(folder: pathlib.Path, keep: Keep) -> None:
    """Removes all checkpoints but those to keep, and what dead processes left in the folder.

    A checkpoint stays if it cannot be read, or if a user has put files into its folder.
    """
    for path in _paths(folder):
        _sweep(path)
    checkpoints = list_in(folder)
    kept = keep.of(checkpoints)
    for path in [checkpoint.path for checkpoint in checkpoints if checkpoint.path not in kept]:
        # Another process may remove it as well.
        with contextlib.suppress(FileNotFoundError):
            own = {*_own_arrays(path), FILE.split("/")[0]} if os.path.lexists(path / FILE) else set()
            if all(name in own or _SAVE.fullmatch(name) for name in os.listdir(path)):
                with _scratch_beside(path) as scratch:
                    path.rename(scratch / "old")


def _paths(folder: pathlib.Path) -> list[pathlib.Path]:
    """Returns the paths at which checkpoints are, or were saved when a process died."""
    try:
        matches = [_STEP.fullmatch(path.name) for path in folder.iterdir() if path.is_dir()]
    except OSError:
        return []
    return sorted({folder / match[1] for match in matches if match})
