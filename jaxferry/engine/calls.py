"""What each instruction of a step needs when it is executed, found once, when the step is compiled.

The thread that issues for an accelerator bounds the speed of small models, so it looks up nothing that is known before.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxferry.engine.instruction import Drop, Instruction, Operation, StepProgram
from jaxferry.engine.program_keys import ProgramKey, ProgramKind, Source, Target
from jaxferry.engine.programs import Programs
from jaxferry.partition import Segment
from jaxferry.tasks import Task


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Call:
    """An instruction as the executor follows it.

    Attributes:
      operation, index, task, segment, group, key, values, offloads_awaited, frees, drops: those of the instruction.
      copy: the load whose copy it reads, or None.
      program: the compiled program of its key; None for one that writes to host memory, since its key may change: see
        `StepGradients.key`.
      reads: the values that the program is given, one list for each of its arguments.
      outputs, nondiff_outputs: the values that a forward makes.
      inputs: the values whose cotangents a backward makes.
      reads_parameters: whether it is given parameters.
      reads_vectors: whether these are the group's vectors in host memory.
      arrives: whether the program waits for their load.
      writes_host: whether it writes its gradient to host memory.
      stores: whether it queues the copy of its gradient there.
      offload: the OFFLOAD whose work it does with that, or -1.
      is_trained: whether it has a gradient that is wanted.
      is_updated_on_device: whether the gradient's group is updated on the device.
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
    copy: int | None
    program: Any
    reads: tuple[tuple[int, ...], ...]
    outputs: tuple[int, ...]
    nondiff_outputs: tuple[int, ...]
    inputs: tuple[int, ...]
    reads_parameters: bool
    reads_vectors: bool
    arrives: bool
    writes_host: bool
    stores: bool
    offload: int
    is_trained: bool
    is_updated_on_device: bool


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
    writes_host = key is not None and key.writes is not Target.DEVICE
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
        copy=made.task.copy,
        program=None if key is None or writes_host else programs[key],
        reads=_reads(step, segment, is_backward),
        outputs=tuple(segment.outputs),
        nondiff_outputs=tuple(segment.nondiff_outputs),
        inputs=tuple(segment.inputs),
        reads_parameters=not is_backward or step.derivatives[segment.program].reads_weights,
        reads_vectors=key is not None and key.reads is Source.HOST,
        arrives=key is not None and key.arrives,
        writes_host=writes_host,
        stores=key is not None and key.stores,
        offload=step.queued.get(made.segment, -1),
        is_trained=bool(segment.trained),
        is_updated_on_device=made.group in step.updated_on_device,
    )


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
