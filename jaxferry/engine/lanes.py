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

import functools
from collections.abc import Callable, Sequence

from jaxferry.engine.ready_tasks import TaskList
from jaxferry.engine.step_run import ALL_LANES, Action, Arrival, Monitor, StepRun
from jaxferry.errors import StateError
from jaxferry.settings import ThreadPool
from jaxferry.step import Lane

ONE_EACH = [(lane,) for lane in Lane]


def _do_tasks(of: StepRun, lanes: Sequence[Lane]) -> None:
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
            found = of._next_task(lanes)
        if found is None:
            return
        run, index = found
        ended = index if run._do(index) else None


def _do_ahead(of: StepRun) -> None:
    _do_all(of, of._next_ahead)


def _do_late(of: StepRun, lanes: Sequence[Lane]) -> None:
    """Does the late tasks of a run that no next one has done."""
    _do_all(of, lambda: of._next_late(lanes))


def _do_all(of: StepRun, next_task: Callable[[], int | None]) -> None:
    ended, lock = None, of._monitor.lock
    while True:
        with lock:
            if ended is not None:
                of._end(ended)
            index = next_task()
        if index is None:
            return
        ended = index if of._do(index) else None


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
            run._ready.prefetch(loads)
            self._monitor.wake([Lane.H2D])
            run._num_threads += 1
        number = next(i for i, lanes in enumerate(self._lanes) if Lane.H2D in lanes)
        try:
            self._threads[number].submit(run._take_part, functools.partial(_do_ahead, run))
        except RuntimeError:  # the process is ending
            run._leave()
        return run

    def submit(self, run: StepRun) -> None:
        """Starts a run on the threads."""
        self._submit(_do_tasks, run)

    def _run_late(self, run: StepRun) -> None:
        """Starts the late tasks of a run that no next one has started."""
        with self._monitor.lock:
            if run.has_broken_off or not run._ready.has_late(ALL_LANES):
                return
        self._submit(_do_late, run)

    def _submit(self, body: Callable[[StepRun, Sequence[Lane]], None], run: StepRun) -> None:
        with self._monitor.lock:
            run._num_threads += len(self._lanes)
        for number, (thread, lanes) in enumerate(zip(self._threads, self._lanes, strict=True)):
            try:
                thread.submit(run._take_part, functools.partial(body, run, lanes))
            except RuntimeError as error:
                with self._monitor.lock:
                    run.is_stopped = True
                    run._num_threads -= len(self._lanes) - number
                    self._monitor.wake_all()
                raise StateError("the process is ending, so nothing more is trained") from error


def make_lanes(is_cpu: bool) -> Lanes:
    """Returns the threads of a training step.

    On a CPU each thread does the work of its lane. An accelerator works in the order of issue, so one thread issues for
    all lanes except the host's. It issues copies a few layers ahead of programs: see `ready_tasks._AHEAD`.
    """
    return Lanes() if is_cpu else Lanes([(Lane.H2D, Lane.D2H, Lane.GPU), (Lane.HOST,)])
