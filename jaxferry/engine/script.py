"""What happens in a step: the plan lowered to tasks, and for each of its programs what it is given and what it frees.

    forward 0 .. S-2 | loss (forward and backward of segment S-1) | backward S-2 .. 0

Everything is known before the first step: a layer is loaded and dropped as the schedule says, a value is freed after
its last reader. So the executor never waits for Python's collector, and the most memory that a step can need is a sum
over this list.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jaxferry.engine.shadow import Kind, Use, places, resident_layers, shadow_model
from jaxferry.modes import GradientPlace, Mode, Remat
from jaxferry.partition import Derivative, Partition
from jaxferry.plan.records import Plan
from jaxferry.profiling.records import LayerProfile, Profile
from jaxferry.schedule import CROSSING_SLOTS, Lane, Schedule, leading_loads, schedule_step
from jaxferry.schedule import Kind as TaskKind

LEAST_BYTES = 1024
"""What smaller values would take from a transfer's latency is more than the memory that they take."""


_SCALAR_BYTES = 8
"""What each program leaves until the step ends: the norm of its gradient, and whether its outputs are finite."""


@dataclasses.dataclass(frozen=True)
class Event:
    """One program of a step.

    Attributes:
      segment: the segment.
      use: which of its programs, and where that reads parameters and writes gradients.
      frees: values that nobody reads after it.
      saves: values that leave for host memory after it.
      fetches: values that come back from there for it.
    """

    segment: int
    use: Use
    frees: tuple[int, ...] = ()
    saves: tuple[int, ...] = ()
    fetches: tuple[int, ...] = ()

    @property
    def kind(self) -> Kind:
        """What the program computes."""
        return self.use.kind


def make_script(
    partition: Partition,
    derivatives: Mapping[int, Derivative],
    modes: Sequence[Mode],
    gradients: Sequence[GradientPlace],
    offload_activations: bool = False,
) -> list[Event]:
    """The programs of a training step, in order.

    Args:
      partition: the segments.
      derivatives: by program number; what each backward reads.
      modes: the mode of each segment.
      gradients: where each segment's gradient goes.
      offload_activations: whether values wait in host memory for their backward.
    """
    uses = shadow_model(partition, derivatives, modes, gradients)
    events = [Event(segment, use) for (_, segment), use in zip(places(partition), uses, strict=True)]
    frees = _frees(partition, derivatives)
    saves: dict[int, list[int]] = collections.defaultdict(list)
    fetches: dict[int, list[int]] = collections.defaultdict(list)
    for value, (last_forward, backward) in _away(partition, derivatives).items() if offload_activations else ():
        saves[last_forward].append(value)
        fetches[backward].append(value)
    return [
        dataclasses.replace(
            event,
            frees=tuple(frees.get(place, ())),
            saves=tuple(saves.get(place, ())),
            fetches=tuple(fetches.get(place, ())),
        )
        for place, event in enumerate(events)
    ]


def lower_plan(
    partition: Partition,
    derivatives: Mapping[int, Derivative],
    plan: Plan,
    profile: Profile | None = None,
    offload_activations: bool = False,
) -> Schedule:
    """The tasks of a step of a plan, as the engine runs them.

    Args:
      partition: the segments.
      derivatives: by program number.
      plan: their modes and gradients, in order.
      profile: how long each task is expected to take; None if that is not known, then the tasks take no time.
      offload_activations: whether values wait in host memory for their backward.
    """
    saves, fetches = [0] * len(partition.segments), [0] * len(partition.segments)
    order = places(partition)
    for value, (last_forward, backward) in _away(partition, derivatives).items() if offload_activations else ():
        saves[order[last_forward][1]] += partition.graph.num_bytes(value)
        fetches[order[backward][1]] += partition.graph.num_bytes(value)
    of_segments = [derivatives[segment.program] for segment in partition.segments]
    profile = profile or _without_times(partition)
    last = len(partition.segments) - 1
    profile = dataclasses.replace(
        profile,
        layers=tuple(
            dataclasses.replace(
                layer,
                backward_reads=derivative.reads_weights,
                gradient_rows=derivative.has_rows,
                has_backward=segment.runs_back,
                has_gradient=bool(segment.trained),
                fused_backward=index == last,
                save_bytes=saves[index],
                fetch_bytes=fetches[index],
            )
            for index, (layer, segment, derivative) in enumerate(
                zip(profile.layers, partition.segments, of_segments, strict=True)
            )
        ),
    )
    # What recomputation costs may not be known, where it is not the planner who chose it.
    layers = tuple(
        mine if theirs.can_recompute else dataclasses.replace(mine, remat=Remat.NONE)
        for mine, theirs in zip(plan.layers, profile.layers, strict=True)
    )
    return schedule_step(profile, dataclasses.replace(plan, layers=layers))


