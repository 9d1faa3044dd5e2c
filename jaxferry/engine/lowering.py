"""Lowers a plan for a partition to the step program.

    forward 0 .. S-2 | loss (forward and backward of segment S-1) | backward S-2 .. 0

The schedule says which tasks run on which lane and what they wait for. This module adds the program of each task, the
values to move and the values to free afterwards.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax

from jaxferry.costs import Profile
from jaxferry.modes import ActivationPlace, GradientPlace, UpdatePlace
from jaxferry.partition import Derivative, Layer, Partition, Segment, aval_bytes
from jaxferry.step import (
    CROSSING_SLOTS,
    NO_JOINS,
    Drop,
    Instruction,
    Joins,
    Kind,
    Lane,
    Operation,
    Plan,
    ProgramKey,
    ProgramKind,
    ProgramUse,
    Source,
    StepProgram,
    Target,
    Task,
    Value,
    places,
    program_keys,
    schedule_step,
)

MIN_OFFLOADED_BYTES = 1024  # smaller values stay on the device: the latency of a transfer outweighs their memory

_OPERATIONS = {
    Kind.LOAD: Operation.LOAD,
    Kind.RELOAD: Operation.LOAD,
    Kind.REFRESH: Operation.REFRESH,
    Kind.FORWARD: Operation.FORWARD,
    Kind.BACKWARD: Operation.BACKWARD,
    Kind.OFFLOAD: Operation.OFFLOAD,
    Kind.UPDATE: Operation.UPDATE,
    Kind.SAVE: Operation.SAVE,
    Kind.FETCH: Operation.FETCH,
    Kind.STATE_UP: Operation.LOAD_STATE,
    Kind.STATE_DOWN: Operation.STORE_STATE,
    Kind.STATE_READ: Operation.READ_STATE,
    Kind.STATE_WRITE: Operation.WRITE_STATE,
    Kind.INTER_FORWARD: Operation.NOTHING,
    Kind.INTER_BACKWARD: Operation.NOTHING,
}


def lower(
    partition: Partition,
    derivatives: Mapping[int, Derivative],
    plan: Plan,
    profile: Profile,
    offload_activations: bool = False,
    joins: Joins = NO_JOINS,
) -> StepProgram:
    """Lowers a plan to the instructions of a step; `profile` has the facts of the programs (`with_program_facts`).

    Values and residuals that can wait in host memory for their backward do so: with `offload_activations` all, else
    where the plan says so. `joins` is the work of the transport that is part of other programs.
    """
    program = StepProgram(partition, derivatives, plan, schedule_step(profile, plan), ())
    is_chosen = plan.offloads_activations and not offload_activations
    offloaded = offloaded_values(partition, derivatives) if offload_activations or is_chosen else {}
    if is_chosen:
        chosen = (plan.layers[uses[0]].activations is ActivationPlace.HOST for uses in partition.uses_of)
        numbers, leaving = itertools.compress(range(len(partition.segments)), chosen), LeavingValues(partition)
        waiting = (leaving.of(derivatives[partition.segments[number].program], number) for number in numbers)
        offloaded = {value: offloaded[value] for value in itertools.chain.from_iterable(waiting)}
    return dataclasses.replace(program, instructions=_Lowering(program, offloaded, joins).instructions())


class _Lowering:
    def __init__(self, program: StepProgram, offloaded: Mapping[Value, tuple[int, int]], joins: Joins) -> None:
        self._partition, self._derivatives, self._plan = program.partition, program.derivatives, program.plan
        self._tasks, self._offloaded, self._joins = program.schedule.tasks, offloaded, joins
        self._keys = program_keys(self._partition, self._derivatives, self._plan)
        self._frees = last_readers(self._partition, self._derivatives)
        self._places = self._places_of_tasks()
        self._drops = self._drops_of_tasks()
        self._vacates = self._vacated_at()
        self._first_readers = self._first_readers_of_copies()

    def instructions(self) -> tuple[Instruction, ...]:
        return tuple(self._instruction(index, task) for index, task in enumerate(self._tasks))

    def _instruction(self, index: int, task: Task) -> Instruction:
        use = self._partition.uses[task.segment]
        made = Instruction(_OPERATIONS[task.kind], index, task, use.segment, use.group)
        if task.kind is Kind.UPDATE and task.lane is Lane.GPU:
            return dataclasses.replace(made, operation=Operation.UPDATE_ON_DEVICE)
        if index in self._places:
            return self._program(made)
        if task.kind in (Kind.FORWARD, Kind.BACKWARD):  # part of another task's program
            return dataclasses.replace(made, operation=Operation.NOTHING, place=self._places[self._runs_in[index]])
        if task.kind is Kind.SAVE:
            values = [value for value, (last_forward, _) in self._offloaded.items() if last_forward == use.segment]
            return dataclasses.replace(made, place=use.segment, values=tuple(values))
        if task.kind is Kind.FETCH:
            place = places(self._partition).index((ProgramKind.BACKWARD, use.segment))
            values = [value for value, (_, until) in self._offloaded.items() if until == place]
            return dataclasses.replace(made, place=place, values=tuple(values))
        return made

    def _program(self, made: Instruction) -> Instruction:
        place = self._places[made.index]
        key, segment = self._joined(self._keys[place], made), self._partition.segments[made.segment]
        reads: tuple[tuple[int, ...], ...] = tuple(segment.inputs), tuple(segment.nondiff_inputs)
        if key.kind is ProgramKind.BACKWARD:
            reads = backward_reads(segment, self._derivatives[segment.program])
        return dataclasses.replace(
            made,
            operation=Operation.LOSS if key.kind is ProgramKind.LOSS else made.operation,
            key=key,
            place=place,
            uses=self._uses_of(made, key),
            reads=reads,
            outputs=tuple(segment.outputs),
            nondiff_outputs=tuple(segment.nondiff_outputs),
            residuals=()
            if key.kind is ProgramKind.LOSS
            else residuals_of(self._partition, self._derivatives, made.segment),
            inputs=tuple(segment.inputs),
            offloads_awaited=tuple(i for i in self._waits_of(made.index) if self._tasks[i].kind is Kind.OFFLOAD),
            frees=tuple(self._frees.get(place, ())),
            drops=tuple(self._drops.get(made.index, ())),
            vacates=tuple(self._vacates.get(place, ())),
        )

    def _joined(self, key: ProgramKey, made: Instruction) -> ProgramKey:
        """The program with the work of the transport that it does beside its own."""
        segment, layer = self._partition.segments[made.segment], self._plan.layers[made.task.segment]
        if len(segment.groups) > 1:
            return key
        derivative = self._derivatives[segment.program]
        has_own_gradient = key.kind is not ProgramKind.FORWARD and segment.trained and not key.writes_host
        is_sent = has_own_gradient and layer.update is UpdatePlace.HOST and self._partition.num_uses[made.group] == 1
        return dataclasses.replace(
            key,
            arrives=self._joins.arrives and self._first_readers.get(made.task.copy) == made.index,
            stores=self._joins.stores and bool(is_sent) and not derivative.has_rows,
        )

    def _first_readers_of_copies(self) -> dict[int | None, int]:
        """By load, the first program that reads its copy, unless that is a backward.

        A backward is most likely to run out of memory: it is given its own values alone. And all plans share programs
        so.
        """
        found: dict[int | None, int] = {}
        for index, place in sorted(self._places.items(), key=lambda pair: pair[1]):
            key, copy = self._keys[place], self._tasks[index].copy
            if copy is not None and Source.DEVICE in key.reads and key.kind is not ProgramKind.BACKWARD:
                found.setdefault(copy, index)
        return found

    def _places_of_tasks(self) -> dict[int, int]:
        """The place of each task that runs a program, the last of its segment's.

        Also finds what runs all others' programs.
        """
        runs: dict[tuple[Kind, int], list[int]] = {}
        for index, task in enumerate(self._tasks):
            if task.kind in (Kind.FORWARD, Kind.BACKWARD):
                runs.setdefault((task.kind, self._partition.uses[task.segment].segment), []).append(index)
        last = len(self._partition.segments) - 1
        loss = runs[Kind.FORWARD, last]
        self._runs_in = {index: members[-1] for members in runs.values() for index in members}
        self._runs_in |= dict.fromkeys(runs.get((Kind.BACKWARD, last), ()), loss[-1])
        found = [members[-1] for (kind, number), members in runs.items() if (kind, number) != (Kind.BACKWARD, last)]
        return {task: place for place, task in enumerate(found)}

    def _waits_of(self, index: int) -> list[int]:
        """What the program of a task waits for."""
        members = [member for member, runs_in in self._runs_in.items() if runs_in == index]
        kind = self._tasks[index].kind
        return sorted({wait for i in members if self._tasks[i].kind is kind for wait in self._tasks[i].after})

    def _copies_of(self, made: Instruction) -> tuple[int | None, ...]:
        """For each group of a program's segment, the load of the copy that it reads."""
        first = self._partition.uses_of[made.segment][0]
        copies: list[int | None] = [None] * len(self._partition.segments[made.segment].groups)
        for member, runs_in in self._runs_in.items():
            task = self._tasks[member]
            if runs_in == made.index and task.kind is made.task.kind:
                copies[task.segment - first] = task.copy
        return tuple(copies)

    def _uses_of(self, made: Instruction, key: ProgramKey) -> tuple[ProgramUse, ...]:
        parts, copies = self._partition, self._copies_of(made)
        read = [True] * len(copies)
        if key.kind is ProgramKind.BACKWARD:
            read = list(self._derivatives[parts.segments[made.segment].program].reads_groups)
        found = []
        for number in parts.uses_of[made.segment]:
            use, layer = parts.uses[number], self._plan.layers[number]
            found.append(
                ProgramUse(
                    number=number,
                    place=use.place,
                    group=use.group,
                    copy=copies[use.place],
                    is_read=read[use.place],
                    reads_vectors=key.reads[use.place] is Source.HOST,
                    writes_host=key.writes[use.place] is not Target.DEVICE,
                    is_trained=use.is_trained,
                    is_updated_on_device=use.is_trained and layer.update is not UpdatePlace.HOST,
                )
            )
        return tuple(found)

    def _drops_of_tasks(self) -> dict[int, list[Drop]]:
        last_use: dict[int, int] = {}
        for index, task in enumerate(self._tasks):
            if task.copy is not None:
                last_use[task.copy] = self._runs_in[index]
        taken = self._taken_over()
        drops: dict[int, list[Drop]] = {}
        for load, index in last_use.items():
            drops.setdefault(index, []).append(Drop(load, (index, self._layout(load)) in taken))
        return drops

    def _vacated_at(self) -> dict[int, list[int]]:
        """The groups to refresh, by the place of the last program that is given their parameters."""
        last_place: dict[int, int] = {}
        for index, place in self._places.items():
            for group in self._partition.segments[self._partition.uses[self._tasks[index].segment].segment].groups:
                last_place[group] = max(place, last_place.get(group, -1))
        vacated: dict[int, list[int]] = {}
        for task in self._tasks:
            if task.kind is Kind.REFRESH:
                group = self._partition.uses[task.segment].group
                vacated.setdefault(last_place[group], []).append(group)
        return vacated

    def _taken_over(self) -> set[tuple[int, Any]]:
        """The programs at whose end a later load starts, each with that load's layout, which reuses the buffers.

        All other buffers are freed at once, since programs may need their memory before such a load starts.
        """
        taken = set()
        program = -1
        waited: list[int] = []
        last_on_lane: dict[Lane, int] = {}
        for index, task in enumerate(self._tasks):
            if task.lane is Lane.GPU:
                program = index if index in self._places else program
                waited.append(program)
                continue
            earlier = (*task.after, *([last_on_lane[task.lane]] if task.lane in last_on_lane else []))
            waited.append(max((waited[each] for each in earlier), default=-1))
            last_on_lane[task.lane] = index
            if task.kind in (Kind.LOAD, Kind.RELOAD):
                taken.add((waited[index], self._layout(index)))
        return taken

    def _layout(self, load: int) -> Any:
        return self._partition.layers[self._partition.uses[self._tasks[load].segment].group].layout


