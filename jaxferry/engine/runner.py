"""Runs the steps of one prepared structure, and decides how each one ends.

A step returns when its gradients are on the host, while its updates continue. A load of the next step waits only for
the update that it needs, and may run before that step is called.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxferry.engine.executor import await_gradients, execute
from jaxferry.engine.lanes import StepRun
from jaxferry.engine.pending import Accumulated, Counts, DeviceCopies, PendingStep, Prefetch, task_error
from jaxferry.engine.state import TrainState
from jaxferry.engine.step import RunnableStep, StepContext, StepResult
from jaxferry.errors import JaxFerryError, StateError, TaskError, described
from jaxferry.optimizer import host_memory
from jaxferry.step import OF_THREADS, Lane
from jaxferry.transport import Marks, deferred_interrupts

DEVICE_LANES = (Lane.GPU, Lane.D2H)
"""A step returns when these have finished, but for transfers down of state that was updated on the device."""


class StepRunner:
    """Runs steps of one prepared structure: `first`, then `runnable`.

    The first step updates after all gradients have arrived. So running out of device memory, the likeliest failure of a
    new structure, is always rolled back.
    """

    def __init__(self, first: RunnableStep, runnable: RunnableStep) -> None:
        self.first, self.runnable = first, runnable
        self._resources, self._has_run = runnable.resources, False
        self._marks: dict[bool, Marks | None] = {}

    def step(self, state: TrainState, batch: Sequence[Any], extra_args: Mapping[str, Any] | None = None) -> StepResult:
        """Takes one step, which updates `state`; its updates may still be in flight afterwards.

        The state is arranged in the partition's groups. `batch` has the leaves of the loss function's further
        arguments, in any memory; `extra_args` the user's own arguments of the optimizer's update, as NumPy arrays.

        Raises:
          TaskError: if a task of this step or of the previous one fails.
          StateError: if the state is damaged.
        """
        with deferred_interrupts() as interrupts:
            step, before = self._begin(state, batch, extra_args), state.counts
            try:
                self._prefetch_next(state, step)
                step.work.wait(DEVICE_LANES, interrupts.are_raised)
                result = self._finished(state, step)
            except JaxFerryError:
                raise
            except Exception as error:
                outcome = self._fail(state, step, before, error)
                raise TaskError(f"the step failed: {described(error)} ({outcome})", "") from error
            if result is not None:
                self._has_run = True
                if step.is_last:
                    self._resources.transport.make_ahead({})  # what this step has not taken, no other one will
                host_memory.reuse_freed_blocks()  # all that training keeps exists now
                return result
            self._fail(state, step, before)
        raise AssertionError("a step ends with its results, an error, or an interrupt handler's exception")

    def compile_updates(self, state: TrainState) -> None:
        """Compiles the update of every unit ahead of the first step."""
        arrivals = self.runnable.program.arrivals
        self._resources.optimizer.updates.compile(state.host.units, state.host.layers, arrivals)

    def _begin(self, state: TrainState, batch: Sequence[Any], extra_args: Mapping[str, Any] | None) -> StepContext:
        runnable = self.runnable if self._has_run else self.first
        prefetch, copies = self._prefetched(state, runnable)
        try:
            previous = self._previous(state, runnable)
            self._resources.transport.settle()
            self._resources.prefetch.keep(state, self._resources.transport)
            self._arrange_copies(state, runnable)
            copies = self._new_copies(state, runnable) if copies is None else copies
            step = StepContext(runnable, state, batch, copies, extra_args)
        except BaseException:
            if prefetch is not None:
                prefetch.discard()
            elif copies is not None:
                copies.drop_all()
            raise
        action, transport = functools.partial(execute, step), self._resources.transport
        arrival = None if step.does_what_it_issues else functools.partial(await_gradients, step)
        if prefetch is None:
            # Buffers may be reserved for the loads of another program.
            transport.release()
            held = [*state.resident.values(), *state.kept.values()]
            transport.loaded_bytes.reset_peak(held if previous is None else None)
            step.work = self._resources.lanes.make(runnable.tasks, action, previous, arrival)
        else:
            transport.loaded_bytes.reset_peak()
            step.work = prefetch.work
            step.work.open(action, arrival)
        self._resources.lanes.submit(step.work)
        return step

    def _previous(self, state: TrainState, runnable: RunnableStep) -> StepRun | None:
        """The run whose updates this step's loads wait for; waits here for any other run in flight."""
        state.check()
        pending = state.pending
        if pending is None or pending.work.is_over():
            return None
        program, host, sums = runnable.program, state.host, state.accumulated.on_device
        are_placed = (host.on_device, host.streamed) == (program.stays_on_device, program.streamed)
        stay = sums.keys() <= program.summed | program.updated_on_device
        are_placed = are_placed and stay and state.resident.keys() == program.resident
        if are_placed and runnable.tasks.is_like(pending.work.list):
            return pending.work
        state.settle()
        return None

    def _arrange_copies(self, state: TrainState, runnable: RunnableStep) -> None:
        """Loads the RESIDENT copies that this program reads; moves state and sums to where it updates them."""
        program, transport, host = runnable.program, self._resources.transport, state.host
        for unit in host.units:
            leaves_device = unit.is_on_device and not program.stays_on_device.issuperset(unit.layers)
            if leaves_device or (unit.subgroups and len(unit.subgroups) != program.streamed.get(unit.layers[0])):
                host.to_host(unit)
        host.refresh(but=program.resident)
        for group in state.kept.keys() - program.kept:
            transport.drop(state.kept.pop(group))
        for group in state.resident.keys() ^ runnable.program.resident:
            if group in state.resident:
                transport.drop(state.resident.pop(group))
            else:
                state.resident[group] = transport.load(group, state.host.vectors[group])
        for unit in host.units:
            if not unit.is_on_device and program.stays_on_device.issuperset(unit.layers):
                host.to_device(unit)
            elif (unit.is_on_host or unit.is_on_disk) and unit.layers[0] in program.streamed:
                host.to_stream(unit, program.streamed[unit.layers[0]])
        for group in sorted(state.accumulated.on_host.keys() & program.updated_on_device):
            layer, placement = host.layers[group].trained, self._resources.placement
            state.accumulated = state.accumulated.brought(group, transport, layer, placement)
        for group in sorted(state.accumulated.on_device.keys() - program.summed - program.updated_on_device):
            try:
                state.accumulated = state.accumulated.offloaded(group, transport)
            except Exception as error:
                name = state.host.layers[group].name
                raise TaskError(
                    f"the offload of the sums of layer {name!r} failed: {described(error)}", name
                ) from error

    def _prefetched(
        self, state: TrainState, runnable: RunnableStep
    ) -> tuple[Prefetch, DeviceCopies] | tuple[None, DeviceCopies | None]:
        """The prefetch for this step, and what it has loaded; frees one that cannot be used.

        Of one for a batch of another size the step takes the copies alone, and those that it has no room for are freed.
        """
        prefetch = state.prefetch
        self._resources.prefetch.take(prefetch)
        if prefetch is None:
            return None, None
        if not prefetch.work.has_broken_off and state.resident.keys() == runnable.program.resident:
            if prefetch.work.list is runnable.tasks:
                state.prefetch = None
                return prefetch, prefetch.copies
            # Marks belong to one list of tasks.
            if prefetch.copies.marks is None and runnable.tasks.is_like(prefetch.work.list):
                state.prefetch = None
                prefetch.work.stop()
                copies = self._new_copies(state, runnable)
                copies.take_over(prefetch.copies, runnable.loads_ahead)
                return None, copies
        self._discard_prefetch(state)
        return None, None

    def _prefetch_next(self, state: TrainState, step: StepContext) -> None:
        """Starts the next step's first loads, each after its update in this step."""
        loads = self.runnable.loads_ahead
        if not loads or step.runnable is not self.runnable:
            return
        copies = self._new_copies(state, self.runnable)
        copies.expects_kept = not step.is_last
        work = self._resources.lanes.begin_ahead(self.runnable.tasks, copies.load, step.work, loads)
        state.prefetch = Prefetch(work, copies)
        self._resources.prefetch.put(state.prefetch)

    def _discard_prefetch(self, state: TrainState) -> None:
        # Programs that were issued may never set their marks.
        self._marks.clear()
        if state.prefetch is not None:
            self._resources.prefetch.take(state.prefetch)
            state.prefetch.discard()
            state.prefetch = None

    def _new_copies(self, state: TrainState, runnable: RunnableStep) -> DeviceCopies:
        resources, marks = self._resources, self._marks_of(runnable)
        noted = None if marks is None else marks.begin()
        vectors, transport = state.host.vectors, resources.transport
        return DeviceCopies(runnable.program, transport, resources.placement, vectors, noted, state.kept)

    def _marks_of(self, runnable: RunnableStep) -> Marks | None:
        """Records when tasks start and end on the device; None if the threads see that, or no recorder is given."""
        recorder, placement = self._resources.recorder, self._resources.placement
        if recorder is None or placement.is_cpu:
            return None
        if runnable.is_first not in self._marks:
            marks = Marks(placement, recorder.num_steps, self._resources.transport.library)
            lanes, trivial = runnable.tasks.lanes, runnable.tasks.trivial
            marks.prepare(i for i, lane in enumerate(lanes) if lane not in OF_THREADS and i not in trivial)
            self._marks[runnable.is_first] = marks
        return self._marks[runnable.is_first]

    def _finished(self, state: TrainState, step: StepContext) -> StepResult | None:
        """Commits a step whose gradients are on the host; None if it has failed or stopped."""
        work, recorder = step.work, self._resources.recorder
        if not work.is_over(DEVICE_LANES) or work.is_stopped or work.failure is not None:
            return None
        before = state.counts
        try:
            result = collect_results(state, step)
        except Exception as error:
            # A device reports errors late; the task that waits for its result fails too.
            work.wait()
            if work.failure is None:
                outcome = self._fail(state, step, before, error)
                raise TaskError(f"a program of the step failed: {described(error)} ({outcome})", "") from error
            return None
        state.pending = PendingStep(work, step, before)
        self._resources.prefetch.note(work)
        if recorder is not None:
            recorder.add(work, step.copies.marks)
        return result

    def _fail(self, state: TrainState, step: StepContext, before: Counts, error: BaseException | None = None) -> str:
        """Ends a step that has not returned: rolls it back, or marks the state as damaged; returns which, in words.

        Raises the error of a failed task of this step or of the previous one, or `StateError` if the state is damaged.
        """
        work = step.work
        self._discard_prefetch(state)
        work.stop()
        if work.failure is not None:
            work.failure = step.earliest_failure(work.failure)
        step.drop()
        state.drop_kept(self._resources.transport)
        outcome = state.end_failed(step, work, before, error)
        if work.failure is not None:
            raise task_error(work, outcome) from work.failure.error
        if state.damage is not None:
            raise StateError(state.damage) from error
        # The updates of the step before may have failed meanwhile.
        state.check()
        return outcome


