"""Plans a forward without a backward under a memory budget: which layers are loaded ahead, later, or not at all.

While a segment runs, the next segment's layer loads as well, so that its load is hidden. If both do not fit, the next
layer is loaded after the segment has ended. If a single layer and its segment's values still do not fit, the segment
reads its parameters in host memory (DHA).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping

from jaxferry.engine.memory import Peak
from jaxferry.errors import BudgetError
from jaxferry.partition import ForwardPartition
from jaxferry.step.program_keys import ProgramKey, ProgramKind, Source, Target
from jaxferry.transport.allocator import Allocator, Buffer, unsplit_bytes
from jaxferry.units import format_bytes


@dataclasses.dataclass(frozen=True)
class Stream:
    """How a forward's segments receive their parameters.

    Attributes:
      reads: where each segment reads its parameter groups.
      ahead: whether each segment's groups are loaded before the previous segment runs.
    """

    reads: tuple[Source, ...]
    ahead: tuple[bool, ...]

    def keys(self, partition: ForwardPartition) -> list[ProgramKey]:
        """Returns the program of each segment."""
        return [
            ProgramKey(ProgramKind.EVALUATION, s.program, (reads,) * len(s.groups), (Target.DEVICE,) * len(s.groups))
            for s, reads in zip(partition.segments, self.reads, strict=True)
        ]

    def layers_at(self, partition: ForwardPartition, place: int) -> tuple[int, ...]:
        """Returns the parameter groups with a device copy while a segment runs, in the order of their loads."""
        layers = list(partition.segments[place].groups) if self.reads[place] is Source.DEVICE else []
        following = place + 1
        if following < len(self.reads) and self.ahead[following] and self.reads[following] is Source.DEVICE:
            layers.extend(partition.segments[following].groups)
        return tuple(dict.fromkeys(layers))


def fit_stream(
    partition: ForwardPartition,
    budget_bytes: int | None,
    temporary_bytes_of: Callable[[Iterable[ProgramKey]], Mapping[ProgramKey, int]],
    other_bytes: int = 0,
    allocator: Allocator | None = None,
) -> tuple[Stream, Peak]:
    """Returns the stream that waits least among those that fit, and its peak device memory.

    Args:
      partition: the segments.
      budget_bytes: device memory; None for no limit.
      temporary_bytes_of: compiles programs; returns the bytes that each needs beside arguments and results.
      other_bytes: device memory that is always in use.
      allocator: the device's allocator, which hands out more than programs ask for; None for one that does not.

    Raises:
      BudgetError: if none fits; it states the smallest possible budget.
    """

    def fit(limit_bytes: int | None) -> tuple[Stream, Peak]:
        stream, needs = _fit_counted(partition, limit_bytes, temporary_bytes_of, other_bytes)
        parameters, held, counted = (max(getattr(n, what) for n in needs) for what in ("parameters", "held", "counted"))
        unsplit = 0
        if allocator is not None:
            unsplit = _unsplit_bytes(partition, stream, temporary_bytes_of(stream.keys(partition)), allocator)
        return stream, Peak(parameters, held, counted, lambda: unsplit)

    found = fit(budget_bytes)
    if budget_bytes is None or found[1].fits(budget_bytes):
        return found
    # How much is left unsplit depends on the sizes of buffers: of a stream with less on the device it may be more.
    # These limits do not depend on the budget, so that the smallest budget that an error states is one that fits.
    most = fit(None)[1].counted if allocator is not None else 0
    tried = []
    for limit_bytes in sorted({most * eighths // 8 for eighths in range(8)}, reverse=True):
        tried.append(fit(limit_bytes))
        if tried[-1][1].fits(budget_bytes):
            return tried[-1]
    stream, peak = min(tried, key=lambda one: one[1].total)
    needs = held_bytes(partition, stream, temporary_bytes_of(stream.keys(partition)), other_bytes)
    place = max(range(len(needs)), key=lambda place: needs[place].counted)
    raise BudgetError(
        f"memory_budget {format_bytes(budget_bytes)} ({budget_bytes} bytes) is too small for this forward: the "
        f"smallest possible is {format_bytes(peak.total)} ({peak.total} bytes), in segment "
        f"{partition.segments[place].name!r}, of which parameters take {format_bytes(needs[place].parameters)}; a "
        "smaller batch needs less",
        peak.total,
    )


def _fit_counted(
    partition: ForwardPartition,
    budget_bytes: int | None,
    temporary_bytes_of: Callable[[Iterable[ProgramKey]], Mapping[ProgramKey, int]],
    other_bytes: int,
) -> tuple[Stream, list[Peak]]:
    """Returns the stream that waits least among those that need no more than a budget, and the need of each segment."""
    num_segments = len(partition.segments)
    stream = Stream((Source.DEVICE,) * num_segments, (True,) * num_segments)

    def measured(stream: Stream) -> list[Peak]:
        return held_bytes(partition, stream, temporary_bytes_of(stream.keys(partition)), other_bytes)

    def places_above(needs: list[Peak], budget_bytes: int) -> set[int]:
        return {place for place, need in enumerate(needs) if need.counted > budget_bytes}

    needs = measured(stream)
    if budget_bytes is not None:
        above = places_above(needs, budget_bytes)
        stream = dataclasses.replace(stream, ahead=tuple(place - 1 not in above for place in range(num_segments)))
        needs = measured(stream)
        above = places_above(needs, budget_bytes)
        in_place = dataclasses.replace(
            stream, reads=tuple(Source.HOST if place in above else Source.DEVICE for place in range(num_segments))
        )
        others = measured(in_place)
        # Some programs that read host memory need more temporary bytes than the parameters would take.
        is_better = [other.counted < need.counted for need, other in zip(needs, others, strict=True)]
        reads = [source if better else Source.DEVICE for source, better in zip(in_place.reads, is_better, strict=True)]
        stream = dataclasses.replace(stream, reads=tuple(reads))
        needs = measured(stream)
    return stream, needs


def _unsplit_bytes(
    partition: ForwardPartition, stream: Stream, temporary_bytes: Mapping[ProgramKey, int], allocator: Allocator
) -> int:
    """Returns what the allocator hands out beyond a run's buffers; a run takes three times for each segment."""
    graph, last_reader, num = partition.graph, last_readers(partition), len(partition.segments)
    buffers, loaded = [], dict[int, int]()

    def add(num_bytes: int, start: int, end: int) -> None:
        buffers.append(Buffer(num_bytes, (start, start), (end, end)))

    for value in (*graph.batch, *partition.prelude_outputs):
        add(graph.held_bytes(value), 0, 3 * num)
    for place, (segment, key) in enumerate(zip(partition.segments, stream.keys(partition), strict=True)):
        layers = stream.layers_at(partition, place)
        for layer in [layer for layer in loaded if layer not in layers]:
            start = loaded.pop(layer)
            for leaf in partition.layers[layer].leaves:
                add(leaf.size * leaf.dtype.itemsize, start, 3 * place)
        loaded |= {layer: 3 * place for layer in layers if layer not in loaded}
        for value in (*segment.outputs, *segment.nondiff_outputs):
            add(graph.held_bytes(value), 3 * place + 1, 3 * last_reader.get(value, num - 1) + 2)
        add(temporary_bytes[key], 3 * place + 1, 3 * place + 2)
    for layer, start in loaded.items():
        for leaf in partition.layers[layer].leaves:
            add(leaf.size * leaf.dtype.itemsize, start, 3 * num)
    return unsplit_bytes(buffers, 3 * num, allocator)


