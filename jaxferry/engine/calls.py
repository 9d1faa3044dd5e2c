"""What each instruction of a step needs when it is executed, found once, when the step is compiled.

The thread that issues for an accelerator bounds the speed of small models, so it looks up nothing that is known before.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxferry.engine.programs import Programs
from jaxferry.partition import Segment
from jaxferry.step.instruction import Drop, Instruction, Operation, StepProgram
from jaxferry.step.program_keys import ProgramKey, ProgramKind, Source, Target
from jaxferry.step.tasks import Task


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class CalledUse:
    """A parameter group of a program.

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


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Call:
    """An instruction as the executor follows it.

    Attributes:
      operation, index, task, segment, group, key, values, offloads_awaited, frees, drops, vacates: those of the
        instruction.
      number: the index of the use that it belongs to; of a program's last one.
      uses: the parameter groups of a program, in the order of its segment.
      written: those whose gradient it writes to host memory.
      program: the compiled program of its key; None for one that writes to host memory, since its key may change: see
        `StepGradients.key`.
      reads: the values that the program is given, one list for each of its arguments.
      outputs, nondiff_outputs: the values that a forward makes.
      inputs: the values whose cotangents a backward makes.
      arrives: whether the program waits for the load of its parameters.
      writes_host: whether it writes any gradient to host memory.
      stores: whether it queues the copy of its gradient there.
      offload: the OFFLOAD whose work it does with that, or -1.
    """

    operation: Operation
    index: int
    task: Task
    segment: int
    group: int
    key: ProgramKey | None
    values: tuple[int, ...]
    offloads_awaited: tuple[int, ...]
    frees: tuple[int, ...]
    drops: tuple[Drop, ...]
    vacates: tuple[int, ...]
    number: int
    uses: tuple[CalledUse, ...]
    written: tuple[CalledUse, ...]
    program: Any
    reads: tuple[tuple[int, ...], ...]
    outputs: tuple[int, ...]
    nondiff_outputs: tuple[int, ...]
    inputs: tuple[int, ...]
    arrives: bool
    writes_host: bool
    stores: bool
    offload: int


def calls_of(step: StepProgram, programs: Programs) -> tuple[Call, ...]:
    """The call of each instruction.

    Args:
      step: the instructions.
      programs: has compiled their programs.
    """
    return tuple(_call(step, programs, instruction) for instruction in step.instructions)


def _call(step: StepProgram, programs: Programs, made: Instruction) -> Call:
    segment, key = step.partition.segments[made.segment], made.key
    is_backward = key is not None and key.kind is ProgramKind.BACKWARD
    writes_host = key is not None and key.writes_host
    uses = () if key is None else _uses(step, made, key)
    return Call(
        operation=made.operation,
        index=made.index,
        task=made.task,
        segment=made.segment,
        group=made.group,
        key=key,
        values=made.values,
        offloads_awaited=made.offloads_awaited,
        frees=made.frees,
        drops=made.drops,
        vacates=made.vacates,
        number=made.task.segment,
        uses=uses,
        written=tuple(use for use in uses if use.writes_host),
        program=None if key is None or writes_host else programs[key],
        reads=_reads(step, segment, is_backward),
        outputs=tuple(segment.outputs),
        nondiff_outputs=tuple(segment.nondiff_outputs),
        inputs=tuple(segment.inputs),
        arrives=key is not None and key.arrives,
        writes_host=writes_host,
        stores=key is not None and key.stores,
        offload=step.queued.get(made.segment, -1),
    )


def _uses(step: StepProgram, made: Instruction, key: ProgramKey) -> tuple[CalledUse, ...]:
    partition, is_backward = step.partition, key.kind is ProgramKind.BACKWARD
    derivative = step.derivatives[partition.segments[made.segment].program]
    found = []
    for number in partition.uses_of[made.segment]:
        use = partition.uses[number]
        found.append(
            CalledUse(
                number=number,
                place=use.place,
                group=use.group,
                copy=made.copies[use.place],
                is_read=not is_backward or derivative.reads_groups[use.place],
                reads_vectors=key.reads[use.place] is Source.HOST,
                writes_host=key.writes[use.place] is not Target.DEVICE,
                is_trained=use.is_trained,
                is_updated_on_device=use.group in step.updated_on_device,
            )
        )
    return tuple(found)


def _reads(step: StepProgram, segment: Segment, is_backward: bool) -> tuple[tuple[int, ...], ...]:
    if not is_backward:
        return tuple(segment.inputs), tuple(segment.nondiff_inputs)
    derivative = step.derivatives[segment.program]
    pairs = (
        (segment.inputs, derivative.inputs_read),
        (segment.nondiff_inputs, derivative.nondiff_inputs_read),
        (segment.outputs, derivative.outputs_read),
    )
    return tuple(tuple(values[i] for i in places) for values, places in pairs)
