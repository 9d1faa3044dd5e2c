"""Runs a training step: carries out the tasks of the schedule, on the lanes that they belong to.

    pinned host vectors --load--> device --forward--> values, residuals --loss, backward--> gradient
           ^                                                                                   | store
           +---- update (CPU backend): clip, Optax, cast <------------------ host gradient <---+

A step returns when its gradients are on the host. Its updates go on meanwhile, and a load of the next step waits for
just the update that it needs, not even for that step to be called. Every device buffer is deleted as soon as its last
reader has been issued.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxferry.engine.ahead import Ahead, OneAhead
from jaxferry.engine.flight import Flight, StepResult
from jaxferry.engine.host_optimizer import HostOptimizer
from jaxferry.engine.interrupts import deferred_interrupts
from jaxferry.engine.lanes import Lanes, TaskList, Work
from jaxferry.engine.marks import Marks, StepMarks
from jaxferry.engine.placement import Placement
from jaxferry.engine.programs import Programs, squared_norm
from jaxferry.engine.recorder import Recorder
from jaxferry.engine.replay import Replay
from jaxferry.engine.script import Event, moves_of, programs_of
from jaxferry.engine.shadow import Kind, Source, Target
from jaxferry.engine.state import GIVEN_UP, Accumulated, LateFailure, TrainState, UnderWay, task_error, to_pinned
from jaxferry.engine.transfers import DeviceLayer, Transport, Vectors, added
from jaxferry.engine.units import Unit
from jaxferry.errors import StateError, TaskError
from jaxferry.partition import Partition, Segment
from jaxferry.schedule import Kind as TaskKind
from jaxferry.schedule import Lane, Schedule


class Executor:
    """Steps of one partition under one schedule.

    Args:
      partition: the segments.
      programs: their compiled programs.
      schedule: the tasks of a step.
      script: its programs, in order.
      resident: layers whose device copy outlives the step.
      optimizer: the host optimizer.
      placement: where arrays live.
      transport: what moves layers and gradients.
      lanes: the threads that run the tasks.
      clips: whether updates need the global norm; the schedule has them after all gradients then.
      skip_nonfinite: whether a step is skipped whose loss or gradients are not finite; likewise.
      checks_gradients: whether an update is left out whose gradients are not finite; likewise.
      recorder: what remembers when tasks started and ended; None for nothing.
      accumulate: of how many micro-batches each update takes the mean gradient.
      kept: layers whose gradients are added up on the device; those of the others, in host memory.
      loads_ahead: the first loads of a step, as far as they may be done before it is called.
      one_ahead: knows of all that has been loaded ahead.
    """

    def __init__(
        self,
        partition: Partition,
        programs: Programs,
        schedule: Schedule,
        script: Sequence[Event],
        resident: Iterable[int],
        optimizer: HostOptimizer,
        placement: Placement,
        transport: Transport,
        lanes: Lanes,
        clips: bool = False,
        skip_nonfinite: bool = False,
        checks_gradients: bool = False,
        recorder: Recorder | None = None,
        accumulate: int = 1,
        kept: Iterable[int] = (),
        loads_ahead: Sequence[int] = (),
        one_ahead: OneAhead | None = None,
    ) -> None:
        self.partition, self.programs, self.schedule = partition, programs, schedule
        self._script, self._resident = list(script), frozenset(resident)
        self._optimizer, self._placement = optimizer, placement
        self._clips, self._skip_nonfinite = clips, skip_nonfinite
        self._checks_gradients = skip_nonfinite or checks_gradients
        # What is added to sums of earlier micro-batches cannot be taken back: no update before all of it has been.
        self._waits_for_all = clips or self._checks_gradients or accumulate > 1
        self._transfers, self._lanes, self._recorder = transport, lanes, recorder
        self._accumulate, self._kept = accumulate, frozenset(kept)
        self._loads_ahead, self._one_ahead = tuple(loads_ahead), one_ahead or OneAhead()
        self._tasks = TaskList(schedule)
        self._places = programs_of(schedule)
        self._drops = _drops(schedule, self._places)
        self._moves = moves_of(schedule, self._script)
        self._freed = _freed(partition, schedule, self._drops)
        self._replay = Replay(partition, schedule, self._script, self._places, self._moves)
        self._num_update_tasks = sum(task.kind is TaskKind.UPDATE for task in schedule.tasks)
        self._num_uses = [sum(s.layer == i for s in partition.segments) for i in range(len(partition.layers))]
        self._constants = {n: jax.device_put(c, placement.device) for n, c in partition.graph.constants.items()}
        self._add = jax.jit(jnp.add)
        self._add_onto = jax.jit(lambda known, more: list(map(added, known, more)), donate_argnums=0)
        self._norm_of = jax.jit(lambda vectors: squared_norm(jax.device_put(vectors, jax.memory.Space.Device)))
        self._total = jax.jit(lambda norms, scale: jnp.sqrt(sum(norms, start=jnp.float32(0))) / scale)
        self._norm_thread = ThreadPoolExecutor(1, thread_name_prefix="jaxferry norms")
        self._no_norm = jax.device_put(np.float32(0), placement.host_compute)
        self._marks = self._make_marks()

    def step(self, state: TrainState, batch: Sequence[Any]) -> StepResult:
        """Takes one step, which updates `state`; its updates may still be under way.

        Args:
          state: arranged in the partition's layers.
          batch: the leaves of the loss function's further arguments, on any memory of the device.

        Raises:
          TaskError: if a task fails, of this step or of the one before.
        """
        with deferred_interrupts() as interrupts:
            ahead = self._ahead_of(state)
            try:
                previous = self._previous(state)
                flight = self._begin(state, batch)
            except BaseException:
                if ahead is not None:
                    ahead.discard()
                raise
            action = functools.partial(self._act, state, flight)
            if ahead is None:
                self._transfers.reset_peak(state.resident.values() if previous is None else None)
                flight.marks = None if self._marks is None else self._marks.begin()
                flight.work = self._lanes.make(self._tasks, action, previous)
            else:
                self._transfers.reset_peak()
                flight.marks, flight.copies, flight.work = ahead.marks, ahead.copies, ahead.work
                flight.work.open(action)
            work, lanes = flight.work, (Lane.GPU, Lane.D2H)
            self._lanes.submit(work)
            self._begin_ahead(state, work)
            work.wait(lanes, interrupts.are_raised)
            again = functools.partial(self._again, state, flight)
            if work.is_over(lanes) and not work.is_stopped and work.failure is None:
                state.in_flight = UnderWay(work, again)
                if self._recorder is not None:
                    self._recorder.add(work, flight.marks)
                if (result := self._finished(state, flight)) is not None:
                    return result
            self._discard_ahead(state)
            is_sum_lost = flight.has_added and not flight.is_updating and self._replay.has_lost_sums(flight)
            if work.failure is not None and is_sum_lost:
                # All gradients since the last update are lost with it.
                self._give_up(state, flight)
                raise task_error(work, GIVEN_UP) from work.failure.error
            if work.is_committed:
                # What is left is tried again when the state is next used.
                finish = functools.partial(self._finish, state, flight)
                state.in_flight = UnderWay(work, again, finish, functools.partial(self._give_up, state, flight))
            else:
                self._take_back(state, flight)
            state.report()
            if work.failure is not None:
                raise task_error(work) from work.failure.error
        raise AssertionError("a step ends with its results, an error, or what the handler of an interrupt raised")

    def compile_updates(self, state: TrainState) -> None:
        """Compiles the update of every unit ahead of the first step."""
        self._optimizer.compile_updates(state.units, state.layers, [uses > 0 for uses in self._num_uses])

    def _make_marks(self) -> Marks | None:
        """What notes when tasks start and end; None if the threads see that, or nobody wants to know."""
        if self._recorder is None or self._placement.is_cpu:
            return None
        return Marks(self._placement, self._recorder.num_steps, self._transfers.library)

    def _previous(self, state: TrainState) -> Work | None:
        """The work whose updates this step's loads wait for; anything else under way is waited for here."""
        state.report()
        known = state.in_flight
        if known is None:
            return None
        if known.finish is None:
            if known.work.is_over():
                return None
            if known.work.list is self._tasks and state.resident.keys() == self._resident:
                return known.work
        state.settle()
        return None

    def _ahead_of(self, state: TrainState) -> Ahead | None:
        """What has been loaded for this step; frees what has been for another, or cannot be used."""
        ahead = state.ahead
        self._one_ahead.take(ahead)
        if ahead is None:
            return None
        is_fresh = state.in_flight is None or state.in_flight.finish is None
        is_same = ahead.work.list is self._tasks and state.resident.keys() == self._resident
        if is_fresh and is_same and ahead.is_good:
            state.ahead = None
            return ahead
        self._discard_ahead(state)
        return None

    def _begin_ahead(self, state: TrainState, work: Work) -> None:
        """Loads what the next step reads first, as this one's updates end."""
        if not self._loads_ahead:
            return
        copies: dict[int, DeviceLayer] = {}
        marks = None if self._marks is None else self._marks.begin()
        action = functools.partial(self._load, state.vectors, copies, marks)
        state.ahead = Ahead(
            self._lanes.begin_ahead(self._tasks, action, work, self._loads_ahead), copies, marks, self._transfers
        )
        self._one_ahead.put(state.ahead)

    def _discard_ahead(self, state: TrainState) -> None:
        """Frees what has been loaded for a next step."""
        # Some programs may have been issued whose marks never come.
        self._marks = self._make_marks()
        if state.ahead is not None:
            self._one_ahead.take(state.ahead)
            state.ahead.discard()
            state.ahead = None

    def _begin(self, state: TrainState, batch: Sequence[Any]) -> Flight:
        # NumPy's memory, which a CPU would read in place, is the caller's again before the batch is done with.
        own = [np.array(leaf) if isinstance(leaf, np.ndarray) and self._placement.is_cpu else leaf for leaf in batch]
        leaves = [jax.device_put(leaf, self._placement.device) for leaf in own]
        for layer in state.resident.keys() ^ self._resident:
            if layer in state.resident:
                self._transfers.drop(state.resident.pop(layer))
            else:
                state.resident[layer] = self._transfers.load(layer, state.vectors[layer])
        self._bring_sums(state)
        is_last = state.accumulated.num_batches == self._accumulate - 1
        flight = Flight(leaves, self._given(leaves), state, is_last)
        scale = state.loss_scale.value
        flight.scale = jax.device_put(np.float32(scale * self._accumulate), self._placement.host_compute)
        if self.programs.is_scaled:
            flight.seed = (jax.device_put(np.float32(scale), self._placement.device),)
        return flight

    def _bring_sums(self, state: TrainState) -> None:
        """Brings sums of gradients to the host that this step's plan does not add up on the device.

        A batch of another shape, with another plan, has left them there: the memory is not counted here, or a program
        adds to them on the host.

        Raises:
          TaskError: if that fails.
        """
        for layer in sorted(state.accumulated.on_device.keys() - self._kept):
            known = state.accumulated
            on_device = dict(known.on_device)
            try:
                stored = self._transfers.store(layer, on_device.pop(layer), known.on_host.get(layer))
                jax.block_until_ready(self._transfers.gather(layer, stored))
            except Exception as error:
                name = self.partition.layers[layer].name
                raise TaskError(f"the offload of the sums of layer {name!r} failed: {error}", name) from error
            on_host = {**known.on_host, layer: stored}
            state.accumulated = dataclasses.replace(known, on_host=on_host, on_device=on_device)

    def _given(self, batch: Sequence[Any]) -> dict[int, Any]:
        """The values that there are before the first program."""
        values = {**self._constants, **dict(zip(self.partition.graph.batch, batch, strict=True))}
        if self.programs.prelude is not None:
            values |= zip(self.partition.prelude_outputs, self.programs.prelude(batch), strict=True)
        return values

    def _again(self, state: TrainState, flight: Flight) -> Work:
        """Tries again what has failed in a step that can no longer be taken back.

        Raises:
          StateError: if that cannot be done.
        """
        work = flight.work
        work.wait()
        failed = flight.failed()
        if failed is None:
            if work.failure is not None and isinstance(work.failure.error, LateFailure):
                raise StateError(f"{task_error(work)}")
            self._lanes.resume(work)
            return work
        bad = {started.segment for started in flight.started}
        flight.landing = collections.deque(e for e in flight.landing if self._tasks.tasks[e[0]].layer not in bad)
        self._land(flight)
        results = {v: a for v, a in flight.values.items() if v == self.partition.loss or v in self.partition.aux}
        self._replay.rewind(flight, failed, self._given(flight.batch) | results)
        self._drop_copies(flight)
        fresh = self._lanes.make(self._tasks, functools.partial(self._act, state, flight))
        flight.work = fresh
        fresh.commit()
        self._lanes.submit(fresh)
        return fresh

    def _finished(self, state: TrainState, flight: Flight) -> StepResult | None:
        """The results of a step; None if a failure of the device, seen late, lets its updates fail as well."""
        try:
            return self._finish(state, flight)
        except Exception:
            flight.work.wait()
            if flight.work.failure is None:
                raise
            return None

    def _finish(self, state: TrainState, flight: Flight) -> StepResult:
        """Counts the step and collects its results."""
        is_finite, norm = flight.judged(self._judge)
        scale = state.loss_scale
        if flight.is_last:
            state.loss_scale = scale.after(is_finite)
        # A step that is skipped on purpose counts as well: the data goes on.
        if is_finite or self._skip_nonfinite or (scale.is_dynamic and not scale.is_least):
            state.step += 1
            state.accumulated = self._accumulated(state, flight, is_finite)
        else:
            state.forget_accumulated()
        partition, values = self.partition, flight.values
        aux = [values[atom] if isinstance(atom, int) else atom.val for atom in partition.aux]
        is_applied = is_finite and flight.is_last
        loss, peak = values[partition.loss], self._transfers.peak_device_bytes
        result = StepResult(loss, aux, norm, is_finite, is_applied, scale.value, flight.finite, peak)
        # What is left of it is kept until its updates have ended.
        flight.values, flight.finite, flight.device_norms, flight.norms = {partition.loss: loss}, [], {}, {}
        flight.release()
        if not flight.started:
            flight.batch = ()
        return result

    def _accumulated(self, state: TrainState, flight: Flight, is_finite: bool) -> Accumulated:
        if flight.is_last:
            return Accumulated()
        return Accumulated(state.accumulated.num_batches + 1, flight.gradients, flight.sums, is_finite)

    def _judge(self, flight: Flight) -> tuple[bool, jax.Array | None]:
        """Whether everything is finite so far, and with the last micro-batch the global norm of the mean gradient."""
        is_finite = self._is_finite(flight)
        if not flight.is_last:
            return is_finite, None
        norm = self._total([flight.norms[layer].result() for layer in sorted(flight.norms)], flight.scale)
        if self._checks_gradients:
            is_finite = is_finite and bool(np.isfinite(np.asarray(norm)))
        return is_finite, norm

    def _is_finite(self, flight: Flight) -> bool:
        return flight.was_finite and bool(np.isfinite(np.asarray(flight.values[self.partition.loss])))

    def _act(self, state: TrainState, flight: Flight, index: int) -> bool:
        """Does one task; see `lanes.Action`."""
        if index in flight.done:
            return True
        task = self._tasks.tasks[index]
        layer = self.partition.segments[task.layer].layer
        if task.kind in (TaskKind.LOAD, TaskKind.RELOAD):
            self._load(state.vectors, flight.copies, flight.marks, index)
        elif task.kind is TaskKind.REFRESH and flight.is_last:
            self._transfers.drop(state.resident[layer])
            held = state.resident[layer] = self._transfers.load(layer, state.vectors[layer], flight.mark(index))
            self._arrived(held)
        elif index in self._places:
            self._run(index, state, flight)
        elif task.kind is TaskKind.OFFLOAD:
            return self._offload(index, layer, flight)
        elif task.kind is TaskKind.UPDATE:
            self._update_group(layer, state, flight)
        elif task.kind is TaskKind.SAVE:
            values = self._script[self._moves[index]].saves
            self._move(index, values, flight.values, flight.away, self._placement.pinned, flight)
        elif task.kind is TaskKind.FETCH:
            values = self._script[self._moves[index]].fetches
            self._move(index, values, flight.away, flight.values, self._placement.device, flight)
        return True

    def _load(
        self, vectors: Sequence[Vectors], copies: dict[int, DeviceLayer], marks: StepMarks | None, index: int
    ) -> bool:
        layer = self.partition.segments[self._tasks.tasks[index].layer].layer
        mark = None if marks is None else marks.of(index)
        held = copies[index] = self._transfers.load(layer, vectors[layer], mark)
        self._arrived(held)
        return True

    def _move(
        self,
        index: int,
        values: Sequence[int],
        source: dict[int, Any],
        target: dict[int, Any],
        memory: jax.sharding.Sharding,
        flight: Flight,
    ) -> None:
        """Moves those of the values that are in `source`, as they are not where this has been done or need not be."""
        moved = [value for value in values if value in source]
        arrays = self._ran(jax.device_put([source[value] for value in moved], memory))
        if moved and (mark := flight.mark(index)) is not None:
            mark.watch(arrays)
        for value, array in zip(moved, arrays, strict=True):
            target[value] = array
            # What is still being read is freed when it has been.
            source.pop(value).delete()

    def _wait_for_saves(self, index: int, flight: Flight) -> None:
        """Waits until values have left the device of which a program needs the room.

        Where one thread only issues, a save counts as ended once it is issued. The device keeps busy meanwhile with
        the program in between.
        """
        for earlier in self._tasks.tasks[index].after:
            if self._tasks.tasks[earlier].kind is TaskKind.SAVE:
                values = self._script[self._moves[earlier]].saves
                try:
                    jax.block_until_ready([flight.away[value] for value in values if value in flight.away])
                except Exception as error:
                    raise LateFailure(earlier) from error

    def _arrived(self, held: DeviceLayer) -> None:
        """Waits for a copy, where the lanes do what they issue."""
        if self._placement.is_cpu:
            jax.block_until_ready(held.parameters())

    def _run(self, index: int, state: TrainState, flight: Flight) -> None:
        """Runs a program, and frees what ends with it."""
        self._wait_for_saves(index, flight)
        event = self._script[self._places[index]]
        segment, values = self.partition.segments[event.segment], flight.values
        if event.use.writes is not Target.DEVICE:
            if not self._may_add(segment.layer, flight):
                return
            event = self._onto_sums(event, flight)
        ended: Any
        if event.kind is Kind.BACKWARD:
            ended = self._backward(index, event, state, flight)
        else:
            arguments = (
                self._weights(index, event, state, flight),
                [values[v] for v in segment.inputs],
                [values[v] for v in segment.passive],
            )
            if event.kind is Kind.FORWARD:
                outputs, extras, saved, finite = self._ran(self.programs[event.use](*arguments))
                flight.saved[event.segment] = saved
            else:
                destinations = self._destinations(event, segment.layer, flight)
                made = self._ran(self.programs[event.use](*destinations, *arguments, *flight.seed))
                gradients, (outputs, extras, finite, cotangents), norm = made
                self._receive(event, segment, flight, gradients, cotangents, norm)
            values |= zip((*segment.outputs, *segment.extras), (*outputs, *extras), strict=True)
            flight.finite.append(finite)
            ended = finite
        flight.num_programs += 1
        flight.release()
        if not self._placement.is_cpu:
            if flight.marks is not None:
                flight.marks.after(index, ended)
            self._land(flight)
        if event.use.writes is not Target.DEVICE:
            self._note_arrival(segment.layer, flight)
        for copy in self._drops.get(index, ()):
            self._transfers.drop(flight.copies.pop(copy), is_reused=copy not in self._freed)
        for value in event.frees:
            values.pop(value).delete()

    def _ran(self, made: Any) -> Any:
        """Waits for a program, where the lanes do what they issue: before anything is known to have changed."""
        return jax.block_until_ready(made) if self._placement.is_cpu else made

    def _may_add(self, layer: int, flight: Flight) -> bool:
        """Asks for leave to add to a gradient of earlier micro-batches, if there is one: that cannot be taken back."""
        if layer not in flight.earlier:
            return True
        flight.has_added |= flight.work.commit()
        return flight.has_added

    def _onto_sums(self, event: Event, flight: Flight) -> Event:
        """Makes a program add to the gradient of earlier micro-batches, if it writes host memory."""
        if event.use.writes is not Target.HOST or self.partition.segments[event.segment].layer not in flight.gradients:
            return event
        return dataclasses.replace(event, use=dataclasses.replace(event.use, writes=Target.HOST_SUM))

    def _weights(self, index: int, event: Event, state: TrainState, flight: Flight) -> Sequence[jax.Array]:
        """What a program reads its layer's parameters from."""
        layer, copy = self.partition.segments[event.segment].layer, self._tasks.tasks[index].copy
        if event.use.reads is Source.HOST:
            return list(state.vectors[layer])
        return (state.resident[layer] if copy is None else flight.copies[copy]).parameters()

    def _destinations(self, event: Event, layer: int, flight: Flight) -> list[Sequence[jax.Array]]:
        """The vectors that a program writes its gradient into, if it does."""
        if event.use.writes is Target.DEVICE:
            return []
        return [list(self._transfers.destinations(layer, flight.gradients.get(layer)))]

    def _backward(self, index: int, event: Event, state: TrainState, flight: Flight) -> Any:
        segment, values = self.partition.segments[event.segment], flight.values
        derivative = self.programs.derivatives[segment.program]
        flight.release(num_kept_backwards(self._placement))
        started = flight.start(self._places[index], event.segment)
        gradients, cotangents, norm = self._ran(
            self.programs[event.use](
                *self._destinations(event, segment.layer, flight),
                self._weights(index, event, state, flight) if derivative.reads_weights else [],
                [values[segment.inputs[i]] for i in derivative.inputs_read],
                [values[segment.passive[i]] for i in derivative.passive_read],
                [values[segment.outputs[i]] for i in derivative.outputs_read],
                flight.saved[event.segment],
                [flight.cotangents[v] if v in flight.cotangents else self._zeros(v) for v in segment.outputs],
            )
        )
        started.made = (cotangents, gradients) if norm is None else norm
        del flight.saved[event.segment]
        for value in segment.outputs:
            flight.cotangents.pop(value, None)
        self._receive(event, segment, flight, gradients, cotangents, norm)
        return norm, gradients, cotangents

    def _receive(
        self, event: Event, segment: Segment, flight: Flight, gradients: Any, cotangents: Any, norm: jax.Array | None
    ) -> None:
        """Adds cotangents to those from later segments, and keeps gradients for their way to the host."""
        for value, cotangent in zip(segment.inputs, cotangents, strict=True):
            known = flight.cotangents.get(value)
            flight.cotangents[value] = cotangent if known is None else self._add(known, cotangent)
        layer = segment.layer
        if not segment.trained:
            return
        flight.device_norms[layer] = norm
        if event.use.writes is Target.DEVICE:
            if layer in flight.sums and self._may_add(layer, flight):
                gradients = self._add_onto(flight.sums[layer], gradients)
                del flight.sums[layer]
            flight.leaving[event.segment] = gradients
        else:
            flight.gradients[segment.layer] = self._transfers.written(gradients)
            flight.stored.add(event.segment)

    def _zeros(self, value: int) -> jax.Array:
        """The cotangent of an output that only the caller reads."""
        aval = self.partition.graph.avals[value]
        return jnp.zeros(aval.shape, aval.dtype, device=self._placement.device)

    def _offload(self, index: int, layer: int, flight: Flight) -> bool:
        segment = self._tasks.tasks[index].layer
        # What another batch's plan has begun to add up on the host is added up there: all plans have the same bits.
        if layer in self._kept and not flight.is_last and layer not in flight.gradients:
            flight.sums[layer] = flight.leaving.pop(segment)
            flight.stored.add(segment)
            return True
        if not self._may_add(layer, flight):
            return True
        if segment not in flight.stored:  # it has been if only the wait for it failed
            known = flight.gradients.get(layer)
            flight.gradients[layer] = self._transfers.store(layer, flight.leaving[segment], known, flight.mark(index))
            del flight.leaving[segment]
            flight.stored.add(segment)
        if self._placement.is_cpu:
            jax.block_until_ready(self._transfers.gather(layer, flight.gradients[layer]))
            self._note_arrival(layer, flight)
            return True
        # To wait for it holds up what is issued next, so that comes after the next program.
        flight.landing.append((index, layer))
        if flight.num_programs == len(self._script):
            self._land(flight)
        return False

    def _land(self, flight: Flight) -> None:
        """Issues the waits for all transfers that are under way."""
        while flight.landing:
            index, layer = flight.landing.popleft()
            try:
                self._transfers.gather(layer, flight.gradients[layer])
            except Exception as error:
                raise LateFailure(index) from error
            self._note_arrival(layer, flight)
            flight.work.end(index)

    def _note_arrival(self, layer: int, flight: Flight) -> None:
        """Starts computing the norm of a layer's gradient once all of it is in host memory."""
        flight.num_arrived[layer] += 1
        if flight.num_arrived[layer] < self._num_uses[layer] or not flight.is_last:
            return
        norm = flight.device_norms[layer]
        is_whole = self._num_uses[layer] == 1 and self._accumulate == 1 and norm is not None
        if is_whole and not self._clips:
            known: Future[jax.Array] = Future()
            known.set_result(jax.device_put(norm, self._placement.host_compute))
            flight.norms[layer] = known
        else:
            # Lookups, several uses or micro-batches, products written by panels: it is whole on the host alone. Where
            # the norm changes the update it is always taken there, so that every plan has the same bits.
            vectors = self._transfers.gather(layer, flight.gradients[layer])
            flight.norms[layer] = self._norm_thread.submit(self._norm_of, vectors)

    def _update_group(self, layer: int, state: TrainState, flight: Flight) -> None:
        """Updates the unit of a layer; with the last one, also those of layers that no segment reads."""
        if not flight.is_last:
            return
        norm: jax.Array | None = self._no_norm
        if self._waits_for_all:
            is_finite, norm = flight.judged(self._judge)
        else:
            is_finite = self._is_finite(flight)
        units = [flight.units[layer]]
        if flight.num_updates == self._num_update_tasks - 1:
            units += flight.units.values()
        units = [unit for unit in {id(unit): unit for unit in units}.values() if id(unit) not in flight.updated]
        # What a device has done wrong is seen when its results are waited for, and masters are given away.
        gradients = jax.block_until_ready([self._gathered(unit, flight) for unit in units])
        jax.block_until_ready(norm)
        if not is_finite or not flight.work.commit():
            return
        flight.is_updating = True
        for unit, vectors in zip(units, gradients, strict=True):
            self._update(unit, vectors, state, flight, norm)
            flight.updated.add(id(unit))
            del flight.packed[id(unit)]
        flight.num_updates += 1
        if flight.num_updates == self._num_update_tasks:
            # Nothing of the step can be asked for again.
            flight.started.clear()
            flight.batch = ()

    def _gathered(self, unit: Unit, flight: Flight) -> list[Vectors]:
        """The gradients of a unit, for each of its layers; nothing for one that no segment reads."""
        known = flight.gradients
        return [self._transfers.gather(layer, known[layer]) if layer in known else () for layer in unit.layers]

    def _update(
        self, unit: Unit, gradients: Sequence[Vectors], state: TrainState, flight: Flight, norm: jax.Array | None
    ) -> None:
        num_trained = [len(state.layers[layer].trained.vectors) for layer in unit.layers]
        vectors = [
            state.vectors[layer][:num] if self._placement.is_cpu else ()
            for layer, num in zip(unit.layers, num_trained, strict=True)
        ]
        if id(unit) not in flight.packed:
            program = unit.programs[tuple(bool(used) for used in gradients)]
            made = program(unit.masters, unit.state, vectors, gradients, norm, flight.scale)
            unit.masters, unit.state, flight.packed[id(unit)] = jax.block_until_ready(made)
        # What fails from here on is tried again without updating twice.
        packed = flight.packed[id(unit)]
        pinned = jax.block_until_ready([to_pinned(vector, self._placement) for vector in packed])
        for layer, vector, num in zip(unit.layers, pinned, num_trained, strict=True):
            state.vectors[layer] = (*vector, *state.vectors[layer][num:])
        for layer in unit.layers:
            if (used := flight.gradients.pop(layer, None)) is not None:
                self._transfers.recycle(layer, used)

    def _take_back(self, state: TrainState, flight: Flight) -> None:
        """Ends a step that has not changed the state, and frees what it has left behind."""
        flight.work.stop()
        if state.in_flight is not None and state.in_flight.work is flight.work:
            state.in_flight = None
        while flight.landing:
            with contextlib.suppress(Exception):  # what has not arrived is not wanted
                self._land(flight)
        self._drop_copies(flight)

    def _give_up(self, state: TrainState, flight: Flight) -> bool:
        """Goes back to the last update, if none has begun since; says whether it has."""
        if flight.is_updating:
            return False
        self._take_back(state, flight)
        state.forget_accumulated()
        return True

    def _drop_copies(self, flight: Flight) -> None:
        for held in flight.copies.values():
            self._transfers.drop(held)
        flight.copies = {}


