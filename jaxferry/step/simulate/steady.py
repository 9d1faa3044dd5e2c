"""The period of an endless chain of one step, in time and memory that grow with the tasks and not with their square.

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
from collections.abc import Mapping

from jaxferry.step.simulate.chain import Chain
from jaxferry.step.simulate.shared_work import with_shared_work
from jaxferry.step.tasks import Lane, Schedule, in_one_period

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
        self.step = in_one_period(with_shared_work(step))

    def seconds(self, by_need: bool) -> float:
        """`steady_step_s` if the host's updates are by need, or not."""
        if by_need:
            return _measured_s(dataclasses.replace(self.step, updates_by_need=True))
        return _Search(self.step).largest_mean_s()


def _boundary(step: Schedule) -> list[int]:
    """The tasks that the next step waits for, in ascending order."""
    last = {task.lane: index for index, task in enumerate(step.tasks)}
    return sorted({index for task in step.tasks for index in task.after_previous} | set(last.values()))


def _measured_s(step: Schedule) -> float:
    """The mean of `STEPS_BY_NEED`; or the growth of a step once all times of the boundary grow equally."""
    first, last = STEPS_BY_NEED
    boundary, chain = _boundary(step), Chain(step)
    gpu = max(index for index, task in enumerate(step.tasks) if task.lane is Lane.GPU)
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
        last = {task.lane: index for index, task in enumerate(step.tasks)}
        self.boundary = _boundary(step)
        self.durations_s = [task.duration_s for task in step.tasks]
        self.waits: list[tuple[int, ...]] = []
        self.waits_previous: list[tuple[int, ...]] = []
        latest: dict[Lane, int] = {}
        totals = dict.fromkeys(Lane, 0.0)
        for index, task in enumerate(step.tasks):
            in_lane = latest.get(task.lane)
            self.waits.append(task.after if in_lane is None else (*task.after, in_lane))
            own = (last[task.lane],) if in_lane is None else ()
            self.waits_previous.append((*task.after_previous, *own))
            latest[task.lane] = index
            totals[task.lane] += task.duration_s
        self.mean_s = max(totals.values())

    def largest_mean_s(self) -> float:
        """Seconds a step."""
        potentials = dict.fromkeys(self.boundary, 0.0)
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
