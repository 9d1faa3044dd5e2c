"""Runs a forward without a backward, layer by layer, under the memory budget of the training step.

A plan says which layers are loaded ahead, later, or not at all. While a segment runs, the next segment's layer loads as
well, so that its load is hidden. If both do not fit, the next layer is loaded after the segment has ended. If a single
layer and its segment's values still do not fit, the segment reads its parameters in host memory (DHA).

pinned host vectors --load--> device --segment--> values ... --last segment--> the function's results
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxferry.engine.pending import task_errors
from jaxferry.engine.programs import Programs
from jaxferry.engine.state import TrainState
from jaxferry.errors import BudgetError
from jaxferry.partition import ForwardPartition
from jaxferry.planner import Peak
from jaxferry.step import ProgramKey, ProgramKind, Source, Target
from jaxferry.transport import Buffer, DeviceLayer, Placement, Transport, deferred_interrupts, unsplit_bytes
from jaxferry.units import format_bytes


@dataclasses.dataclass(frozen=True)
class Stream:
    """How a forward's segments read their groups, and which groups load before the segment before theirs runs."""

    reads: tuple[Source, ...]
    ahead: tuple[bool, ...]

    def keys(self, partition: ForwardPartition) -> list[ProgramKey]:
        """Returns the program of each segment."""
        return [
            ProgramKey(ProgramKind.EVALUATION, s.program, (reads,) * len(s.groups), (Target.DEVICE,) * len(s.groups))
            for s, reads in zip(partition.segments, self.reads, strict=True)
        ]

    def layers_at(self, partition: ForwardPartition, number: int) -> tuple[int, ...]:
        """Returns the parameter groups with a device copy while a segment runs, in the order of their loads."""
        layers = list(partition.segments[number].groups) if self.reads[number] is Source.DEVICE else []
        following = number + 1
        if following < len(self.reads) and self.ahead[following] and self.reads[following] is Source.DEVICE:
            layers.extend(partition.segments[following].groups)
        return tuple(dict.fromkeys(layers))


