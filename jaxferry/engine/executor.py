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

from jaxferry.engine.lanes import Wait
from jaxferry.engine.pending import wait_for_copy
from jaxferry.engine.step import StepContext
from jaxferry.optimizer import UpdateGroup
from jaxferry.processes import moved
from jaxferry.step import Instruction, Operation, ProgramKey, ProgramUse, Value
from jaxferry.transport import PutCopy, Vectors, delete_all

_add = jax.jit(jnp.add)


def execute(step: StepContext, index: int) -> Wait | None:
    """Executes one instruction; see `lanes.Action`. JAX's profiler shows it by its task's name."""
    call = step.instructions[index]
    # Offloads whose memory this program reuses count as ended once issued, so the device waits for them.
    for offload in call.offloads_awaited:
        step.gradients.in_flight.hold(offload)
    operation = OPERATIONS[call.operation]
    if not TraceAnnotation.is_enabled():
        return operation(step, call)
    with TraceAnnotation(call.task.name):
        return operation(step, call)


def await_gradients(step: StepContext, index: int) -> None:
    """Waits until the gradients that an update reads are in host memory; see `lanes.Arrival`."""
    if step.is_last:
        step.gradients.wait_for(step.host.unit_of(step.instructions[index].group))


def load(step: StepContext, call: Instruction) -> None:
    """Copies a group's parameters to the device."""
    step.copies.load(call.index)


def refresh(step: StepContext, call: Instruction) -> None:
    """Replaces the RESIDENT copy of a group after its update."""
    if step.is_last:
        group, resident, resources = call.group, step.resident, step.runnable.resources
        resources.transport.drop(resident[group])
        mark = step.mark(call.index)
        resident[group] = resources.transport.load(group, step.host.vectors[group], mark)
        wait_for_copy(resident[group], resources.placement)


def forward(step: StepContext, call: Instruction) -> None:
    """Runs a forward and keeps its residuals."""
    assert call.key is not None
    outputs, nondiff_outputs, saved, finite = _run(step, call, call.key, (), _values_read(step, call))
    step.values.update(zip(call.residuals, saved, strict=True))
    _keep_outputs(step, call, outputs, nondiff_outputs, finite)
    _end_program(step, call, finite)


def loss(step: StepContext, call: Instruction) -> None:
    """Runs forward and backward of the last segment."""
    key = step.gradients.key(call, step.work.commit)
    if key is None:
        return
    destinations = step.gradients.destinations(call, key)
    made = _run(step, call, key, destinations, [*_values_read(step, call), *step.seed])
    gradients, (outputs, nondiff_outputs, finite, cotangents), norms = made
    _keep_cotangents(step, call, cotangents)
    step.gradients.receive(call, key, gradients, norms, step.work.commit)
    _keep_outputs(step, call, outputs, nondiff_outputs, finite)
    _end_program(step, call, finite)


def backward(step: StepContext, call: Instruction) -> None:
    """Runs a backward and passes on its gradients and cotangents."""
    key = step.gradients.key(call, step.work.commit)
    if key is None:
        return
    destinations = step.gradients.destinations(call, key)
    saved = list(map(step.values.pop, call.residuals))
    others = [*_values_read(step, call), saved, list(map(step.cotangent, call.outputs))]
    gradients, cotangents, norms = _run(step, call, key, destinations, others)
    for value in call.outputs:
        step.cotangents.pop(value, None)
    _keep_cotangents(step, call, cotangents)
    step.gradients.receive(call, key, gradients, norms, step.work.commit)
    _end_program(step, call, (norms, gradients, cotangents))


def offload(step: StepContext, call: Instruction) -> None:
    """Offloads a gradient; on an accelerator this only issues the copy."""
    mark = step.mark(call.index)
    step.gradients.offload(call, mark, step.work.commit, waits=step.does_what_it_issues)
    _end_offloads(step)


def update(step: StepContext, call: Instruction) -> None:
    """Updates the unit of a group, the last update task also the units that no segment reads.

    Before the last micro-batch it adds up what has arrived.
    """
    if not step.is_last:
        step.gradients.add_up(step.host.unit_of(call.group))
        return
    norm: jax.Array | None = step.runnable.norms.none
    if step.runnable.rules.need_all_gradients:
        is_finite, norm = jax.block_until_ready(step.judged())
    else:
        is_finite = step.is_finite()
    if step.runnable.is_first:
        step.gradients.wait_for_all()
    units = _units_to_update(step, call)
    gradients = [step.gradients.gathered(unit) for unit in units]
    # A device error surfaces at this wait, before any master is donated.
    for vector in (vector for of_unit in gradients for vectors in of_unit for vector in vectors):
        vector.block_until_ready()
    if is_finite and step.work.commit():
        step.is_updating = True
        for unit, vectors in zip(units, gradients, strict=True):
            _update_unit(step, unit, vectors, norm)
            if call.group not in unit.layers:  # no task writes what no segment reads
                step.host.to_disk(unit)
        step.num_updates += 1
    elif not is_finite and step.program.plan.gradient_buffers is not None:
        for unit in units:  # later programs of the step take this memory
            step.gradients.recycle(unit)


