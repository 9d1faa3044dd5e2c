"""A recording of training steps: how it is made, its JSON file, and what its page states of it.

An example of `jaxferry.recording/1`:

    {"format": "jaxferry.recording/1", "model": "gpt2:tiny", "machine": {...}, "accumulate": 1,
     "memory_budget_bytes": null, "plan": {...}, "profile": {...},
     "tasks": [{"name": "load h_0", "kind": "load", "layer": "h_0", "lane": "H2D", "step": 7, "micro_batch": 0,
                "bytes": 793600, "start_s": 0.1, "end_s": 0.2}, ...],
     "device_bytes": {"parameters": [[0.0, 1024], ...], ...}, "host_bytes": {"master parameters": 4096, ...}}
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import importlib.metadata
import itertools
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from jaxferry.costs import Profile
from jaxferry.errors import InputError, StateError
from jaxferry.records import (
    MAX_SECONDS,
    Reader,
    check_bytes,
    check_choice,
    check_count,
    check_format,
    check_list,
    check_object,
    check_text,
    load_record,
    read_fields,
    write_json,
)
from jaxferry.step import (
    Bottleneck,
    Kind,
    Lane,
    Plan,
    Run,
    Task,
    device_bytes_by_kind,
    find_bottleneck,
    link_bytes,
    repeat,
    run,
    schedule_step,
    steady_step_s,
)

if TYPE_CHECKING:
    from jaxferry.engine import TrainState
    from jaxferry.training import Prepared, TrainStep


RECORDING_FORMAT = "jaxferry.recording/1"

STAGES = {
    "forward": (Kind.FORWARD, Kind.INTER_FORWARD),
    "backward": (Kind.BACKWARD, Kind.INTER_BACKWARD),
    "load": (Kind.LOAD, Kind.RELOAD, Kind.REFRESH, Kind.READ),
    "offload": (Kind.OFFLOAD, Kind.WRITE),
    "activations": (Kind.SAVE, Kind.FETCH),
    "update": (Kind.UPDATE,),
    "state": (Kind.STATE_UP, Kind.STATE_DOWN, Kind.STATE_READ, Kind.STATE_WRITE),
    "contention": (Kind.CONTENTION,),
}
"""Kinds of tasks by what they are for. Only predictions have reads, writes and contention."""

STAGE_OF = {kind: stage for stage, kinds in STAGES.items() for kind in kinds}
_AFTER_UPDATES = (Kind.REFRESH, *STAGES["state"])
_PREDICTED_STEPS = 4

Changes = tuple[tuple[float, int], ...]  # seconds, and bytes from then on


@dataclasses.dataclass(frozen=True)
class RecordedTask:
    """One task as it ran.

    Attributes:
      name: kind and layer, for display.
      layer: the name of the segment; for updates and refreshes, the name of the parameter group's first segment.
      step: the number of the training step.
      micro_batch: the step's number among the steps that share an update, counted from 0.
      num_bytes: bytes moved over the host link, by a transfer or by a program that uses host memory.
      start_s, end_s: seconds from the start of the first recorded step.
    """

    name: str
    kind: Kind
    layer: str
    lane: Lane
    step: int
    micro_batch: int
    num_bytes: int
    start_s: float
    end_s: float

    @classmethod
    def from_json(cls, document: Any, index: int) -> Self:
        """Reads one element of `tasks`; raises `InputError` for a missing or unknown key or a bad value."""
        where = f"tasks[{index}]"
        values = read_fields(document, _READERS, where)
        times = values["start_s"], values["end_s"]
        if not all(isinstance(time, int | float) and abs(time) <= MAX_SECONDS for time in times) or times[0] > times[1]:
            raise InputError(f"{where}: start_s and end_s must be seconds, the end not before the start, got {times}")
        return cls(*values.values())

    def to_json(self) -> dict[str, Any]:
        """Returns the task as an element of `tasks`."""
        return dict(zip(_READERS, vars(self).values(), strict=True))


_READERS: dict[str, Reader] = {
    "name": check_text,
    "kind": lambda value, key, where: Kind(check_choice(value, key, tuple(Kind), where)),
    "layer": check_text,
    "lane": lambda value, key, where: Lane(check_choice(value, key, tuple(Lane), where)),
    **dict.fromkeys(("step", "micro_batch", "bytes"), check_bytes),
    **dict.fromkeys(("start_s", "end_s"), lambda value, key, where: value),
}
"""How each key of a task is read, in the order of its fields."""


@dataclasses.dataclass(frozen=True)
class Recording:
    """Recorded training steps.

    Attributes:
      machine: facts about the machine, JSON values by name.
      memory_budget_bytes: device memory that the step may take; None for no limit.
      plan: the plan that ran.
      profile: the profile that the plan was made from; without times if the policy needs none.
      tasks: the tasks, step by step in dispatch order.
      device_bytes: by kind, (seconds, bytes from then on) for each change of device memory, as the schedule counts.
      host_bytes: host memory that training keeps, by what it is for.
    """

    model: str
    machine: Mapping[str, Any]
    accumulate: int
    memory_budget_bytes: int | None
    plan: Plan
    profile: Profile
    tasks: tuple[RecordedTask, ...]
    device_bytes: Mapping[str, Changes]
    host_bytes: Mapping[str, int]

    @classmethod
    def from_json(cls, document: Any) -> Self:
        """Reads `jaxferry.recording/1`; raises `InputError` for a missing or unknown key or a bad value."""
        fields = dict(check_format(document, RECORDING_FORMAT))
        del fields["format"]
        return cls(**read_fields(fields, _FIELDS, "recording"))

    def to_json(self) -> dict[str, Any]:
        """Returns the recording as `jaxferry.recording/1`."""
        records = {"plan": self.plan.to_json(), "profile": self.profile.to_json()}
        memory = {kind: [list(change) for change in changes] for kind, changes in self.device_bytes.items()}
        tasks = [task.to_json() for task in self.tasks]
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {"format": RECORDING_FORMAT, **own, **records, "tasks": tasks, "device_bytes": memory}

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Reads a recording from a file; errors name the file."""
        return load_record(path, cls.from_json)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the recording to a file."""
        write_json(path, self.to_json())

    @functools.cached_property
    def step_s(self) -> tuple[float, ...]:
        """Seconds from each step's last program to the next one's; for a single step, of its programs."""
        spans = _program_spans(self.tasks)
        if len(spans) > 1:
            return tuple(after - before for (_, before), (_, after) in itertools.pairwise(spans))
        [(begin, end)] = spans
        return (end - begin,)

    @property
    def measured_s(self) -> float:
        """The median step."""
        return statistics.median(self.step_s)

    @functools.cached_property
    def predicted(self) -> tuple[RecordedTask, ...]:
        """The tasks of some predicted steps; empty if the profile has no times."""
        profile, plan = self.profile, self.plan
        if not profile.has_times:
            return ()
        ran = run(repeat(schedule_step(profile, plan), _PREDICTED_STEPS))
        return _tasks_of(ran, profile, lambda task, batch: link_bytes(profile.layers[task.segment], task))

    @functools.cached_property
    def predicted_s(self) -> float | None:
        """The predicted seconds a step in the steady state; None if the profile has no times."""
        profile, plan = self.profile, self.plan
        return steady_step_s(schedule_step(profile, plan)) if profile.has_times else None

    @functools.cached_property
    def bottleneck(self) -> Bottleneck:
        """What limits the recorded steps."""
        tasks = self.tasks
        span_s = max(task.end_s for task in tasks) - min(task.start_s for task in tasks)
        busy_s = dict.fromkeys(Lane, 0.0)
        for task in tasks:
            busy_s[task.lane] += task.end_s - task.start_s
        busy_share = {lane: min(seconds / span_s, 1.0) if span_s > 0 else 0.0 for lane, seconds in busy_s.items()}
        return find_bottleneck(busy_share, self.plan.details, self.predicted_s or self.measured_s)

    @property
    def sentence(self) -> str:
        """Names what limits the recorded steps."""
        return f"The bottleneck is the {self.bottleneck.noun}: {self.bottleneck.reason}."

    def seconds_by_stage(self) -> dict[tuple[str, int], float]:
        """Returns the mean seconds of work a step, by stage and micro-batch."""
        found: dict[tuple[str, int], float] = collections.defaultdict(float)
        steps: dict[int, set[int]] = collections.defaultdict(set)
        for task in self.tasks:
            found[STAGE_OF[task.kind], task.micro_batch] += task.end_s - task.start_s
            steps[task.micro_batch].add(task.step)
        return {key: seconds / len(steps[key[1]]) for key, seconds in found.items()}

    def bytes_by_link(self) -> dict[tuple[Lane, str], float]:
        """Returns the mean bytes a step over the host link, by lane and stage."""
        found: dict[tuple[Lane, str], float] = collections.defaultdict(float)
        num_steps = len({task.step for task in self.tasks})
        for task in self.tasks:
            if task.num_bytes:
                found[task.lane, STAGE_OF[task.kind]] += task.num_bytes / num_steps
        return dict(found)

    def bytes_over_time(self, lane: Lane, num_bins: int) -> np.ndarray:
        """Returns the bytes that a lane moves in each of `num_bins` equal parts of the time, evenly over each task."""
        edges = np.linspace(0.0, max(task.end_s for task in self.tasks), num_bins + 1)
        edges[[0, -1]] = -np.inf, np.inf
        moved = np.zeros(num_bins)
        for task in self.tasks:
            if task.lane is lane and task.num_bytes:
                moved += task.num_bytes * np.diff(np.interp(edges, (task.start_s, task.end_s), (0.0, 1.0)))
        return moved

    def speed(self, lane: Lane) -> float | None:
        """Returns the bytes a second while tasks of a lane move any; None if none of them takes time."""
        tasks = [task for task in self.tasks if task.lane is lane and task.num_bytes]
        seconds = sum(task.end_s - task.start_s for task in tasks)
        return sum(task.num_bytes for task in tasks) / seconds if seconds > 0 else None


def _read_changes(document: Any, *_: str) -> dict[str, Changes]:
    try:
        found = {
            kind: tuple((float(time_s), check_bytes(num_bytes, kind, "device_bytes")) for time_s, num_bytes in changes)
            for kind, changes in document.items()
        }
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise InputError(f"device_bytes must hold pairs of seconds and bytes by kind: {error}") from error
    if not all(changes and all(abs(time_s) <= MAX_SECONDS for time_s, _ in changes) for changes in found.values()):
        raise InputError("device_bytes must hold one or more pairs of seconds and bytes by kind")
    return found


_FIELDS: dict[str, Reader] = {
    "model": check_text,
    "machine": check_object,
    "accumulate": check_count,
    "memory_budget_bytes": lambda value, *where: None if value is None else check_bytes(value, *where),
    "plan": lambda value, *_: Plan.from_json(value),
    "profile": lambda value, *_: Profile.from_json(value),
    "tasks": lambda value, *_: tuple(
        map(RecordedTask.from_json, check_list(value, "tasks", "task"), itertools.count())
    ),
    "device_bytes": _read_changes,
    "host_bytes": lambda value, *where: {
        name: check_bytes(size, name, "host_bytes") for name, size in check_object(value, *where).items()
    },
}


def make_recording(
    step: TrainStep,
    state: TrainState,
    prepared: Prepared,
    *,
    model: str = "model",
    machine: Mapping[str, Any] | None = None,
) -> Recording:
    """Makes a recording of the last steps, which `step.recorded()` returns. Waits for them to end.

    The step was made with `record_steps`; `state` is the state after its last step, and `prepared` the step that ran:
    `step.prepare(batch)`. `machine` has facts, by default the device's name and JAX's version. Raises `StateError` if
    no step was recorded.
    """
    state.block_until_ready()
    ran = step.recorded()
    if ran is None:
        raise StateError("there is nothing to record: train_step needs record_steps=, and at least one step must end")
    profile, accumulate = prepared.profile, step.options.numerics.accumulate
    moved = functools.partial(_moved_bytes, prepared, accumulate)
    return Recording(
        model=model,
        machine=machine or {"name": step.device_kind, "jax": importlib.metadata.version("jax")},
        accumulate=accumulate,
        memory_budget_bytes=step.options.planning.memory_budget_bytes,
        plan=prepared.plan,
        profile=profile,
        tasks=_tasks_of(ran, profile, moved, state.step - ran.schedule.steps, accumulate),
        device_bytes=device_bytes_by_kind(ran, profile, prepared.plan),
        host_bytes=step.compiler.model.host_bytes_of(prepared),
    )


def _tasks_of(
    ran: Run, profile: Profile, moved: Callable[[Task, int], int], first: int = 0, accumulate: int = 1
) -> tuple[RecordedTask, ...]:
    """Returns the tasks of steps from number `first` on; `moved` returns a task's bytes in a micro-batch."""
    tasks = []
    for task, start_s, end_s in zip(ran.schedule.tasks, ran.starts_s, ran.ends_s, strict=True):
        layer, number = profile.layers[task.segment].name, first + task.step
        batch = number % accumulate
        size = moved(task, batch)
        tasks.append(RecordedTask(task.name, task.kind, layer, task.lane, number, batch, size, start_s, end_s))
    return tuple(tasks)


