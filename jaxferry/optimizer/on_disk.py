"""Masters and optimizer state in a scratch file, from which updates read them and to which they write them back.

file --read--> slot in host memory --update--> the same slot --write--> file
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxferry.optimizer.on_devices import Elsewhere, home_of
from jaxferry.optimizer.pieces import Key, filled
from jaxferry.optimizer.scratch import OnDiskArray, Scratch
from jaxferry.optimizer.split_masters import SplitMaster
from jaxferry.optimizer.update_group import UpdateGroup
from jaxferry.processes import is_key
from jaxferry.transport import Placement, as_numpy

_LEAST_BYTES = 2**16
"""Smaller arrays, such as counts of steps, stay in memory."""


def bytes_on_disk(num_bytes: int) -> int:
    """What the file holds of an array of so many bytes."""
    return num_bytes if num_bytes >= _LEAST_BYTES else 0


def put_on_disk(array: Any, scratch: Scratch) -> Any:
    """The array in the file, or itself; see `is_small`."""
    return array if is_small(array) else _written(array, None, scratch)


def is_small(array: Any) -> bool:
    """Whether an array stays in memory: it is in the file already, small, or no plain numbers."""
    return isinstance(_content(array), OnDiskArray) or not bytes_on_disk(_content(array).nbytes) or is_key(array)


def _content(stored: Any) -> Any:
    """What is stored of an array beside the compute copy."""
    return stored.rest if isinstance(stored, SplitMaster) else stored


def _written(array: Any, known: Any, scratch: Scratch) -> Any:
    """An array in the file, in the room of `known` if that is as large."""
    own, old = _content(array), _content(known)
    if not (isinstance(old, OnDiskArray) and (old.shape, old.dtype) == (tuple(own.shape), own.dtype)):
        has_room = isinstance(old, OnDiskArray) and old.region.num_bytes >= own.nbytes
        region = old.region.first(own.nbytes) if has_room else scratch.region(own.nbytes)
        old = OnDiskArray(region, tuple(own.shape), own.dtype)
    old.write(np.ascontiguousarray(np.asarray(own)))
    return array.with_rest(old) if isinstance(array, SplitMaster) else old


@dataclasses.dataclass(frozen=True, kw_only=True)
class OnDisk(Elsewhere):
    """Masters and state of a unit in a scratch file; `arrays` are these, in the file or small ones in memory."""

    arrays: Sequence[Any]
    scratch: Scratch

    @classmethod
    def move(cls, unit: UpdateGroup, scratch: Scratch, placement: Placement) -> None:
        """Moves a unit's masters and state from host memory to the file, into the room that they had there."""
        arrays, old = [*unit.masters, *unit.state], unit.on_disk
        known = [None] * len(arrays) if old is None else old.arrays
        stored = [
            array if is_small(array) else _written(array, before, scratch)
            for array, before in zip(arrays, known, strict=True)
        ]
        for array, before in zip(map(_content, arrays), map(_content, known), strict=True):
            if isinstance(before, OnDiskArray):  # an update has read it into a slot
                scratch.keep(array, before.nbytes)
        home = home_of(unit)
        unit.on_disk = unit.elsewhere = cls(home, placement, arrays=stored, scratch=scratch)
        unit.masters, unit.state = home.masters, home.state

    def read(self, unit: UpdateGroup) -> None:
        """Moves them back to host memory, in the form that they had there; the room in the file stays theirs."""
        made = list(map(self._read, self.arrays))
        unit.masters, unit.state = made[: len(self.home.masters)], made[len(self.home.masters) :]
        unit.elsewhere = None

    def _read(self, stored: Any) -> Any:
        content = _content(stored)
        if not isinstance(content, OnDiskArray):
            return stored
        is_split = isinstance(stored, SplitMaster)
        made = self.scratch.slot(content, is_split)
        if made is None and is_split:
            made = np.empty(content.shape, content.dtype)
        elif made is None:
            made = filled(content.shape, content.dtype, self.placement, lambda made: None)
        content.read(made if is_split else as_numpy(made))
        return stored.with_rest(made) if is_split else made

    def masters(self, unit: UpdateGroup) -> list[Any]:
        """See `Elsewhere`; arrays that are read from the file when somebody asks for their elements."""
        return list(self.arrays[: len(self.home.masters)])

    def state(self, unit: UpdateGroup) -> list[Any]:
        """Likewise."""
        return list(self.arrays[len(self.home.masters) :])

    def replace_state(self, unit: UpdateGroup, leaves: Mapping[Key, jax.Array]) -> bool:
        """See `Elsewhere`."""
        return False

    def _arrays(self, unit: UpdateGroup) -> dict[Key, Any]:
        return unit.by_key(self.masters(unit), self.state(unit))
