"""Remembers when the tasks of the last steps started and ended."""

from __future__ import annotations

import collections
import math
from collections.abc import Mapping, Sequence

from jaxferry.engine.lanes import StepRun
from jaxferry.engine.trace.marks import StepMarks
from jaxferry.schedule import Lane, Run, Schedule, repeat


class Recorder:
    """Keeps the last steps that were taken.

    Where a thread does what its lane is given, a task's start and end are two readings of the host's clock. Where one
    thread only issues what a device does, they are the device's (`marks.py`), on the same clock (`on_the_device`).

    Args:
      num_steps: how many; 0 keeps none.
    """

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps
        self._steps: collections.deque[tuple[StepRun, StepMarks | None]] = collections.deque(maxlen=num_steps)

    def add(self, work: StepRun, marks: StepMarks | None = None) -> None:
        """Remembers a step; steps of another task list are forgotten.

        Args:
          work: its tasks.
          marks: when they start and end on the device; None if what the threads saw is that.
        """
        if self._steps and self._steps[-1][0].list is not work.list:
            self._steps.clear()
        self._steps.append((work, marks))

    def run(self) -> Run | None:
        """The steps as one chain, in seconds from the start of the first; None if there are none.

        Steps that are still under way are left out. Waits for what a device has left to do of the others.
        """
        steps = [step for step in self._steps if _has_ended(step[0])]
        if not steps:
            return None
        starts_s = [start for work, _ in steps for start in work.starts_s]
        ends_s = [end for work, _ in steps for end in work.ends_s]
        chain = repeat(steps[0][0].list.schedule, len(steps))
        if any(marks is not None for _, marks in steps):
            starts_s, ends_s = on_the_device(chain, starts_s, ends_s, _times(steps))
        begin_s = steps[0][0].begin_s
        return Run(chain, tuple(s - begin_s for s in starts_s), tuple(e - begin_s for e in ends_s))


def on_the_device(
    schedule: Schedule, starts_s: Sequence[float], ends_s: Sequence[float], known: Mapping[int, tuple[float, float]]
) -> tuple[list[float], list[float]]:
    """When tasks started and ended that one thread has issued.

    A task ends when it was seen to end; one that nobody could see, and one that gave the device nothing to do, as it
    starts. It starts when it was seen to start, but not before it was issued, nor before what it waits for and the task
    before it in its lane have ended. Of the host's tasks, whose threads themselves wait for what they need, only that
    wait is taken off.

    Args:
      schedule: the tasks.
      starts_s: when each was issued, or for the host's lane when its thread took it up; all times in seconds.
      ends_s: for the host's lane, when it had been done.
      known: for tasks of the other lanes, when they were seen to start and end; NaN for what nobody saw.
    """
    starts, ends, lane_ends = list(starts_s), list(ends_s), dict.fromkeys(Lane, -math.inf)
    for index, task in enumerate(schedule.tasks):
        starts[index] = max([starts[index], *(ends[earlier] for earlier in task.after)])
        if task.lane is Lane.HOST:
            ends[index] = max(ends[index], starts[index])
            continue
        start, end = known.get(index, (math.nan, math.nan))
        starts[index] = _later(max(starts[index], lane_ends[task.lane]), start)
        lane_ends[task.lane] = ends[index] = _later(starts[index], end)
    return starts, ends


def _later(time_s: float, other_s: float) -> float:
    """The later of two times, of which the second may not be known."""
    return time_s if math.isnan(other_s) else max(time_s, other_s)


def _has_ended(work: StepRun) -> bool:
    return work.is_over() and work.failure is None and not work.is_stopped


def _times(steps: Sequence[tuple[StepRun, StepMarks | None]]) -> dict[int, tuple[float, float]]:
    """What is known of each task of a chain of steps."""
    known: dict[int, tuple[float, float]] = {}
    offset = 0
    for work, marks in steps:
        times = {} if marks is None else marks.times()
        known |= {index + offset: seen for index, seen in times.items()}
        offset += len(work.list.tasks)
    return known