class Evaluator:
    """Evaluates the function of one partition without derivatives; raises `BudgetError` if the budget is too small.

    `stream` says how segments receive their parameters: of those that fit, it waits least. `peak` is the peak device
    memory of a run, without what the state keeps there.
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
        # The last segment that reads each value, except for values that are returned to the caller.
        returned = {atom for atom in partition.graph.outputs if isinstance(atom, int)}
        readers = {v: n for n, s in enumerate(partition.segments) for v in (*s.inputs, *s.nondiff_inputs)}
        self._last_reader = {value: number for value, number in readers.items() if value not in returned}
        self.stream, self.peak = self._fitted(budget_bytes)
        self._keys = self.stream.keys(partition)
        self._programs.keep(self._keys)

    def _fitted(self, budget_bytes: int | None) -> tuple[Stream, Peak]:
        found = self._within(budget_bytes)
        if budget_bytes is None or found[1].fits(budget_bytes):
            return found
        # How much is left unsplit depends on the sizes of buffers: of a stream with less on the device it may be more.
        # These limits do not depend on the budget, so that the smallest budget that an error states is one that fits.
        most = self._within(None)[1].counted if self._placement.allocator is not None else 0
        tried = []
        for limit_bytes in sorted({most * eighths // 8 for eighths in range(8)}, reverse=True):
            tried.append(self._within(limit_bytes))
            if tried[-1][1].fits(budget_bytes):
                return tried[-1]
        stream, peak = min(tried, key=lambda one: one[1].total)
        needs = self._held_bytes(stream)
        number = max(range(len(needs)), key=lambda number: needs[number].counted)
        raise BudgetError(
            f"memory_budget {format_bytes(budget_bytes)} ({budget_bytes} bytes) is too small for this forward: the "
            f"smallest possible is {format_bytes(peak.total)} ({peak.total} bytes), in segment "
            f"{self.partition.segments[number].name!r}, of which parameters take "
            f"{format_bytes(needs[number].parameters)}; a smaller batch needs less",
            peak.total,
        )

    def _within(self, budget_bytes: int | None) -> tuple[Stream, Peak]:
        """Returns the stream that waits least among those whose buffers need no more than a budget, and its peak."""
        num = len(self.partition.segments)
        stream = Stream((Source.DEVICE,) * num, (True,) * num)
        needs = self._held_bytes(stream)
        if budget_bytes is not None:
            fits = [True, *(need.counted <= budget_bytes for need in needs)]
            stream = dataclasses.replace(stream, ahead=tuple(fits[:num]))
            needs = self._held_bytes(stream)
            reads = [Source.DEVICE if need.counted <= budget_bytes else Source.HOST for need in needs]
            others = self._held_bytes(dataclasses.replace(stream, reads=tuple(reads)))
            # Some programs that read host memory need more temporary bytes than the parameters would take.
            is_better = [other.counted < need.counted for need, other in zip(needs, others, strict=True)]
            reads = [source if better else Source.DEVICE for source, better in zip(reads, is_better, strict=True)]
            stream = dataclasses.replace(stream, reads=tuple(reads))
            needs = self._held_bytes(stream)
        parameters, buffers, counted = (
            max(getattr(need, what) for need in needs) for what in ("parameters", "array_bytes", "counted")
        )
        unsplit = self._unsplit_bytes(stream)
        return stream, Peak(parameters, buffers, counted, lambda: unsplit)

    def _unsplit_bytes(self, stream: Stream) -> int:
        """Returns what the allocator hands out beyond a run's buffers; a run takes three times for each segment."""
        if self._placement.allocator is None:
            return 0
        partition, graph, num = self.partition, self.partition.graph, len(self.partition.segments)
        temporary_bytes = self._programs.temporary_bytes_of(stream.keys(partition))
        buffers, loaded = [], dict[int, int]()

        def add(num_bytes: int, start: int, end: int) -> None:
            buffers.append(Buffer(num_bytes, (start, start), (end, end)))

        def drop(layer: int, end: int) -> None:
            start = loaded.pop(layer)
            for leaf in partition.layers[layer].leaves:
                add(leaf.size * leaf.dtype.itemsize, start, end)

        for value in (*graph.batch, *partition.prelude_outputs):
            add(graph.held_bytes(value), 0, 3 * num)
        for number, (segment, key) in enumerate(zip(partition.segments, stream.keys(partition), strict=True)):
            layers = stream.layers_at(partition, number)
            for layer in [layer for layer in loaded if layer not in layers]:
                drop(layer, 3 * number)
            loaded |= {layer: 3 * number for layer in layers if layer not in loaded}
            for value in (*segment.outputs, *segment.nondiff_outputs):
                add(graph.held_bytes(value), 3 * number + 1, 3 * self._last_reader.get(value, num - 1) + 2)
            add(temporary_bytes[key], 3 * number + 1, 3 * number + 2)
        for layer in list(loaded):
            drop(layer, 3 * num)
        return unsplit_bytes(buffers, 3 * num, self._placement.allocator)

    def _held_bytes(self, stream: Stream) -> list[Peak]:
        """Returns the device memory in use while each segment runs; compiles the programs."""
        partition, graph, keys = self.partition, self.partition.graph, stream.keys(self.partition)
        temporary_bytes = self._programs.temporary_bytes_of(keys)
        inputs = {*graph.batch, *graph.constants, *partition.prelude_outputs}
        always = self.transport.staging_bytes + graph.held_bytes(*inputs)
        crossing: dict[int, int] = {}
        needs = []
        for number, (segment, key) in enumerate(zip(partition.segments, keys, strict=True)):
            crossing |= {v: graph.held_bytes(v) for v in (*segment.outputs, *segment.nondiff_outputs)}
            parameters = sum(partition.layers[layer].num_bytes for layer in stream.layers_at(partition, number))
            buffers = parameters + always + sum(crossing.values())
            needs.append(Peak(parameters, buffers, buffers + temporary_bytes[key]))
            crossing = {v: size for v, size in crossing.items() if self._last_reader.get(v) != number}
        return needs

    def run(self, state: TrainState, batch: Sequence[Any], other_bytes: int = 0) -> Any:
        """Runs the function on the leaves of a batch; returns its results as a tree of arrays on the device.

        `other_bytes` is other device memory that the training step holds. Raises `BudgetError` if the state holds too
        much device memory.
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
        copies: dict[int, DeviceLayer] = {}
        try:
            for number in range(len(partition.segments)):
                # Interrupts are delivered between segments, when every copy is recorded.
                with deferred_interrupts():
                    self._load(number, copies, state)
                    self._run(number, copies, state, values)
        finally:
            with deferred_interrupts():
                for done in copies.values():
                    self._drop(done, state)
        alike, atoms = self._placement.put_alike, list[Any](graph.outputs)
        outputs = [values[a] if isinstance(a, int) else alike(np.asarray(a.val, a.aval.dtype)) for a in atoms]
        return jax.tree.unflatten(graph.out_tree, outputs)

    def _make_room(self, state: TrainState, other_bytes: int) -> None:
        """Frees what the training step keeps on the device if the budget requires it."""
        self.transport.release()
        self.transport.loaded_bytes.reset_peak()
        if self._budget_bytes is None:
            return
        sums = sum(array.nbytes for arrays in state.accumulated.on_device.values() for array in arrays)
        needed, budget = self.peak.total + other_bytes + sums, self._budget_bytes
        if needed + state.host.device_bytes > budget:
            # The next training step moves it there again.
            state.host.bring_home()
        if needed + state.host.device_bytes + sum(copy.num_bytes for copy in state.resident.values()) > budget:
            # The next training step loads them again.
            while state.resident:
                self.transport.drop(state.resident.popitem()[1])
            self.transport.release()
        if needed > budget:
            raise BudgetError(
                f"memory_budget {format_bytes(budget)} ({budget} bytes) is too small for this "
                f"forward beside what training keeps on the device: together {format_bytes(needed)} ({needed} bytes); "
                "an update frees sums of gradients, a smaller batch needs less",
                needed,
            )

    def _load(self, number: int, copies: dict[int, DeviceLayer], state: TrainState) -> None:
        """Drops the copies that are no longer needed, and starts the next loads."""
        wanted = self.stream.layers_at(self.partition, number)
        for layer in [layer for layer in copies if layer not in wanted]:
            self._drop(copies.pop(layer), state)
        missing = [layer for layer in wanted if layer not in copies]
        for layer in missing:
            copies[layer] = state.resident.get(layer) or self.transport.load(layer, state.host.vectors[layer])
        if not missing:
            self.transport.release()

    def _run(self, number: int, copies: dict[int, DeviceLayer], state: TrainState, values: dict[int, Any]) -> None:
        segment, key = self.partition.segments[number], self._keys[number]
        by_dha = self.stream.reads[number] is Source.HOST
        with task_errors(f"the evaluation of layer {segment.name!r}", segment.name):
            made = self._programs[key](
                [state.host.readable(g) if by_dha else copies[g].parameters() for g in segment.groups],
                [values[v] for v in segment.inputs],
                [values[v] for v in segment.nondiff_inputs],
            )
            outputs, nondiff_outputs = self._placement.in_turn(made)
            if self._placement.is_cpu:
                # There, an error surfaces only at a wait.
                jax.block_until_ready((outputs, nondiff_outputs))
        values |= zip((*segment.outputs, *segment.nondiff_outputs), (*outputs, *nondiff_outputs), strict=True)
        for value in {*segment.inputs, *segment.nondiff_inputs}:
            if self._last_reader.get(value) == number:
                del values[value]

    def _drop(self, copy: DeviceLayer, state: TrainState) -> None:
        if copy.layer not in state.resident:
            self.transport.drop(copy)
