"""The machine: runs a list of tasks on four lanes, exactly and without fitted constants, once or for ever.

A task starts once its lane is free and all its dependencies have ended. Lanes follow the order of the list, except the
host with updates by need (`Schedule.updates_by_need`).

The period of an endless chain of one step is found in time and memory that grow with the tasks, not with their square.

The next step waits for each lane's last task, for updates and for refreshes, here the **boundary**. A max-plus linear
map yields the ends of the boundary's tasks from those of the previous step. The period of the map's powers is its
largest cycle mean: the longest way from a task to itself some steps later, divided by the number of these steps.

The search has a mean of some cycle, and a potential for each task of the boundary. One step from these potentials gives
the longest way to each task. If no way is longer than the difference of potentials plus the mean, no cycle has a larger
mean. Otherwise the potentials rise (Bellman and Ford), until they prove the mean or the ways that raised them form a
cycle with a larger one.

With updates by need the map is not linear. The period is then measured, see `STEPS_BY_NEED`.
"""

import dataclasses
import functools
import heapq
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from jaxferry.step.shared_work import with_shared_work
from jaxferry.step.tasks import (
    Kind,
    Lane,
    Run,
    Schedule,
    Task,
    dispatch_order,
    in_one_period,
    waits_in_one_period,
)

_LANES = {lane: number for number, lane in enumerate(Lane)}
_HOST = _LANES[Lane.HOST]


class Chain:
    """An endless chain of one step's tasks, run step by step, so that memory does not grow with the steps.

    With updates by need, the host chooses at each instant after all other lanes, once all tasks that end at that
    instant have ended. All updates of a step are due before any of the next step, whose forwards wait for them. So the
    updates of one step are ordered once all of them are known.

    Args:
      step: the tasks.
    """

    def __init__(self, step: Schedule):
        self.tasks, self.by_need = step.tasks, step.updates_by_need
        size = len(step.tasks)
        self.order, self.with_previous = dispatch_order(step.tasks), dispatch_order(step.tasks, size)
        self.is_late = [task.before is not None and task.before >= size for task in step.tasks]
        self.lanes = [_LANES[task.lane] for task in step.tasks]
        self.durations_s = [task.duration_s for task in step.tasks]
        self.free = [0.0] * len(_LANES)
        self.starts: list[float] = []
        self.ends: list[float] = []
        self.earlier: tuple[list[float], list[float]] = [], []
        self.latest_due = 0.0

    def run_step(self) -> tuple[list[float], list[float]]:
        """Runs the next step; returns when each task starts and ends, in seconds from the first step's start.

        Tasks that the step leaves to the next one run there; `finish` runs those of the last step.
        """
        self.earlier = self.starts, self.ends
        self.starts, self.ends = [0.0] * len(self.tasks), [0.0] * len(self.tasks)
        waiting: dict[int, float] = {}
        for index in self.with_previous if self.earlier[1] else self.order:
            if not self.is_late[index]:
                self._run(index, waiting)
            elif self.earlier[1]:
                self._run_late(index, *self.earlier)
        self._run_updates(waiting)
        return self.starts, self.ends

    def finish(self) -> None:
        """Runs what the last step leaves to a next one; the lists that `run_step` has returned hold the times."""
        for index in self.order:
            if self.is_late[index]:
                self._run_late(index, self.starts, self.ends)

    def _run(self, index: int, waiting: dict[int, float]) -> None:
        """Runs a task, or adds it to the updates by need that wait."""
        task, lane, ends, before = self.tasks[index], self.lanes[index], self.ends, self.earlier[1]
        by_need = self.by_need and task.kind is Kind.UPDATE and lane == _HOST
        if waiting and lane == _HOST and not by_need:
            self._run_updates(waiting)
        start = 0.0 if by_need else self.free[lane]
        for other in task.after:
            if other in waiting:
                self._run_updates(waiting)
            start = max(start, ends[other])
        if before:
            for other in task.after_previous:
                start = max(start, before[other])
        if by_need:
            waiting[index] = start
        else:
            self.starts[index], ends[index] = start, start + self.durations_s[index]
            self.free[lane] = ends[index]

    def _run_late(self, index: int, starts: list[float], ends: list[float]) -> None:
        """Runs a task that its step, with these times, leaves to the next one."""
        lane = self.lanes[index]
        starts[index] = max([self.free[lane], *(ends[other] for other in self.tasks[index].after)])
        self.free[lane] = ends[index] = starts[index] + self.durations_s[index]

    def _run_updates(self, waiting: dict[int, float]) -> None:
        """Runs updates by need; `waiting` maps them to the time at which they are due, and is emptied."""
        assert min(waiting.values(), default=self.latest_due) >= self.latest_due
        self.latest_due = max(waiting.values(), default=self.latest_due)
        by_time = sorted(waiting, key=waiting.__getitem__, reverse=True)
        could_start: list[tuple[tuple[int, int], int]] = []
        now = self.free[_HOST]
        while by_time or could_start:
            if not could_start:
                now = max(now, waiting[by_time[-1]])
            while by_time and waiting[by_time[-1]] <= now:
                index = by_time.pop()
                heapq.heappush(could_start, (self.tasks[index].need, index))
            index = heapq.heappop(could_start)[1]
            self.starts[index], now = now, now + self.durations_s[index]
            self.ends[index] = now
        self.free[_HOST] = now
        waiting.clear()


