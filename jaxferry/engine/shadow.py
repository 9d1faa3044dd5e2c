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
    EVALUATION = "evaluation"
    """A forward that keeps nothing for a backward."""
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


def places(partition: Partition) -> list[tuple[Kind, int]]:
    """The programs of a step in order: what each computes, and its segment."""
    last = len(partition.segments) - 1
    forwards = [(Kind.FORWARD, s) for s in range(last)]
    backwards = [(Kind.BACKWARD, s) for s in reversed(range(last)) if partition.segments[s].runs_back]
    return [*forwards, (Kind.LOSS, last), *backwards]


def resident_layers(partition: Partition, modes: Sequence[Mode]) -> frozenset[int]:
    """Layers of which a device copy outlives the step."""
    return frozenset(s.layer for s, mode in zip(partition.segments, modes, strict=True) if mode is Mode.RESIDENT)


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
    written: set[int] = set()
    table = []
    for kind, number in places(partition):
        segment = partition.segments[number]
        derivative = derivatives[segment.program]
        is_read = kind is not Kind.BACKWARD or derivative.reads_weights
        by_dha = modes[number] is Mode.DHA or (modes[number] is Mode.DFGB and kind is not Kind.BACKWARD)
        reads = Source.HOST if is_read and by_dha else Source.DEVICE
        writes = Target.DEVICE
        if kind is not Kind.FORWARD and segment.trained:
            if gradients[number] is GradientPlace.HOST and not derivative.has_rows:
                writes = Target.HOST_SUM if segment.layer in written else Target.HOST
            written.add(segment.layer)
        table.append(Use(kind, segment.program, reads, writes))
    return table


def onto_sums(uses: Sequence[Use]) -> list[Use]:
    """What programs that write host memory see where an earlier micro-batch has written before."""
    return [dataclasses.replace(use, writes=Target.HOST_SUM) for use in uses if use.writes is Target.HOST]
