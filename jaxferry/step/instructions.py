"""The step program: one list of instructions that carries a plan from the planner to the executor.

    segments + plan --lower--> StepProgram --memory--> peak bytes
                                   |------- simulate -> predicted times (its schedule)
                                   `------- execute --> a step

An instruction is a task of the schedule plus what the engine needs to execute it: the program to run, the values to
move, the buffers to free afterwards. All of this is known before the first step. So the executor decides nothing, and
the peak memory of a step is a fold over the list.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
from collections.abc import Collection, Mapping

from jaxferry.modes import GradientPlace, Mode, UpdatePlace
from jaxferry.partition import Derivative, Partition
from jaxferry.step.keys import ProgramKey, Source
from jaxferry.step.plans import Plan
from jaxferry.step.tasks import Schedule, Task

Value = int | tuple[int, int]
"""The number of a value between programs; or a residual: its segment, and its index among the segment's residuals."""


class Operation(enum.Enum):
    """What an instruction does."""

    LOAD = "load"
    """Copies a group's parameters to the device."""
    REFRESH = "refresh"
    """Replaces a RESIDENT copy after its update."""
    FORWARD = "forward"
    LOSS = "loss"
    """Forward and backward of the last segment, as one program."""
    BACKWARD = "backward"
    OFFLOAD = "offload"
    """Copies a gradient to the host."""
    UPDATE = "update"
    UPDATE_ON_DEVICE = "update on the device"
    LOAD_STATE = "load state"
    """Copies a subgroup's masters and optimizer state to the device, for its update there."""
    STORE_STATE = "store state"
    """Copies them back to host memory, with the new compute copy unless that stays on the device."""
    READ_STATE = "read state"
    """Reads masters and optimizer state from the scratch file, for an update on the host."""
    WRITE_STATE = "write state"
    """Writes them back."""
    SAVE = "save"
    """Moves values that cross segments to host memory."""
    FETCH = "fetch"
    """Moves them back to the device for a backward."""
    NOTHING = "nothing"
    """A task whose work another instruction does."""

    # An enumeration's own is a Python function, which the executor would call for each task.
    __hash__ = object.__hash__


class Arrival(enum.Enum):
    """In which form a group's gradient arrives for its update on the host."""

    NONE = "none"
    """There is none, since no segment reads the group."""
    OWN = "own"
    """It has the dtypes of `Layer.trained`."""
    WIDE = "wide"
    """It is a sum in the dtypes of `Layer.wide`."""

    __hash__ = object.__hash__  # as for `Operation`


@dataclasses.dataclass(frozen=True)
class Drop:
    """A device copy that no later instruction reads.

    Attributes:
      load: the instruction that loaded it.
      is_reused: whether a later load reuses its buffers; else they are freed.
    """

    load: int
    is_reused: bool


