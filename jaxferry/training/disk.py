"""Which layers' masters and optimizer state are in the scratch file, and what host memory then holds.

Of several processes, each has a file and elements of its own. Their plans must be the same, so all choose the same
layers, by the largest numbers that any of them has.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Self

from jaxferry.errors import InputError
from jaxferry.optimizer import (
    HostOptimizer,
    Scratch,
    Stored,
    bytes_on_disk,
    host_memory,
    master_bytes,
    put_on_disk,
)
from jaxferry.partition import Layer, Ownership, aval_bytes
from jaxferry.processes import check_same, largest
from jaxferry.settings import users_stacklevel
from jaxferry.step import DISK_SLOTS
from jaxferry.training.host_usage import MASTERS, STATE
from jaxferry.units import format_apart, format_bytes

Bytes = tuple[int, int]
"""Of masters and of optimizer state."""


@dataclasses.dataclass(frozen=True)
class DiskOptions:
    """The scratch file for what `host_memory_bytes` do not hold; None for what the process may still take."""

    scratch: Scratch | None = None
    host_memory_bytes: int | None = None

    @classmethod
    def of(cls, folder: str | None, host_memory_bytes: int | None) -> Self:
        """The file in a folder, or none; raises `InputError` if there can be none."""
        return cls(None if folder is None else Scratch(folder), host_memory_bytes)


NO_DISK = DiskOptions()


class StateOnDisk:
    """Chooses the groups whose masters and optimizer state are in the scratch file: as few as host memory allows.

    They are spread evenly, so that the disk works beside other groups' updates. The first choice is made before a state
    exists. Later ones, of other groups, are made likewise if the user says what training may take of host memory; else
    they leave as many bytes to the disk, since the state itself takes memory by then. Of several processes, each must
    ask for a choice first at the same point; all take as many groups as the one needs that needs most.

    Args:
      options: the file.
      optimizer: what is updated together.
      ownership: which elements are stored.
      needs: the bytes of training if all is in host memory, by what they are for.
      fits: whether host memory holds such bytes.
    """

    def __init__(
        self,
        options: DiskOptions,
        optimizer: HostOptimizer,
        ownership: Ownership,
        needs: Callable[[Sequence[Layer]], dict[str, int]],
        fits: Callable[[dict[str, int]], bool],
    ) -> None:
        self.scratch, self._most_bytes, self._optimizer = options.scratch, options.host_memory_bytes, optimizer
        self._ownership, self._needs, self._fits = ownership, needs, fits
        self._known: dict[tuple[Layer, ...], Mapping[int, Bytes]] = {}
        self._least_bytes: float | None = None
        self._is_alone = ownership.is_all
        self._has_compared = self._is_alone

    def groups(self, layers: Sequence[Layer]) -> frozenset[int]:
        """The chosen groups; raises `InputError` if one update covers several."""
        return frozenset(self._chosen(layers))

    def _chosen(self, layers: Sequence[Layer]) -> Mapping[int, Bytes]:
        """The bytes of each chosen group."""
        key = tuple(layers)
        if key in self._known:
            return self._known[key]
        is_by_layer = self.scratch is None or self._optimizer.is_by_layer(layers)
        if not self._has_compared:
            check_same("whether they have scratch=", str(self.scratch is not None))
            check_same("their optimizers", str(is_by_layer))
            self._has_compared = True
        if self.scratch is None:
            return {}
        if not is_by_layer:
            raise InputError(
                "scratch needs an optimizer that updates each layer alone: this one updates several at once"
            )
        sizes, needed = self._sizes(layers), self._needs(layers)
        num_bytes = dict(zip(sizes, self._largest(list(map(sum, sizes.values()))), strict=True))

        def is_enough(groups: Sequence[int]) -> bool:
            if self._least_bytes is not None and self._most_bytes is None:
                return sum(num_bytes[group] for group in groups) >= self._least_bytes
            return self._fits(left_in_memory(needed, [sizes[group] for group in groups]))

        groups = self._together(lambda least: fewest_on_disk(num_bytes, is_enough, least))
        self._known[key] = {group: sizes[group] for group in groups}
        on_disk = list(self._known[key].values())
        if self._least_bytes is None:
            self._least_bytes = sum(num_bytes[group] for group in groups)
        self.scratch.slot_bytes = max(self.scratch.slot_bytes, slot_bytes(on_disk))
        return self._known[key]

    def check(self, found: Mapping[str, int], others: Mapping[str, int]) -> None:
        """Warns if the bytes of a step, by what they are for, are more than the user gives training.

        `others` are those that no choice of what is on disk makes fewer.
        """
        most, num_bytes = self._most_bytes, sum(found.values())
        if most is not None and num_bytes > most:
            why = ", although all large masters and optimizer state are in scratch="
            if others:
                why = f", of which {' and '.join(others)} take {format_bytes(sum(others.values()))}"
            needs, wanted = format_apart(num_bytes, most)
            warnings.warn(
                f"training takes {needs} of host memory, more than host_memory={wanted}{why}",
                stacklevel=users_stacklevel(),
            )

    def _together(self, choose: Callable[[int], list[int]]) -> list[int]:
        """The fewest groups with which all processes do, of a function that chooses at least so many for this one."""
        num, chosen = -1, choose(0)
        while (most := int(self._largest([len(chosen)])[0])) > num:
            num, chosen = most, choose(most)
        return chosen

    def _largest(self, numbers: Sequence[float]) -> Sequence[float]:
        """The largest of each number in any process."""
        return numbers if self._is_alone or not numbers else largest(numbers)

    def _sizes(self, layers: Sequence[Layer]) -> dict[int, Bytes]:
        """The bytes of masters, as they are stored, and of the optimizer's state, by group; without small arrays."""
        updates, found = self._optimizer.updates, dict[int, Bytes]()
        for unit in self._optimizer.units_of(layers):
            form = updates.form_of(unit, layers) if updates.joins_masters else updates.master_form
            own = [pair for group in unit.layers for pair in self._ownership.placed(layers[group].trained)]
            masters = sum(bytes_on_disk(master_bytes(leaf, form, pieces)) for leaf, pieces in own)
            found[unit.layers[0]] = masters, sum(bytes_on_disk(aval_bytes(leaf)) for leaf in unit.state)
        return found

    def left(self, needed: dict[str, int], layers: Sequence[Layer]) -> dict[str, int]:
        """What host memory holds of these bytes, with the slots into which updates read."""
        return left_in_memory(needed, list(self._chosen(layers).values()))

    def bytes_by_name(self, layers: Sequence[Layer]) -> dict[str, int]:
        """The most bytes that any process has in its file, by group; each must call this."""
        chosen = self._chosen(layers)
        num_bytes = self._largest(list(map(sum, chosen.values())))
        return {layers[group].name: int(own) for group, own in zip(chosen, num_bytes, strict=True)}

    @functools.cached_property
    def seconds_a_byte(self) -> tuple[float, float]:
        """What a byte takes from the scratch file, and to it, as measured by the slowest process; each must call this.

        All measure at the same time, as they train: several files may be on one disk.
        """
        assert self.scratch is not None
        self._largest([0.0])  # nobody begins before the others
        read_s, write_s = self._largest(self.scratch.seconds_a_byte())
        return read_s, write_s

    def left_bytes(self, found: Mapping[str, int]) -> int | None:
        """What the user leaves for more than these bytes, by what they are for; None for no limit."""
        return None if self._most_bytes is None else max(self._most_bytes - sum(found.values()), 0)

    def keeper(self, layers: Sequence[Layer]) -> Callable[[int | str, Stored], Stored]:
        """What is kept of each array that a new state is made of: in the file if its group is there.

        The keys are those of masters, by index in the flattened tree, and of the optimizer's state, by path.
        """
        kept, chosen = set[int | str](), self._chosen(layers)
        for unit in self._optimizer.units_of(layers) if chosen else []:
            if unit.layers[0] in chosen:
                kept |= {leaf.index for leaf in layers[unit.layers[0]].leaves} | {name for name, _ in unit.state_keys}
        return lambda key, stored: self._written(stored) if key in kept else stored

    def _written(self, stored: Stored) -> Stored:
        scratch = self.scratch
        assert scratch is not None
        pieces = {where: put_on_disk(array, scratch) for where, array in stored.pieces.items()}
        return dataclasses.replace(stored, pieces=pieces)


