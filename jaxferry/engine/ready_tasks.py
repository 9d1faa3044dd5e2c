"""Decides which tasks of a list may start: each lane in its order, each task once all its dependencies have ended.

Nothing here locks: `lanes.py` calls it under its own lock.
"""

from __future__ import annotations

import collections
import heapq
from collections.abc import Sequence

from jaxferry.schedule import Lane, Schedule


class TaskList:
    """The tasks of one step with their dependencies; made once, run often."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule, self.tasks = schedule, schedule.tasks
        count = len(self.tasks)
        self.waiting: list[list[int]] = [[] for _ in range(count)]
        self.waiting_next: list[list[int]] = [[] for _ in range(count)]
        self.num_waits = [len(set(task.after)) for task in self.tasks]
        self.by_lane: dict[Lane, list[int]] = {lane: [] for lane in Lane}
        for index, task in enumerate(self.tasks):
            self.by_lane[task.lane].append(index)
            for earlier in set(task.after):
                self.waiting[earlier].append(index)
            for earlier in set(task.after_previous):
                self.waiting_next[earlier].append(index)


class ReadyTasks:
    """The progress of one run of a task list.

    Args:
      tasks: the list.
      previous: the progress of the run that `after_previous` refers to; None if it has ended.
    """

    def __init__(self, tasks: TaskList, previous: ReadyTasks | None) -> None:
        self._list = tasks
        self._missing = list(tasks.num_waits)
        self._is_done = [False] * len(tasks.tasks)
        self._num_left = {lane: len(indices) for lane, indices in tasks.by_lane.items()}
        self._num_all = len(tasks.tasks)
        self._next = dict.fromkeys(Lane, 0)
        self._updates: list[tuple[tuple[int, int], int]] = []
        self._ahead: collections.deque[int] = collections.deque()
        if previous is not None:
            for index, task in enumerate(tasks.tasks):
                self._missing[index] += sum(not previous._is_done[earlier] for earlier in set(task.after_previous))
        for index in tasks.by_lane[Lane.HOST]:
            self._offer(index)

    def end(self, index: int) -> list[Lane]:
        """Records that a task has ended; returns the lanes that may continue."""
        lane = self._list.tasks[index].lane
        self._is_done[index] = True
        self._num_left[lane] -= 1
        self._num_all -= 1
        lanes = [] if self._num_left[lane] else [lane]
        for later in self._list.waiting[index]:
            lanes += self.fewer_missing(later)
        return lanes

    def fewer_missing(self, index: int) -> list[Lane]:
        """Records that one dependency of a task has ended; returns its lane if the task may start now."""
        self._missing[index] -= 1
        self._offer(index)
        return [] if self._missing[index] else [self._list.tasks[index].lane]

    def take(self, lanes: Sequence[Lane]) -> int | None:
        """A task that may start now, from the first of these lanes that has one; None if there is none."""
        for lane in lanes:
            if lane is Lane.HOST and self._updates:
                return heapq.heappop(self._updates)[1]
            order, place = self._list.by_lane[lane], self._next[lane]
            if lane is not Lane.HOST and place < len(order) and self._missing[order[place]] == 0:
                self._next[lane] += 1
                return order[place]
        return None

    def prefetch(self, loads: Sequence[int]) -> None:
        """Reserves the first loads for `take_prefetch`."""
        self._ahead.extend(loads)

    def take_prefetch(self) -> int | None:
        """The next of these loads that may start now; None if there is none."""
        if not self._ahead or self._missing[self._ahead[0]]:
            return None
        self._next[Lane.H2D] += 1
        return self._ahead.popleft()

    def end_prefetch(self) -> None:
        """Leaves the other loads to `take`."""
        self._ahead.clear()

    @property
    def has_prefetch(self) -> bool:
        """Whether `take_prefetch` has loads left."""
        return bool(self._ahead)

    def has_started(self, lane: Lane) -> bool:
        """Whether every task of a lane has been taken."""
        return self._next[lane] >= len(self._list.by_lane[lane])

    def is_over(self, lanes: Sequence[Lane]) -> bool:
        """Whether every task of these lanes has ended."""
        return not self._num_all or not any(map(self._num_left.get, lanes))

    def has_left(self, lanes: Sequence[Lane]) -> bool:
        """Whether a thread that runs these lanes has tasks left to take."""
        if Lane.HOST in lanes:
            return self._num_left[Lane.HOST] > 0
        return not all(map(self.has_started, lanes))

    def _offer(self, index: int) -> None:
        task = self._list.tasks[index]
        if self._missing[index] == 0 and task.lane is Lane.HOST:
            need = task.need if self._list.schedule.updates_by_need else (0, index)
            heapq.heappush(self._updates, (need, index))