STEPS_BY_NEED = (8, 24)
"""With updates by need, the steady step is the mean time between these steps of a chain."""

_SAME = 1e-12
_ROUNDING = 1e-14


def steady_step_s(step: Schedule) -> float:
    """Seconds a step in an endless chain of this step; exact for any transient, without updates by need."""
    return SteadyStep(step).seconds(step.updates_by_need)


class SteadyStep:
    """An endless chain of one step, with either order of updates."""

    def __init__(self, step: Schedule):
        self.step = with_shared_work(step)

    @functools.cached_property
    def _search(self) -> "_Search":
        return _Search(self.step)

    def seconds(self, by_need: bool) -> float:
        """`steady_step_s` if the host's updates are by need, or not."""
        if by_need:
            return _measured_s(dataclasses.replace(in_one_period(self.step), updates_by_need=True))
        return self._search.largest_mean_s

    @property
    def least_s(self) -> float:
        """The work of the lane that has the most: no order of updates is faster."""
        return self._search.least_s

    def critical(self) -> tuple[list[Task], int]:
        """The tasks of a cycle that sets the period, with updates in backward order, and the steps that it takes."""
        return self._search.critical()


def _boundary(earlier: Iterable[tuple[int, ...]], lanes: Sequence[Lane]) -> list[int]:
    """The tasks that the next step waits for, in ascending order, from all waits for the previous step."""
    last = {lane: index for index, lane in enumerate(lanes)}
    return sorted({index for waits in earlier for index in waits} | set(last.values()))


def _measured_s(step: Schedule) -> float:
    """The mean of `STEPS_BY_NEED`; or the growth of a step once all times of the boundary grow equally."""
    first, last = STEPS_BY_NEED
    lanes, chain = [task.lane for task in step.tasks], Chain(step)
    boundary = _boundary((task.after_previous for task in step.tasks), lanes)
    gpu = max(index for index, lane in enumerate(lanes) if lane is Lane.GPU)
    ends: list[float] = []
    before: list[float] = []
    for _ in range(last):
        now = chain.run_step()[1]
        ends.append(now[gpu])
        growth = [now[index] - before[index] for index in boundary] if before else []
        if growth and max(growth) - min(growth) <= _SAME * ends[-1]:
            return now[gpu] - before[gpu]
        before = now
    return (ends[last - 1] - ends[first - 1]) / (last - first)


