"""Builds expensive libraries once for all processes that share the tests."""

import atexit
import fcntl
import os
import pathlib
import shutil
import sys
import tempfile


def built_once(name, build):
    """The folder in which `build(folder)` ran, for the first process of this session that asked; others wait for it."""
    root = pathlib.Path(os.environ.get("JAXFERRY_TESTS_CACHE") or _own_folder())
    folder = root / f"{name}-{sys.version_info.major}.{sys.version_info.minor}"
    root.mkdir(parents=True, exist_ok=True)
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "done").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            build(folder)
            (folder / "done").touch()
    return folder


def _own_folder():
    """A folder for this process, of a benchmark that runs without the settings of the tests."""
    folder = tempfile.mkdtemp(prefix="jaxferry-built-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
