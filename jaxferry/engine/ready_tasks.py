"""Decides which tasks of a list may start: each lane in its order, each task once all its dependencies have ended.

Nothing here locks: `lanes.py` calls it under its own lock.
"""

from __future__ import annotations

import collections
import functools
import heapq
from collections.abc import Callable, Collection, Sequence

from jaxferry.step import Kind, Lane, Schedule

_AHEAD = 6
"""Places in the list by which one thread issues copies before programs: two or three layers.

Copies overlap what the device runs before, so they go first. But to issue each takes the thread a part of a
millisecond, in which a device that waits for its next program does nothing.
"""
_NONE = -1  # follows the last task of a lane, and is never ready


class TaskList:
    """The tasks of one step with their dependencies; made once, run often.

    No thread takes `trivial` tasks, which have no work of their own: each ends once those that it waits for have
    ended, and on the GPU's lane the one before it. `groups` has the parameter group of each task. `late` has, by lane,
    the tasks that run between those of the next step, each with its place there.
    """

    def __init__(self, schedule: Schedule, trivial: Collection[int] = (), groups: Sequence[int] = ()) -> None:
        self.schedule, self.tasks, self._groups = schedule, schedule.tasks, tuple(groups)
        count = len(self.tasks)
        self.trivial = frozenset(trivial)
        self.lanes = [task.lane for task in self.tasks]
        self.waiting: list[list[int]] = [[] for _ in range(count)]
        self.waiting_next: list[list[int]] = [[] for _ in range(count)]
        self.after_previous = [
            (i, set(task.after_previous)) for i, task in enumerate(self.tasks) if task.after_previous
        ]
        self.num_waits = [0] * count
        self.orders: dict[Lane, list[int]] = {lane: [] for lane in Lane}
        late = [(task.before - count, i) for i, task in enumerate(self.tasks) if task.before is not None]
        self.late = {lane: sorted(each for each in late if self.lanes[each[1]] is lane) for lane in Lane}
        before = _NONE
        for index, task in enumerate(self.tasks):
            after = set(task.after)
            if task.lane is Lane.GPU:
                after |= {before} if before != _NONE and not self.trivial.isdisjoint((before, index)) else set()
                before = index
            if index not in self.trivial and task.before is None:
                self.orders[task.lane].append(index)
            self.num_waits[index] = len(after)
            for earlier in after:
                self.waiting[earlier].append(index)
            for earlier in set(task.after_previous):
                self.waiting_next[earlier].append(index)
        for order in self.orders.values():
            order.append(_NONE)
        self.counts = dict.fromkeys(Lane, 0)
        # Those that may outlast their step: what it leaves to the next one, and transfers of updated state.
        self.outlasts = [task.before is not None or task.kind is Kind.STATE_DOWN for task in self.tasks]
        for task, outlasts in zip(self.tasks, self.outlasts, strict=True):
            self.counts[task.lane] += not outlasts
        self.needs = [task.need if schedule.updates_by_need else (0, i) for i, task in enumerate(self.tasks)]

    def is_like(self, other: TaskList) -> bool:
        """Whether a run of one may follow a run of the other: the same tasks of the same groups.

        They depend on the same ones of the step before. With larger batches, other tasks of the same step may have to
        end first.
        """
        return self is other or self._structure == other._structure

    @functools.cached_property
    def _structure(self) -> tuple[object, ...]:
        kinds = [(task.kind, task.lane, task.segment, task.subgroup, task.num_subgroups) for task in self.tasks]
        order = [(task.after_previous, task.before) for task in self.tasks]
        return kinds, order, self.trivial, self._groups


