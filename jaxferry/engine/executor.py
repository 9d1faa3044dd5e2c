"""Executes the instructions of a step: one short function for each operation.

    pinned host vectors --LOAD--> device --FORWARD--> values, residuals --LOSS, BACKWARD--> gradient
           ^                                                                                  | OFFLOAD
           +---- UPDATE (CPU backend): clip, Optax, cast <------------- host gradient <-------+

A thread of `lanes.py` calls `execute` for each task of its lane. Each device buffer is deleted once its last reader has
been issued.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.profiler import TraceAnnotation

from jaxferry.engine.global_arrays import moved
from jaxferry.engine.host.pinned import update_targets, updated_vectors
from jaxferry.engine.host.update_group import UpdateGroup
from jaxferry.engine.instruction import Instruction, Operation
from jaxferry.engine.lanes import Wait
from jaxferry.engine.prefetch import wait_for_copy
from jaxferry.engine.program_keys import ProgramKey, Source, Target
from jaxferry.engine.step import StepContext
from jaxferry.engine.transport.base import Vectors, delete_all

_add = jax.jit(jnp.add)


def execute(step: StepContext, index: int) -> Wait | None:
    """Executes one instruction; see `lanes.Action`. JAX's profiler shows it by its task's name."""
    instruction = step.program.instructions[index]
    operation = OPERATIONS[instruction.operation]
    if not TraceAnnotation.is_enabled():
        return operation(step, instruction)
    with TraceAnnotation(instruction.task.name):
        return operation(step, instruction)


def load(step: StepContext, instruction: Instruction) -> None:
    """Copies a group's parameters to the device."""
    step.copies.load(instruction.index)


def refresh(step: StepContext, instruction: Instruction) -> None:
    """Replaces the RESIDENT copy of a group after its update."""
    if step.is_last:
        group, state, resources = instruction.group, step.state, step.runnable.resources
        resources.transport.drop(state.resident[group])
        mark = step.mark(instruction.index)
        state.resident[group] = resources.transport.load(group, state.host.vectors[group], mark)
        wait_for_copy(state.resident[group], resources.placement)


def forward(step: StepContext, instruction: Instruction) -> None:
    """Runs a forward and keeps its residuals."""
    assert instruction.key is not None
    step.make_room(instruction)
    arguments = _forward_arguments(step, instruction, instruction.key)
    outputs, nondiff_outputs, saved, finite = _run(step, instruction, instruction.key, *arguments)
    step.saved[instruction.segment] = saved
    _keep_outputs(step, instruction, outputs, nondiff_outputs, finite)
    _end_program(step, instruction, instruction.key, finite)


def loss(step: StepContext, instruction: Instruction) -> None:
    """Runs forward and backward of the last segment."""
    step.make_room(instruction)
    key = step.gradients.key(instruction, step.work.commit)
    if key is None:
        return
    arguments = _forward_arguments(step, instruction, key)
    destinations = step.gradients.destinations(key, instruction.group)
    made = _run(step, instruction, key, *destinations, *arguments, *step.seed)
    gradients, (outputs, nondiff_outputs, finite, cotangents), norm = made
    _keep_cotangents(step, instruction, cotangents)
    step.gradients.receive(instruction, key, gradients, norm, step.work.commit)
    _keep_outputs(step, instruction, outputs, nondiff_outputs, finite)
    _end_program(step, instruction, key, finite)


def backward(step: StepContext, instruction: Instruction) -> None:
    """Runs a backward and passes on its gradients and cotangents."""
    step.make_room(instruction)
    key = step.gradients.key(instruction, step.work.commit)
    if key is None:
        return
    segment = step.program.partition.segments[instruction.segment]
    destinations = step.gradients.destinations(key, instruction.group)
    arguments = _backward_arguments(step, instruction, key)
    gradients, cotangents, norm = _run(step, instruction, key, *destinations, *arguments)
    del step.saved[instruction.segment]
    for value in segment.outputs:
        step.cotangents.pop(value, None)
    _keep_cotangents(step, instruction, cotangents)
    step.gradients.receive(instruction, key, gradients, norm, step.work.commit)
    _end_program(step, instruction, key, (norm, gradients, cotangents))


