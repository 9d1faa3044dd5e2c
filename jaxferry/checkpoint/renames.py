"""Renames that Python's `os` lacks: an exchange of two paths, and a rename that replaces nothing (Linux)."""

from __future__ import annotations

import ctypes
import errno
import os
import pathlib

_WORKING_FOLDER = -100  # AT_FDCWD
_NO_REPLACE, _EXCHANGE = 1, 2
# What kernels and file systems answer that have no such rename.
_UNSUPPORTED = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}

_call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)


def exchange(first: pathlib.Path, second: pathlib.Path) -> bool:
    """Exchanges two paths atomically; returns False where the file system cannot.

    Raises:
      OSError: as `os.rename` does; `FileNotFoundError` if either is missing.
    """
    return _rename(first, second, _EXCHANGE)


def rename_new(source: pathlib.Path, target: pathlib.Path) -> None:
    """Renames a folder to a path where nothing is yet.

    Raises:
      FileExistsError: if something is there.
      OSError: as `os.rename` does.
    """
    if _rename(source, target, _NO_REPLACE):
        return
    if os.path.lexists(target):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
    try:
        os.rename(source, target)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.ENOTDIR):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target)) from error
        raise


def _rename(source: pathlib.Path, target: pathlib.Path, flag: int) -> bool:
    if _call is None:
        return False
    if _call(_WORKING_FOLDER, os.fsencode(source), _WORKING_FOLDER, os.fsencode(target), flag) == 0:
        return True
    number = ctypes.get_errno()
    if number in _UNSUPPORTED:
        return False
    raise OSError(number, os.strerror(number), str(source), None, str(target))