def held_bytes(
    partition: ForwardPartition, stream: Stream, temporary_bytes: Mapping[ProgramKey, int], other_bytes: int = 0
) -> list[Peak]:
    """Returns the device memory in use while each segment runs."""
    graph, last_reader = partition.graph, last_readers(partition)
    given = {*graph.batch, *graph.constants, *partition.prelude_outputs}
    always = other_bytes + graph.held_bytes(*given)
    crossing: dict[int, int] = {}
    needs = []
    for place, (segment, key) in enumerate(zip(partition.segments, stream.keys(partition), strict=True)):
        crossing |= {v: graph.held_bytes(v) for v in (*segment.outputs, *segment.nondiff_outputs)}
        parameters = sum(partition.layers[layer].num_bytes for layer in stream.layers_at(partition, place))
        held = parameters + always + sum(crossing.values())
        needs.append(Peak(parameters, held, held + temporary_bytes[key]))
        crossing = {v: size for v, size in crossing.items() if last_reader.get(v) != place}
    return needs


def last_readers(partition: ForwardPartition) -> dict[int, int]:
    """Returns the last segment that reads each value, except for values that are returned to the caller."""
    returned = {atom for atom in partition.graph.outputs if isinstance(atom, int)}
    readers = {v: place for place, s in enumerate(partition.segments) for v in (*s.inputs, *s.nondiff_inputs)}
    return {value: place for value, place in readers.items() if value not in returned}