class _Search:
    """The largest cycle mean of a step's map."""

    def __init__(self, step: Schedule):
        order, after, earlier = waits_in_one_period(step)
        self.tasks = [step.tasks[index] for index in order]
        lanes = [task.lane for task in self.tasks]
        last = {lane: index for index, lane in enumerate(lanes)}
        self.boundary = _boundary(earlier, lanes)
        self.potentials = dict.fromkeys(self.boundary, 0.0)
        self.durations_s = [task.duration_s for task in self.tasks]
        self.waits: list[tuple[int, ...]] = []
        self.waits_previous = earlier
        latest: dict[Lane, int] = {}
        totals = dict.fromkeys(Lane, 0.0)
        for index, (lane, waits, seconds) in enumerate(zip(lanes, after, self.durations_s, strict=True)):
            if lane in latest:
                self.waits.append((*waits, latest[lane]))
            else:
                self.waits.append(waits)
                earlier[index] = (*earlier[index], last[lane])
            latest[lane] = index
            totals[lane] += seconds
        self.least_s = self.mean_s = max(totals.values())

    @functools.cached_property
    def largest_mean_s(self) -> float:
        """Seconds a step."""
        potentials = self.potentials
        come_from: dict[int, tuple[int, float]] = {}
        while True:
            raised = self._longer_ways(potentials)
            for index, (value, origin, length_s) in raised.items():
                potentials[index] = value
                come_from[index] = (origin, length_s)
            mean_s = _largest_mean_s(come_from)
            if not raised or (mean_s is not None and mean_s <= self.mean_s):
                return self.mean_s
            if mean_s is not None:
                self.mean_s, come_from = mean_s, {}

    def critical(self) -> tuple[list[Task], int]:
        """The tasks of a cycle with the largest mean, and its number of steps."""
        _ = self.largest_mean_s
        size = len(self.durations_s)
        values, came_from = [0.0] * size, [(-1, False)] * size
        potentials = self.potentials
        for index, duration_s in enumerate(self.durations_s):
            best = -float("inf")
            for other in self.waits[index]:
                if values[other] > best:
                    best, came_from[index] = values[other], (other, False)
            for other in self.waits_previous[index]:
                if potentials[other] > best:
                    best, came_from[index] = potentials[other], (other, True)
            values[index] = best + duration_s
        start = max(self.boundary, key=lambda index: values[index] - potentials[index])
        way, at, begins = [start], start, {start: 0}
        while True:
            at, is_earlier = came_from[at]
            if is_earlier and at in begins:
                num_steps = 1 + sum(place > begins[at] for place in begins.values())
                return [self.tasks[index] for index in way[begins[at] :]], num_steps
            if is_earlier:
                begins[at] = len(way)
            way.append(at)

    def _longer_ways(self, potentials: Mapping[int, float]) -> dict[int, tuple[float, int, float]]:
        """For each task whose potential rises: the new one, the task where the longest way begins, and its seconds."""
        size = len(self.durations_s)
        values, lengths, origins = [0.0] * size, [0.0] * size, [0] * size
        for index, duration_s in enumerate(self.durations_s):
            best, length, origin = -float("inf"), 0.0, -1
            for other in self.waits[index]:
                if values[other] > best:
                    best, length, origin = values[other], lengths[other], origins[other]
            for other in self.waits_previous[index]:
                if potentials[other] > best:
                    best, length, origin = potentials[other], 0.0, other
            values[index], lengths[index], origins[index] = best + duration_s, length + duration_s, origin
        least_rise = _ROUNDING * size**0.5 * max(map(abs, values))
        return {
            index: (values[index] - self.mean_s, origins[index], lengths[index])
            for index in self.boundary
            if values[index] - self.mean_s > potentials[index] + least_rise
        }


def _largest_mean_s(come_from: Mapping[int, tuple[int, float]]) -> float | None:
    """The largest mean of the cycles among ways, given by their last task as (first task, seconds); None if none."""
    seen: dict[int, int] = {}
    found: list[float] = []
    for number, start in enumerate(come_from):
        task = start
        while task in come_from and task not in seen:
            seen[task] = number
            task = come_from[task][0]
        if seen.get(task) == number and task in come_from:
            lengths, at = [come_from[task][1]], come_from[task][0]
            while at != task:
                lengths.append(come_from[at][1])
                at = come_from[at][0]
            found.append(sum(lengths) / len(lengths))
    return max(found, default=None)