def _without_times(partition: Partition) -> Profile:
    times = {field.name: 0.0 for field in dataclasses.fields(LayerProfile) if field.name.endswith("_s")}
    layers = []
    for segment in partition.segments:
        layer = partition.layers[segment.layer]
        facts: dict[str, Any] = {"param_bytes": layer.num_bytes, "grad_bytes": layer.trained.num_bytes, **times}
        facts["recompute_activation_bytes"] = 0
        layers.append(LayerProfile(name=segment.name, parameters=layer.name, **facts))
    return Profile({}, tuple(layers))


def kept_layers(
    partition: Partition, derivatives: Mapping[int, Derivative], gradients: Sequence[GradientPlace]
) -> list[int]:
    """Layers whose gradients can be added up on the device: the plan lets them stay there, and one program makes them.

    Of a layer with several uses they are added up on the host in every plan, so that all have the same bits.
    """
    uses = collections.Counter(segment.layer for segment in partition.segments)
    return [
        segment.layer
        for segment, place in zip(partition.segments, gradients, strict=True)
        if place is GradientPlace.DEVICE
        and uses[segment.layer] == 1
        and segment.trained
        and not derivatives[segment.program].has_rows
    ]


def programs_of(schedule: Schedule) -> dict[int, int]:
    """For each task that runs a program, its place in the script.

    The last segment's program is that of its forward task; its backward task has nothing left to do.
    """
    forwards = [i for i, task in enumerate(schedule.tasks) if task.kind is TaskKind.FORWARD]
    backwards = [i for i, task in enumerate(schedule.tasks) if task.kind is TaskKind.BACKWARD]
    return {task: place for place, task in enumerate([*forwards, *backwards[1:]])}


def moves_of(schedule: Schedule, script: Sequence[Event]) -> dict[int, int]:
    """For each save the place of the program that it follows, for each fetch that of the one that it is for."""
    backwards = {event.segment: place for place, event in enumerate(script) if event.kind is Kind.BACKWARD}
    return {
        index: task.layer if task.kind is TaskKind.SAVE else backwards[task.layer]
        for index, task in enumerate(schedule.tasks)
        if task.kind in (TaskKind.SAVE, TaskKind.FETCH)
    }


def _reads(partition: Partition, derivatives: Mapping[int, Derivative]) -> list[list[int]]:
    """What each program of a step reads, or makes, of what segments and the prelude make and the step may free."""
    kept = {partition.loss, *(atom for atom in partition.aux if isinstance(atom, int))}
    made = {v for s in partition.segments for v in (*s.outputs, *s.extras)} | set(partition.prelude_outputs)
    table = []
    for kind, number in places(partition):
        segment = partition.segments[number]
        read = (*segment.inputs, *segment.passive, *segment.outputs, *segment.extras)
        if kind is Kind.BACKWARD:
            derivative = derivatives[segment.program]
            read = (
                *(segment.inputs[i] for i in derivative.inputs_read),
                *(segment.passive[i] for i in derivative.passive_read),
                *(segment.outputs[i] for i in derivative.outputs_read),
            )
        table.append([value for value in read if value in made and value not in kept])
    return table


