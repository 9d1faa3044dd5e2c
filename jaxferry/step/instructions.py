"""The step program: one list of instructions from the planner to the executor, with the programs that they run.

Identifies the compiled programs of a step: what each computes, where it reads parameters and writes its gradient.

A step may read a parameter group in several places. DFGB reads host memory in the forward and a device copy in the
backward. The lookup of a tied table can read host memory while its head reads a copy. No program gets a copy of a
parameter that it can read in place. MemFerry, section IV-A, calls this view of all layers the shadow model.

The step program: one list of instructions that carries a plan from the planner to the executor.

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
from collections.abc import Collection, Mapping, Sequence

from jaxferry.modes import GradientPlace, Mode, UpdatePlace
from jaxferry.partition import Derivative, Partition
from jaxferry.step.plans import Plan
from jaxferry.step.tasks import Schedule, Task


class ProgramKind(enum.Enum):
    """What a program computes."""

    FORWARD = "forward"
    EVALUATION = "evaluation"
    """A forward that keeps nothing for a backward."""
    LOSS = "loss"
    """Forward and backward of the last segment."""
    BACKWARD = "backward"


class Source(enum.Enum):
    """Where a program reads parameters."""

    DEVICE = "device"
    """The group's device copy."""
    HOST = "host"
    """The group's vectors in pinned host memory, by the operations of Direct Host Access."""


class Target(enum.Enum):
    """Where a program's gradient goes."""

    DEVICE = "device"
    """Device buffers; an offload takes them to the host."""
    HOST = "host"
    """Vectors in pinned host memory, written by the program itself (GO)."""
    HOST_SUM = "host sum"
    """Likewise, added to an earlier program's gradient."""


@dataclasses.dataclass(frozen=True)
class ProgramKey:
    """Identifies one compiled program.

    Attributes:
      kind: what it computes.
      program: the segment's program number.
      reads: where it reads the parameters of each group of its segment; DEVICE also if it reads none.
      writes: where the gradient of each group goes; DEVICE also if there is none.
      arrives: whether it waits for the load of the parameters that it reads; only with one group.
      stores: whether it queues the copy of its gradient from the device to the host; only with one group.
    """

    kind: ProgramKind
    program: int
    reads: tuple[Source, ...] = (Source.DEVICE,)
    writes: tuple[Target, ...] = (Target.DEVICE,)
    arrives: bool = False
    stores: bool = False

    @property
    def writes_host(self) -> bool:
        """Whether it writes any gradient to host memory itself."""
        return any(target is not Target.DEVICE for target in self.writes)

    def alone_in(self, places: Collection[int]) -> ProgramKey:
        """The program that writes the gradients of the groups at these places to host memory instead of adding them."""
        return self._changed(places, {Target.HOST_SUM: Target.HOST})

    def onto_sums_in(self, places: Collection[int]) -> ProgramKey:
        """The program that adds the gradients of the groups at these places to host memory instead of writing them."""
        return self._changed(places, {Target.HOST: Target.HOST_SUM})

    @property
    def alone(self) -> ProgramKey:
        """The program that writes all gradients to host memory instead of adding them."""
        return self.alone_in(range(len(self.writes)))

    def _changed(self, places: Collection[int], change: Mapping[Target, Target]) -> ProgramKey:
        writes = tuple(change.get(t, t) if place in places else t for place, t in enumerate(self.writes))
        return self if writes == self.writes else dataclasses.replace(self, writes=writes)


@dataclasses.dataclass(frozen=True)
class Joins:
    """Which work of a transport is part of the programs beside it, so that it takes no launch of its own.

    Attributes:
      arrives: whether the first program that reads a copy waits for its load.
      stores: whether the program that makes a gradient queues its copy to the host.
    """

    arrives: bool = False
    stores: bool = False


NO_JOINS = Joins()


def places(partition: Partition) -> list[tuple[ProgramKind, int]]:
    """The programs of a step in order: what each computes, and its segment."""
    last = len(partition.segments) - 1
    forwards = [(ProgramKind.FORWARD, s) for s in range(last)]
    backwards = [(ProgramKind.BACKWARD, s) for s in reversed(range(last)) if partition.segments[s].runs_back]
    return [*forwards, (ProgramKind.LOSS, last), *backwards]


