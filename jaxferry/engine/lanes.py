"""Threads that run lists of tasks: every lane in its order, every task as soon as what it waits for has ended.

    H2D   load load load ...            a thread for each lane, or one for several lanes whose work is only
    GPU   forward forward ...           issued by it and done by the device in the order of issue
    D2H          offload ...
    host            update update ...   of the updates that could start, the one needed first

It knows nothing of what a task does: that is an action given with the list. Lists follow each other as steps do: a task
may wait for tasks of the list before (`Task.after_previous`), so the end of one step overlaps the start of the next.
Its first loads need not even wait for it to be submitted (`Lanes.begin_ahead`).
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from jaxferry.errors import StateError
from jaxferry.schedule import Lane, Schedule

Action = Callable[[int], bool]
"""Does the task of an index. False if it has not ended yet: then somebody calls `Work.end` later."""

ALL_LANES = tuple(Lane)
ONE_EACH = [(lane,) for lane in Lane]
_POLL_S = 0.05


@dataclasses.dataclass(frozen=True)
class Failure:
    """What went wrong in a task.

    Attributes:
      index: the task.
      error: what its action raised.
    """

    index: int
    error: BaseException


class TaskList:
    """The tasks of one step with who waits for whom; made once, run often."""

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


class Monitor:
    """One lock, and who waits under it for what: a task that ends wakes only those that may go on.

    Attributes:
      outside: those who wait for work to be done.

    Args:
      threads: the lanes that each thread runs.
    """

    def __init__(self, threads: Sequence[Sequence[Lane]]) -> None:
        self._lock = threading.RLock()
        self.outside = threading.Condition(self._lock)
        self._of_lane: dict[Lane, threading.Condition] = {}
        for lanes in threads:
            self._of_lane |= dict.fromkeys(lanes, threading.Condition(self._lock))

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def thread_of(self, lane: Lane) -> threading.Condition:
        """What the thread that runs a lane waits on."""
        return self._of_lane[lane]

    def wake_all(self) -> None:
        """Lets everybody look again."""
        for condition in (self.outside, *self._of_lane.values()):
            condition.notify_all()


class Work:
    """One run of a task list; made by `Lanes.make`.

    Attributes:
      list: the tasks.
      failure: the first failure, or None.
      is_stopped: whether no further task is started.
      begin_s: when it was made.
      starts_s: when each task started, all by the clock of `time.perf_counter`; where a thread only issues what a
        device does, when it was issued.
      ends_s: when each task ended, likewise.
      is_committed: whether something has been done that cannot be undone, so that all of it must be.
    """

    def __init__(self, tasks: TaskList, action: Action, previous: Work | None, monitor: Monitor) -> None:
        self.list, self._action, self._monitor = tasks, action, monitor
        self.failure: Failure | None = None
        self.is_stopped = self.is_committed = False
        count = len(tasks.tasks)
        self._missing = list(tasks.num_waits)
        self._is_done = [False] * count
        self._num_left = collections.Counter(task.lane for task in tasks.tasks)
        self._next = dict.fromkeys(Lane, 0)
        self._ready_updates: list[tuple[tuple[int, int], int]] = []
        self._successor: Work | None = None
        self._num_threads = 0
        self._ahead: collections.deque[int] = collections.deque()
        self._is_open = True
        self.begin_s = time.perf_counter()
        self.starts_s, self.ends_s = [0.0] * count, [0.0] * count
        if previous is not None:
            self._follow(previous)
        for index in tasks.by_lane[Lane.HOST]:
            self._offer(index)

    def wait(self, lanes: Sequence[Lane] = ALL_LANES, should_stop: Callable[[], bool] | None = None) -> None:
        """Returns when all tasks of these lanes have ended, or the work has stopped.

        Args:
          lanes: the lanes.
          should_stop: looked at meanwhile; once it says so, no further task is started, unless the work is committed.
        """
        with self._monitor:
            while not self.is_over(lanes):
                self._monitor.outside.wait(None if should_stop is None else _POLL_S)
                if should_stop is not None and not self.is_committed and should_stop():
                    self.is_stopped = True
                    self._monitor.wake_all()

    def is_over(self, lanes: Sequence[Lane] = ALL_LANES) -> bool:
        """Whether nothing in these lanes is left to be done, or everything has stopped."""
        has_ended = all(self._num_left[lane] == 0 for lane in lanes)
        return has_ended or ((self.is_stopped or self.failure is not None) and self._num_threads == 0)

    def wait_ahead(self) -> None:
        """Returns when what can be done ahead has been done, or the work has stopped."""
        with self._monitor:
            self._monitor.outside.wait_for(lambda: self._num_threads == 0)

    def stop(self) -> None:
        """Starts no further task, and returns when those that are under way have ended."""
        with self._monitor:
            self.is_stopped = True
            self._monitor.wake_all()
            self._monitor.outside.wait_for(lambda: self._num_threads == 0)
            self._action = _nothing

    def commit(self) -> bool:
        """Asks for leave to do what cannot be undone; False if the work has stopped."""
        with self._monitor:
            self.is_committed |= not self.is_stopped
            return self.is_committed

    def open(self, action: Action) -> None:
        """Lets work that has begun ahead be submitted; tasks that have not started yet are done by this action."""
        with self._monitor:
            self._action, self._is_open = action, True
            self._ahead.clear()
            self._monitor.wake_all()
            self.begin_s = min([time.perf_counter(), *(start_s for start_s in self.starts_s if start_s)])

    def end(self, index: int) -> None:
        """Notes that a task has ended whose action returned False."""
        with self._monitor:
            self._end(index)

    def _follow(self, previous: Work) -> None:
        """Waits for those tasks of the run before that have not ended; they never will if it has failed."""
        previous._successor = self
        self.is_stopped = previous.is_stopped or previous.failure is not None
        for index, task in enumerate(self.list.tasks):
            self._missing[index] += sum(not previous._is_done[earlier] for earlier in set(task.after_previous))

    def _offer(self, index: int) -> None:
        task = self.list.tasks[index]
        if self._missing[index] == 0 and task.lane is Lane.HOST:
            need = task.need if self.list.schedule.updates_by_need else (0, index)
            heapq.heappush(self._ready_updates, (need, index))

    def _end(self, index: int) -> None:
        self.ends_s[index] = time.perf_counter()
        self._is_done[index] = True
        lane = self.list.tasks[index].lane
        self._num_left[lane] -= 1
        for later in self.list.waiting[index]:
            self._fewer_missing(later)
        if self._successor is not None:
            for later in self.list.waiting_next[index]:
                self._successor._fewer_missing(later)
        if not self._num_left[lane]:
            self._monitor.thread_of(lane).notify_all()
            self._monitor.outside.notify_all()
        if not any(self._num_left.values()):
            self._action = _nothing

    def _fewer_missing(self, index: int) -> None:
        """One of the tasks that a task waits for has ended."""
        self._missing[index] -= 1
        self._offer(index)
        if not self._missing[index]:
            self._monitor.thread_of(self.list.tasks[index].lane).notify_all()

    def _take(self, lanes: Sequence[Lane]) -> int | None:
        """A task that may start now, of the first of these lanes that has one; None if there is none."""
        for lane in lanes:
            if lane is Lane.HOST and self._ready_updates:
                return heapq.heappop(self._ready_updates)[1]
            order = self.list.by_lane[lane]
            place = self._next[lane]
            if lane is not Lane.HOST and place < len(order) and self._missing[order[place]] == 0:
                self._next[lane] += 1
                return order[place]
        return None

    def _has_left(self, lanes: Sequence[Lane]) -> bool:
        if Lane.HOST in lanes:
            return self._num_left[Lane.HOST] > 0
        return any(self._next[lane] < len(self.list.by_lane[lane]) for lane in lanes)

    def do(self, lanes: Sequence[Lane]) -> None:
        """Does the tasks of these lanes; the body of a thread."""
        try:
            while (found := self._next_task(lanes)) is not None:
                work, index = found
                work._do(index)
                if work is not self:
                    work._leave()
        finally:
            self._leave()

    def do_ahead(self) -> None:
        """Does the tasks that need not wait for the rest to be submitted; the body of a thread."""
        try:
            while (index := self._next_ahead()) is not None:
                self._do(index)
        finally:
            self._leave()

    def _do(self, index: int) -> None:
        self.starts_s[index] = time.perf_counter()
        try:
            has_ended = self._action(index)
        except BaseException as error:  # noqa: BLE001 - raised where somebody waits for the work
            self._fail(index, error)
            return
        if has_ended:
            self.end(index)

    def _leave(self) -> None:
        """A thread has done what it had to."""
        with self._monitor:
            self._num_threads -= 1
            if not self._num_threads:
                self._monitor.outside.notify_all()

    def _next_task(self, lanes: Sequence[Lane]) -> tuple[Work, int] | None:
        """What comes next in these lanes: a task, of this work or ahead of the next; None if nothing is left."""
        with self._monitor:
            while self._has_left(lanes) and not self.is_stopped and self.failure is None:
                if (ahead := self._take_of_successor(lanes)) is not None:
                    return ahead
                index = self._take(lanes)
                if index is not None:
                    return self, index
                self._monitor.thread_of(lanes[0]).wait()
        return None

    def _next_ahead(self) -> int | None:
        with self._monitor:
            while self._ahead and not self.is_stopped and self.failure is None:
                index = self._take_ahead()
                if index is not None:
                    return index
                self._monitor.thread_of(Lane.H2D).wait()
            if not self._is_open:
                self._action = _nothing
        return None

    def _take_ahead(self) -> int | None:
        if not self._ahead or self.is_stopped or self.failure is not None or self._missing[self._ahead[0]]:
            return None
        self._next[Lane.H2D] += 1
        return self._ahead.popleft()

    def _take_of_successor(self, lanes: Sequence[Lane]) -> tuple[Work, int] | None:
        """A load ahead of the next work, where one thread has several lanes, and this work has no loads left."""
        later = self._successor
        if later is None or Lane.H2D not in lanes or self._next[Lane.H2D] < len(self.list.by_lane[Lane.H2D]):
            return None
        index = later._take_ahead()
        if index is None:
            return None
        later._num_threads += 1
        return later, index

    def _fail(self, index: int, error: BaseException) -> None:
        with self._monitor:
            self.failure = self.failure or Failure(index, error)
            work: Work | None = self._successor
            while work is not None:
                work.is_stopped, work = True, work._successor
            self._monitor.wake_all()


def _nothing(index: int) -> bool:
    """The action of work that is done: what its own one refers to is free to go."""
    return True


class Lanes:
    """The threads that run task lists.

    Args:
      threads: the lanes that each thread runs. Where it has several, the first one goes first.
    """

    def __init__(self, threads: Sequence[Sequence[Lane]] = ONE_EACH) -> None:
        self._lanes = [tuple(lanes) for lanes in threads]
        self._monitor = Monitor(self._lanes)
        # Python waits for them at its end, so that no update is cut off.
        self._threads = [
            ThreadPoolExecutor(1, thread_name_prefix=f"jaxferry {'+'.join(lanes)}") for lanes in self._lanes
        ]

    def make(self, tasks: TaskList, action: Action, previous: Work | None = None) -> Work:
        """Prepares a run of a list of tasks; `submit` starts it.

        Args:
          tasks: the list.
          action: does one of them.
          previous: the run of the same list whose tasks `after_previous` means; None if nothing of it is under way.
        """
        with self._monitor:
            return Work(tasks, action, previous, self._monitor)

    def begin_ahead(self, tasks: TaskList, action: Action, previous: Work, loads: Sequence[int]) -> Work:
        """Prepares a run and does its first loads, each once what it waits for of the run before has ended.

        Args:
          tasks: the list.
          action: does one of these loads.
          previous: the run before, which has been submitted.
          loads: the first tasks of the link up, which wait for no other tasks of their own list.

        Returns:
          The work: `open` it and submit it, or stop it.
        """
        with self._monitor:
            work = Work(tasks, action, previous, self._monitor)
            work._is_open = False
            work._ahead.extend(loads)
            work._num_threads += 1
            self._monitor.thread_of(Lane.H2D).notify_all()
        number = next(i for i, lanes in enumerate(self._lanes) if Lane.H2D in lanes)
        try:
            self._threads[number].submit(work.do_ahead)
        except RuntimeError:  # the process is ending
            work._leave()
        return work

    def submit(self, work: Work) -> None:
        """Has the threads do what is left of some work."""
        with self._monitor:
            work._num_threads += len(self._lanes)
        for number, (thread, lanes) in enumerate(zip(self._threads, self._lanes, strict=True)):
            try:
                thread.submit(work.do, lanes)
            except RuntimeError as error:
                with self._monitor:
                    work.is_stopped = True
                    work._num_threads -= len(self._lanes) - number
                    self._monitor.wake_all()
                raise StateError("the process is ending, so nothing more is trained") from error


def make_lanes(is_cpu: bool) -> Lanes:
    """The threads of a training step.

    On a CPU a thread does the work of its lane. An accelerator works by itself in the order of issue, so one thread
    issues for all lanes but the host's: transfers first, since they overlap what comes after.

    Args:
      is_cpu: whether the device is a CPU.
    """
    return Lanes() if is_cpu else Lanes([(Lane.H2D, Lane.D2H, Lane.GPU), (Lane.HOST,)])
