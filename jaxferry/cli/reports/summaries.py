"""Sums and windows of a recording: what its page states."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import statistics
from collections.abc import Sequence

from jaxferry.cli.recording import RecordedTask, Recording
from jaxferry.step.bottleneck import Bottleneck, find_bottleneck
from jaxferry.step.schedule import Kind, Lane, repeat, schedule_step
from jaxferry.step.simulate.machine import run, steady_step_s
from jaxferry.step.simulate.report import link_bytes

STAGES = {
    "forward": (Kind.FORWARD, Kind.INTER_FORWARD),
    "backward": (Kind.BACKWARD, Kind.INTER_BACKWARD),
    "load": (Kind.LOAD, Kind.RELOAD, Kind.REFRESH, Kind.READ),
    "offload": (Kind.OFFLOAD, Kind.WRITE),
    "activations": (Kind.SAVE, Kind.FETCH),
    "update": (Kind.UPDATE,),
    "state": (Kind.STATE_UP, Kind.STATE_DOWN),
}
"""Kinds of tasks by what they are for; also the classes of their colours. Predictions alone have reads and writes."""

STAGE_OF = {kind: stage for stage, kinds in STAGES.items() for kind in kinds}
_PREDICTED_STEPS = 4


@dataclasses.dataclass(frozen=True)
class Window:
    """The tasks that run in one step, those of its neighbours included.

    Attributes:
      begin_s: the end of the last program of the step before; the first task's start if no step surrounds it.
      end_s: the end of its own last program; the last task's end if no step follows.
      tasks: what runs meanwhile.
    """

    begin_s: float
    end_s: float
    tasks: tuple[RecordedTask, ...]


class Summary:
    """A recording, and the prediction for the same plan under the machine model.

    Args:
      recording: at least one step.
    """

    def __init__(self, recording: Recording) -> None:
        self.recording = recording

    @functools.cached_property
    def step_s(self) -> tuple[float, ...]:
        """Seconds from each step's last program to the next one's; of a single step, of its programs."""
        ends = [end for _, end in _program_spans(self.recording.tasks)]
        if len(ends) > 1:
            return tuple(after - before for before, after in itertools.pairwise(ends))
        [(begin, end)] = _program_spans(self.recording.tasks)
        return (end - begin,)

    @property
    def measured_s(self) -> float:
        """The median step."""
        return statistics.median(self.step_s)

    @functools.cached_property
    def predicted(self) -> tuple[RecordedTask, ...]:
        """The tasks of some predicted steps; none if the profile has no times."""
        profile, plan = self.recording.profile, self.recording.plan
        if not profile.has_times:
            return ()
        of = run(repeat(schedule_step(profile, plan), _PREDICTED_STEPS))
        return tuple(
            RecordedTask(
                name=task.name,
                kind=task.kind,
                layer=profile.layers[task.segment].name,
                lane=task.lane,
                step=task.step,
                micro_batch=0,
                num_bytes=link_bytes(profile.layers[task.segment], task),
                start_s=start_s,
                end_s=end_s,
            )
            for task, start_s, end_s in zip(of.schedule.tasks, of.starts_s, of.ends_s, strict=True)
        )

    @functools.cached_property
    def predicted_s(self) -> float | None:
        """The predicted seconds a step in the steady state; None if the profile has no times."""
        profile, plan = self.recording.profile, self.recording.plan
        return steady_step_s(schedule_step(profile, plan)) if profile.has_times else None

    @functools.cached_property
    def busy_share(self) -> dict[Lane, float]:
        """The share of the recorded time in which each lane works."""
        tasks = self.recording.tasks
        span_s = max(task.end_s for task in tasks) - min(task.start_s for task in tasks)
        busy_s = dict.fromkeys(Lane, 0.0)
        for task in tasks:
            busy_s[task.lane] += task.end_s - task.start_s
        return {lane: min(seconds / span_s, 1.0) if span_s > 0 else 0.0 for lane, seconds in busy_s.items()}

    @functools.cached_property
    def bottleneck(self) -> Bottleneck:
        """What limits the recorded steps."""
        return find_bottleneck(self.busy_share, self.recording.plan.details, self.predicted_s or self.measured_s)


def window(tasks: Sequence[RecordedTask]) -> Window:
    """The last step that has one before and one after it; of fewer than three steps, the last one by itself."""
    spans, last = _program_spans(tasks), max(task.step for task in tasks)
    if len(spans) >= 3:
        begin_s, end_s = spans[-3][1], spans[-2][1]
        inside = tuple(task for task in tasks if task.start_s < end_s and task.end_s > begin_s)
    else:
        inside = tuple(task for task in tasks if task.step == last)
        begin_s, end_s = min(task.start_s for task in inside), max(task.end_s for task in inside)
    return Window(begin_s, end_s, inside)


def _program_spans(tasks: Sequence[RecordedTask]) -> list[tuple[float, float]]:
    """Start of the first and end of the last program of each step, in order."""
    spans: dict[int, tuple[float, float]] = {}
    for task in tasks:
        if task.lane is Lane.GPU:
            start_s, end_s = spans.get(task.step, (task.start_s, task.end_s))
            spans[task.step] = min(start_s, task.start_s), max(end_s, task.end_s)
    return [spans[step] for step in sorted(spans)]


def seconds_by_stage(recording: Recording) -> dict[tuple[str, int], float]:
    """Mean seconds of work a step, by stage and micro-batch."""
    found: dict[tuple[str, int], float] = collections.defaultdict(float)
    steps: dict[int, set[int]] = collections.defaultdict(set)
    for task in recording.tasks:
        found[STAGE_OF[task.kind], task.micro_batch] += task.end_s - task.start_s
        steps[task.micro_batch].add(task.step)
    return {key: seconds / len(steps[key[1]]) for key, seconds in found.items()}


def bytes_by_link(recording: Recording) -> dict[tuple[Lane, str], float]:
    """Mean bytes a step over the host link, by lane and stage."""
    found: dict[tuple[Lane, str], float] = collections.defaultdict(float)
    num_steps = len({task.step for task in recording.tasks})
    for task in recording.tasks:
        if task.num_bytes:
            found[task.lane, STAGE_OF[task.kind]] += task.num_bytes / num_steps
    return dict(found)


def bytes_over_time(recording: Recording, lane: Lane, num_bins: int) -> list[float]:
    """The bytes that a lane's tasks move in each of equal parts of the recorded time; a task moves them evenly."""
    end = max(task.end_s for task in recording.tasks)
    moved = [0.0] * num_bins
    for task in (task for task in recording.tasks if task.lane is lane and task.num_bytes):
        _spread(moved, task, end)
    return moved


def _spread(moved: list[float], task: RecordedTask, end: float) -> None:
    """Adds a transfer's bytes to the bins of time that it covers, evenly."""
    width = end / len(moved) or 1.0
    first, last = (min(max(int(time / width), 0), len(moved) - 1) for time in (task.start_s, task.end_s))
    for number in range(first, last + 1):
        covered = min(task.end_s, (number + 1) * width) - max(task.start_s, number * width)
        share = covered / (task.end_s - task.start_s) if task.end_s > task.start_s else 1.0 / (last - first + 1)
        moved[number] += task.num_bytes * max(share, 0.0)


def speed(recording: Recording, lane: Lane) -> float | None:
    """Bytes a second while tasks of a lane move any; None if none of them takes time."""
    tasks = [task for task in recording.tasks if task.lane is lane and task.num_bytes]
    seconds = sum(task.end_s - task.start_s for task in tasks)
    return sum(task.num_bytes for task in tasks) / seconds if seconds > 0 else None
