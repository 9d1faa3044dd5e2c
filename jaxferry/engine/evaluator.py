"""Runs a forward without a backward, layer by layer, under the memory budget of the training step.

pinned host vectors --load--> device --segment--> values ... --last segment--> the function's results
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxferry.engine.pending import task_errors
from jaxferry.engine.programs import Programs
from jaxferry.engine.state import TrainState
from jaxferry.engine.stream import fit_stream, last_readers
from jaxferry.errors import BudgetError
from jaxferry.partition import ForwardPartition
from jaxferry.step.program_keys import Source
from jaxferry.transport.base import Transport
from jaxferry.transport.held import DeviceLayer
from jaxferry.transport.interrupts import deferred_interrupts
from jaxferry.transport.placement import Placement
from jaxferry.units import format_bytes


class Evaluator:
    """Evaluates the function of one partition without derivatives.

    Args:
      partition: the segments.
      placement: where arrays live.
      transport: loads the layers; the training step's own if it has the same layers.
      native: whether programs read host memory by native operations.
      budget_bytes: device memory; None for no limit.

    Attributes:
      partition, transport: as given.
      stream: how segments receive their parameters.
      peak: the peak device memory of a run, without what the state keeps there.

    Raises:
      BudgetError: if the budget is too small.
    """

    def __init__(
        self,
        partition: ForwardPartition,
        placement: Placement,
        transport: Transport,
        native: bool = False,
        budget_bytes: int | None = None,
    ) -> None:
        self.partition, self.transport = partition, transport
        self._placement, self._budget_bytes = placement, budget_bytes
        self._programs = Programs(partition, {}, placement, native)
        temporary_bytes_of, staging_bytes = self._programs.temporary_bytes_of, transport.staging_bytes
        self.stream, self.peak = fit_stream(
            partition, budget_bytes, temporary_bytes_of, staging_bytes, placement.allocator
        )
        self._keys = self.stream.keys(partition)
        self._programs.keep(self._keys)
        self._last_reader = last_readers(partition)

    def run(self, state: TrainState, batch: Sequence[Any], other_bytes: int = 0) -> Any:
        """Runs the function; returns its results as a tree of arrays on the device.

        Args:
          state: arranged in the partition's layers.
          batch: the leaves of the function's further arguments.
          other_bytes: other device memory that the training step holds.

        Raises:
          BudgetError: if the state holds too much device memory.
        """
        self._make_room(state, other_bytes)
        state.host.refresh()
        partition = self.partition
        graph, put = partition.graph, self._placement.put
        with task_errors():
            leaves = [put(graph, number, leaf) for number, leaf in zip(graph.batch, batch, strict=True)]
            made = self._placement.in_turn(self._programs.run_prelude(leaves, self._placement.is_cpu))[0]
        values = {number: put(graph, number, value) for number, value in graph.constants.items()}
        values |= zip(graph.batch, leaves, strict=True)
        values |= zip(partition.prelude_outputs, made, strict=True)
        held: dict[int, DeviceLayer] = {}
        try:
            for place in range(len(partition.segments)):
                # Interrupts are delivered between segments, when every copy is recorded.
                with deferred_interrupts():
                    self._load(place, held, state)
                    self._run(place, held, state, values)
        finally:
            with deferred_interrupts():
                for done in held.values():
                    self._drop(done, state)
        return jax.tree.unflatten(partition.graph.out_tree, [self._output(a, values) for a in partition.graph.outputs])

    def _output(self, atom: Any, values: dict[int, Any]) -> Any:
        if isinstance(atom, int):
            return values[atom]
        return self._placement.put_alike(np.asarray(atom.val, atom.aval.dtype))

    def _make_room(self, state: TrainState, other_bytes: int) -> None:
        """Frees what the training step keeps on the device if the budget requires it."""
        self.transport.release()
        self.transport.held.reset_peak()
        if self._budget_bytes is None:
            return
        sums = [array for arrays in state.accumulated.on_device.values() for array in arrays]
        needed = self.peak.total + other_bytes + sum(array.nbytes for array in sums)
        if needed + state.host.device_bytes > self._budget_bytes:
            # The next training step moves it there again.
            state.host.bring_home()
        if (
            needed + state.host.device_bytes + sum(copy.num_bytes for copy in state.resident.values())
            > self._budget_bytes
        ):
            # The next training step loads them again.
            while state.resident:
                self.transport.drop(state.resident.popitem()[1])
            self.transport.release()
        if needed > self._budget_bytes:
            raise BudgetError(
                f"memory_budget {format_bytes(self._budget_bytes)} ({self._budget_bytes} bytes) is too small for this "
                f"forward beside what training keeps on the device: together {format_bytes(needed)} ({needed} bytes); "
                "an update frees sums of gradients, a smaller batch needs less",
                needed,
            )

    def _load(self, place: int, held: dict[int, DeviceLayer], state: TrainState) -> None:
        """Drops the copies that are no longer needed, and starts the next loads."""
        wanted = self.stream.layers_at(self.partition, place)
        for layer in [layer for layer in held if layer not in wanted]:
            self._drop(held.pop(layer), state)
        missing = [layer for layer in wanted if layer not in held]
        for layer in missing:
            held[layer] = state.resident.get(layer) or self.transport.load(layer, state.host.vectors[layer])
        if not missing:
            self.transport.release()

    def _run(self, place: int, held: dict[int, DeviceLayer], state: TrainState, values: dict[int, Any]) -> None:
        segment, key = self.partition.segments[place], self._keys[place]
        by_dha = self.stream.reads[place] is Source.HOST
        with task_errors(f"the evaluation of layer {segment.name!r}", segment.name):
            made = self._programs[key](
                [state.host.readable(g) if by_dha else held[g].parameters() for g in segment.groups],
                [values[v] for v in segment.inputs],
                [values[v] for v in segment.nondiff_inputs],
            )
            outputs, nondiff_outputs = self._placement.in_turn(made)
            if self._placement.is_cpu:
                # There, an error surfaces only at a wait.
                jax.block_until_ready((outputs, nondiff_outputs))
        values |= zip((*segment.outputs, *segment.nondiff_outputs), (*outputs, *nondiff_outputs), strict=True)
        for value in {*segment.inputs, *segment.nondiff_inputs}:
            if self._last_reader.get(value) == place:
                del values[value]

    def _drop(self, held: DeviceLayer, state: TrainState) -> None:
        if held.layer not in state.resident:
            self.transport.drop(held)