@dataclasses.dataclass(frozen=True, slots=True)
class ProgramUse:
    """What a program does with one parameter group of its segment.

    Attributes:
      number, place, group: the index of the use, its place among those of its segment, and the group.
      copy: the load whose copy the program reads, or None.
      is_read: whether the program is given parameters of the group.
      reads_vectors: whether these are the group's vectors in host memory.
      writes_host: whether the program writes the group's gradient to host memory.
      is_trained: whether the group has a gradient that is wanted.
      is_updated_on_device: whether it is updated on the device.
    """

    number: int
    place: int
    group: int
    copy: int | None
    is_read: bool
    reads_vectors: bool
    writes_host: bool
    is_trained: bool
    is_updated_on_device: bool


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction of a step, with all that the executor looks up.

    The thread that issues for an accelerator bounds the speed of small models, so nothing is found out during a step.

    Attributes:
      operation: what it does.
      index: its index in the step program, and that of its task in the schedule.
      task: lane, duration and dependencies.
      segment: index of the segment.
      group: index of the parameter group that it moves or updates; for a program, of one that its segment reads.
      key: the program that it runs, or None.
      place: the position of that program among all programs of the step; for a SAVE that of the program before it, for
        a FETCH that of the program that reads the values, for a task that is part of another one's program that of the
        program; else -1.
      values: the values and residuals that a SAVE or FETCH moves.
      uses: for a program, the parameter groups of its segment, in that order.
      reads: the values that the program is given, one tuple for each of its arguments.
      outputs, nondiff_outputs: the values that a forward makes.
      residuals: those that a forward makes, or that a backward is given.
      inputs: the values whose cotangents a backward makes.
      offloads_awaited: OFFLOAD instructions that must have ended on the device before the program may allocate memory.
      frees: values that no later program reads.
      drops: device copies that no later instruction reads.
      vacates: groups whose RESIDENT copy no later program reads before it is refreshed.
    """

    operation: Operation
    index: int
    task: Task
    segment: int
    group: int
    key: ProgramKey | None = None
    place: int = -1
    values: tuple[Value, ...] = ()
    uses: tuple[ProgramUse, ...] = ()
    reads: tuple[tuple[int, ...], ...] = ()
    outputs: tuple[int, ...] = ()
    nondiff_outputs: tuple[int, ...] = ()
    residuals: tuple[Value, ...] = ()
    inputs: tuple[int, ...] = ()
    offloads_awaited: tuple[int, ...] = ()
    frees: tuple[int, ...] = ()
    drops: tuple[Drop, ...] = ()
    vacates: tuple[int, ...] = ()

    @property
    def copies(self) -> tuple[int | None, ...]:
        """For a program, the load of the copy that it reads of each group of its segment; None without one."""
        return tuple(use.copy for use in self.uses)

    @functools.cached_property
    def written(self) -> tuple[ProgramUse, ...]:
        """The uses whose gradient the program writes to host memory."""
        return tuple(use for use in self.uses if use.writes_host)

    @functools.cached_property
    def stores(self) -> bool:
        """Whether the program queues the copy of its gradient to host memory."""
        return self.key is not None and self.key.stores


@dataclasses.dataclass(frozen=True, eq=False)
class StepProgram:
    """The instructions of one step.

    Attributes:
      partition: the segments.
      derivatives: by program number.
      plan: the lowered plan.
      schedule: the plan's tasks.
      instructions: one for each task, in the same order.
      summed: groups whose gradients are summed on the device over micro-batches; other sums are in host memory.
      kept: groups whose loaded copies stay on the device from one micro-batch to the next, until their update.
      reserved: groups whose device buffers stay allocated for the next step's load, which then waits for no program.
      widened: groups whose gradients the host sums in the wider dtypes of `Layer.wide`, each with the number of
        gradients that arrive (`lower.widened_groups`).
    """

    partition: Partition
    derivatives: Mapping[int, Derivative]
    plan: Plan
    schedule: Schedule
    instructions: tuple[Instruction, ...]
    summed: frozenset[int] = frozenset()
    kept: frozenset[int] = frozenset()
    reserved: frozenset[int] = frozenset()
    widened: Mapping[int, int] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def programs(self) -> list[Instruction]:
        """The instructions that run a program, in order."""
        return sorted((i for i in self.instructions if i.key is not None), key=lambda i: i.place)

    @property
    def keys(self) -> list[ProgramKey]:
        """The program of each place."""
        return [instruction.key for instruction in self.programs if instruction.key is not None]

    @functools.cached_property
    def queued(self) -> dict[int, int]:
        """By segment, the OFFLOAD whose work its program does, since that queues the copy itself."""
        queuing = {i.segment for i in self.programs if i.key is not None and i.key.stores}
        offloads = [i for i in self.instructions if i.operation is Operation.OFFLOAD and i.segment in queuing]
        return {instruction.segment: instruction.index for instruction in offloads}

    @property
    def trivial(self) -> list[int]:
        """The tasks whose work other instructions do."""
        nothing = [i.index for i in self.instructions if i.operation is Operation.NOTHING]
        return [*nothing, *self.queued.values()]

    @functools.cached_property
    def resident(self) -> frozenset[int]:
        """Groups whose device copy outlives the step."""
        uses = zip(self.partition.uses, self.plan.modes, strict=True)
        return frozenset(use.group for use, mode in uses if mode is Mode.RESIDENT)

    @functools.cached_property
    def updated_on_device(self) -> frozenset[int]:
        """Groups that are updated on the device, so that their gradients stay there."""
        uses = zip(self.partition.uses, self.plan.layers, strict=True)
        return frozenset(use.group for use, layer in uses if layer.update is not UpdatePlace.HOST and use.is_trained)

    @functools.cached_property
    def stored(self) -> dict[int, bool]:
        """Groups whose gradients leave the device, in that order, each with whether programs write host memory."""
        found: dict[int, bool] = {}
        for use, layer in reversed([*zip(self.partition.uses, self.plan.layers, strict=True)]):
            if use.is_trained and use.group not in self.updated_on_device:
                found[use.group] = found.get(use.group, False) or layer.gradient is GradientPlace.HOST
        return found

    @functools.cached_property
    def streamed(self) -> dict[int, int]:
        """Those of them whose masters and optimizer state come for the update only, by number of subgroups."""
        ups = [i for i in self.instructions if i.operation is Operation.LOAD_STATE]
        return {instruction.group: instruction.task.num_subgroups for instruction in ups}

    @functools.cached_property
    def loaded(self) -> dict[int, int]:
        """The number of loads of each group that is loaded."""
        return dict(collections.Counter(i.group for i in self.instructions if i.operation is Operation.LOAD))

    @functools.cached_property
    def read_in_place(self) -> frozenset[int]:
        """Groups that programs read in host memory."""
        return frozenset(
            group
            for instruction in self.programs
            for group, source in zip(
                self.partition.segments[instruction.segment].groups,
                () if instruction.key is None else instruction.key.reads,
                strict=True,
            )
            if source is Source.HOST
        )

    @functools.cached_property
    def arrivals(self) -> list[Arrival]:
        """The form in which the gradient of each group arrives for an update on the host."""
        return arrivals_of(self.partition, self.widened)

    @property
    def stays_on_device(self) -> frozenset[int]:
        """Those of them whose masters and optimizer state stay on the device."""
        return self.updated_on_device - self.streamed.keys()


def arrivals_of(partition: Partition, widened: Collection[int]) -> list[Arrival]:
    """Returns the form in which the gradient of each group arrives for an update on the host.

    Args:
      partition: the segments.
      widened: the groups whose gradients the host sums in wider dtypes.
    """
    read = {use.group for use in partition.uses}
    kinds = [Arrival.WIDE if group in widened else Arrival.OWN for group in range(len(partition.layers))]
    return [kind if group in read else Arrival.NONE for group, kind in enumerate(kinds)]