def offload(step: StepContext, instruction: Instruction) -> None:
    """Offloads a gradient; on an accelerator this only issues the copy."""
    mark = step.mark(instruction.index)
    step.gradients.offload(instruction, mark, step.work.commit, waits=step.does_what_it_issues)
    _end_offloads(step)


def update(step: StepContext, instruction: Instruction) -> None:
    """Updates the unit of a group. The last update task also updates the units that no segment reads."""
    if not step.is_last:
        return
    norm: jax.Array | None = step.runnable.norms.none
    if step.runnable.rules.need_all_gradients:
        is_finite, norm = step.judged()
    else:
        is_finite = step.is_finite()
    if step.runnable.is_first:
        step.gradients.wait_for_all()
    units = _units_to_update(step, instruction)
    # A device error surfaces at this wait, before any master is donated.
    gradients = jax.block_until_ready([step.gradients.gathered(unit) for unit in units])
    jax.block_until_ready(norm)
    if is_finite and step.work.commit():
        step.is_updating = True
        for unit, vectors in zip(units, gradients, strict=True):
            _update_unit(step, unit, vectors, norm)
        step.num_updates += 1


def update_on_device(step: StepContext, instruction: Instruction) -> Wait | None:
    """Updates the unit of a group whose masters and optimizer state are on the device.

    Where the update needs the norm of all gradients, a thread that may wait issues it. Otherwise it is issued here, and
    the device decides whether the loss is finite.
    """
    if not step.is_last:
        return None
    runnable = step.runnable
    if not runnable.rules.need_all_gradients and not runnable.is_first:
        _update_on_device(step, instruction, np.float32(0))
        return _update_unread(step)

    def judged() -> None:
        is_finite, norm = step.judged()
        if is_finite:
            _update_on_device(step, instruction, np.float32(0 if norm is None else norm))
            wait = _update_unread(step)
            if wait is not None:
                wait()

    if not step.does_what_it_issues:
        return judged
    judged()
    return None


def load_state(step: StepContext, instruction: Instruction) -> None:
    """Copies a subgroup's masters and optimizer state to the device."""
    if step.is_last:
        step.streaming.load(_subgroup(instruction), step.mark(instruction.index))


def store_state(step: StepContext, instruction: Instruction) -> Wait | None:
    """Copies them back to host memory, with the new compute copy, if they have been updated."""
    if not step.is_last:
        return None
    place = _subgroup(instruction)
    step.streaming.store(place, step.mark(instruction.index))
    if not step.does_what_it_issues:
        return lambda: step.streaming.wait(place)
    step.streaming.wait(place)
    return None


def save(step: StepContext, instruction: Instruction) -> Wait | None:
    """Moves values to pinned host memory. Programs that need their memory wait for the end of this task."""
    arrays = _move(step, instruction, step.values, step.offloaded, "pinned_host")
    for value in instruction.values:
        # The runtime frees memory of the device only after its last read.
        step.values.pop(value).delete()
    return None if step.does_what_it_issues else lambda: jax.block_until_ready(arrays)


def fetch(step: StepContext, instruction: Instruction) -> None:
    """Moves values back to the device."""
    _move(step, instruction, step.offloaded, step.values, "device")
    # Pinned memory is free at once, whatever the device still reads: `release` drops it when the step has ended.
    step.fetched += [step.offloaded.pop(value) for value in instruction.values]


def nothing(step: StepContext, instruction: Instruction) -> None:
    """Does nothing: another instruction does this task's work."""


OPERATIONS: dict[Operation, Callable[[StepContext, Instruction], Wait | None]] = {
    Operation.LOAD: load,
    Operation.REFRESH: refresh,
    Operation.FORWARD: forward,
    Operation.LOSS: loss,
    Operation.BACKWARD: backward,
    Operation.OFFLOAD: offload,
    Operation.UPDATE: update,
    Operation.UPDATE_ON_DEVICE: update_on_device,
    Operation.LOAD_STATE: load_state,
    Operation.STORE_STATE: store_state,
    Operation.SAVE: save,
    Operation.FETCH: fetch,
    Operation.NOTHING: nothing,
}


