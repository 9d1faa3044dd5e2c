"""Threads that run lists of tasks.

    H2D   load load load ...            one thread for each lane, or one thread that only issues for several lanes
    GPU   forward forward ...           while the device works in the order of issue
    D2H          offload ...
    host            update update ...   of the updates that could start, the one needed first

An action given with the list does the work of a task. Or it begins the work, and one more thread waits for its end. One
list follows another as one step follows another. A task may wait for tasks of the previous list
(`Task.after_previous`), so the end of one step overlaps the start of the next. The first loads of a list can run before
the list is submitted (`Lanes.begin_ahead`). Where an offload has ended once it is issued, one more thread waits until
the gradient of an update has arrived: the host chooses only among such updates. Late tasks of a list (`Task.before`)
run between those of the next one, or alone once somebody waits for all of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Sequence

from jaxferry.engine.ready_tasks import ReadyTasks, TaskList
from jaxferry.errors import StateError
from jaxferry.settings import ThreadPool
from jaxferry.step import Lane

Wait = Callable[[], object]
Action = Callable[[int], Wait | None]
"""Does the task with this index, or only begins it and returns a function that waits until it has ended."""
Arrival = Callable[[int], object]  # waits until all that the task with this index reads has arrived in host memory
ALL_LANES = tuple(Lane)
ONE_EACH = [(lane,) for lane in Lane]
_POLL_S = 0.05


@dataclasses.dataclass(frozen=True)
class Failure:
    """The error of a failed task; `index` is None for what runs before all tasks, or between them."""

    index: int | None
    error: BaseException


class Monitor:
    """One lock and the threads that wait under it. The end of a task wakes only threads that may continue.

    `outside` wakes callers that wait for a run; `later` waits for tasks that an action has only begun, `arrivals` for
    what updates read.
    """

    def __init__(self, threads: Sequence[Sequence[Lane]]) -> None:
        self.lock = threading.RLock()
        self.outside = threading.Condition(self.lock)
        self.later, self.arrivals = ThreadPool(1, "jaxferry later"), ThreadPool(1, "jaxferry arrivals")
        self._of_lane: dict[Lane, threading.Condition] = {}
        for lanes in threads:
            self._of_lane |= dict.fromkeys(lanes, threading.Condition(self.lock))
        self._asleep: set[threading.Condition] = set()

    def sleep(self, lane: Lane) -> None:
        """Makes a lane's thread, which has the lock, sleep until somebody wakes it."""
        condition = self._of_lane[lane]
        self._asleep.add(condition)
        condition.wait()

    def wake(self, lanes: Sequence[Lane]) -> None:
        """Wakes the threads of these lanes that sleep."""
        if self._asleep:
            for condition in self._asleep.intersection(map(self._of_lane.__getitem__, lanes)):
                self._asleep.discard(condition)
                condition.notify()

    def wake_all(self) -> None:
        """Wakes everybody, also if `wake` has failed."""
        self._asleep.clear()
        for condition in {*self._of_lane.values(), self.outside}:
            condition.notify_all()


