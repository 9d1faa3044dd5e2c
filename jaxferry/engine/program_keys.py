"""Identifies the compiled programs of a step: what each computes, where it reads parameters and writes its gradient.

A step may read a parameter group in several places. DFGB reads host memory in the forward and a device copy in the
backward. The lookup of a tied table can read host memory while its head reads a copy. No program gets a copy of a
parameter that it can read in place. MemFerry, section IV-A, calls this view of all layers the shadow model.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping, Sequence

from jaxferry.modes import GradientPlace, Mode
from jaxferry.partition import Derivative, Partition
from jaxferry.plan.records import Plan


class ProgramKind(enum.Enum):
    """What a program computes."""

    FORWARD = "forward"
    EVALUATION = "evaluation"
    """A forward that keeps nothing for a backward."""
    LOSS = "loss"
    """Forward and backward of the last segment."""
    BACKWARD = "backward"


class Source(enum.Enum):
    """Where a program reads parameters."""

    DEVICE = "device"
    """The group's device copy."""
    HOST = "host"
    """The group's vectors in pinned host memory, by the operations of Direct Host Access."""


class Target(enum.Enum):
    """Where a program's gradient goes."""

    DEVICE = "device"
    """Device buffers; an offload takes them to the host."""
    HOST = "host"
    """Vectors in pinned host memory, written by the program itself (GO)."""
    HOST_SUM = "host sum"
    """Likewise, added to an earlier program's gradient."""


@dataclasses.dataclass(frozen=True)
class ProgramKey:
    """Identifies one compiled program.

    Attributes:
      kind: what it computes.
      program: the segment's program number.
      reads: where it reads parameters; DEVICE also if it reads none.
      writes: where its gradient goes; DEVICE also if it has none.
      arrives: whether it waits for the load of the parameters that it reads.
      stores: whether it queues the copy of its gradient from the device to the host.
    """

    kind: ProgramKind
    program: int
    reads: Source = Source.DEVICE
    writes: Target = Target.DEVICE
    arrives: bool = False
    stores: bool = False

    @property
    def alone(self) -> ProgramKey:
        """The program that writes this one's gradient to host memory instead of adding it."""
        return dataclasses.replace(self, writes=Target.HOST) if self.writes is Target.HOST_SUM else self

    @property
    def onto_sum(self) -> ProgramKey:
        """The program that adds this one's gradient to host memory instead of writing it."""
        return dataclasses.replace(self, writes=Target.HOST_SUM) if self.writes is Target.HOST else self


@dataclasses.dataclass(frozen=True)
class Joins:
    """Which work of a transport is part of the programs beside it, so that it takes no launch of its own.

    Attributes:
      arrives: whether the first program that reads a copy waits for its load.
      stores: whether the program that makes a gradient queues its copy to the host.
    """

    arrives: bool = False
    stores: bool = False


NO_JOINS = Joins()


def places(partition: Partition) -> list[tuple[ProgramKind, int]]:
    """The programs of a step in order: what each computes, and its segment."""
    last = len(partition.segments) - 1
    forwards = [(ProgramKind.FORWARD, s) for s in range(last)]
    backwards = [(ProgramKind.BACKWARD, s) for s in reversed(range(last)) if partition.segments[s].runs_back]
    return [*forwards, (ProgramKind.LOSS, last), *backwards]


def program_keys(partition: Partition, derivatives: Mapping[int, Derivative], plan: Plan) -> list[ProgramKey]:
    """The program of each place of a step, in the order of `places`.

    Args:
      partition: the segments.
      derivatives: by program number.
      plan: modes and gradient places of the segments. Gradients that are rows of lookups stay on the device: the rows
        are few, and an offload moves only these.
    """
    written: set[int] = set()
    keys = []
    for kind, number in places(partition):
        segment, derivative = partition.segments[number], derivatives[partition.segments[number].program]
        is_read = kind is not ProgramKind.BACKWARD or derivative.reads_weights
        mode = plan.layers[number].mode
        by_dha = mode is Mode.DHA or (mode is Mode.DFGB and kind is not ProgramKind.BACKWARD)
        reads = Source.HOST if is_read and by_dha else Source.DEVICE
        writes = Target.DEVICE
        if kind is not ProgramKind.FORWARD and segment.trained:
            if plan.layers[number].gradient is GradientPlace.HOST and not derivative.has_rows:
                writes = Target.HOST_SUM if segment.group in written else Target.HOST
            written.add(segment.group)
        keys.append(ProgramKey(kind, segment.program, reads, writes))
    return keys


def beside_rows(
    partition: Partition, derivatives: Mapping[int, Derivative], keys: Sequence[ProgramKey]
) -> list[ProgramKey]:
    """The programs of places that add to a group's gradient in host memory, as such that write it.

    An accelerator needs them where an earlier gradient of the group is rows of a lookup: these are summed on the host.
    """
    of_rows = {segment.group for segment in partition.segments if derivatives[segment.program].has_rows}
    groups = [partition.segments[number].group for _, number in places(partition)]
    found = (key.alone for key, group in zip(keys, groups, strict=True) if group in of_rows)
    return [key for key in dict.fromkeys(found) if key.writes is Target.HOST]


def with_sums(partition: Partition, keys: Sequence[ProgramKey], is_widened: Callable[[int], bool]) -> list[ProgramKey]:
    """The programs of all micro-batches of an update.

    After the first, they add to host memory instead of writing it, unless the host adds.

    Args:
      partition: the segments.
      keys: the programs of all places.
      is_widened: whether the host adds all gradients of a group; see `Transport.is_widened`.
    """
    groups = [partition.segments[number].group for _, number in places(partition)]
    pairs = list(zip(keys, map(is_widened, groups), strict=True))
    first = [key.alone if widened else key for key, widened in pairs]
    return list(dict.fromkeys([*first, *(key.onto_sum for key, widened in pairs if not widened)]))