def _run(step: StepContext, instruction: Instruction, key: ProgramKey, *arguments: Any) -> Any:
    """Runs the program of an instruction, which may wait for its own parameters."""
    program = step.runnable.programs[key]
    if not key.arrives:
        return step.ran(program(*arguments))
    assert instruction.task.copy is not None
    held, sources = step.copies.arriving(instruction.task.copy)
    try:
        parameters, made = step.ran(program(*arguments, sources))
    except BaseException:
        if any(array.is_deleted() for array in held.arrays):
            # The program has failed after its wait, with the parameters that it was given.
            held.arrived_in(())
            step.copies.forget(instruction.task.copy)
        raise
    held.arrived_in(parameters)
    return made


def _parameters(step: StepContext, instruction: Instruction, key: ProgramKey) -> Sequence[jax.Array]:
    if key.reads is Source.HOST:
        return step.state.host.readable(instruction.group)
    if key.arrives:
        assert instruction.task.copy is not None
        return step.copies.arriving(instruction.task.copy)[0].arrays
    return step.weights(instruction)


def _forward_arguments(step: StepContext, instruction: Instruction, key: ProgramKey) -> list[Any]:
    segment = step.program.partition.segments[instruction.segment]
    inputs, others = ([step.values[v] for v in values] for values in (segment.inputs, segment.nondiff_inputs))
    return [_parameters(step, instruction, key), inputs, others]


def _backward_arguments(step: StepContext, instruction: Instruction, key: ProgramKey) -> list[Any]:
    segment = step.program.partition.segments[instruction.segment]
    derivative = step.program.derivatives[segment.program]
    return [
        _parameters(step, instruction, key) if derivative.reads_weights else [],
        [step.values[segment.inputs[i]] for i in derivative.inputs_read],
        [step.values[segment.nondiff_inputs[i]] for i in derivative.nondiff_inputs_read],
        [step.values[segment.outputs[i]] for i in derivative.outputs_read],
        step.saved[instruction.segment],
        [step.cotangent(v) for v in segment.outputs],
    ]


def _keep_outputs(
    step: StepContext, instruction: Instruction, outputs: Any, nondiff_outputs: Any, finite: jax.Array
) -> None:
    segment = step.program.partition.segments[instruction.segment]
    step.values |= zip((*segment.outputs, *segment.nondiff_outputs), (*outputs, *nondiff_outputs), strict=True)
    step.finite.append(finite)


def _keep_cotangents(step: StepContext, instruction: Instruction, cotangents: Any) -> None:
    """Adds cotangents to those of later segments."""
    segment = step.program.partition.segments[instruction.segment]
    for value, cotangent in zip(segment.inputs, cotangents, strict=True):
        known = step.cotangents.get(value)
        step.cotangents[value] = cotangent if known is None else _add(known, cotangent)


def _end_program(step: StepContext, instruction: Instruction, key: ProgramKey, ended: Any) -> None:
    """Marks the end of a program and frees the buffers that it read last."""
    step.num_programs += 1
    _mark_end(step, instruction, ended)
    if key.writes is not Target.DEVICE:
        step.gradients.note_arrival(instruction.group)
    _end_offloads(step)
    for drop in instruction.drops:
        step.copies.drop(drop.load, drop.is_reused)
    for value in instruction.frees:
        step.values.pop(value).delete()


def _mark_end(step: StepContext, instruction: Instruction, ended: Any) -> None:
    """Records when the device has made these arrays, if a recorder asks for it."""
    if not step.does_what_it_issues and step.copies.marks is not None:
        step.copies.marks.after(instruction.index, ended)


def _end_offloads(step: StepContext) -> None:
    """Makes the device wait for all offloads once all programs have been issued."""
    if step.num_programs == len(step.program.programs):
        step.gradients.in_flight.hold_all()


def _move(
    step: StepContext,
    instruction: Instruction,
    source: dict[int, Any],
    target: dict[int, Any],
    memory_kind: str,
) -> list[jax.Array]:
    found = [source[value] for value in instruction.values]
    where = [array.sharding.with_memory_kind(memory_kind) for array in found]
    arrays: list[jax.Array] = step.ran(moved(found, where))
    if arrays and (mark := step.mark(instruction.index)) is not None:
        mark.watch(arrays)
    target |= zip(instruction.values, arrays, strict=True)
    return arrays


