"""Checkpoints of one run in a folder, named by step: which there are, and which to keep.

    FOLDER/00000100/   FOLDER/00000200/   ...

They are ordered by the time of their save, not by step: after a return to an older checkpoint, the newest is that of
the run that goes on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import pathlib
import re
import time
import warnings

from jaxferry.checkpoint.about import read_about
from jaxferry.checkpoint.replacement import complete, find, foreign, sweep
from jaxferry.checkpoint.scratch import MARK, is_scratch, scratch_beside
from jaxferry.errors import CheckpointError, InputError

# A checkpoint, or a folder that an interrupted save of it has left.
_NAME = re.compile(rf"\.?(\d{{8,}})(?:{re.escape(MARK)}\w+)?")


@dataclasses.dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint in a folder.

    Attributes:
      path: its folder, for `step.restore`.
      step: number of steps taken.
      saved_at_s: when it was saved, in seconds since 1970.
      metric: the metric given when it was saved; None if there was none, or it was not finite.
    """

    path: pathlib.Path
    step: int
    saved_at_s: float
    metric: float | None


@dataclasses.dataclass(frozen=True)
class Keep:
    """Which checkpoints of a folder to keep.

    Attributes:
      last: this many that were saved last; at least 1.
      best: and this many with the lowest metric.
    """

    last: int
    best: int = 0

    def __post_init__(self) -> None:
        for name, value, least in (("keep_last", self.last, 1), ("keep_best", self.best, 0)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise InputError(f"{name} must be a whole number of at least {least}, got {value!r}")

    def of(self, checkpoints: list[SavedCheckpoint]) -> set[pathlib.Path]:
        """Returns the paths of those to keep.

        Args:
          checkpoints: all, oldest first.
        """
        rated = sorted((c.metric, -i) for i, c in enumerate(checkpoints) if c.metric is not None)
        best = [checkpoints[-i] for _, i in rated[: self.best]]
        return {checkpoint.path for checkpoint in [*checkpoints[-self.last :], *best]}


def path_in(folder: pathlib.Path, step: int) -> pathlib.Path:
    """Returns the path of a step's checkpoint."""
    return folder / f"{step:08d}"


def list_in(folder: pathlib.Path) -> list[SavedCheckpoint]:
    """Returns the checkpoints of a folder, oldest first; a warning names those that cannot be read."""
    found, errors = _read(folder)
    for checkpoint, error in errors:
        if checkpoint.exists():
            warnings.warn(f"{checkpoint} is left out: {error}", stacklevel=2)
    return found


def _read(folder: pathlib.Path) -> tuple[list[SavedCheckpoint], list[tuple[pathlib.Path, InputError]]]:
    """Returns the checkpoints of a folder, oldest first, and those that cannot be read with their errors.

    A checkpoint that is not named by its step is a user's own.
    """
    found, errors = [], []
    for path in _paths(folder):
        checkpoint = find(path)
        try:
            about = read_about(checkpoint)
        except InputError as error:
            errors.append((checkpoint, error))
            continue
        if path == path_in(folder, about.step):
            found.append(SavedCheckpoint(checkpoint, about.step, about.saved_at_s, about.metric))
    return sorted(found, key=lambda checkpoint: (checkpoint.saved_at_s, checkpoint.step)), errors


def next_time_s(folder: pathlib.Path) -> float:
    """Returns the time of a save that begins now: later than all before, though clocks may differ or be set back."""
    found, _ = _read(folder)
    return max([time.time(), *(math.nextafter(checkpoint.saved_at_s, math.inf) for checkpoint in found)])


def prune(folder: pathlib.Path, keep: Keep) -> None:
    """Removes all checkpoints but those to keep, and what dead processes left in the folder.

    A checkpoint stays if it cannot be read, or if a user has put files of his own into its folder.
    """
    for path in _paths(folder):
        complete(path)
        sweep(path)
    checkpoints = list_in(folder)
    kept = keep.of(checkpoints)
    for checkpoint in checkpoints:
        # Another process may be replacing it, or remove it as well.
        if checkpoint.path in kept or is_scratch(checkpoint.path.parent):
            continue
        with contextlib.suppress(FileNotFoundError):
            if not foreign(checkpoint.path):
                with scratch_beside(checkpoint.path) as scratch:
                    checkpoint.path.rename(scratch.old)


def check_metric(metric: float | None) -> float | None:
    """Returns a metric as a number; None for one that is not finite.

    Raises:
      InputError: if it is not a number.
    """
    if metric is None:
        return None
    try:
        number = float(metric)
    except (TypeError, ValueError) as error:
        raise InputError(f"metric must be a number, the lower the better, got {metric!r}") from error
    return number if math.isfinite(number) else None


def newest_in(folder: pathlib.Path) -> pathlib.Path | None:
    """Returns the newest checkpoint of a folder; None if the folder has none.

    Raises:
      CheckpointError: if there are only damaged ones.
    """
    if not _paths(folder):
        return None
    checkpoints = list_in(folder)
    if not checkpoints:
        raise CheckpointError(f"{folder} holds no checkpoint that can be read")
    return checkpoints[-1].path


def _paths(folder: pathlib.Path) -> list[pathlib.Path]:
    """Returns the paths at which checkpoints are, or were saved when a process died."""
    try:
        matches = [_NAME.fullmatch(path.name) for path in folder.iterdir() if path.is_dir()]
    except OSError:
        return []
    return sorted({folder / match[1] for match in matches if match})
