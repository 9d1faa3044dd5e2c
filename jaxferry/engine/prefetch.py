"""The loads that run before their step is called.

A load waits only for the update of its group. That update often ends while the previous step is still running, or while
the caller prepares the next batch.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Collection
from typing import Protocol

import jax

from jaxferry.engine.lanes import StepRun
from jaxferry.step import StepProgram
from jaxferry.transport import DeviceLayer, Placement, StepMarks, TaskMark, Transport, Vectors


class DeviceCopies:
    """The device copies that one step loads.

    Loads take copies that an earlier micro-batch has left in `kept`, by group; drops leave them there.

    Attributes:
      is_last: whether the update follows, so that no copy is left.
      expects_kept: whether the micro-batch before, which may still be running, leaves the copies that stay. A program
        takes such a copy when it needs it, since the load may run too early.
    """

    def __init__(
        self,
        program: StepProgram,
        transport: Transport,
        placement: Placement,
        vectors: list[Vectors],
        marks: StepMarks | None,
        kept: dict[int, DeviceLayer],
    ) -> None:
        self._program, self._transport, self._vectors = program, transport, vectors
        self._placement, self.marks, self._kept = placement, marks, kept
        self._held: dict[int, DeviceLayer] = {}
        self._num_left = dict(program.loaded)
        self.is_last, self.expects_kept = True, False

    def __len__(self) -> int:
        return len(self._held)

    @property
    def arrays(self) -> list[jax.Array]:
        """All arrays that currently hold copies."""
        return [array for copy in self._held.values() for array in copy.arrays]

    def load(self, index: int) -> None:
        """Runs the load with this index; see `lanes.Action`."""
        group = self._program.instructions[index].group
        is_first = self._num_left[group] == self._program.loaded[group]
        self._num_left[group] -= 1
        if index not in self._held and not (is_first and self.expects_kept and group in self._program.kept):
            self._take(index, None if self.marks is None else self.marks.of(index))

    def _take(self, index: int, mark: TaskMark | None = None) -> DeviceLayer:
        """Takes the copy of a load: one that stays from an earlier load of the group, or a new one."""
        group = self._program.instructions[index].group
        copy = self._kept.pop(group, None)
        if copy is None:
            copy = self._transport.load(group, self._vectors[group], mark)
            wait_for_copy(copy, self._placement)
        self._held[index] = copy
        return copy

    def _copy(self, index: int) -> DeviceLayer:
        copy = self._held.get(index)
        return self._take(index) if copy is None else copy

    def parameters(self, index: int) -> list[jax.Array]:
        """The parameters that the load with this index copied."""
        return self._copy(index).parameters()

    def arriving(self, index: int) -> tuple[DeviceLayer, Vectors]:
        """The copy of this load for a program that waits for it, and the vectors that the load reads."""
        return self._copy(index), self._vectors[self._program.instructions[index].group]

    def drop(self, index: int, is_reused: bool = True) -> None:
        """Frees the copy of a load once the programs that read it have run, or leaves it to a later load."""
        copy, group = self._copy(index), self._program.instructions[index].group
        del self._held[index]
        if group in self._program.kept and (self._num_left[group] or not self.is_last):
            assert group not in self._kept, "two copies of a group stay"
            self._kept[group] = copy
        else:
            # Before the update the next load does not wait for the gradient that the last reader makes.
            self._transport.drop(copy, is_reused, self.is_last and group in self._program.reserved)

    def take_over(self, earlier: DeviceCopies, loads: Collection[int]) -> None:
        """Takes the copies that these loads have made for a step with like tasks; frees its other copies."""
        self._held = {index: copy for index, copy in earlier._held.items() if index in loads}
        earlier._held = {index: copy for index, copy in earlier._held.items() if index not in loads}
        earlier.drop_all()

    def forget(self, index: int) -> None:
        """Gives up the copy of a load whose arrays a failed program has taken."""
        self._transport.take(self._held.pop(index))

    def drop_all(self) -> None:
        """Frees every copy."""
        while self._held:
            self._transport.drop(self._held.popitem()[1])


def wait_for_copy(copy: DeviceLayer, placement: Placement) -> None:
    """Waits for a copy if the lanes' threads do the work themselves."""
    if placement.is_cpu:
        jax.block_until_ready(copy.parameters())


@dataclasses.dataclass(eq=False)
class Prefetch:
    """A step that has not been called yet, with some groups already on the device or in flight."""

    work: StepRun
    copies: DeviceCopies

    @property
    def is_good(self) -> bool:
        """Whether the step can continue from here."""
        return not self.work.is_stopped and self.work.failure is None

    def discard(self) -> None:
        """Waits for loads in flight, and frees all copies."""
        self.work.stop()
        self.copies.drop_all()


class Keeper(Protocol):
    """A state with copies that stay between micro-batches, and updates that its last step has left to the next one."""

    def finish(self) -> None:
        """Waits for these updates; their errors are raised when the state is used."""

    def drop_kept(self, transport: Transport) -> None:
        """Frees them."""


class PrefetchSlot:
    """Ensures that at most one state of a training step has something on the device between two steps.

    That is, prefetched copies, copies that stay, or gradients of updates that are left to the next step.
    """

    def __init__(self) -> None:
        self._known: Prefetch | None = None
        self._keeper: tuple[weakref.ref[Keeper], Transport] | None = None

    def keep(self, keeper: Keeper, transport: Transport) -> None:
        """Lets only this state keep copies between micro-batches, and leave updates to its next step."""
        if self._keeper is None or self._keeper[0]() is not keeper:
            self._drop_kept()
        self._keeper = (weakref.ref(keeper), transport)

    def clear(self) -> None:
        """Frees all of these copies, so that something else may run."""
        self.take(None)
        self._drop_kept()

    def _drop_kept(self) -> None:
        known, self._keeper = self._keeper, None
        if known is not None and (keeper := known[0]()) is not None:
            keeper.finish()
            keeper.drop_kept(known[1])

    def put(self, prefetch: Prefetch) -> None:
        """Remembers a prefetch until it is taken."""
        self._known = prefetch

    def take(self, prefetch: Prefetch | None) -> None:
        """Forgets the remembered prefetch, and frees it unless it is the given one, which its caller uses or frees."""
        known, self._known = self._known, None
        if known is not None and known is not prefetch:
            known.discard()