def summed_groups(
    partition: Partition, derivatives: Mapping[int, Derivative], accumulate: int, plan: Plan | None = None
) -> list[int]:
    """Returns the groups whose gradients can be summed on the device before they leave: one program computes them.

    Gradients of a group with several uses are summed on the host under every plan, so all plans give the same bits.
    `plan` decides whose gradients leave the device; None for all.
    """
    if accumulate == 1:
        return []
    layers = [None] * len(partition.uses) if plan is None else plan.layers
    return [
        use.group
        for use, layer in zip(partition.uses, layers, strict=True)
        if (layer is None or (layer.gradient is GradientPlace.DEVICE and layer.update is UpdatePlace.HOST))
        and partition.num_uses[use.group] == 1
        and use.is_trained
        and not derivatives[partition.segments[use.segment].program].has_rows
    ]


def widened_groups(partition: Partition, derivatives: Mapping[int, Derivative], accumulate: int = 1) -> dict[int, int]:
    """Returns the groups whose gradients the host sums in more bits than they have.

    A sum in 16 bits would be rounded after each addition. With several micro-batches, the host widens the sums of all
    groups. With one, it widens the sums of groups with several uses, except where exactly one use is dense and the
    others look rows up, such as a tied table. The host rounds each lookup's rows once into the dense gradient: a wider
    sum would slow down the update of the table, which reads all of it. By group, the value is the number of dense
    gradients that arrive in each micro-batch, at least 1.
    """
    dense = collections.Counter(
        use.group
        for use in partition.uses
        if use.is_trained and not derivatives[partition.segments[use.segment].program].has_rows
    )
    trained = {use.group for use in partition.uses if use.is_trained}
    return {
        group: max(dense[group], 1)
        for group in sorted(trained)
        if partition.layers[group].trained.wide is not partition.layers[group].trained
        and (accumulate > 1 or (partition.num_uses[group] > 1 and dense[group] != 1))
    }


