"""Identifies the compiled programs of a step: what each computes, where it reads parameters and writes its gradient.

A step may read a parameter group in several places. DFGB reads host memory in the forward and a device copy in the
backward. The lookup of a tied table can read host memory while its head reads a copy. No program gets a copy of a
parameter that it can read in place. MemFerry, section IV-A, calls this view of all layers the shadow model.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Collection, Mapping, Sequence

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
      reads: where it reads the parameters of each group of its segment; DEVICE also if it reads none.
      writes: where the gradient of each group goes; DEVICE also if there is none.
      arrives: whether it waits for the load of the parameters that it reads; only with one group.
      stores: whether it queues the copy of its gradient from the device to the host; only with one group.
    """

    kind: ProgramKind
    program: int
    reads: tuple[Source, ...] = (Source.DEVICE,)
    writes: tuple[Target, ...] = (Target.DEVICE,)
    arrives: bool = False
    stores: bool = False

    @property
    def writes_host(self) -> bool:
        """Whether it writes any gradient to host memory itself."""
        return any(target is not Target.DEVICE for target in self.writes)

    def alone_in(self, places: Collection[int]) -> ProgramKey:
        """The program that writes the gradients of the groups at these places to host memory instead of adding them."""
        return self._changed(places, {Target.HOST_SUM: Target.HOST})

    def onto_sums_in(self, places: Collection[int]) -> ProgramKey:
        """The program that adds the gradients of the groups at these places to host memory instead of writing them."""
        return self._changed(places, {Target.HOST: Target.HOST_SUM})

    @property
    def alone(self) -> ProgramKey:
        """The program that writes all gradients to host memory instead of adding them."""
        return self.alone_in(range(len(self.writes)))

    def _changed(self, places: Collection[int], change: Mapping[Target, Target]) -> ProgramKey:
        writes = tuple(change.get(t, t) if place in places else t for place, t in enumerate(self.writes))
        return self if writes == self.writes else dataclasses.replace(self, writes=writes)


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
        reads, writes = [], []
        for use, layer in ((partition.uses[i], plan.layers[i]) for i in partition.uses_of[number]):
            is_read = kind is not ProgramKind.BACKWARD or derivative.reads_groups[use.place]
            by_dha = layer.mode is Mode.DHA or (layer.mode is Mode.DFGB and kind is not ProgramKind.BACKWARD)
            reads.append(Source.HOST if is_read and by_dha else Source.DEVICE)
            writes.append(Target.DEVICE)
            if kind is not ProgramKind.FORWARD and use.is_trained:
                if layer.gradient is GradientPlace.HOST and not derivative.has_rows:
                    writes[-1] = Target.HOST_SUM if use.group in written else Target.HOST
                written.add(use.group)
        keys.append(ProgramKey(kind, segment.program, tuple(reads), tuple(writes)))
    return keys


def beside_rows(
    partition: Partition, derivatives: Mapping[int, Derivative], keys: Sequence[ProgramKey]
) -> list[ProgramKey]:
    """The programs of places that add to a group's gradient in host memory, as such that write it.

    An accelerator needs them where an earlier gradient of the group is rows of a lookup: these are summed on the host.
    """
    of_rows = {
        group for segment in partition.segments if derivatives[segment.program].has_rows for group in segment.groups
    }
    found = (key.alone_in(in_rows) for key, in_rows in _with_places(partition, keys, of_rows.__contains__) if in_rows)
    return [key for key in dict.fromkeys(found) if Target.HOST in key.writes]


def with_sums(partition: Partition, keys: Sequence[ProgramKey], is_widened: Callable[[int], bool]) -> list[ProgramKey]:
    """The programs of all micro-batches of an update.

    After the first, they add to host memory instead of writing it, unless the host adds.

    Args:
      partition: the segments.
      keys: the programs of all places.
      is_widened: whether the host adds all gradients of a group; see `Transport.is_widened`.
    """
    pairs = _with_places(partition, keys, is_widened)
    first = [key.alone_in(widened) for key, widened in pairs]
    later = [
        key.onto_sums_in({*range(len(key.writes))} - widened) for key, (_, widened) in zip(first, pairs, strict=True)
    ]
    return list(dict.fromkeys([*first, *later]))


def _with_places(
    partition: Partition, keys: Sequence[ProgramKey], is_chosen: Callable[[int], bool]
) -> list[tuple[ProgramKey, set[int]]]:
    """The program of each place of a step, with the places of the chosen ones among its segment's groups."""
    groups = [partition.segments[number].groups for _, number in places(partition)]
    chosen = [{place for place, group in enumerate(each) if is_chosen(group)} for each in groups]
    return list(zip(keys, chosen, strict=True))
