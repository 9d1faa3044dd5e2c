"""Files of control groups, made up or real ones."""

import contextlib
import pathlib
import uuid

import pytest

MOUNT = pathlib.Path("/sys/fs/cgroup")


def write(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@contextlib.contextmanager
def real_group(controller, version_1, version_2):
    """Makes a control group of this machine; skips the test where that is not allowed.

    Args:
      controller: the controller's name.
      version_1: texts by the file's name, as that version of the interface wants them.
      version_2: likewise.

    Yields:
      Python code that moves its process into the group.
    """
    is_first = (MOUNT / controller).is_dir()
    folder = (MOUNT / controller if is_first else MOUNT) / f"jaxferry-{uuid.uuid4().hex}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made: {error}")
    try:
        try:
            for name, text in (version_1 if is_first else version_2).items():
                (folder / name).write_text(text)
        except OSError as error:
            pytest.skip(f"the control group has no such limit: {error}")
        yield f"import os; open({str(folder / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))"
    finally:
        folder.rmdir()
