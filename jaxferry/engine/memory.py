"""The device memory of a step program: a fold over its instructions that holds for any duration of the transfers.

    instructions --copies, gradients, values, cotangents at each place--> Footprint of each program --maximum--> Peak

The count needs no thread and no device. `Footprint.total` adds the temporaries that XLA reports for each compiled
program. What a budget leaves beside them holds the next step's loads, their buffers, and copies between micro-batches.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxferry.engine.lowering import aval_of
from jaxferry.partition import Derivative, Partition, Segment
from jaxferry.planner import Peak
from jaxferry.step import Instruction, Lane, Operation, ProgramKey, ProgramKind, StepProgram, Value, leading_loads

_SCALAR_BYTES = {ProgramKind.FORWARD: 1, ProgramKind.LOSS: 5, ProgramKind.BACKWARD: 4}
"""Until the step ends, programs keep a flag for finite outputs and the norm of their gradient."""

PRELUDE_BYTES = 1  # likewise the flag of what runs before the first layer


@dataclasses.dataclass(frozen=True)
class Footprint:
    """The most device memory in use while one program of a step runs, in bytes.

    Attributes:
      copies: this step's copies of parameters, RESIDENT ones included; then the next step's.
      more_ahead: what these take beyond the memory of gradients that have left before them.
      gradients: gradients on the device, the program's own included.
      values: batch, constants, values between segments, residuals, cotangents and scalars.
      other: device memory that is always in use.
    """

    copies: int
    copies_ahead: int
    more_ahead: int
    gradients: int
    values: int
    other: int
    temporaries: int

    @property
    def parameters(self) -> int:
        """All copies of parameters."""
        return self.copies + self.copies_ahead

    @property
    def array_bytes(self) -> int:
        """Everything but the temporaries."""
        return self.copies + self.more_ahead + self.gradients + self.values + self.other

    @property
    def total(self) -> int:
        """All memory in use."""
        return self.array_bytes + self.temporaries


def peak_bytes(
    program: StepProgram,
    temporary_bytes: Mapping[ProgramKey, int],
    other_bytes: int = 0,
    ahead: Sequence[int] = (),
    unsplit: Callable[[], int] = int,
) -> Peak:
    """The most memory that a step needs; arguments as for `footprints` and `Peak`."""
    resident = _resident_bytes(program)
    found = footprints(program, temporary_bytes, other_bytes, ahead)
    parameters, arrays, total = (
        max((getattr(footprint, what) for footprint in found), default=resident)
        for what in ("parameters", "array_bytes", "total")
    )
    return Peak(parameters, arrays, total, unsplit)


def footprints(
    program: StepProgram, temporary_bytes: Mapping[ProgramKey, int], other_bytes: int = 0, ahead: Sequence[int] = ()
) -> list[Footprint]:
    """Returns the most memory in use while each program runs, by place.

    `temporary_bytes` without a program means 0. `other_bytes` are always in use, besides RESIDENT copies. `ahead` are
    loads that may run in the previous step.
    """
    resident, transfers = _resident_bytes(program), Transfers(program, ahead)
    values, found = LiveValues(program.partition, program.derivatives), []
    for instruction in program.programs:
        place, key = instruction.place, _key(instruction)
        alive = values.enter(key.kind, instruction.segment)
        # Once it has ended, values for the backward after the next one may arrive.
        alive = max(alive, values.leave(key.kind, instruction.segment, instruction.frees) + transfers.arriving[place])
        found.append(
            Footprint(
                copies=resident + transfers.copies[place],
                copies_ahead=transfers.copies_ahead[place],
                more_ahead=transfers.more_ahead[place],
                gradients=transfers.gradients[place],
                values=alive - transfers.offloaded[place],
                other=other_bytes,
                temporaries=temporary_bytes.get(key, 0),
            )
        )
    return found


def _resident_bytes(program: StepProgram) -> int:
    return sum(program.partition.layers[group].num_bytes for group in program.resident)


def _key(instruction: Instruction) -> ProgramKey:
    assert instruction.key is not None
    return instruction.key


class LiveValues:
    """The live values between segments, residuals, cotangents and scalars while a step's programs run in order."""

    def __init__(self, partition: Partition, derivatives: Mapping[int, Derivative]) -> None:
        self._partition, self._derivatives = partition, derivatives
        self._graph = graph = partition.graph
        self._size = graph.held_bytes
        self._alive = self._size(*graph.batch, *graph.constants, *partition.prelude_outputs)
        self._alive += PRELUDE_BYTES if partition.prelude_outputs else 0
        self._cotangents: dict[int, int] = {}
        self._reused: dict[int, int] = {}

    def enter(self, kind: ProgramKind, number: int) -> int:
        """The bytes alive while the program of a segment runs, including its arguments and results."""
        segment = self._partition.segments[number]
        self._alive += _SCALAR_BYTES[kind]
        if kind is not ProgramKind.BACKWARD:
            self._alive += self._size(*segment.outputs, *segment.nondiff_outputs)
        if kind is ProgramKind.FORWARD:
            self._alive += self._saved_bytes(segment)
        added: set[int] = set()
        if kind is not ProgramKind.FORWARD:
            added = {v for v in segment.inputs if v in self._cotangents}
            self._cotangents |= {v: self._size(v) for v in segment.inputs}
        reused = self._reused_bytes(segment) if kind is ProgramKind.BACKWARD else 0
        # While two cotangents are added, both are alive besides their sum.
        return self._alive + sum(self._cotangents.values()) + 2 * self._size(*added) - reused

    def leave(self, kind: ProgramKind, number: int, frees: Sequence[int]) -> int:
        """Ends the program and frees these values; returns the bytes alive until the next one starts."""
        segment = self._partition.segments[number]
        self._alive -= self._size(*frees)
        if kind is ProgramKind.BACKWARD:
            self._alive -= self._saved_bytes(segment)
            self._cotangents = {v: n for v, n in self._cotangents.items() if v not in segment.outputs}
        return self._alive + sum(self._cotangents.values())

    def _reused_bytes(self, segment: Segment) -> int:
        """The bytes of a backward's results that XLA writes into donated arguments of the same shape and dtype."""
        if segment.program not in self._reused:
            avals, derivative = self._partition.graph.avals, self._derivatives[segment.program]
            donated = _by_shape((*derivative.saved, *(avals[value] for value in segment.outputs)))
            made = _by_shape((*derivative.row_gradients, *(avals[value] for value in segment.inputs)))
            reused = (donated & made).elements()
            structs = [jax.ShapeDtypeStruct(*shape) for shape in reused]
            self._reused[segment.program] = self._graph.device_bytes(*structs)
        return self._reused[segment.program]

    def _saved_bytes(self, segment: Segment) -> int:
        return self._graph.device_bytes(*self._derivatives[segment.program].saved)


