"""The control groups of the process, whose limits containers and job schedulers set.

A limit of any group above the process's own counts too. Sources: cgroups(7), and Linux's documentation of control
groups, versions 1 and 2.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator

_MOUNT = "sys/fs/cgroup"


@dataclasses.dataclass(frozen=True)
class Group:
    """A control group.

    Attributes:
      folder: its files.
      version: that of the interface, 1 or 2; the files' names depend on it.
    """

    folder: pathlib.Path
    version: int

    def first_line(self, name: str) -> str:
        """Returns the first line of a file; empty if there is none."""
        return next(iter(read_lines(self.folder / name)), "")

    def statistics(self, name: str) -> dict[str, int]:
        """Returns the numbers of a file with a name and a number a line."""
        fields = [line.split() for line in read_lines(self.folder / name)]
        return {field[0]: int(field[1]) for field in fields if len(field) == 2 and field[1].isdigit()}


def groups(controller: str, root: pathlib.Path) -> Iterator[Group]:
    """Yields the process's groups of a controller, each followed by those above it.

    Args:
      controller: its name, such as "memory".
      root: the folder that holds `proc` and `sys`.
    """
    mount = root / _MOUNT
    for line in read_lines(root / "proc/self/cgroup"):
        fields = line.split(":", 2)
        if len(fields) < 3:
            continue
        _, controllers, path = fields
        if controllers == "":
            mounts, version = [mount, mount / "unified"], 2
        elif controller in controllers.split(","):
            mounts, version = [mount / name for name in dict.fromkeys([controller, controllers])], 1
        else:
            continue
        # In a container the path may be one of the host's, and the mount the container's own group.
        for base in mounts:
            own = base / path.lstrip("/")
            yield from (Group(folder, version) for folder in [own, *own.parents] if folder.is_relative_to(base))


def read_lines(path: pathlib.Path) -> list[str]:
    """Returns the lines of a file; none if it cannot be read."""
    try:
        return path.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return []
