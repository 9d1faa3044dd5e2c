"""What happens in a step, in order: which program runs, what is loaded before it, what is dropped after it.

    forward 0 .. S-2 | loss (forward and backward of segment S-1) | backward S-2 .. 0

Everything is known before the first step: the moment at which a layer is loaded and dropped follows from its mode, the
moment at which a value is freed from its last reader. So the executor never waits for Python's collector, and the most
memory that a step can need is a sum over this list.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from jaxferry.engine.shadow import Kind, Span, Target, Use, places, resident_layers, shadow_model, spans
from jaxferry.modes import GradientPlace, Mode
from jaxferry.partition import Derivative, Partition


@dataclasses.dataclass(frozen=True)
class Event:
    """One program of a step.

    Attributes:
      segment: the segment.
      use: which of its programs, and where that reads parameters and writes gradients.
      loads: layers whose load is issued before this program, in order.
      drops: layers whose device copy is deleted after it.
      frees: values that nobody reads after it.
    """

    segment: int
    use: Use
    loads: tuple[int, ...] = ()
    drops: tuple[int, ...] = ()
    frees: tuple[int, ...] = ()

    @property
    def kind(self) -> Kind:
        """What the program computes."""
        return self.use.kind


def make_script(
    partition: Partition,
    derivatives: Mapping[int, Derivative],
    modes: Sequence[Mode],
    gradients: Sequence[GradientPlace],
    loads_first: bool = False,
) -> list[Event]:
    """The events of a training step.

    Args:
      partition: the segments.
      derivatives: by program number; what each backward reads.
      modes: the mode of each segment.
      gradients: where each segment's gradient goes.
      loads_first: whether the forward's loads are all issued at the start; else each one program ahead of its use. The
        loads of DFGB layers follow those of the forward.
    """
    order = places(len(partition.segments))
    uses = shadow_model(partition, derivatives, modes, gradients)
    events = [Event(segment, use) for (_, segment), use in zip(order, uses, strict=True)]
    loads, drops = _loads_and_drops(partition, derivatives, modes, loads_first)
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


def _loads_and_drops(
    partition: Partition, derivatives: Mapping[int, Derivative], modes: Sequence[Mode], loads_first: bool
) -> tuple[dict[int, list[tuple[int, int]]], dict[int, list[int]]]:
    """By place: the loads (with the place of their use, in whose order they are issued), and the layers dropped."""
    last = len(partition.segments) - 1
    # Each span with the place from which on the layer has no other copy.
    held: list[tuple[int, Span, int]] = []
    for layer in range(len(partition.layers)):
        free = 0
        for span in spans(layer, partition, derivatives, modes):
            held.append((layer, span, free))
            free = span.last + 1
    loads: dict[int, list[tuple[int, int]]] = {}
    drops: dict[int, list[int]] = {}

    def add(layer: int, span: Span, issued: int) -> None:
        loads.setdefault(issued, []).append((span.first, layer))
        drops.setdefault(span.last, []).append(layer)

    for layer, span, free in held:
        if not span.issued:
            early = 0 if loads_first and span.first <= last else span.first - 1
            add(layer, span, max(free, early))
    # A link is first in, first out: what the forward waits for goes before what the backward will want.
    forward_done = max((place for place, found in loads.items() if any(use <= last for use, _ in found)), default=0)
    for layer, span, free in held:
        if span.issued:
            add(layer, span, min(max(span.issued, forward_done, free), span.first))
    return loads, drops


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
      held: of parameters, values between segments, residuals and gradients together.
      total: of all these and what the running program needs for temporaries.
    """

    parameters: int
    held: int
    total: int


def peak_bytes(
    partition: Partition,
    derivatives: Mapping[int, Derivative],
    modes: Sequence[Mode],
    script: Sequence[Event],
    temporary_bytes: Mapping[Use, int],
    lag: int = 0,
) -> Peak:
    """Adds up what is held at each event.

    Args:
      partition: the segments.
      derivatives: by program number.
      modes: the mode of each segment.
      script: the events of a step under these modes.
      temporary_bytes: device memory that each program needs beside its arguments and results; none if not there.
      lag: how many further programs a gradient stays on the device for, until its store has ended.
    """
    graph = partition.graph
    sizes = [layer.num_bytes for layer in partition.layers]
    parameters = sum(sizes[layer] for layer in resident_layers(partition, modes))
    other = sum(graph.num_bytes(v) for v in (*graph.batch, *graph.constants, *partition.prelude_outputs))
    peak_parameters = peak_held = peak_total = parameters
    cotangents: dict[int, int] = {}
    gradients: list[int] = []
    for event in script:
        segment = partition.segments[event.segment]
        parameters += sum(sizes[layer] for layer in event.loads)
        if event.kind is not Kind.BACKWARD:
            other += sum(graph.num_bytes(v) for v in (*segment.outputs, *segment.extras))
        if event.kind is Kind.FORWARD:
            other += derivatives[segment.program].saved_bytes
        if event.kind is not Kind.FORWARD:
            # What a program that writes host memory holds of a gradient is among its temporaries.
            gradients.append(sizes[segment.layer] if event.use.writes is Target.DEVICE else 0)
            cotangents |= {v: graph.num_bytes(v) for v in segment.inputs}
        peak_parameters = max(peak_parameters, parameters)
        held = parameters + other + sum(gradients[-1 - lag :]) + sum(cotangents.values())
        peak_held = max(peak_held, held)
        peak_total = max(peak_total, held + temporary_bytes.get(event.use, 0))
        parameters -= sum(sizes[layer] for layer in event.drops)
        other -= sum(graph.num_bytes(v) for v in event.frees)
        if event.kind is Kind.BACKWARD:
            other -= derivatives[segment.program].saved_bytes
            cotangents = {v: n for v, n in cotangents.items() if v not in segment.outputs}
    return Peak(peak_parameters, peak_held, peak_total)
