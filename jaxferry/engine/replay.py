"""Going on with a step whose backward failed after the first updates had been applied.

    forward 0 .. k again | backward k again .. 0, from the cotangents that were kept | what is left of the updates

Layers behind segment k have been updated, so the step cannot be taken back, nor their forward be run again. It need not
be: what they handed on to segment k, its cotangents, is kept until the backward has run. No layer up to k has been
updated, since its gradient is not there. So all that those segments need is computed again, with the same bits.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jaxferry.engine.flight import Flight, Started
from jaxferry.engine.script import Event
from jaxferry.engine.shadow import Kind
from jaxferry.errors import StateError
from jaxferry.partition import Partition
from jaxferry.schedule import Kind as TaskKind
from jaxferry.schedule import Schedule


class Replay:
    """Takes the steps of one schedule back to before a backward program.

    Args:
      partition: the segments.
      schedule: the tasks of a step.
      script: its programs.
      places: for each task that runs a program, its place in the script.
      moves: for each that moves values, the place of the program that it follows or is for.
    """

    def __init__(
        self,
        partition: Partition,
        schedule: Schedule,
        script: Sequence[Event],
        places: Mapping[int, int],
        moves: Mapping[int, int],
    ) -> None:
        self._partition, self._tasks, self._script, self._places = partition, schedule.tasks, script, places
        self._moves = moves
        self._num_uses = collections.Counter(segment.layer for segment in partition.segments)

    def has_lost_sums(self, flight: Flight) -> bool:
        """Whether an error took gradients of earlier micro-batches with it, to which something was being added."""
        sums: list[Any] = [flight.gradients[layer].vectors for layer in flight.earlier & flight.gradients.keys()]
        sums += [flight.sums[layer] for layer in flight.earlier & flight.sums.keys()]
        sums += [left for segment, left in flight.leaving.items() if self._layer(segment) in flight.earlier]
        arrays = jax.tree.leaves(sums)
        if any(array.is_deleted() for array in arrays):
            return True
        try:
            jax.block_until_ready(arrays)
        except RuntimeError:
            return True
        return False

    def rewind(self, flight: Flight, failed: Started, values: dict[int, Any]) -> None:
        """Makes a flight such that its tasks, done once more, complete the step.

        Args:
          flight: nothing of it is under way any more.
          failed: the first backward program that has not run.
          values: what there is before the first program, and the results of the step that are known.

        Raises:
          StateError: if a layer would be needed as it was before its update, or a gradient would be added twice.
        """
        programs = [index for index, place in self._places.items() if self._is_redone(place, failed)]
        self._check(flight, failed, {self._tasks[index].layer for index in programs})
        for started in flight.started:
            flight.leaving.pop(started.segment, None)
            if started.segment in flight.stored:
                flight.stored.remove(started.segment)
                flight.gradients.pop(self._layer(started.segment), None)
                flight.sums.pop(self._layer(started.segment), None)
            flight.norms.pop(self._layer(started.segment), None)
        flight.values, flight.saved, flight.cotangents, flight.away = values, {}, dict(failed.cotangents), {}
        flight.num_arrived = collections.Counter(map(self._layer, flight.stored))
        flight.num_programs, flight.num_updates = len(self._script) - len(programs), 0
        flight.started.clear()
        flight.forget_verdict()
        copies = {self._tasks[index].copy for index in programs}
        flight.done = frozenset(
            index
            for index, task in enumerate(self._tasks)
            if (index in self._places and index not in programs)
            or (task.kind in (TaskKind.LOAD, TaskKind.RELOAD) and index not in copies)
            or (task.kind is TaskKind.OFFLOAD and task.layer in flight.stored)
            # A value whose last forward is not run again stays on the device, so its fetch finds nothing to do.
            or (index in self._moves and not self._is_redone(self._moves[index], failed))
        )

    def _is_redone(self, place: int, failed: Started) -> bool:
        event = self._script[place]
        return event.segment <= failed.segment if event.kind is Kind.FORWARD else place >= failed.place

    def _check(self, flight: Flight, failed: Started, segments: set[int]) -> None:
        for layer in map(self._layer, segments):
            if layer in flight.units and id(flight.units[layer]) in flight.updated | flight.packed.keys():
                name = self._partition.layers[layer].name
                raise StateError(f"layer {name!r}, which is needed as it was before, has been updated")
        for started in flight.started:
            layer = self._layer(started.segment)
            if started.segment in flight.stored and (self._num_uses[layer] > 1 or layer in flight.earlier):
                raise StateError(f"a gradient of layer {self._partition.layers[layer].name!r} has been added to others")

    def _layer(self, segment: int) -> int:
        return self._partition.segments[segment].layer