def _by_shape(avals: Iterable[Any]) -> collections.Counter[Any]:
    return collections.Counter((aval.shape, aval.dtype) for aval in avals)


def _updates_on_device(instruction: Instruction) -> bool:
    return instruction.operation is Operation.UPDATE_ON_DEVICE


class Transfers:
    """The most bytes that transfers hold on the device at each place.

    A copy may exist once the last program that its load waits for has ended. A gradient may exist until the first
    program that waits for its offload, or for a later offload in the queue. A load for the next step waits for the
    update of its group, and so for the offload of that gradient: its copy takes the place of gradients. The gradient of
    an update that is left to the next step stays until there.

    Attributes:
      copies_of: for each group, the bytes of its copies if none stays between micro-batches, by place.
      copies, gradients: bytes of the step's own copies of parameters, and of gradients, by place.
      copies_ahead: bytes of the next step's copies, by place.
      more_ahead: by place, the memory that these take beyond that of the gradients which left before them.
      offloaded: bytes of values that are only in host memory while the program of a place runs.
      arriving: bytes of these that may return before the next program starts, by place.
      last_program: by instruction, the place of the last program that it waits for, directly or through its lane.
      first_waiter: by OFFLOAD or SAVE, the place of the first program that waits for it; missing for none.
      last_use: by LOAD, the place of the last program that reads the copy.
      gradient_stops: by segment and group, the first place at which the gradient is certainly gone. For updates that
        are left to the next step, it lies behind the step's last place.
      ahead_from: by load that may run in the previous step, the first place there at which its copy may exist.
    """

    def __init__(self, program: StepProgram, ahead: Sequence[int]) -> None:
        self._program, self._num_places = program, len(program.programs)
        self.last_program: list[int] = []
        self.first_waiter: dict[int, int] = {}
        self.last_use: dict[int, int] = {}
        self._last_on_lane: dict[Lane, int] = {}
        self.gradient_stops: dict[tuple[int, int], int] = {}
        self.ahead_from: dict[int, int] = {}
        self._walk()
        self._gradients_at: list[dict[int, int]] = [{} for _ in range(self._num_places)]
        self.copies_of = {group: np.zeros(self._num_places, np.int64) for group in program.loaded}
        for load, last in self.last_use.items():
            group = program.instructions[load].group
            self.copies_of[group][self.last_program[load] + 1 : last + 1] += self._bytes_of(load)
        for group in program.reserved:
            self.copies_of[group][:] = program.partition.layers[group].num_bytes
        self.copies = self._copies()
        self.arriving = [0] * self._num_places
        self.offloaded = self._offloaded()
        self._add_kept_gradients()
        self.gradients = [sum(found.values()) for found in self._gradients_at]
        self.copies_ahead, self.more_ahead = self._ahead(ahead)

    def _walk(self) -> None:
        """Finds the last program that each instruction waits for, directly or through its lane."""
        loss_place, place = len(self._program.partition.segments) - 1, -1
        for instruction in self._program.instructions:
            task = instruction.task
            waits = [*task.after, *([self._last_on_lane[task.lane]] if task.lane in self._last_on_lane else [])]
            if task.before is None:
                self._last_on_lane[task.lane] = instruction.index
            if instruction.operation is Operation.UPDATE_ON_DEVICE:
                self.last_program.append(place)
                continue
            if task.lane is not Lane.GPU:
                self.last_program.append(max((self.last_program[earlier] for earlier in waits), default=-1))
                continue
            place = instruction.place if instruction.place >= 0 else loss_place
            self.last_program.append(place)
            for earlier in task.after:
                self.first_waiter.setdefault(earlier, place)
            if task.copy is not None:
                self.last_use[task.copy] = place

    def _bytes_of(self, index: int) -> int:
        return self._program.partition.layers[self._program.instructions[index].group].num_bytes

    def _gradient_bytes(self, segment: int, group: int) -> int:
        """The bytes of a group's gradient that a segment's program makes; of a lookup's table only touched rows."""
        partition = self._program.partition
        derivative = self._program.derivatives[partition.segments[segment].program]
        layer = partition.layers[group]
        dense_bytes = -(-layer.trained.num_bytes // partition.graph.num_shares(layer.is_whole))
        return derivative.row_gradient_bytes or dense_bytes

    def _copies(self) -> list[int]:
        layers, kept = self._program.partition.layers, self._program.kept
        copies = np.full(self._num_places, sum(layers[group].num_bytes for group in kept))
        for group, num_bytes in self.copies_of.items():
            if group not in kept:
                copies += num_bytes
        return [int(num_bytes) for num_bytes in copies]

    def _offloaded(self) -> list[int]:
        """Finds until when gradients may be there, and where values are certainly in host memory alone."""
        partition, instructions = self._program.partition, self._program.instructions
        offloaded, free_from = [0] * self._num_places, self._num_places
        gone_from: dict[Value, int] = {}
        for instruction in reversed([i for i in instructions if i.task.lane is Lane.D2H]):
            free_from = min(free_from, self.first_waiter.get(instruction.index, free_from))
            if instruction.operation is Operation.SAVE:
                gone_from |= dict.fromkeys(instruction.values, free_from)
                continue
            if instruction.operation is Operation.STORE_STATE:
                continue  # counted as slots for subgroups
            self.gradient_stops[instruction.segment, instruction.group] = free_from
            num_bytes = self._gradient_bytes(instruction.segment, instruction.group)
            for place in range(self.last_program[instruction.index], free_from):
                self._gradients_at[place][instruction.index] = num_bytes
        for instruction in instructions:
            for value in instruction.values if instruction.operation is Operation.FETCH else ():
                num_bytes = partition.graph.device_bytes(aval_of(partition, self._program.derivatives, value))
                last = self.last_program[instruction.index]
                for place in range(gone_from[value], last + 1):
                    offloaded[place] += num_bytes
                self.arriving[last] += num_bytes * (gone_from[value] <= last)
        return offloaded

    def _add_kept_gradients(self) -> None:
        """Adds gradients that stay on the device until their group's update there, from their backward on."""
        until = {i.group: self.last_program[i.index] for i in self._program.instructions if _updates_on_device(i)}
        partition, late = self._program.partition, self._late_updates()
        for instruction in self._program.programs:
            if _key(instruction).kind is ProgramKind.FORWARD:
                continue
            for use in (partition.uses[number] for number in partition.uses_of[instruction.segment]):
                if not use.is_trained or use.group not in until:
                    continue
                num_late = late.get(use.group, 0)
                in_next = self._gradients_at[:num_late]
                stop = self._num_places + num_late if num_late else until[use.group] + 1
                self.gradient_stops[use.segment, use.group] = stop
                for at_place in (*self._gradients_at[instruction.place : until[use.group] + 1], *in_next):
                    num_bytes = self._gradient_bytes(use.segment, use.group)
                    at_place[instruction.index] = at_place.get(instruction.index, 0) + num_bytes

    def _late_updates(self) -> dict[int, int]:
        """The groups whose last update is left to the next step, each with its place among the programs there."""
        instructions, found = self._program.instructions, dict[int, int]()
        indices = [instruction.index for instruction in self._program.programs]
        for instruction in instructions:
            before = instruction.task.before
            if before is not None and _updates_on_device(instruction):
                found[instruction.group] = sum(index < before - len(instructions) for index in indices)
        return found

    def _ahead(self, ahead: Sequence[int]) -> tuple[list[int], list[int]]:
        """The copies of the next step: all that may be there, and what they take beyond the gradients that left."""
        tasks = self._program.schedule.tasks
        copies, more = [0] * self._num_places, [0] * self._num_places
        link = [self._last_on_lane[Lane.H2D]] if Lane.H2D in self._last_on_lane else []
        arrived, first = -1, 0
        for load in ahead:  # each waits for the one before
            updates = tasks[load].after_previous
            first = max([first, *(self.last_program[earlier] + 1 for earlier in (*updates, *link))])
            self.ahead_from[load] = first
            offloads = [i for update in updates for i in tasks[update].after if tasks[i].lane is Lane.D2H]
            arrived = max([arrived, *offloads])
            num_bytes = 0 if self._program.instructions[load].group in self._program.reserved else self._bytes_of(load)
            for place in range(first, self._num_places):
                copies[place] += num_bytes
                gone = sum(size for index, size in self._gradients_at[place].items() if index <= arrived)
                more[place] = max(more[place], copies[place] - gone)
        return copies, more


def loads_ahead(
    program: StepProgram, peak_of: Callable[[Sequence[int]], Peak], budget_bytes: int | None = None
) -> tuple[int, ...]:
    """Returns the loads that may run before their step is called: as many leading loads as fit.

    They never raise the peak of parameters within one step, and keep the total within the budget. `peak_of` takes the
    loads that run in the previous step.
    """
    leading = leading_loads(program.schedule)
    return leading[: _most(len(leading), lambda count: peak_of(leading[:count]), budget_bytes)]


def _most(num: int, peak_of: Callable[[int], Peak], budget_bytes: int | None) -> int:
    """How many of `num` fit into the budget without a higher peak of parameters than with none."""
    within = peak_of(0)

    def takes_more(count: int) -> bool:
        peak = peak_of(count)
        return peak.parameters > within.parameters or not peak.fits(budget_bytes)

    return bisect.bisect_right(range(1, num + 1), False, key=takes_more)


def groups_to_reserve(
    program: StepProgram, ahead: Sequence[int], peak_of: Callable[[StepProgram], Peak], budget_bytes: int | None = None
) -> frozenset[int]:
    """Returns the groups whose device buffers may stay allocated until their load for the next step.

    In new memory, a load would wait for all programs issued before, which may use it. The layer's own buffers are free:
    the load waits for the group's update on the host, the update for the gradient, and the gradient for the last
    program that reads the copy. Groups that are loaded first are taken, as long as the peak of parameters does not rise
    and the total is within the budget. Buffers that another load of the step takes over are left to it.
    """
    tasks, left = program.schedule.tasks, {d.load for i in program.programs for d in i.drops if not d.is_reused}
    untrained = {use.group for use in program.partition.uses if not use.is_trained}
    groups = [
        program.instructions[load].group
        for load in ahead
        if load in left and any(tasks[other].lane is Lane.HOST for other in tasks[load].after_previous)
    ]
    groups = [g for g in groups if program.loaded[g] == 1 and g not in untrained and g not in program.kept]

    def reserved(count: int) -> Peak:
        return peak_of(dataclasses.replace(program, reserved=frozenset(groups[:count])))

    return frozenset(groups[: _most(len(groups), reserved, budget_bytes)])


def groups_to_keep(
    program: StepProgram,
    temporary_bytes: Mapping[ProgramKey, int],
    other_bytes: int = 0,
    budget_bytes: int | None = None,
) -> frozenset[int]:
    """Returns the groups whose loaded copies may stay on the device between micro-batches.

    Each that fits beside the others is taken: first those that are loaded twice, then those that are needed first.
    Arguments as for `footprints`.
    """
    groups = sorted(program.loaded, key=lambda group: -program.loaded[group])
    if budget_bytes is None:
        return frozenset(groups)
    totals = np.array([found.total for found in footprints(program, temporary_bytes, other_bytes)])
    counted, kept = Transfers(program, ()).copies_of, set()
    for group in groups:
        more = program.partition.layers[group].num_bytes - counted[group]
        if (totals + more).max() <= budget_bytes:
            totals += more
            kept.add(group)
    return frozenset(kept)