def groups_backward(partition: Partition) -> list[list[int]]:
    """The trained groups of each program that computes gradients, in the order in which these run."""
    uses = partition.uses
    groups = ([uses[number].group for number in own if uses[number].is_trained] for own in partition.uses_of)
    return [each for each in groups if each][::-1]


def groups_with_buffers(
    layers: Sequence[Layer], programs: Sequence[Collection[int]], num: int | None
) -> frozenset[int]:
    """The groups whose gradients have memory of their own on the host; the others take that of these in turn.

    `programs` has the groups of each program that computes gradients, in the order in which these run. The gradients of
    `num` programs exist at one time, and of a group with several uses from its first one on; None for all. A buffer is
    reused by groups whose vectors have the same sizes and dtypes.
    """
    everything = frozenset(range(len(layers)))
    if num is None:
        return everything
    last = {group: place for place, groups in enumerate(programs) for group in groups}
    owners, free, held = everything - last.keys(), collections.Counter[Any](), dict[int, Any]()
    for place, groups in enumerate(programs):
        for group in [each for each in held if last[each] + num <= place]:
            free[held.pop(group)] += 1
        for group in [each for each in dict.fromkeys(groups) if each not in held]:
            kind = held[group] = tuple((vector.size, vector.dtype) for vector in layers[group].trained.vectors)
            owners |= set() if free[kind] else {group}
            free[kind] = max(free[kind] - 1, 0)
    return owners