def update_on_device(step: StepContext, call: Instruction) -> Wait | None:
    """Updates the unit of a group whose masters and optimizer state are on the device.

    Where the update needs the norm of all gradients, a thread that may wait issues it. Otherwise it is issued here, and
    the device decides whether the loss is finite.
    """
    if not step.is_last:
        return None
    runnable = step.runnable
    if not runnable.rules.need_all_gradients and not runnable.is_first:
        _update_on_device(step, call, np.float32(0))
        return _update_unread(step)

    def judged() -> None:
        is_finite, norm = step.judged()
        if is_finite:
            _update_on_device(step, call, np.float32(0 if norm is None else norm))
            wait = _update_unread(step)
            if wait is not None:
                wait()

    return _ended(step, judged)


def load_state(step: StepContext, call: Instruction) -> None:
    """Copies a subgroup's masters and optimizer state to the device."""
    if step.is_last:
        step.streaming.load(_subgroup(call), step.mark(call.index))


def store_state(step: StepContext, call: Instruction) -> Wait | None:
    """Copies them back to host memory if they have been updated, with the new compute copy unless that stays."""
    if not step.is_last:
        return None
    place = _subgroup(call)
    step.streaming.store(place, step.mark(call.index))
    return _ended(step, lambda: step.streaming.wait(place))


def read_state(step: StepContext, call: Instruction) -> None:
    """Reads the masters and the optimizer state of a group from the scratch file."""
    if step.is_last:
        host = step.host
        host.to_host(host.unit_of(call.group))


def write_state(step: StepContext, call: Instruction) -> None:
    """Writes them back."""
    if step.is_last:
        host = step.host
        host.to_disk(host.unit_of(call.group))


def save(step: StepContext, call: Instruction) -> Wait | None:
    """Moves values to pinned host memory. Programs that need their memory wait for the end of this task."""
    arrays = _move(step, call, step.values, step.offloaded, "pinned_host")
    return _ended(step, PutCopy([step.values.pop(value) for value in call.values], arrays).wait)


def fetch(step: StepContext, call: Instruction) -> None:
    """Moves values back to the device."""
    _move(step, call, step.offloaded, step.values, "device")
    # Pinned memory is free at once, whatever the device still reads: `release` drops it when the step has ended.
    step.fetched += [step.offloaded.pop(value) for value in call.values]


def nothing(step: StepContext, call: Instruction) -> None:
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
    Operation.READ_STATE: read_state,
    Operation.WRITE_STATE: write_state,
    Operation.SAVE: save,
    Operation.FETCH: fetch,
    Operation.NOTHING: nothing,
}


def _ended(step: StepContext, wait: Wait) -> Wait | None:
    """Waits for the end of a task if its lane's thread does the work itself; else returns that wait."""
    if not step.does_what_it_issues:
        return wait
    wait()
    return None


def _run(
    step: StepContext, call: Instruction, key: ProgramKey, destinations: Sequence[Any], others: Sequence[Any]
) -> Any:
    """Runs the program of a call, which may wait for its own parameters."""
    program = step.compiled[call.index] or step.runnable.programs[key]
    if not key.arrives:
        return step.ran(program(*destinations, [_parameters(step, use) for use in call.uses], *others))
    [use] = call.uses
    assert use.copy is not None
    copy, sources = step.copies.arriving(use.copy)
    try:
        parameters, made = step.ran(program(*destinations, [copy.arrays], *others, sources))
    except BaseException:
        if any(array.is_deleted() for array in copy.arrays):
            # The program has failed after its wait, with the parameters that it was given.
            copy.arrived_in(())
            step.copies.forget(use.copy)
        raise
    copy.arrived_in(parameters)
    return made


def _parameters(step: StepContext, use: ProgramUse) -> Sequence[jax.Array]:
    """The parameters of a group that a program reads, or its vectors in host memory; none if it reads neither."""
    if not use.is_read:
        return []
    if use.reads_vectors:
        return step.host.readable(use.group)
    return step.resident[use.group].parameters() if use.copy is None else step.copies.parameters(use.copy)


def _values_read(step: StepContext, call: Instruction) -> list[list[jax.Array]]:
    value = step.values.__getitem__
    return [list(map(value, numbers)) for numbers in call.reads]


def _keep_outputs(step: StepContext, call: Instruction, outputs: Any, nondiff_outputs: Any, finite: jax.Array) -> None:
    step.values.update(zip(call.outputs, outputs, strict=True))
    step.values.update(zip(call.nondiff_outputs, nondiff_outputs, strict=True))
    step.finite.append(finite)


def _keep_cotangents(step: StepContext, call: Instruction, cotangents: Any) -> None:
    for value, cotangent in zip(call.inputs, cotangents, strict=True):
        known = step.cotangents.get(value)
        step.cotangents[value] = cotangent if known is None else _add(known, cotangent)


