"""Builds expensive libraries once for all processes that share the tests."""

import fcntl
import os
import pathlib
import shutil
import sys


def built_once(name, build):
    """The folder in which `build(folder)` ran, for the first process of this session that asked; others wait for it."""
    root = pathlib.Path(os.environ["JAXFERRY_TESTS_CACHE"])
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