def _moved_bytes(prepared: Prepared, accumulate: int, task: Task, batch: int) -> int:
    """Returns a task's bytes on the host link; of a lookup's gradient only the rows leave the device.

    Before the last micro-batch, sums stay on the device, and nothing is updated. After the first one, copies that stay
    are not loaded again.
    """
    layer, group = prepared.profile.layers[task.segment], prepared.partition.uses[task.segment].group
    stays = task.kind is Kind.OFFLOAD and group in prepared.program.summed
    if batch < accumulate - 1 and (task.kind in _AFTER_UPDATES or stays):
        return 0
    if group in prepared.program.kept and (task.kind is Kind.RELOAD or (task.kind is Kind.LOAD and batch)):
        return 0
    has_rows = task.kind is Kind.OFFLOAD and layer.gradient_rows
    return layer.device_gradient_bytes if has_rows else link_bytes(layer, task)


class Window(NamedTuple):
    """The tasks that run during one step, including tasks of the neighbouring steps.

    It lasts from the end of the last program of the step before to that of its own; without such steps, from the first
    task's start, to the last one's end.
    """

    begin_s: float
    end_s: float
    tasks: tuple[RecordedTask, ...]


def window(tasks: Sequence[RecordedTask]) -> Window:
    """Returns the last step that has one before and one after it; of fewer than three steps, the last one alone."""
    spans, last = _program_spans(tasks), max(task.step for task in tasks)
    if len(spans) >= 3:
        begin_s, end_s = spans[-3][1], spans[-2][1]
        inside = tuple(task for task in tasks if task.start_s < end_s and task.end_s > begin_s)
    else:
        inside = tuple(task for task in tasks if task.step == last)
        begin_s, end_s = min(task.start_s for task in inside), max(task.end_s for task in inside)
    return Window(begin_s, end_s, inside)


def _program_spans(tasks: Sequence[RecordedTask]) -> list[tuple[float, float]]:
    """Returns the start of the first and the end of the last program of each step, in order."""
    spans: dict[int, tuple[float, float]] = {}
    for task in tasks:
        if task.lane is Lane.GPU:
            start_s, end_s = spans.get(task.step, (task.start_s, task.end_s))
            spans[task.step] = min(start_s, task.start_s), max(end_s, task.end_s)
    return [spans[step] for step in sorted(spans)]