def _units_to_update(step: StepContext, instruction: Instruction) -> list[UpdateGroup]:
    """The units of an update task of the host that still need an update."""
    units = [unit for unit in step.state.host.units if instruction.group in unit.layers or step.is_last_update]
    units = [unit for unit in units if id(unit) not in step.updated and unit.is_on_host]
    step.updated |= {id(unit) for unit in units}
    return units


def _update_on_device(step: StepContext, instruction: Instruction, norm: np.floating) -> None:
    """Issues the update of the group's unit, or of a subgroup, unless another group of the unit has done so."""
    (unit,) = (unit for unit in step.state.host.units if instruction.group in unit.layers)
    if (id(unit) in step.updated and not unit.subgroups) or not step.work.commit():
        return
    step.updated.add(id(unit))
    step.is_updating = True
    if unit.subgroups:
        _update_subgroup(step, instruction, unit, norm)
        return
    host, resident = step.state.host, [step.state.resident[group] for group in unit.layers]
    trained = [[i for i, leaf in enumerate(host.layers[group].leaves) if leaf.is_trained] for group in unit.layers]
    arrays = [held.parameters() for held in resident]
    copies = [[own[i] for i in chosen] for own, chosen in zip(arrays, trained, strict=True)]
    gradients, loss = step.gradients.take_kept(unit), step.values[step.program.partition.loss]
    made = step.runnable.device_updates.update(unit, copies, gradients, norm, step.scale, loss)
    unit.masters, unit.state, new = step.ran(made)
    for held, own, chosen, updated in zip(resident, arrays, trained, new, strict=True):
        given = dict(zip(chosen, updated, strict=True))
        held.arrays = [given.get(i, array) for i, array in enumerate(own)]
    host.note_update(unit)
    _mark_end(step, instruction, new)
    delete_all(jax.tree.leaves(gradients))


def _update_subgroup(step: StepContext, instruction: Instruction, unit: UpdateGroup, norm: np.floating) -> None:
    """Issues the update of a subgroup that has been loaded."""

    def take_uses() -> Any:
        return step.gradients.take_kept(unit)[0]

    loss = step.values[step.program.partition.loss]
    made = step.ran(step.streaming.update(_subgroup(instruction), take_uses, norm, step.scale, loss))
    _mark_end(step, instruction, loss if made is None else made)


def _subgroup(instruction: Instruction) -> tuple[int, int]:
    return instruction.group, instruction.task.subgroup


def _update_unread(step: StepContext) -> Wait | None:
    """Counts an update on the device. After the last one, if the host has none, it updates what no segment reads."""
    if any(instruction.operation is Operation.UPDATE for instruction in step.program.instructions):
        return None
    is_last = step.is_last_update
    step.num_updates += 1
    units = [unit for unit in step.state.host.units if id(unit) not in step.updated and unit.is_on_host]
    if not is_last or not units:
        return None

    def wait() -> None:
        is_finite, norm = step.judged()
        if is_finite and step.work.commit():
            step.updated |= {id(unit) for unit in units}
            for unit in units:
                _update_unit(step, unit, step.gradients.gathered(unit), norm)

    if not step.does_what_it_issues:
        return wait
    wait()
    return None


def _update_unit(step: StepContext, unit: UpdateGroup, gradients: Sequence[Vectors], norm: jax.Array | None) -> None:
    host, placement = step.state.host, step.runnable.resources.placement
    trained = [host.layers[group].trained for group in unit.layers]
    num_trained = [len(layer.vectors) for layer in trained]
    old = [host.vectors[group][:num] for group, num in zip(unit.layers, num_trained, strict=True)]
    program = unit.programs[tuple(bool(used) for used in gradients)]
    made = program(unit.masters, unit.state, update_targets(old, placement), gradients, norm, step.scale)
    unit.masters, unit.state, packed = jax.block_until_ready(made)
    # The gradients have arrived, so no program of this step reads the compute copy any more.
    for group, new, num in zip(unit.layers, updated_vectors(old, packed, placement, trained), num_trained, strict=True):
        host.vectors[group] = (*new, *host.vectors[group][num:])
    step.gradients.recycle(unit)
