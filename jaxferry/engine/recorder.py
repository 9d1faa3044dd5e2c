"""Records when the tasks of the last steps started and ended."""

from __future__ import annotations

import collections
import math
from collections.abc import Mapping, Sequence

from jaxferry.engine.lanes import StepRun
from jaxferry.step import OF_THREADS, Lane, Run, Schedule, dispatch_order, repeat
from jaxferry.transport import StepMarks


class Recorder:
    """Keeps the records of the last `num_steps` steps.

    If a thread does its lane's work itself, a task's start and end are two readings of the host's clock. If a thread
    only issues work to a device, they are the device's times (`marks.py`), on the same clock (`on_the_device`).
    """

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps
        self._steps: collections.deque[tuple[StepRun, StepMarks | None]] = collections.deque(maxlen=num_steps)

    def add(self, work: StepRun, marks: StepMarks | None = None) -> None:
        """Adds a step, with its times on the device if those apply; drops earlier steps of another task list."""
        if self._steps and self._steps[-1][0].list is not work.list:
            self._steps.clear()
        self._steps.append((work, marks))

    def run(self) -> Run | None:
        """Returns the steps that have ended as one chain, in seconds from the start of the first; None without any."""
        steps = [each for each in self._steps if each[0].is_over() and not each[0].has_broken_off]
        if not steps:
            return None
        starts_s = [start for work, _ in steps for start in work.starts_s]
        ends_s = [end for work, _ in steps for end in work.ends_s]
        chain = repeat(steps[0][0].list.schedule, len(steps))
        if any(marks is not None for _, marks in steps):
            size = len(steps[0][0].list.tasks)
            times = [{} if marks is None else marks.times() for _, marks in steps]
            known = {number * size + index: seen for number, own in enumerate(times) for index, seen in own.items()}
            starts_s, ends_s = on_the_device(chain, starts_s, ends_s, known)
        begin_s = steps[0][0].begin_s
        return Run(chain, tuple(s - begin_s for s in starts_s), tuple(e - begin_s for e in ends_s))


def on_the_device(
    schedule: Schedule, starts_s: Sequence[float], ends_s: Sequence[float], known: Mapping[int, tuple[float, float]]
) -> tuple[list[float], list[float]]:
    """Returns when tasks that one thread has issued started and ended on the device, in seconds.

    A task ends at its observed end (`known`). Without one (NaN), or without device work, it ends as it starts. It
    starts at its observed start, but not before it was issued, and not before the tasks that it waits for and the
    previous task of its lane have ended. The host's and the disk's threads wait for inputs within a task, so only that
    wait is subtracted. The disk works in order too: what it does next is not before a transfer whose end is seen late.
    """
    starts, ends, lane_ends = list(starts_s), list(ends_s), dict.fromkeys(Lane, -math.inf)
    for index in dispatch_order(schedule.tasks):
        task = schedule.tasks[index]
        starts[index] = max([starts[index], *(ends[earlier] for earlier in task.after)])
        if task.lane is not Lane.HOST:  # which updates in any order
            starts[index] = max(starts[index], lane_ends[task.lane])
        if task.lane in OF_THREADS:
            ends[index] = max(ends[index], starts[index])
        else:
            start, end = known.get(index, (math.nan, math.nan))
            starts[index] = _later(starts[index], start)
            ends[index] = _later(starts[index], end)
        lane_ends[task.lane] = ends[index]
    return starts, ends


def _later(time_s: float, other_s: float) -> float:
    """Returns the later of two times; the second may be NaN (unknown)."""
    return time_s if math.isnan(other_s) else max(time_s, other_s)
