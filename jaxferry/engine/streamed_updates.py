"""Updates of parameter groups whose masters and optimizer state come to the device for the update only.

    pinned vectors --load--> masters, state --update--> masters, state, new parameters --store--> pinned vectors

One subgroup of a group follows another; see `jaxferry.step.streaming` for their order. The new parameters of a RESIDENT
group are written into its copy on the device, in place, and do not go to host memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxferry.optimizer import HostArrays, Subgroup
from jaxferry.partition import Gradient
from jaxferry.transport import DeviceLayer, HostGradient, Placement, TaskMark, Transport, delete_all

Uses = Sequence[Sequence[Gradient]]
"""The gradients of a layer, one list for each segment that reads it, as its program returns them."""

Compiled = Callable[..., Any]

SubgroupKey = tuple[int, int]  # a group, and a subgroup of it


@dataclasses.dataclass(frozen=True)
class StreamedUpdates:
    """The compiled updates of one step program that stream, by group and subgroup.

    Attributes:
      updates: `(moved, kept, copies, uses, norm, scale, loss, *extra) -> moved, kept, parameters`: masters and state
        that move, as their transport loads and stores them; state that stays on the device; the new parameters in the
        compute dtype. `copies` are none, or parameters of a RESIDENT copy that the subgroup changes, which are donated.
      layers: the number of each subgroup's layout in `transport`; that of its parameters follows.
      copies: of a RESIDENT group, which parameters of the group's copy a subgroup changes.
    """

    updates: Mapping[SubgroupKey, Compiled]
    layers: Mapping[SubgroupKey, int]
    transport: Transport
    copies: Mapping[SubgroupKey, Sequence[int]]


class StreamingStep:
    """The updates of one step that stream; `resident` are device copies of RESIDENT groups."""

    def __init__(
        self, updates: StreamedUpdates, host: HostArrays, resident: Mapping[int, DeviceLayer], placement: Placement
    ) -> None:
        self._updates, self._host, self._resident, self._placement = updates, host, resident, placement
        self._loaded: dict[SubgroupKey, DeviceLayer] = {}
        self._made: dict[SubgroupKey, tuple[Any, Any]] = {}
        self._stored: dict[SubgroupKey, tuple[HostGradient | None, HostGradient, Any]] = {}
        self._uses: dict[int, Uses] = {}

    def load(self, key: SubgroupKey, mark: TaskMark | None) -> None:
        """Starts to copy a subgroup's masters and state to the device."""
        subgroup = self._subgroup(key)
        if subgroup.unit.leaves:
            copy = self._updates.transport.load(self._updates.layers[key], subgroup.vectors, mark)
            self._loaded[key] = copy
            if self._placement.is_cpu:
                jax.block_until_ready(copy.parameters())

    def update(
        self,
        key: SubgroupKey,
        take_uses: Callable[[], Uses],
        norm: np.floating,
        scale: np.floating,
        loss: jax.Array,
        extra: Sequence[Any],
    ) -> Any:
        """Updates a loaded subgroup; arguments as for `DeviceUpdates.update`. The last one frees the gradients."""
        group, number = key
        if number == 0:
            self._uses[group] = take_uses()
        subgroup = self._subgroup(key)
        made: Any = None
        if subgroup.unit.leaves:
            moved = self._updates.transport.take(self._loaded.pop(key))
            chosen, num = set(subgroup.moved), len(subgroup.unit.masters)
            stays = [i for i in range(len(subgroup.unit.state)) if num + i not in chosen]
            kept = [subgroup.unit.state[i] for i in stays]
            copies = self._copies(key)
            made = self._updates.updates[key](moved, kept, copies, self._uses[group], norm, scale, loss, *extra)
            for i, leaf in zip(stays, made[1], strict=True):
                subgroup.unit.state[i] = leaf
            self._made[key] = (made[0], made[2])
            if key in self._updates.copies:
                copy, new = self._resident[group], dict(zip(self._updates.copies[key], made[2], strict=True))
                copy.arrays = [new.get(i, array) for i, array in enumerate(copy.arrays)]
                self._host.note_update(self._unit(group))
                self._made[key] = (made[0], None)
        if number + 1 == len(self._unit(group).subgroups):
            delete_all(jax.tree.leaves(self._uses.pop(group)))
        return made

    def _copies(self, key: SubgroupKey) -> list[jax.Array]:
        """The parameters of a RESIDENT copy that a subgroup changes; none without one."""
        if key not in self._updates.copies:
            return []
        arrays = self._resident[key[0]].parameters()
        return [arrays[i] for i in self._updates.copies[key]]

    def store(self, key: SubgroupKey, mark: TaskMark | None) -> None:
        """Starts to copy an updated subgroup to host memory, with its new parameters unless these stay."""
        if key not in self._made:
            self._forget(key)
            return
        group, transport, number = key[0], self._updates.transport, self._updates.layers[key]
        subgroup = self._subgroup(key)
        moved, parameters = self._made.pop(key)
        # A transport may write to new memory. What was issued before may read the old one until the copy ends.
        replaced = subgroup.vectors, self._host.vectors[group]
        copied = None
        if parameters is not None:
            vectors = list(self._host.vectors[group])
            copied = transport.store(number + 1, parameters, into=tuple(vectors[i] for i in subgroup.touched))
            for i, vector in zip(subgroup.touched, copied.vectors, strict=True):
                vectors[i] = vector
            self._host.vectors[group] = tuple(vectors)
        stored = transport.store(number, moved, mark=mark, into=subgroup.vectors)
        subgroup.vectors = stored.vectors
        self._stored[key] = copied, stored, replaced

    def wait(self, key: SubgroupKey) -> None:
        """Waits until a subgroup is in host memory."""
        if key not in self._stored:
            return
        copied, stored, _ = self._stored.pop(key)
        if stored.copy is None:
            jax.block_until_ready(stored.vectors)
        else:
            stored.copy.wait()
        if copied is not None and copied.copy is not None:
            copied.copy.settle()

    def drop(self) -> None:
        """Frees what is on the device, in any state of the step."""
        for key in list(self._stored):
            with contextlib.suppress(Exception):  # the step has failed
                self.wait(key)
        for key in list(self._loaded):
            self._forget(key)
        delete_all(jax.tree.leaves([*self._made.values(), *self._uses.values()]))
        self._made, self._uses = {}, {}

    def _forget(self, key: SubgroupKey) -> None:
        if key in self._loaded:
            self._updates.transport.drop(self._loaded.pop(key), is_reused=False)
            self._uses.pop(key[0], None)

    def _unit(self, group: int) -> Any:
        return self._host.unit_of(group)

    def _subgroup(self, key: SubgroupKey) -> Subgroup:
        subgroup: Subgroup = self._unit(key[0]).subgroups[key[1]]
        return subgroup
