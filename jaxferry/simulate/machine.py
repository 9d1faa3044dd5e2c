"""The machine: runs a list of tasks on four lanes, exactly and without fitted constants.

A task starts once its lane is free and all its dependencies have ended. Lanes follow the order of the list, except the
host with updates by need (`Schedule.updates_by_need`).
"""

import heapq
from collections.abc import Sequence

import numpy as np

from jaxferry.tasks import Kind, Lane, Run, Schedule, Task, repeat

STEPS_BY_NEED = (8, 24)
"""With updates by need, the steady step is the mean time between these steps of a chain."""


def run(schedule: Schedule) -> Run:
    """Runs all tasks."""
    return _run_by_need(schedule) if schedule.updates_by_need else _run_in_order(schedule)


def _run_in_order(schedule: Schedule) -> Run:
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


def _run_by_need(schedule: Schedule) -> Run:
    """Runs event by event: the next update depends on which ones could start once the host is free.

    At each instant the host chooses after all other lanes, once all tasks that end at that instant have ended.
    """
    tasks = schedule.tasks
    waiting, missing = _dependencies(tasks)
    queues: dict[Lane, list[int]] = {lane: [] for lane in Lane}
    for index, task in enumerate(tasks):
        if not missing[index]:
            queues[task.lane].append(index)
    starts, ends = [0.0] * len(tasks), [0.0] * len(tasks)
    is_free = dict.fromkeys(Lane, True)
    events: list[tuple[float, int]] = []
    by_need: list[tuple[tuple[int, int], int]] = [(tasks[i].need, i) for i in queues[Lane.HOST]]
    now = 0.0
    while True:
        for lane in Lane:
            queue: list = by_need if lane is Lane.HOST else queues[lane]
            if lane is Lane.HOST and events and events[0][0] == now:
                continue
            if is_free[lane] and queue:
                index = heapq.heappop(queue)[1] if lane is Lane.HOST else heapq.heappop(queue)
                starts[index], ends[index], is_free[lane] = now, now + tasks[index].duration_s, False
                heapq.heappush(events, (ends[index], index))
        if not events:
            return Run(schedule, tuple(starts), tuple(ends))
        now = events[0][0]
        while events and events[0][0] == now:
            done = heapq.heappop(events)[1]
            is_free[tasks[done].lane] = True
            for later in waiting[done]:
                missing[later] -= 1
                if missing[later] == 0 and tasks[later].lane is Lane.HOST:
                    heapq.heappush(by_need, (tasks[later].need, later))
                elif missing[later] == 0:
                    heapq.heappush(queues[tasks[later].lane], later)


def _dependencies(tasks: Sequence[Task]) -> tuple[list[list[int]], list[int]]:
    """For each task the tasks that wait for it, and the number of tasks that it waits for, its lane's order included.

    The host's lane has no order.
    """
    waiting: list[list[int]] = [[] for _ in tasks]
    missing = [0] * len(tasks)
    before: dict[Lane, int] = {}
    for index, task in enumerate(tasks):
        after = set(task.after)
        if task.lane is not Lane.HOST and task.lane in before:
            after.add(before[task.lane])
        before[task.lane] = index
        missing[index] = len(after)
        for earlier in after:
            waiting[earlier].append(index)
    return waiting, missing


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
        changes.setdefault(start, [0, 0])[0] += task.start_bytes + task.workspace_bytes
        changes.setdefault(end, [0, 0])[1] -= task.end_bytes + task.workspace_bytes
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

    Each one starts when its predecessor ends; the first starts at 0.
    """
    tasks = of.schedule.tasks
    before: dict[int, int | None] = {}
    last: dict[Lane, int] = {}
    # Follow the order in which a lane ran its tasks. With updates by need it can differ from that of the list.
    for index in sorted(range(len(tasks)), key=lambda index: (of.starts_s[index], of.ends_s[index], index)):
        before[index] = last.get(tasks[index].lane)
        last[tasks[index].lane] = index
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

    The next step waits for each lane's last task, for updates and for refreshes. A max-plus linear map yields the ends
    of these tasks from those of the previous step. The period of the map's powers is its largest cycle mean. Karp's
    theorem gives it exactly, for any transient of the chain and any number of steps in its cycle.

    With updates by need the map is not linear. The period is then measured, see `STEPS_BY_NEED`.
    """
    if step.updates_by_need:
        first, last = STEPS_BY_NEED
        chain = run(repeat(step, last))
        ends = [0.0] * last
        for task, end in zip(chain.schedule.tasks, chain.ends_s, strict=True):
            if task.lane is Lane.GPU:
                ends[task.step] = max(ends[task.step], end)
        return (ends[last - 1] - ends[first - 1]) / (last - first)
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
