"""What happens in a step, in order: which program runs, what is loaded before it, what is dropped after it.

    forward 0 .. S-2 | loss (forward and backward of segment S-1) | backward S-2 .. 0

Everything is known before the first step: the moment at which a layer is loaded and dropped follows from its mode, the
moment at which a value is freed from its last reader. So the executor never waits for Python's collector, and the most
memory that a step can need is a sum over this list.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from jaxferry.engine.programs import Kind
from jaxferry.modes import Mode
from jaxferry.partition import Derivative, Partition


@dataclasses.dataclass(frozen=True)
class Event:
    """One program of a step.

    Attributes:
      kind: which of the segment's programs.
      segment: the segment.
      loads: layers whose load is issued before this program, in order.
      drops: layers whose device copy is deleted after it.
      frees: values that nobody reads after it.
    """

    kind: Kind
    segment: int
    loads: tuple[int, ...] = ()
    drops: tuple[int, ...] = ()
    frees: tuple[int, ...] = ()


def make_script(
    partition: Partition, derivatives: Mapping[int, Derivative], modes: Sequence[Mode], loads_first: bool = False
) -> list[Event]:
    """The events of a training step.

    Args:
      partition: the segments.
      derivatives: by program number; what each backward reads.
      modes: the mode of each segment. A layer that several segments use has one device copy while any of them holds it.
        Without the native operations no program reads host memory: DHA is loaded at its use, not ahead of it, and
        dropped right after; DFGB is loaded at its forward.
      loads_first: whether the forward's loads are all issued at the start; else each one program ahead of its use.
    """
    last = len(partition.segments) - 1
    events = [Event(Kind.FORWARD, s) for s in range(last)] + [Event(Kind.LOSS, last)]
    events += [Event(Kind.BACKWARD, s) for s in reversed(range(last))]
    loads: dict[int, list[tuple[int, int]]] = {}
    drops: dict[int, list[int]] = {}
    for layer in range(len(partition.layers)):
        free = 0
        for first, end, is_direct in _held(layer, partition, derivatives, modes):
            early = 0 if loads_first and first <= last else first - 1
            issued, free = first if is_direct else max(free, early), end + 1
            loads.setdefault(issued, []).append((first, layer))
            drops.setdefault(end, []).append(layer)
    frees = _frees(partition, derivatives, events)
    return [
        dataclasses.replace(
            event,
            loads=tuple(layer for _, layer in sorted(loads.get(place, []))),
            drops=tuple(drops.get(place, ())),
            frees=tuple(frees.get(place, ())),
        )
        for place, event in enumerate(events)
    ]


def resident_layers(partition: Partition, modes: Sequence[Mode]) -> frozenset[int]:
    """Layers of which a device copy outlives the step."""
    return frozenset(s.layer for s, mode in zip(partition.segments, modes, strict=True) if mode is Mode.RESIDENT)


def _held(
    layer: int, partition: Partition, derivatives: Mapping[int, Derivative], modes: Sequence[Mode]
) -> list[tuple[int, int, bool]]:
    """First and last event of each time that the layer is on the device within a step, and whether it starts by DHA."""
    if layer in resident_layers(partition, modes):
        return []
    end = 2 * len(partition.segments) - 2
    spans: list[tuple[int, int, bool]] = []
    for place, (segment, mode) in enumerate(zip(partition.segments, modes, strict=True)):
        if segment.layer != layer:
            continue
        if mode in (Mode.GFGB, Mode.DFGB):
            spans.append((place, end - place, mode is Mode.DFGB))
        else:
            spans.append((place, place, mode is Mode.DHA))
            # The backward of a lookup, for one, reads no weight.
            reads = derivatives[segment.program].reads_weights
            spans += [(end - place, end - place, mode is Mode.DHA)] if reads else []
    joined: list[tuple[int, int, bool]] = []
    for first, last, is_direct in sorted(spans):
        if joined and first <= joined[-1][1] + 1:
            start, stop, was_direct = joined[-1]
            joined[-1] = (start, max(last, stop), was_direct)
        else:
            joined.append((first, last, is_direct))
    return joined


def _frees(
    partition: Partition, derivatives: Mapping[int, Derivative], events: Sequence[Event]
) -> dict[int, list[int]]:
    """The values whose last reader is each event."""
    made = {v for s in partition.segments for v in (*s.outputs, *s.extras)} | set(partition.prelude_outputs)
    last: dict[int, int] = {}
    for place, event in enumerate(events):
        segment = partition.segments[event.segment]
        read = (*segment.inputs, *segment.passive, *segment.outputs, *segment.extras)
        if event.kind is Kind.BACKWARD:
            derivative = derivatives[segment.program]
            read = (
                *(segment.inputs[i] for i in derivative.inputs_read),
                *(segment.passive[i] for i in derivative.passive_read),
                *(segment.outputs[i] for i in derivative.outputs_read),
            )
        last |= {value: place for value in read if value in made}
    kept = {partition.loss, *(atom for atom in partition.aux if isinstance(atom, int))}
    frees: dict[int, list[int]] = {}
    for value, place in last.items():
        if value not in kept:
            frees.setdefault(place, []).append(value)
    return frees


@dataclasses.dataclass(frozen=True)
class Peak:
    """The most device memory that a step needs, in bytes.

    Attributes:
      parameters: of parameters alone.
      total: of parameters, values between segments, residuals and gradients together, plus the largest need of a
        single program for temporaries.
    """

    parameters: int
    total: int


def peak_bytes(
    partition: Partition,
    derivatives: Mapping[int, Derivative],
    modes: Sequence[Mode],
    script: Sequence[Event],
    temporary_bytes: int = 0,
) -> Peak:
    """Adds up what is held at each event."""
    graph = partition.graph
    sizes = [layer.num_bytes for layer in partition.layers]
    parameters = sum(sizes[layer] for layer in resident_layers(partition, modes))
    other = sum(graph.num_bytes(v) for v in (*graph.batch, *graph.constants, *partition.prelude_outputs))
    peak_parameters = peak_total = parameters
    cotangents: dict[int, int] = {}
    for event in script:
        segment = partition.segments[event.segment]
        parameters += sum(sizes[layer] for layer in event.loads)
        gradient = 0
        if event.kind is not Kind.BACKWARD:
            other += sum(graph.num_bytes(v) for v in (*segment.outputs, *segment.extras))
        if event.kind is Kind.FORWARD:
            other += derivatives[segment.program].saved_bytes
        if event.kind is not Kind.FORWARD:
            gradient = sizes[segment.layer]
            cotangents |= {v: graph.num_bytes(v) for v in segment.inputs}
        peak_parameters = max(peak_parameters, parameters)
        peak_total = max(peak_total, parameters + other + gradient + sum(cotangents.values()))
        parameters -= sum(sizes[layer] for layer in event.drops)
        other -= sum(graph.num_bytes(v) for v in event.frees)
        if event.kind is Kind.BACKWARD:
            other -= derivatives[segment.program].saved_bytes
            cotangents = {v: n for v, n in cotangents.items() if v not in segment.outputs}
    return Peak(peak_parameters, peak_total + temporary_bytes)