class StepRun:
    """One run of a task list; made by `Lanes.make` at `begin_s`.

    Attributes:
      failure: the first failure, or None.
      is_stopped: whether no further task starts.
      starts_s, ends_s: by task, of `time.perf_counter`. If a thread only issues for a device, the time of issue.
      is_committed: whether an irreversible change was made, so the run must be completed.
    """

    def __init__(
        self,
        tasks: TaskList,
        action: Action,
        previous: StepRun | None,
        monitor: Monitor,
        run_late: Callable[[StepRun], None],
        arrival: Arrival | None = None,
    ) -> None:
        self.list, self._action, self._monitor, self._run_late = tasks, action, monitor, run_late
        self._arrival = arrival
        self.failure: Failure | None = None
        self.is_stopped = self.is_committed = False
        self._ready: ReadyTasks = ReadyTasks(tasks, None if previous is None else previous._ready, self._await)
        self.starts_s, self.ends_s = self._ready.starts_s, self._ready.ends_s
        self._successor: StepRun | None = None
        self._previous = previous if previous is not None and previous._ready.has_late(ALL_LANES) else None
        self._num_threads = 0
        self._is_open = True
        self.begin_s = time.perf_counter()
        if previous is not None:
            previous._successor = self
            # Tasks that wait for a failed run never start.
            self.is_stopped = previous.is_stopped or previous.failure is not None

    @property
    def has_broken_off(self) -> bool:
        """Whether no further task starts: the run was stopped, or a task has failed."""
        return self.is_stopped or self.failure is not None

    def wait(self, lanes: Sequence[Lane] = ALL_LANES, should_stop: Callable[[], bool] | None = None) -> None:
        """Returns when all tasks of these lanes have ended or the run has broken off.

        `should_stop` is polled while waiting; once true, no further task starts unless the run is committed.
        """
        if len(lanes) == len(ALL_LANES):
            self._run_late(self)
        with self._monitor.lock:
            while not self.is_over(lanes):
                self._monitor.outside.wait(None if should_stop is None else _POLL_S)
                if should_stop is not None and not self.is_committed and should_stop():
                    self.is_stopped = True
                    self._monitor.wake_all()

    def is_over(self, lanes: Sequence[Lane] = ALL_LANES) -> bool:
        """Whether every task of these lanes has ended, or the run has broken off and no thread works on it."""
        return self._ready.is_over(lanes) or (self.has_broken_off and self._num_threads == 0)

    def wait_ahead(self) -> None:
        """Returns when the loads that run ahead have ended or the run has broken off."""
        with self._monitor.lock:
            self._monitor.outside.wait_for(lambda: self._num_threads == 0)

    def stop(self) -> None:
        """Prevents further tasks from starting and returns when those in flight have ended."""
        with self._monitor.lock:
            self.is_stopped = True
            self._monitor.wake_all()
            self._monitor.outside.wait_for(lambda: self._num_threads == 0)
            self._forget_actions()

    def commit(self) -> bool:
        """Asks permission for an irreversible change; False if the run was stopped."""
        with self._monitor.lock:
            self.is_committed |= not self.is_stopped
            return self.is_committed

    def open(self, action: Action, arrival: Arrival | None = None) -> None:
        """Prepares a run that has begun ahead for `submit`; this action does the tasks that have not started yet."""
        with self._monitor.lock:
            self._action, self._arrival, self._is_open = action, arrival, True
            self._ready.ahead.clear()  # the other loads are left to `take`
            self._monitor.wake_all()
            self.begin_s = min([time.perf_counter(), *(start_s for start_s in self.starts_s if start_s)])

    def _end(self, index: int) -> None:
        """Records that a task has ended; the caller has the lock."""
        num_over = self._ready.num_over
        self._monitor.wake(self._ready.end(index, time.perf_counter()))
        if self._ready.num_over > num_over:
            self._monitor.outside.notify_all()
            if self._ready.is_over(ALL_LANES):
                self._forget_actions()

    def _forget_actions(self) -> None:
        """Lets go of all that the actions refer to."""
        self._action, self._arrival = _nothing, None

    def _do(self, index: int) -> bool:
        """Does a task; returns whether it has ended, else it has failed or ends later."""
        self.starts_s[index] = time.perf_counter()
        try:
            wait = self._action(index)
            if wait is None:
                return True
            self._end_later(index, wait)
        except BaseException as error:  # noqa: BLE001 - raised by whoever waits for the run
            self._fail(index, error)
        return False

    def _end_later(self, index: int, wait: Wait) -> None:
        def end() -> None:
            try:
                wait()
                with self._monitor.lock:
                    self._end(index)
            except BaseException as error:  # noqa: BLE001 - as above
                self._fail(index, error)

        self._run_apart(self._monitor.later, end)

    def _await(self, index: int) -> None:
        """Offers a task of the host's lane once all that it reads has arrived; the caller has the lock."""

        def offer() -> None:
            with self._monitor.lock:
                self._ready.arrive(index)
                self._monitor.wake([Lane.HOST])

        if (arrival := self._arrival) is None:
            offer()
            return

        def wait() -> None:
            with contextlib.suppress(Exception):  # the task waits too, and fails
                arrival(index)
            offer()

        self._run_apart(self._monitor.arrivals, wait)

    def _run_apart(self, thread: ThreadPool, part: Callable[[], None]) -> None:
        with self._monitor.lock:
            self._num_threads += 1
        try:
            thread.submit(self._take_part, part)
        except RuntimeError:  # the process is ending
            self._take_part(part)

    def _take_part(self, part: Callable[[], object]) -> None:
        """Runs a thread's part of this run; the body of the thread. What is raised between tasks fails the run."""
        try:
            part()
        except BaseException as error:  # noqa: BLE001 - as above
            self._fail(None, error)
        finally:
            self._leave()

    def _leave(self) -> None:
        with self._monitor.lock:
            self._num_threads -= 1
            if not self._num_threads:
                self._monitor.outside.notify_all()

    def _next_task(self, lanes: Sequence[Lane]) -> tuple[StepRun, int] | None:
        """The next task of these lanes, of this run, late of the previous or ahead of the next; None if none is left.

        The caller has the lock, and calls `_leave` after a task of another run.
        """
        while not (self.is_stopped or self.failure is not None):
            later = self._successor
            if later is not None and later._ready.ahead and (ahead := self._take_of(later, lanes)) is not None:
                return later, ahead
            if self._previous is not None:
                found = self._next_of_two(self._previous, lanes)
                has_late = self._previous is not None and self._previous._ready.has_late(lanes)
            else:
                index, has_late = self._ready.take(lanes), False
                found = None if index is None else (self, index)
            if found is not None:
                return found
            if not has_late and not self._ready.has_left(lanes):
                return None
            self._monitor.sleep(lanes[0])
        return None

    def _next_of_two(self, previous: StepRun, lanes: Sequence[Lane]) -> tuple[StepRun, int] | None:
        """The next task of this run or late of the previous one; None if none may start."""
        found = self._ready.take_after(previous._ready, lanes)
        if not previous._ready.has_late(ALL_LANES):
            self._previous = None
        if found is None:
            return None
        is_late, index = found
        previous._num_threads += is_late
        return previous if is_late else self, index

    def _next_late(self, lanes: Sequence[Lane]) -> tuple[StepRun, int] | None:
        """The next late task of this run; None if none is left. The caller has the lock."""
        while self._ready.has_late(lanes) and not self.has_broken_off:
            if (index := self._ready.take_late(lanes)) is not None:
                return self, index
            self._monitor.sleep(lanes[0])
        return None

    def _next_ahead(self) -> tuple[StepRun, int] | None:
        """The next of the loads that run before this run is submitted; None if none is left."""
        while self._ready.ahead and not self.has_broken_off:
            if (index := self._ready.take_prefetch()) is not None:
                return self, index
            self._monitor.sleep(Lane.H2D)
        if not self._is_open:
            self._forget_actions()
        return None

    def _take_of(self, later: StepRun, lanes: Sequence[Lane]) -> int | None:
        """A load of the next run, if one thread has several lanes and this run has no loads left."""
        if Lane.H2D not in lanes or not self._ready.has_started(Lane.H2D) or later.has_broken_off:
            return None
        index = later._ready.take_prefetch()
        if index is not None:
            later._num_threads += 1
        return index

    def _fail(self, index: int | None, error: BaseException) -> None:
        with self._monitor.lock:
            self.failure = self.failure or Failure(index, error)
            run: StepRun | None = self._successor
            while run is not None:
                run.is_stopped, run = True, run._successor
            self._monitor.wake_all()