def _frees(partition: Partition, derivatives: Mapping[int, Derivative]) -> dict[int, list[int]]:
    """The values whose last reader is each program."""
    last: dict[int, int] = {}
    for place, read in enumerate(_reads(partition, derivatives)):
        last |= dict.fromkeys(read, place)
    frees: dict[int, list[int]] = {}
    for value, place in last.items():
        frees.setdefault(place, []).append(value)
    return frees


def _away(partition: Partition, derivatives: Mapping[int, Derivative]) -> dict[int, tuple[int, int]]:
    """Values that may be in host memory while at least one program runs: after which program, and until which."""
    last_forward: dict[int, int] = {}
    backward: dict[int, int] = {}
    for place, read in enumerate(_reads(partition, derivatives)):
        for value in read:
            if place < len(partition.segments):
                last_forward[value] = place
            else:
                backward.setdefault(value, place)
    return {
        value: (last_forward[value], until)
        for value, until in backward.items()
        if until - last_forward[value] >= 2 * CROSSING_SLOTS and _is_worth_moving(partition, value)
    }


def _is_worth_moving(partition: Partition, value: int) -> bool:
    is_key = jax.dtypes.issubdtype(partition.graph.avals[value].dtype, jax.dtypes.extended)
    return not is_key and partition.graph.num_bytes(value) >= LEAST_BYTES


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
    schedule: Schedule,
    script: Sequence[Event],
    modes: Sequence[Mode],
    temporary_bytes: Mapping[Use, int],
    other_bytes: int = 0,
    num_kept: int = 0,
    ahead: Sequence[int] = (),
) -> Peak:
    """Adds up the most that can be held at each program, however long the transfers take.

    Args:
      partition: the segments.
      derivatives: by program number.
      schedule: the tasks of a step.
      script: its programs.
      modes: the mode of each segment.
      temporary_bytes: device memory that each program needs beside its arguments and results; none if not there.
      other_bytes: device memory that is taken all the time, beside RESIDENT layers.
      num_kept: of how many backward programs before the running one cotangents are kept.
      ahead: loads that may be done in the step before.
    """
    graph = partition.graph
    resident = sum(partition.layers[layer].num_bytes for layer in resident_layers(partition, modes))
    copies, gradients, away = _held_by_transfers(schedule, script, partition, ahead)
    other = sum(graph.num_bytes(v) for v in (*graph.batch, *graph.constants, *partition.prelude_outputs))
    peak_parameters = peak_held = peak_total = resident
    cotangents: dict[int, int] = {}
    kept: collections.deque[int] = collections.deque(maxlen=num_kept)
    for place, event in enumerate(script):
        segment = partition.segments[event.segment]
        if event.kind is not Kind.BACKWARD:
            other += sum(graph.num_bytes(v) for v in (*segment.outputs, *segment.extras))
        if event.kind is Kind.FORWARD:
            other += derivatives[segment.program].saved_bytes
        added: set[int] = set()
        if event.kind is not Kind.FORWARD:
            added = {v for v in segment.inputs if v in cotangents}
            cotangents |= {v: graph.num_bytes(v) for v in segment.inputs}
        parameters = resident + copies[place]
        # While one cotangent is added to another there are both and their sum.
        backward = sum(cotangents.values()) + 2 * sum(map(graph.num_bytes, added)) + sum(kept)
        scalars = _SCALAR_BYTES * (place + 1)
        held = parameters + other - away[place] + gradients[place] + backward + scalars + other_bytes
        peak_parameters = max(peak_parameters, parameters)
        peak_held = max(peak_held, held)
        peak_total = max(peak_total, held + temporary_bytes.get(event.use, 0))
        other -= sum(graph.num_bytes(v) for v in event.frees)
        if event.kind is Kind.BACKWARD:
            other -= derivatives[segment.program].saved_bytes
            kept.append(sum(map(graph.num_bytes, added | (cotangents.keys() & set(segment.outputs)))))
            cotangents = {v: n for v, n in cotangents.items() if v not in segment.outputs}
    return Peak(peak_parameters, peak_held, peak_total)