def slot_bytes(on_disk: Sequence[Bytes]) -> int:
    """The most memory into which updates read masters and state of some groups: of as many as are read ahead."""
    return sum(sorted(map(sum, on_disk))[-DISK_SLOTS:])


def fewest_on_disk(sizes: Mapping[int, float], is_enough: Callable[[Sequence[int]], bool], least: int = 0) -> list[int]:
    """The fewest groups that are enough, `least` or more, spread evenly; all if none are.

    Much larger ones than usual, whose slots are large too, are taken only if all others do not do.

    Args:
      sizes: the bytes of each group.
      is_enough: whether some groups are.
      least: the least number.
    """
    ordered = sorted(sizes.values())
    usual = [group for group, own in sizes.items() if own <= 2 * ordered[len(ordered) // 2]]
    others = [group for group in sizes if group not in usual]
    chosen: list[int] = []
    for num in range(least, len(sizes) + 1):
        evenly = [usual[len(usual) * (2 * place + 1) // (2 * num)] for place in range(min(num, len(usual)))]
        chosen = evenly if num <= len(usual) else usual + others[: num - len(usual)]
        if is_enough(chosen):
            break
    return chosen


def left_in_memory(needed: dict[str, int], on_disk: Sequence[Bytes]) -> dict[str, int]:
    """The bytes without masters and state of some groups, and with slots for as many as updates read ahead."""
    if not on_disk:
        return needed
    masters, state = map(sum, zip(*on_disk, strict=True))
    slots = slot_bytes(on_disk)
    changed = {MASTERS: needed[MASTERS] - masters, STATE: needed[STATE] - state, host_memory.SLOTS: slots}
    return needed | changed
