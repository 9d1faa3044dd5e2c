"""The machine: runs a list of tasks on four lanes, exactly and without fitted constants.

A task starts when its lane is free and everything that it waits for has ended; lanes work in the order of the list.
"""

import dataclasses

import numpy as np

from jaxferry.schedule import Kind, Lane, Schedule, Task


@dataclasses.dataclass(frozen=True)
class Run:
    """When each task of a schedule starts and ends, in seconds from the first step's start.

    Attributes:
      schedule: what ran.
      starts_s: start of each task.
      ends_s: end of each task.
    """

    schedule: Schedule
    starts_s: tuple[float, ...]
    ends_s: tuple[float, ...]


def run(schedule: Schedule) -> Run:
    """Runs all tasks."""
    free = dict.fromkeys(Lane, 0.0)
    starts: list[float] = []
    ends: list[float] = []
    for task in schedule.tasks:
        start = free[task.lane]
        for index in task.after:
            start = max(start, ends[index])
        starts.append(start)
        ends.append(start + task.duration_s)
        free[task.lane] = ends[-1]
    return Run(schedule, tuple(starts), tuple(ends))


def forward_s(of: Run) -> float:
    """Seconds to the end of the first step's last forward or inter_forward."""
    return max(_ends(of, (Kind.FORWARD, Kind.INTER_FORWARD)))


def step_s(of: Run) -> float:
    """Seconds to the end of the first step's last update."""
    return max(_ends(of, (Kind.UPDATE,)))


def _ends(of: Run, kinds: tuple[Kind, ...]) -> list[float]:
    return [
        end for task, end in zip(of.schedule.tasks, of.ends_s, strict=True) if task.kind in kinds and task.step == 0
    ]


def device_bytes(of: Run) -> list[tuple[float, int]]:
    """Device memory over time: (seconds, bytes from then on), one entry for each change.

    Memory that is freed at an instant serves an allocation at the same instant.
    """
    changes: dict[float, list[int]] = {}
    for task, start, end in zip(of.schedule.tasks, of.starts_s, of.ends_s, strict=True):
        changes.setdefault(start, [0, 0])[0] += task.start_bytes
        changes.setdefault(end, [0, 0])[1] -= task.end_bytes
    held = of.schedule.resident_bytes
    timeline = [(0.0, held)]
    for time in sorted(changes):
        allocated, freed = changes[time]
        if allocated or freed:
            held += allocated + freed
            timeline.append((time, held))
    return timeline


def critical_path(of: Run) -> list[int]:
    """Indices of the tasks, first to last, that determine the end of the first step's last update.

    Each starts the instant its predecessor ends, and the first one starts at 0.
    """
    tasks = of.schedule.tasks
    before: list[int | None] = []
    last: dict[Lane, int] = {}
    for task in tasks:
        before.append(last.get(task.lane))
        last[task.lane] = len(before) - 1
    updates = [index for index, task in enumerate(tasks) if task.kind is Kind.UPDATE and task.step == 0]
    current = max(updates, key=lambda index: of.ends_s[index])
    path = [current]
    while of.starts_s[current] > 0:
        lane_before = before[current]
        candidates = (*tasks[current].after, *(() if lane_before is None else (lane_before,)))
        current = next(index for index in candidates if of.ends_s[index] == of.starts_s[current])
        path.append(current)
    return path[::-1]


def steady_step_s(step: Schedule) -> float:
    """Seconds a step in an endless chain of this step.

    The ends of the tasks that the next step waits for (each lane's last task, updates, refreshes) follow from the same
    ends of the previous step by a max-plus linear map. The period of its powers is its largest cycle mean, which
    Karp's theorem gives exactly, whatever the transient of the chain and however many steps its cycle spans.
    """
    matrix = _boundary_matrix(step.tasks)
    size = len(matrix)
    walks = np.zeros((size + 1, size))
    for length in range(size):
        walks[length + 1] = (matrix + walks[length]).max(axis=1)
    lengths = np.arange(size, 0, -1)[:, None]
    with np.errstate(invalid="ignore"):
        means = (walks[size] - walks[:size]) / lengths
    means = np.where(np.isneginf(walks[:size]), np.inf, means).min(axis=0)
    return float(np.where(np.isneginf(walks[size]), -np.inf, means).max())


def _boundary_matrix(tasks: tuple[Task, ...]) -> np.ndarray:
    """Entry (i, j): the longest way from the end of boundary task j to the end of i one step later, -inf if none."""
    last = {task.lane: index for index, task in enumerate(tasks)}
    boundary = sorted({index for task in tasks for index in task.after_previous} | set(last.values()))
    column = {index: number for number, index in enumerate(boundary)}
    ends = np.full((len(tasks), len(boundary)), -np.inf)
    latest: dict[Lane, int] = {}
    for index, task in enumerate(tasks):
        start = ends[index]
        waits = task.after if task.lane not in latest else (*task.after, latest[task.lane])
        if waits:
            np.max(ends[list(waits)], axis=0, out=start)
        for previous in task.after_previous if task.lane in latest else (*task.after_previous, last[task.lane]):
            start[column[previous]] = max(start[column[previous]], 0.0)
        start += task.duration_s
        latest[task.lane] = index
    return ends[boundary]