def collect_results(state: TrainState, step: StepContext) -> StepResult:
    """Counts the step and collects its results."""
    is_finite, norm = step.judged()
    rules, partition, values = step.runnable.rules, step.program.partition, step.values
    scale = state.loss_scale
    if step.is_last:
        state.loss_scale = scale.after(is_finite)
    if step.weight == -math.inf:
        state.forget_accumulated()
    # A deliberately skipped step counts too, since its batch is consumed.
    elif is_finite or rules.skip_nonfinite or (scale.is_dynamic and scale.value > 1):
        state.step += 1
        gradients, num = step.gradients, state.accumulated.num_batches + 1
        sums = () if step.is_last else (num, step.weight, step.loss, gradients.on_host, gradients.sums, is_finite)
        state.accumulated = Accumulated(*sums)
    else:
        state.forget_accumulated()
    aux = [values[atom] if isinstance(atom, int) else atom.val for atom in partition.aux]
    loss, peak = values[partition.loss], step.runnable.resources.transport.loaded_bytes.peak
    is_applied, layer = is_finite and step.is_last, _nonfinite_gradient(step, norm)
    mean_loss = step.loss / step.weight if rules.is_weighted and step.is_last and is_finite else None
    result = StepResult(
        loss, step.weight, mean_loss, aux, norm, is_finite, is_applied, scale.value, step.finite, layer, peak
    )
    step.release()
    return result


def _nonfinite_gradient(step: StepContext, norm: jax.Array | None) -> str | None:
    """The first layer whose gradient is not finite; the norm of all is known by now."""
    if norm is None or np.isfinite(np.asarray(norm)):
        return None
    group = step.gradients.norms.first_nonfinite()
    # The sum of finite squares may overflow.
    layers = step.program.partition.layers
    return ", ".join(layer.name for layer in layers) if group is None else layers[group].name