def residuals_of(partition: Partition, derivatives: Mapping[int, Derivative], segment: int) -> tuple[Value, ...]:
    """The residuals between the forward and the backward of a segment."""
    saved = derivatives[partition.segments[segment].program].saved
    return tuple((segment, index) for index in range(len(saved)))


def aval_of(partition: Partition, derivatives: Mapping[int, Derivative], value: Value) -> Any:
    """The shape and dtype of a value between programs, or of a residual."""
    if isinstance(value, int):
        return partition.graph.avals[value]
    segment, index = value
    return derivatives[partition.segments[segment].program].saved[index]


def offloaded_values(partition: Partition, derivatives: Mapping[int, Derivative]) -> dict[Value, tuple[int, int]]:
    """The values and residuals that can wait in host memory.

    Returns:
      For each, the place after which it leaves and the one that reads it.
    """
    last_forward: dict[Value, int] = {}
    backward: dict[Value, int] = {}
    for place, read in enumerate(_freeable_reads(partition, derivatives)):
        for value in read:
            if place < len(partition.segments):
                last_forward[value] = place
            else:
                backward.setdefault(value, place)
    for place, (kind, number) in enumerate(places(partition)):
        made = residuals_of(partition, derivatives, number) if kind is ProgramKind.BACKWARD else ()
        last_forward |= dict.fromkeys(made, number)
        backward |= dict.fromkeys(made, place)
    return {
        value: (last_forward[value], until)
        for value, until in backward.items()
        if until - last_forward[value] >= 2 * CROSSING_SLOTS and _may_wait(aval_of(partition, derivatives, value))
    }


