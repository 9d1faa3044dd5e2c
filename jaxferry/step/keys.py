"""Identifies the compiled programs of a step: what each computes, where it reads parameters and writes its gradient.

A step may read a parameter group in several places. DFGB reads host memory in the forward and a device copy in the
backward. The lookup of a tied table can read host memory while its head reads a copy. No program gets a copy of a
parameter that it can read in place. MemFerry, section IV-A, calls this view of all layers the shadow model.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Collection, Mapping, Sequence

from jaxferry.modes import GradientPlace, Mode
from jaxferry.partition import Derivative, Partition
from jaxferry.step.plans import Plan


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


def variant_of(key: ProgramKey, widened: Collection[int], added: Collection[int]) -> ProgramKey:
    """The program to run in place of a planned one, given what is in host memory already.

    A planned program has up to three variants: that of the first micro-batch, that of later ones, which adds to all
    gradients in host memory, and the one that writes all of them there, which the host then adds. The last one stands
    for all others, as where rows of a lookup are summed on the host and another group's gradient is not.

    Args:
      key: the planned program.
      widened: the places among its segment's groups whose gradients the host always adds; see `StepProgram.widened`.
      added: those with a gradient in host memory to which the device can add.
    """
    exact = key.alone.onto_sums_in(added)
    is_compiled = exact == key.alone_in(widened) or exact == _of_later_micro_batches(key, widened)
    return exact if is_compiled else key.alone


def variants_of(
    partition: Partition,
    keys: Sequence[ProgramKey],
    all_widened: Collection[int],
    accumulates: bool,
    summed_on_host: Collection[int],
) -> list[ProgramKey]:
    """All programs that `variant_of` chooses for the places of a step.

    Args:
      partition: the segments.
      keys: the planned programs of all places.
      all_widened: the groups whose gradients the host always adds.
      accumulates: whether there are several micro-batches, which may have other plans.
      summed_on_host: the groups whose gradients of one micro-batch may be summed on the host.
    """
    found: list[ProgramKey] = []
    for key, (_, number) in zip(keys, places(partition), strict=True):
        groups = partition.segments[number].groups
        widened = {place for place, group in enumerate(groups) if group in all_widened}
        exact = key.alone_in(widened)
        found.append(exact)
        if accumulates:
            found += [_of_later_micro_batches(key, widened), key.alone]
        elif any(w is Target.HOST_SUM and g in summed_on_host for w, g in zip(exact.writes, groups, strict=True)):
            found.append(key.alone)
    return list(dict.fromkeys(found))


def groups_summed_on_host(
    partition: Partition, derivatives: Mapping[int, Derivative], plan: Plan, adds_on_host: bool
) -> set[int]:
    """The groups whose gradients of one micro-batch an accelerator's host may sum.

    It sums the rows of lookups, and some transports let it sum all that they store (`Transport.adds_on_host`).
    """
    return {
        use.group
        for use, layer in zip(partition.uses, plan.layers, strict=True)
        if derivatives[partition.segments[use.segment].program].has_rows
        or (adds_on_host and layer.gradient is GradientPlace.DEVICE)
    }


def _of_later_micro_batches(key: ProgramKey, widened: Collection[int]) -> ProgramKey:
    return key.alone_in(widened).onto_sums_in({*range(len(key.writes))}.difference(widened))