def num_kept_backwards(placement: Placement) -> int:
    """Of how many backward programs before the running one cotangents are kept: they may still turn out to fail.

    Two keep an accelerator's queue filled, and take the memory of two cotangents.
    """
    return 0 if placement.is_cpu else 2


def make_lanes(placement: Placement) -> Lanes:
    """The threads of a training step.

    Where the device is a CPU, a thread does the work of its lane. An accelerator does it by itself in the order of
    issue, so one thread issues for all lanes but the host's: transfers first, since they overlap what comes after.
    """
    if placement.is_cpu:
        return Lanes()
    return Lanes([(Lane.H2D, Lane.D2H, Lane.GPU), (Lane.HOST,)])


def _drops(schedule: Schedule, places: Mapping[int, int]) -> dict[int, list[int]]:
    """For each task that runs a program, the loads whose copies nothing reads after it."""
    loss = max((index for index in places if schedule.tasks[index].kind is TaskKind.FORWARD), default=None)
    last_use: dict[int, int] = {}
    for index, task in enumerate(schedule.tasks):
        if task.copy is not None:
            last_use[task.copy] = index if index in places or loss is None else loss
    drops: dict[int, list[int]] = {}
    for copy, index in last_use.items():
        drops.setdefault(index, []).append(copy)
    return drops


def _freed(partition: Partition, schedule: Schedule, drops: Mapping[int, Sequence[int]]) -> frozenset[int]:
    """The loads whose buffers no load takes over that waits for the program after which they are dropped.

    To keep these for the next step would take memory that the backward may need, and that `peak_bytes` does not count.
    """

    def layout(load: int) -> Any:
        return partition.layers[partition.segments[schedule.tasks[load].layer].layer].layout

    loads = [i for i, task in enumerate(schedule.tasks) if task.kind in (TaskKind.LOAD, TaskKind.RELOAD)]
    taken = {(task, layout(load)) for load in loads for task in schedule.tasks[load].after}
    return frozenset(copy for task, copies in drops.items() for copy in copies if (task, layout(copy)) not in taken)