def _may_wait(aval: Any) -> bool:
    return not jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended) and aval_bytes(aval) >= MIN_OFFLOADED_BYTES


class LeavingValues:
    """What a plan may let wait in host memory of each segment: residuals, and inputs that no later one reads."""

    def __init__(self, partition: Partition) -> None:
        self._partition, segments = partition, partition.segments
        self._backward = {own: place for place, own in enumerate(places(partition)) if own[0] is ProgramKind.BACKWARD}
        made = {v for each in segments for v in (*each.outputs, *each.nondiff_outputs)} | {*partition.prelude_outputs}
        read = [(v, n) for n, each in enumerate(segments) for v in (*each.inputs, *each.nondiff_inputs) if v in made]
        end, results = len(segments), (partition.loss, *partition.aux)
        self._last_read = dict(read) | {atom: end for atom in results if isinstance(atom, int)}

    def of(self, derivative: Derivative, number: int) -> list[Value]:
        """Those of the segment with this number; `derivative` is the segment's, whatever it keeps."""
        if self._backward.get((ProgramKind.BACKWARD, number), -1) - number < 2 * CROSSING_SLOTS:
            return []
        inputs, avals = backward_reads(self._partition.segments[number], derivative)[:2], self._partition.graph.avals
        alone = [v for v in dict.fromkeys(itertools.chain(*inputs)) if self._last_read.get(v) == number]
        residuals = ((number, index) for index, aval in enumerate(derivative.saved) if _may_wait(aval))
        return [*(v for v in alone if _may_wait(avals[v])), *residuals]


def last_readers(partition: Partition, derivatives: Mapping[int, Derivative]) -> dict[int, list[int]]:
    """The values that each place is the last to read."""
    last: dict[int, int] = {}
    for place, read in enumerate(_freeable_reads(partition, derivatives)):
        last |= dict.fromkeys(read, place)
    frees: dict[int, list[int]] = {}
    for value, place in last.items():
        frees.setdefault(place, []).append(value)
    return frees


def backward_reads(segment: Segment, derivative: Derivative) -> tuple[tuple[int, ...], ...]:
    """The values that a backward is given: inputs, inputs without derivative, and outputs of its segment."""
    pairs = (
        (segment.inputs, derivative.inputs_read),
        (segment.nondiff_inputs, derivative.nondiff_inputs_read),
        (segment.outputs, derivative.outputs_read),
    )
    return tuple(tuple(values[i] for i in places) for values, places in pairs)


def _freeable_reads(partition: Partition, derivatives: Mapping[int, Derivative]) -> list[list[int]]:
    kept = {partition.loss, *(atom for atom in partition.aux if isinstance(atom, int))}
    made = {v for s in partition.segments for v in (*s.outputs, *s.nondiff_outputs)} | set(partition.prelude_outputs)
    table = []
    for kind, number in places(partition):
        segment = partition.segments[number]
        read = (*segment.inputs, *segment.nondiff_inputs, *segment.outputs, *segment.nondiff_outputs)
        if kind is ProgramKind.BACKWARD:
            read = tuple(itertools.chain(*backward_reads(segment, derivatives[segment.program])))
        table.append([value for value in read if value in made and value not in kept])
    return table