_UPDATES = (Kind.UPDATE, Kind.STATE_DOWN)


def run(schedule: Schedule) -> Run:
    """Runs all tasks, and those that `shared_work` adds."""
    schedule = with_shared_work(schedule)
    chain = Chain(schedule)
    starts, ends = chain.run_step()
    chain.finish()
    return Run(schedule, tuple(starts), tuple(ends))


def forward_s(of: Run) -> float:
    """Seconds to the end of the first step's last forward or inter_forward."""
    return max(_ends(of, (Kind.FORWARD, Kind.INTER_FORWARD)))


def step_s(of: Run) -> float:
    """Seconds to the end of the first step's last update; one that streams ends with the state in host memory."""
    return max(_ends(of, _UPDATES))


def _ends(of: Run, kinds: tuple[Kind, ...]) -> list[float]:
    return [
        end for task, end in zip(of.schedule.tasks, of.ends_s, strict=True) if task.kind in kinds and task.step == 0
    ]


def device_bytes(of: Run) -> list[tuple[float, int]]:
    """Device memory over time, see `bytes_over_time`."""
    return device_bytes_of_steps(of.schedule, [(of.starts_s, of.ends_s)])


def device_bytes_of_steps(
    schedule: Schedule, steps: Sequence[tuple[Sequence[float], Sequence[float]]]
) -> list[tuple[float, int]]:
    """Likewise, for tasks that run several times.

    Args:
      schedule: the tasks of one step, or of a chain of steps.
      steps: when the tasks start and end, for each time that they run.
    """
    own = [task.start_bytes + task.workspace_bytes for task in schedule.tasks]
    back = [task.end_bytes + task.workspace_bytes for task in schedule.tasks]
    moments = np.concatenate([np.concatenate(step) for step in steps])
    changes = np.tile(np.array([*own, *(-num_bytes for num_bytes in back)], dtype=np.int64), len(steps))
    return bytes_over_time(schedule.resident_bytes, moments, changes)


def bytes_over_time(first: int, moments: np.ndarray, changes: np.ndarray) -> list[tuple[float, int]]:
    """Adds changes of memory up, from the bytes at first: (seconds, bytes from then on), one entry for each moment.

    Memory that is freed at an instant serves an allocation at the same instant.
    """
    moments, changes = moments[changes != 0], changes[changes != 0]
    times, number = np.unique(moments, return_inverse=True)
    total = np.zeros(len(times), dtype=np.int64)
    np.add.at(total, number, changes)
    return [(0.0, first), *zip(times.tolist(), (first + np.cumsum(total)).tolist(), strict=True)]


def critical_path(of: Run, kinds: tuple[Kind, ...] | None = None) -> list[int]:
    """Indices of the tasks, first to last, that determine the end of the first step's last update.

    Each one starts when its predecessor ends; the first starts at 0.

    Args:
      of: the run.
      kinds: the kinds of task whose last end counts; None for updates.
    """
    kinds = kinds or _UPDATES
    tasks = of.schedule.tasks
    before: dict[int, int | None] = {}
    last: dict[Lane, int] = {}
    # Follow the order in which a lane ran its tasks. With updates by need it can differ from that of the list.
    for index in sorted(range(len(tasks)), key=lambda index: (of.starts_s[index], of.ends_s[index], index)):
        before[index] = last.get(tasks[index].lane)
        last[tasks[index].lane] = index
    ending = [index for index, task in enumerate(tasks) if task.kind in kinds and task.step == 0]
    current = max(ending, key=lambda index: of.ends_s[index])
    path = [current]
    while of.starts_s[current] > 0:
        lane_before = before[current]
        candidates = (*tasks[current].after, *(() if lane_before is None else (lane_before,)))
        current = next(index for index in candidates if of.ends_s[index] == of.starts_s[current])
        path.append(current)
    return path[::-1]
