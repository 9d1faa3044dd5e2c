"""The shadow model: for every program of a step, where it reads its layer's parameters and writes its gradient.

One table, made before the first step. A layer may be read in several places within a step: DFGB reads host memory in
the forward and a device copy in the backward; of a tied table the lookup can read host memory and the head a copy.
No program is given a copy of a parameter that it could have read where it was.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence

from jaxferry.modes import GradientPlace, Mode
from jaxferry.partition import Derivative, Partition


class Kind(enum.Enum):
    """What a program computes."""

    FORWARD = "forward"
    LOSS = "loss"
    BACKWARD = "backward"


class Source(enum.Enum):
    """Where a program reads parameters."""

    DEVICE = "device"
    """The layer's device copy."""
    HOST = "host"
    """The layer's vectors in pinned host memory, by the operations of Direct Host Access."""


class Target(enum.Enum):
    """Where a program's gradient goes."""

    DEVICE = "device"
    """Device buffers, which a store takes to the host."""
    HOST = "host"
    """Vectors in pinned host memory, which the program writes itself (GO)."""
    HOST_SUM = "host sum"
    """Likewise, added to what an earlier program has written there."""


@dataclasses.dataclass(frozen=True)
class Use:
    """One program's view of its layer.

    Attributes:
      kind, program: which program.
      reads: where it reads parameters; DEVICE also if it reads none.
      writes: where its gradient goes; DEVICE also if it has none.
    """

    kind: Kind
    program: int
    reads: Source = Source.DEVICE
    writes: Target = Target.DEVICE


@dataclasses.dataclass(frozen=True)
class Span:
    """A time that a layer is on the device within a step.

    Attributes:
      first, last: the programs that need it first and last, as places in the step.
      issued: the place before which its load may be issued at the earliest.
    """

    first: int
    last: int
    issued: int = 0


def places(num_segments: int) -> list[tuple[Kind, int]]:
    """The programs of a step in order: what each computes, and its segment."""
    last = num_segments - 1
    forwards = [(Kind.FORWARD, s) for s in range(last)]
    return [*forwards, (Kind.LOSS, last), *((Kind.BACKWARD, s) for s in reversed(range(last)))]


def resident_layers(partition: Partition, modes: Sequence[Mode]) -> frozenset[int]:
    """Layers of which a device copy outlives the step."""
    return frozenset(s.layer for s, mode in zip(partition.segments, modes, strict=True) if mode is Mode.RESIDENT)


def spans(layer: int, partition: Partition, derivatives: Mapping[int, Derivative], modes: Sequence[Mode]) -> list[Span]:
    """When a layer is on the device within a step; RESIDENT layers are all the time and have no span.

    A layer that several segments use has one device copy while any of them holds it.
    """
    if layer in resident_layers(partition, modes):
        return []
    end = 2 * len(partition.segments) - 2
    found: list[Span] = []
    for place, (segment, mode) in enumerate(zip(partition.segments, modes, strict=True)):
        # The backward of a lookup, for one, reads no weight.
        reads_back = derivatives[segment.program].reads_weights or 2 * place == end
        if segment.layer != layer or mode is Mode.DHA:
            continue
        if mode is Mode.DFGB:
            # The last segment's forward and backward are one program, which loads cannot come between.
            found += [Span(end - place, end - place, place + 1)] if reads_back and 2 * place != end else []
        elif mode is Mode.GFGB:
            found.append(Span(place, end - place))
        else:
            found.append(Span(place, place))
            found += [Span(end - place, end - place)] if reads_back else []
    joined: list[Span] = []
    for span in sorted(found, key=lambda span: (span.first, span.last)):
        if joined and span.first <= joined[-1].last + 1:
            joined[-1] = dataclasses.replace(joined[-1], last=max(span.last, joined[-1].last))
        else:
            joined.append(span)
    return joined


def shadow_model(
    partition: Partition,
    derivatives: Mapping[int, Derivative],
    modes: Sequence[Mode],
    gradients: Sequence[GradientPlace],
) -> list[Use]:
    """What each program of a step sees, in the order of `places`.

    Args:
      partition: the segments.
      derivatives: by program number.
      modes: the mode of each segment.
      gradients: where each segment's gradient goes. Rows of lookups stay on the device: they are few, and a store takes
        them alone.
    """
    held = {i: spans(i, partition, derivatives, modes) for i in range(len(partition.layers))}
    resident = resident_layers(partition, modes)
    written: set[int] = set()
    table = []
    for place, (kind, number) in enumerate(places(len(partition.segments))):
        segment = partition.segments[number]
        derivative = derivatives[segment.program]
        is_held = segment.layer in resident or any(s.first <= place <= s.last for s in held[segment.layer])
        is_read = kind is not Kind.BACKWARD or derivative.reads_weights
        reads = Source.HOST if is_read and not is_held else Source.DEVICE
        writes = Target.DEVICE
        if kind is not Kind.FORWARD:
            if gradients[number] is GradientPlace.HOST and not derivative.has_rows:
                writes = Target.HOST_SUM if segment.layer in written else Target.HOST
            written.add(segment.layer)
        table.append(Use(kind, segment.program, reads, writes))
    return table
