"""Where a checkpoint lies: the user's path, with links followed."""

from __future__ import annotations

import os
import pathlib
import re

from jaxferry.errors import CheckpointError

# `pathlib` shortens "gs://bucket" to "gs:/bucket".
_REMOTE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


def local_path(path: str | bytes | os.PathLike[str]) -> pathlib.Path:
    """Returns the absolute path of a local folder, with symbolic links followed.

    Raises:
      CheckpointError: if it is a URL, a broken link, or no path at all.
    """
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


def reason(error: BaseException) -> str:
    """Returns an error's message as one short line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
