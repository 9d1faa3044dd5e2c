"""Runs a step's tasks again and again: one pass through the list a step."""

import heapq

from jaxferry.step.tasks import Kind, Lane, Schedule, dispatch_order

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
