"""Runs a step's tasks again and again: one pass through the list a step."""

import heapq

from jaxferry.tasks import Lane, Schedule

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
        self.lanes = [_LANES[task.lane] for task in step.tasks]
        self.durations_s = [task.duration_s for task in step.tasks]
        self.free = [0.0] * len(_LANES)
        self.starts: list[float] = []
        self.ends: list[float] = []
        self.latest_due = 0.0

    def run_step(self) -> tuple[list[float], list[float]]:
        """Runs the next step; returns when each task starts and ends, in seconds from the first step's start."""
        before, free = self.ends, self.free
        self.starts, self.ends = starts, ends = [0.0] * len(self.tasks), [0.0] * len(self.tasks)
        waiting: dict[int, float] = {}
        for index, (task, lane, duration_s) in enumerate(zip(self.tasks, self.lanes, self.durations_s, strict=True)):
            by_need = self.by_need and lane == _HOST
            start = 0.0 if by_need else free[lane]
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
                starts[index], ends[index] = start, start + duration_s
                free[lane] = ends[index]
        self._run_updates(waiting)
        return starts, ends

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
