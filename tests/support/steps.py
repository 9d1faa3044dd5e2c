"""Steps of the engine that tests slow down, break, or run one task after the other."""

import contextlib
import dataclasses
import itertools
import time

from jaxferry.engine import DeviceCopies, Programs, StepContext, collect_results, executor
from jaxferry.native import library
from jaxferry.settings import own_settings


def transport_of(step, batch):
    """The transport of a prepared step."""
    return step.prepare(batch).runner.runnable.resources.transport


def with_sums_in_host_memory(prepared):
    """Makes a prepared step sum no gradients on the device."""
    runner = prepared.runner
    program = dataclasses.replace(runner.runnable.program, summed=frozenset())
    runner.runnable = dataclasses.replace(runner.runnable, program=program)
    runner.first = runner.runnable
    return prepared


def delay(monkeypatch, draw, longest_s):
    """Delays each task of every step by up to this much."""

    def slowed(function):
        def slow(*args):
            time.sleep(draw.random() * longest_s)
            return function(*args)

        return slow

    for operation, function in executor.OPERATIONS.items():
        monkeypatch.setitem(executor.OPERATIONS, operation, slowed(function))
    monkeypatch.setattr(DeviceCopies, "load", slowed(DeviceCopies.load))


def wrap(monkeypatch, operation, wrapper):
    """Runs `wrapper(function, step, instruction)` in place of the function of an operation."""
    function = executor.OPERATIONS[operation]
    monkeypatch.setitem(executor.OPERATIONS, operation, lambda *args: wrapper(function, *args))


def fail(monkeypatch, operations, after, times=1, message="the host ran out of memory"):
    """Makes the calls of these operations raise from number `after` on, that many times."""
    count = itertools.count()

    def failing(function, *args):
        if after <= next(count) < after + times:
            raise RuntimeError(message)
        return function(*args)

    for operation in operations:
        wrap(monkeypatch, operation, failing)


def after_each_program(monkeypatch, action):
    """Calls `action(number)` each time a compiled program has run, in the thread that ran it."""
    count, find = itertools.count(), Programs.__getitem__

    def found(programs, key):
        def run(*args):
            results = find(programs, key)(*args)
            action(next(count))
            return results

        return run

    monkeypatch.setattr(Programs, "__getitem__", found)


@contextlib.contextmanager
def link(load=0.0, store=0.0, delay_s=0.0, seed=0):
    """The emulated link carries so many bytes a second each way (0: any), and copies end up to so much later."""
    native = library("cpu")
    try:
        native.set_bandwidth("load", load)
        native.set_bandwidth("store", store)
        native.set_delay(delay_s, seed)
        yield native
    finally:
        native.set_bandwidth("load", 0)
        native.set_bandwidth("store", 0)
        native.set_delay(0.0, 0)


class Serial:
    """Runs the tasks of a step one after the other, in the thread that asks for them."""

    def __init__(self, step, state, batch):
        step.compile_updates(state, batch)
        self._runnable, self._state, self._batch = step.prepare(batch).runner.runnable, state, batch
        state.fill()

    def commit(self):
        """Nothing stops it."""
        return True

    def step(self):
        """Takes one step; returns its loss."""
        with own_settings():
            return self._step()

    def _step(self):
        runnable, resources = self._runnable, self._runnable.resources
        copies = DeviceCopies(
            runnable.program, resources.transport, resources.placement, self._state.host.vectors, marks=None, kept={}
        )
        context = StepContext(runnable, self._state, [self._batch], copies)
        context.work = self
        for group in sorted(runnable.program.resident - self._state.resident.keys()):
            self._state.resident[group] = resources.transport.load(group, self._state.host.vectors[group])
        trivial = runnable.program.trivial
        for index in (index for index in range(len(runnable.program.instructions)) if index not in trivial):
            if (wait := executor.execute(context, index)) is not None:
                wait()
        return float(collect_results(self._state, context).loss)