def loads_ahead(
    schedule: Schedule, peak_of: Callable[[Sequence[int]], Peak], budget_bytes: int | None = None
) -> tuple[int, ...]:
    """The loads that a step may do before it is called, as soon as the updates of the step before let it.

    They are the leading ones, as many as fit: there are never more bytes of parameters than within one step, and no
    more bytes of all than the budget has.

    Args:
      schedule: the tasks of a step.
      peak_of: the most device memory that a step needs where these loads are done in the step before.
      budget_bytes: device memory; None for no limit.
    """
    leading, within = leading_loads(schedule), peak_of(())

    def takes_more(count: int) -> bool:
        peak = peak_of(leading[:count])
        return peak.parameters > within.parameters or (budget_bytes is not None and peak.total > budget_bytes)

    counts = range(1, len(leading) + 1)
    return leading[: bisect.bisect_right(counts, False, key=takes_more)]


def _held_by_transfers(
    schedule: Schedule, script: Sequence[Event], partition: Partition, ahead: Sequence[int] = ()
) -> tuple[list[int], list[int], list[int]]:
    """At each place of the script, the most bytes of copies of parameters, and of gradients, that there can be.

    A copy may be there as soon as the last program has ended that its load waits for. A gradient may be there until the
    first program that waits for its transfer, or for one behind it. Likewise for values: the third result is the bytes
    of those that are in host memory alone, however long the transfers take.

    The loads in `ahead` may be done in the step before, behind all that its link up has to do.
    """
    tasks, places, loss_place = schedule.tasks, programs_of(schedule), len(partition.segments) - 1
    moves, num_places = moves_of(schedule, script), len(script)
    layers = [partition.layers[segment.layer] for segment in partition.segments]
    last_program: list[int] = []
    before: dict[Lane, int] = {}
    last_use: dict[int, int] = {}
    first_waiter: dict[int, int] = {}
    for index, task in enumerate(tasks):
        waits = [*task.after, *([before[task.lane]] if task.lane in before else [])]
        before[task.lane] = index
        if task.lane is not Lane.GPU:
            last_program.append(max((last_program[earlier] for earlier in waits), default=-1))
            continue
        place = places.get(index, loss_place)
        last_program.append(place)
        for earlier in task.after:
            first_waiter.setdefault(earlier, place)
        if task.copy is not None:
            last_use[task.copy] = place
    copies, gradients, away = [0] * num_places, [0] * num_places, [0] * num_places
    for copy, last in last_use.items():
        for place in range(last_program[copy] + 1, last + 1):
            copies[place] += layers[tasks[copy].layer].num_bytes
    for copy in ahead:
        ended = [*tasks[copy].after_previous, *([before[Lane.H2D]] if Lane.H2D in before else [])]
        for place in range(max((last_program[earlier] for earlier in ended), default=-1) + 1, num_places):
            copies[place] += layers[tasks[copy].layer].num_bytes
    free_from = num_places
    away_from: dict[int, int] = {}
    for index in reversed([i for i, task in enumerate(tasks) if task.lane is Lane.D2H]):
        free_from = min(free_from, first_waiter.get(index, free_from))
        if tasks[index].kind is TaskKind.SAVE:
            away_from |= dict.fromkeys(script[moves[index]].saves, free_from)
            continue
        for place in range(last_program[index], free_from):
            gradients[place] += layers[tasks[index].layer].trained.num_bytes
    for index, backward in moves.items():
        for value in script[backward].fetches if tasks[index].kind is TaskKind.FETCH else ():
            for place in range(away_from[value], last_program[index] + 1):
                away[place] += partition.graph.num_bytes(value)
    return copies, gradients, away