def _nothing(index: int) -> None:
    """The action of an ended run. It replaces the run's own action, whose references can then be freed."""


def _do_tasks(of: StepRun, next_task: Callable[[], tuple[StepRun, int] | None]) -> None:
    """Does the tasks of this run, and of those beside it, that `next_task` finds, until there is none."""
    run, ended, lock = of, None, of._monitor.lock
    while True:
        # The end of one task and the choice of the next take the lock once.
        with lock:
            try:
                if ended is not None:
                    run._end(ended)
            except BaseException as error:
                run._fail(ended, error)
                raise
            finally:
                if run is not of:
                    run._leave()
            found = next_task()
        if found is None:
            return
        run, index = found
        ended = index if run._do(index) else None


class Lanes:
    """The threads that run task lists, each with the lanes that it runs in order of priority."""

    def __init__(self, threads: Sequence[Sequence[Lane]] = ONE_EACH) -> None:
        self._lanes = [tuple(lanes) for lanes in threads]
        # Python joins these threads at exit, so no update is cut off.
        self._threads = [ThreadPool(1, f"jaxferry {'+'.join(lanes)}") for lanes in self._lanes]
        self._monitor = Monitor(self._lanes)

    def make(
        self, tasks: TaskList, action: Action, previous: StepRun | None = None, arrival: Arrival | None = None
    ) -> StepRun:
        """Prepares a run of a list of tasks; `submit` starts it.

        `previous` is the run that `after_previous` refers to, None if it has ended. `arrival` waits for what a task of
        the host's lane reads; None if that is there once the task may start.
        """
        with self._monitor.lock:
            return StepRun(tasks, action, previous, self._monitor, self._run_late, arrival)

    def begin_ahead(self, tasks: TaskList, action: Action, previous: StepRun, loads: Sequence[int]) -> StepRun:
        """Prepares a run and starts its first loads, each after the tasks of the previous run that it waits for.

        `loads` are the first tasks of the link up, which wait for no other tasks of their own list. The caller either
        opens and submits the run, or stops it.
        """
        with self._monitor.lock:
            run = StepRun(tasks, action, previous, self._monitor, self._run_late)
            run._is_open = False
            run._ready.ahead.extend(loads)
            self._monitor.wake([Lane.H2D])
            run._num_threads += 1
        number = next(i for i, lanes in enumerate(self._lanes) if Lane.H2D in lanes)
        try:
            self._threads[number].submit(run._take_part, functools.partial(_do_tasks, run, run._next_ahead))
        except RuntimeError:  # the process is ending
            run._leave()
        return run

    def submit(self, run: StepRun) -> None:
        """Starts a run on the threads."""
        self._submit(run, run._next_task)

    def _run_late(self, run: StepRun) -> None:
        """Starts the late tasks of a run that no next one has started."""
        with self._monitor.lock:
            if run.has_broken_off or not run._ready.has_late(ALL_LANES):
                return
        self._submit(run, run._next_late)

    def _submit(self, run: StepRun, next_task: Callable[[Sequence[Lane]], tuple[StepRun, int] | None]) -> None:
        with self._monitor.lock:
            run._num_threads += len(self._lanes)
        for number, (thread, lanes) in enumerate(zip(self._threads, self._lanes, strict=True)):
            try:
                thread.submit(run._take_part, functools.partial(_do_tasks, run, functools.partial(next_task, lanes)))
            except RuntimeError as error:
                with self._monitor.lock:
                    run.is_stopped = True
                    run._num_threads -= len(self._lanes) - number
                    self._monitor.wake_all()
                raise StateError("the process is ending, so nothing more is trained") from error


def make_lanes(is_cpu: bool) -> Lanes:
    """Returns the threads of a training step.

    On a CPU each thread does the work of its lane. An accelerator works in the order of issue, so one thread issues for
    all lanes but the host's and the disk's. It issues copies a few layers ahead of programs: see `ready_tasks._AHEAD`.
    """
    return Lanes() if is_cpu else Lanes([(Lane.H2D, Lane.D2H, Lane.GPU), (Lane.HOST,), (Lane.DISK,)])