class ReadyTasks:
    """The progress of one run of a task list; `starts_s` and `ends_s` are by task, `ahead` the loads before the others.

    `begin_arrival` calls `arrive` for a task of the host's lane, all of whose dependencies have ended, once what the
    task reads is there. `num_over` rises when the last task of a lane ends, and with each one that outlasts its step
    afterwards.
    """

    def __init__(
        self, tasks: TaskList, previous: ReadyTasks | None, begin_arrival: Callable[[int], None] | None = None
    ) -> None:
        count = len(tasks.tasks)
        self._list = tasks
        self._successor: ReadyTasks | None = None
        self._missing = [*tasks.num_waits, 1]
        self._is_done = [False] * count
        self._num_left, self.num_over = dict(tasks.counts), 0
        self._num_all = count
        self._next, self._next_late = dict.fromkeys(Lane, 0), dict.fromkeys(Lane, 0)
        self._updates: list[tuple[tuple[int, int], int]] = []
        self.ahead: collections.deque[int] = collections.deque()
        self.starts_s, self.ends_s = [0.0] * count, [0.0] * count
        if previous is not None:
            previous._successor = self
            for index, earlier in tasks.after_previous:
                self._missing[index] += sum(not previous._is_done[each] for each in earlier)
        self._begin_arrival: Callable[[int], None] | None = None  # what waits for no task reads nothing that arrives
        first = [*tasks.orders[Lane.HOST][:-1], *sorted(tasks.trivial)]
        for index in [index for index in first if not self._missing[index]]:
            self._offer(index, 0.0)
        self._begin_arrival = begin_arrival

    def end(self, index: int, now_s: float = 0.0) -> list[Lane]:
        """Records that a task has ended; returns the lanes that may continue, of this run or of the next one."""
        tasks, lane = self._list, self._list.lanes[index]
        self.ends_s[index], self._is_done[index] = now_s, True
        self._num_left[lane] -= not tasks.outlasts[index]
        self._num_all -= 1
        lanes = []
        if not self._num_left[lane]:
            self.num_over += 1
            lanes.append(lane)
        self._end_for(tasks.waiting[index], now_s, lanes)
        if self._successor is not None and (waiting := tasks.waiting_next[index]):
            self._successor._end_for(waiting, now_s, lanes)
        return lanes

    def _end_for(self, waiting: Sequence[int], now_s: float, lanes: list[Lane]) -> None:
        """Records that a dependency of these tasks has ended; adds the lanes that may continue."""
        missing = self._missing
        for index in waiting:
            missing[index] -= 1
            if not missing[index]:
                lanes += self._offer(index, now_s)

    def _offer(self, index: int, now_s: float) -> Sequence[Lane]:
        """Offers a task that may start now to its lane, or ends it if it is trivial."""
        lane = self._list.lanes[index]
        if index in self._list.trivial:
            self.starts_s[index] = now_s
            return self.end(index, now_s)
        if lane is Lane.HOST:
            if self._begin_arrival is not None:
                self._begin_arrival(index)
                return ()
            self.arrive(index)
        return (lane,)

    def arrive(self, index: int) -> None:
        """Offers a task to the host's lane: all that it reads is there."""
        heapq.heappush(self._updates, (self._list.needs[index], index))

    def take(self, lanes: Sequence[Lane]) -> int | None:
        """A task of these lanes that may start now, copies a few places ahead of programs; None if there is none."""
        found: list[tuple[int, Lane]] = []
        for lane in lanes:
            if lane is Lane.HOST:
                if self._updates:
                    return heapq.heappop(self._updates)[1]
                continue
            index = self._list.orders[lane][self._next[lane]]
            if not self._missing[index]:
                found.append((index - (0 if lane is Lane.GPU else _AHEAD), lane))
        if not found:
            return None
        lane = min(found)[1]
        self._next[lane] += 1
        return self._list.orders[lane][self._next[lane] - 1]

    def take_after(self, earlier: ReadyTasks, lanes: Sequence[Lane]) -> tuple[bool, int] | None:
        """As `take`, with late tasks of the previous run between these: whether it is one of those, and the task."""
        for lane in lanes:
            order, position = earlier._list.late[lane], earlier._next_late[lane]
            upcoming = self._list.orders[lane][self._next[lane]]
            if position < len(order) and (upcoming == _NONE or order[position][0] <= upcoming):
                found, is_late = earlier.take_late((lane,)), True
            else:
                found, is_late = self.take((lane,)), False
            if found is not None:
                return is_late, found
        return None

    def take_late(self, lanes: Sequence[Lane]) -> int | None:
        """A late task that may start now, from the first of these lanes that has one; None if there is none."""
        for lane in lanes:
            order, position = self._list.late[lane], self._next_late[lane]
            if position < len(order) and not self._missing[order[position][1]]:
                self._next_late[lane] += 1
                return order[position][1]
        return None

    def has_late(self, lanes: Sequence[Lane]) -> bool:
        """Whether late tasks of these lanes have not been taken."""
        return any(self._next_late[lane] < len(self._list.late[lane]) for lane in lanes)

    def take_prefetch(self) -> int | None:
        """The next of the loads `ahead` that may start now; None if there is none."""
        if not self.ahead or self._missing[self.ahead[0]]:
            return None
        self._next[Lane.H2D] += 1
        return self.ahead.popleft()

    def has_started(self, lane: Lane) -> bool:
        """Whether every task of a lane has been taken, but for late ones."""
        return self._list.orders[lane][self._next[lane]] == _NONE

    def is_over(self, lanes: Sequence[Lane]) -> bool:
        """Whether every task of these lanes has ended. What may outlast its step counts if these are all lanes."""
        return not self._num_all or (len(lanes) < len(Lane) and not any(map(self._num_left.get, lanes)))

    def has_left(self, lanes: Sequence[Lane]) -> bool:
        """Whether a thread that runs these lanes has tasks left to take, but for late ones."""
        if Lane.HOST in lanes:
            return self._num_left.get(Lane.HOST, 0) > 0
        return not all(map(self.has_started, lanes))