def _end_program(step: StepContext, call: Instruction, ended: Any) -> None:
    """Marks the end of a program and frees the buffers that it read last."""
    step.num_programs += 1
    _mark_end(step, call, ended)
    for use in call.written:
        step.gradients.note_arrival(use.group)
    # Before the device waits for anything else.
    for drop in call.drops:
        step.copies.drop(drop.load, drop.is_reused)
    for group in call.vacates if step.is_last else ():
        step.runnable.resources.transport.vacate(step.resident[group])
    _end_offloads(step)
    for value in call.frees:
        step.values.pop(value).delete()


def _mark_end(step: StepContext, call: Instruction, ended: Any) -> None:
    """Records when the device has made these arrays, if a recorder asks for it."""
    if step.copies.marks is not None and not step.does_what_it_issues:
        step.copies.marks.after(call.index, ended)


def _end_offloads(step: StepContext) -> None:
    """Makes the device wait for all offloads once all programs have been issued: the next step needs their memory."""
    if step.num_programs == len(step.program.programs):
        step.gradients.in_flight.hold()


def _move(
    step: StepContext, call: Instruction, source: dict[Value, Any], target: dict[Value, Any], memory_kind: str
) -> list[jax.Array]:
    found = [source[value] for value in call.values]
    where = [array.sharding.with_memory_kind(memory_kind) for array in found]
    arrays: list[jax.Array] = step.ran(moved(found, where))
    if arrays and (mark := step.mark(call.index)) is not None:
        mark.watch(arrays)
    target |= zip(call.values, arrays, strict=True)
    return arrays


def _units_to_update(step: StepContext, call: Instruction) -> list[UpdateGroup]:
    """The units of an update task of the host that still need an update."""
    host = step.host
    units = host.units if step.is_last_update else [host.unit_of(call.group)]
    return _taken(step, units)


def _taken(step: StepContext, units: Sequence[UpdateGroup]) -> list[UpdateGroup]:
    """Those of the units that the host updates and that have not been updated; read from a scratch file."""
    units = [unit for unit in units if id(unit) not in step.updated and (unit.is_on_host or unit.is_on_disk)]
    step.updated |= {id(unit) for unit in units}
    for unit in units:
        if unit.is_on_disk:
            step.host.to_host(unit)
    return units


def _update_on_device(step: StepContext, call: Instruction, norm: np.floating) -> None:
    """Issues the update of the group's unit, or of a subgroup, unless another group of the unit has done so."""
    unit = step.host.unit_of(call.group)
    if (id(unit) in step.updated and not unit.subgroups) or not step.work.commit():
        return
    step.updated.add(id(unit))
    step.is_updating = True
    loss = step.values[step.program.partition.loss]
    if unit.subgroups:
        numbers = norm, step.scale, loss, step.extra(True)
        made = step.ran(step.streaming.update(_subgroup(call), lambda: step.gradients.take_kept(unit)[0], *numbers))
        _mark_end(step, call, loss if made is None else made)
        return
    host, resident = step.host, [step.resident[group] for group in unit.layers]
    trained = [[i for i, leaf in enumerate(host.layers[group].leaves) if leaf.is_trained] for group in unit.layers]
    arrays = [copy.parameters() for copy in resident]
    copies = [[own[i] for i in chosen] for own, chosen in zip(arrays, trained, strict=True)]
    gradients = step.gradients.take_kept(unit)
    program = step.runnable.device_updates.updates[unit.layers]
    made = program(unit.masters, unit.state, copies, gradients, norm, step.scale, loss, *step.extra(True))
    unit.masters, unit.state, new = step.ran(made)
    for copy, own, chosen, updated in zip(resident, arrays, trained, new, strict=True):
        changed = dict(zip(chosen, updated, strict=True))
        copy.arrays = [changed.get(i, array) for i, array in enumerate(own)]
    host.note_update(unit)
    _mark_end(step, call, new)
    delete_all(jax.tree.leaves(gradients))


def _subgroup(call: Instruction) -> tuple[int, int]:
    return call.group, call.task.subgroup


def _update_unread(step: StepContext) -> Wait | None:
    """Counts an update on the device. After the last one, if the host has none, it updates what no segment reads."""
    if any(instruction.operation is Operation.UPDATE for instruction in step.program.instructions):
        return None
    is_last = step.is_last_update
    step.num_updates += 1
    host = step.host
    if not is_last or all(id(unit) in step.updated for unit in host.units):
        return None

    def wait() -> None:
        is_finite, norm = step.judged()
        if is_finite and step.work.commit():
            for unit in _taken(step, host.units):
                _update_unit(step, unit, step.gradients.gathered(unit), norm)
                host.to_disk(unit)

    return _ended(step, wait)


def _update_unit(step: StepContext, unit: UpdateGroup, gradients: Sequence[Vectors], norm: jax.Array | None) -> None:
    vectors, update = step.host.vectors, unit.program(step.program.arrivals)
    # The gradients have arrived, so no program of this step reads the compute copy any more.
    made = update(unit, [vectors[group] for group in unit.layers], gradients, norm, step.scale, step.extra(False))
    for group, new in zip(unit.layers, made, strict=True):
        vectors[group] = new
        step.host.whole_copies.outdate(group, len(step.host.layers[group].trained.vectors))
    step.gradients.recycle(unit)