def program_keys(partition: Partition, derivatives: Mapping[int, Derivative], plan: Plan) -> list[ProgramKey]:
    """The program of each place of a step, in the order of `places`.

    Args:
      partition: the segments.
      derivatives: by program number.
      plan: modes and gradient places of the segments. Gradients that are rows of lookups stay on the device: the rows
        are few, and an offload moves only these.
    """
    written: set[int] = set()
    keys = []
    for kind, number in places(partition):
        segment, derivative = partition.segments[number], derivatives[partition.segments[number].program]
        reads, writes = [], []
        for use, layer in ((partition.uses[i], plan.layers[i]) for i in partition.uses_of[number]):
            is_read = kind is not ProgramKind.BACKWARD or derivative.reads_groups[use.place]
            by_dha = layer.mode is Mode.DHA or (layer.mode is Mode.DFGB and kind is not ProgramKind.BACKWARD)
            reads.append(Source.HOST if is_read and by_dha else Source.DEVICE)
            writes.append(Target.DEVICE)
            if kind is not ProgramKind.FORWARD and use.is_trained:
                if layer.gradient is GradientPlace.HOST and not derivative.has_rows:
                    writes[-1] = Target.HOST_SUM if use.group in written else Target.HOST
                written.add(use.group)
        keys.append(ProgramKey(kind, segment.program, tuple(reads), tuple(writes)))
    return keys


def variant_of(key: ProgramKey, widened: Collection[int], added: Collection[int]) -> ProgramKey:
    """The program to run in place of a planned one, given what is in host memory already.

    A planned program has up to three variants: that of the first micro-batch, that of later ones, which adds to all
    gradients in host memory, and the one that writes all of them there, which the host then adds. The last one stands
    for all others, as where rows of a lookup are summed on the host and another group's gradient is not.

    Args:
      key: the planned program.
      widened: the places among its segment's groups whose gradients the host always adds; see `StepProgram.widened`.
      added: those with a gradient in host memory to which the device can add.
    """
    exact = key.alone.onto_sums_in(added)
    is_compiled = exact == key.alone_in(widened) or exact == _of_later_micro_batches(key, widened)
    return exact if is_compiled else key.alone


def variants_of(
    partition: Partition,
    keys: Sequence[ProgramKey],
    all_widened: Collection[int],
    accumulates: bool,
    summed_on_host: Collection[int],
) -> list[ProgramKey]:
    """All programs that `variant_of` chooses for the places of a step.

    Args:
      partition: the segments.
      keys: the planned programs of all places.
      all_widened: the groups whose gradients the host always adds.
      accumulates: whether there are several micro-batches, which may have other plans.
      summed_on_host: the groups whose gradients of one micro-batch may be summed on the host.
    """
    found: list[ProgramKey] = []
    for key, (_, number) in zip(keys, places(partition), strict=True):
        groups = partition.segments[number].groups
        widened = {place for place, group in enumerate(groups) if group in all_widened}
        exact = key.alone_in(widened)
        found.append(exact)
        if accumulates:
            found += [_of_later_micro_batches(key, widened), key.alone]
        elif any(w is Target.HOST_SUM and g in summed_on_host for w, g in zip(exact.writes, groups, strict=True)):
            found.append(key.alone)
    return list(dict.fromkeys(found))


def groups_summed_on_host(
    partition: Partition, derivatives: Mapping[int, Derivative], plan: Plan, adds_on_host: bool
) -> set[int]:
    """The groups whose gradients of one micro-batch an accelerator's host may sum.

    It sums the rows of lookups, and some transports let it sum all that they store (`Transport.adds_on_host`).
    """
    return {
        use.group
        for use, layer in zip(partition.uses, plan.layers, strict=True)
        if derivatives[partition.segments[use.segment].program].has_rows
        or (adds_on_host and layer.gradient is GradientPlace.DEVICE)
    }


def _of_later_micro_batches(key: ProgramKey, widened: Collection[int]) -> ProgramKey:
    return key.alone_in(widened).onto_sums_in({*range(len(key.writes))}.difference(widened))


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
      values: the values that a SAVE or FETCH moves.
      uses: for a program, the parameter groups of its segment, in that order.
      reads: the values that the program is given, one tuple for each of its arguments.
      outputs, nondiff_outputs: the values that a forward makes.
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
    values: tuple[int, ...] = ()
    uses: tuple[ProgramUse, ...] = ()
    reads: tuple[tuple[int, ...], ...] = ()
    outputs: tuple[int, ...] = ()
    nondiff_outputs: tuple[int, ...] = ()
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

    def with_sums_of(self, groups: frozenset[int]) -> StepProgram:
        """The same step, with the gradients of these groups summed on the device."""
        return dataclasses.replace(self, summed=groups)


def arrivals_of(partition: Partition, widened: Collection[int]) -> list[Arrival]:
    """Returns the form in which the gradient of each group arrives for an update on the host.

    Args:
      partition: the segments.
      widened: the groups whose gradients the host sums in wider dtypes.
    """
    read = {use.group for use in partition.uses}
    kinds = [Arrival.WIDE if group in widened else Arrival.OWN for group in range(len(partition.layers))]
    return [kind if group in read else Arrival.NONE for group, kind in enumerate(kinds)]
