"""Measures when tasks start and end on an asynchronous device, where one thread issues for all its lanes.

    load, store (ferry)   one event on the queue before its copies, one after them      start, end
    program               one event on its stream after it; the start is that of        start, end
                          the previous mark, or of the last wait for a queue
    without the library   a thread waits for the task's results                         end

A mark is part of the program that it marks, or a tiny program after it, so it runs in the right place. Nothing waits
for marks until they are read; a step only issues them. A token identifies the task of a mark: one byte of device memory
per task, whose address is the task's key. Marks with the same token are counted.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import math
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxferry.native import NativeLibrary, targets
from jaxferry.settings import ThreadPool
from jaxferry.transport.placement import Placement

UNDER_WAY = 2  # steps that make marks while those of the last finished steps are kept: a running one and a failed one
_MOST_COPIES = 64


class Marks:
    """The marks of one list of tasks, kept for the last `num_steps` steps.

    With the `library` that moves layers, events are on the device's queues; without, threads wait for results and read
    `clock`, in seconds.
    """

    def __init__(
        self,
        placement: Placement,
        num_steps: int,
        library: NativeLibrary | None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        device = placement.device
        self._device, self._num_kept, self._library, self._clock = device, num_steps + UNDER_WAY, library, clock
        self._tokens: dict[int, jax.Array] = {}
        self._addresses: dict[int, int] = {}
        self._counts: collections.Counter[int] = collections.Counter()
        self._results: dict[int, jax.Array] = {}
        self._mark = jax.jit(lambda token, result: targets.mark(token, [result], "program"), out_shardings=device)
        self._probe = jax.jit(lambda result: jnp.zeros((), jnp.int8), keep_unused=True, out_shardings=device)
        # Programs end in their order. A copy's buffer may be deleted as soon as it has been read, so a thread must be
        # waiting for it by then.
        self._programs = ThreadPool(1, "jaxferry marks of programs")
        self._copies = ThreadPool(_MOST_COPIES, "jaxferry marks of copies")
        if library is not None:
            weakref.finalize(self, _close, library, self._addresses)

    def begin(self) -> StepMarks:
        """Returns the marks of a new step."""
        return StepMarks(self)

    def prepare(self, tasks: Iterable[int]) -> None:
        """Makes the tokens of tasks, by index, which waits for the device; the thread that issues then does not."""
        if self._library is not None:
            for index in tasks:
                self.token(index)

    def token(self, index: int) -> jax.Array:
        """Returns the token that identifies a task's marks."""
        if index not in self._tokens:
            assert self._library is not None
            token = jax.device_put(np.zeros(1, np.uint8), self._device, may_alias=False)
            self._addresses[index] = token.unsafe_buffer_pointer()
            self._library.open_marks(self._addresses[index], self._num_kept)
            self._tokens[index] = token
        return self._tokens[index]

    def count(self, index: int, result: jax.Array) -> int:
        """Records the result of a program that marks a task; returns the mark's number among the task's marks."""
        self._results[index] = result
        number = self._counts[index]
        self._counts[index] += 1
        return number

    def after(self, index: int, result: jax.Array) -> int | Future[float]:
        """Marks the end of the program with this result; returns the mark's number, or the time as a future."""
        if self._library is None:
            return self._programs.submit(_seen_s, [self._probe(result)], self._clock)
        return self.count(index, self._mark(self.token(index), result))

    def when(self, arrays: Sequence[jax.Array]) -> Future[float]:
        """Returns the time at which arrays are ready; NaN if they are deleted before a thread waits for them."""
        if any(array.is_deleted() for array in arrays):
            return self._copies.submit(lambda: math.nan)
        # JAX crashes if one thread deletes an array while another one waits for it, so the thread holds its own.
        own = [array.addressable_data(0) for array in arrays]
        return self._copies.submit(_seen_s, own, self._clock)

    def read(self, numbers: Mapping[int, int]) -> dict[int, tuple[float, float]]:
        """Returns start and end of tasks, given the numbers of their marks."""
        if self._library is None or not numbers:
            return {}
        # After this, all issued tasks are marked and all marked tasks have ended. Errors of failed programs are
        # suppressed: their own step reports them.
        with contextlib.suppress(RuntimeError):
            jax.block_until_ready(list(self._results.values()))
        self._library.synchronize()
        addresses = [self._addresses[index] for index in numbers]
        return dict(zip(numbers, self._library.read_marks(addresses, list(numbers.values())), strict=True))


class StepMarks:
    """The marks of one step; made by `Marks.begin`."""

    def __init__(self, marks: Marks) -> None:
        self.marks = marks
        self._numbers: dict[int, int] = {}
        self._seen: dict[int, Future[float]] = {}

    def of(self, index: int) -> TaskMark:
        """Returns the mark of one task."""
        return TaskMark(self, index)

    def add(self, index: int, result: jax.Array) -> None:
        """Records that the program with this result has marked the task."""
        self._numbers[index] = self.marks.count(index, result)

    def after(self, index: int, results: Any) -> None:
        """Marks the end of a program."""
        mark = self.marks.after(index, jax.tree.leaves(results)[0])
        if isinstance(mark, int):
            self._numbers[index] = mark
        else:
            self._seen[index] = mark

    def watch(self, index: int, arrays: Sequence[jax.Array]) -> None:
        """Marks the end of a task by the time at which these arrays are ready."""
        self._seen[index] = self.marks.when(arrays)

    def times(self) -> dict[int, tuple[float, float]]:
        """Waits for tasks in flight; returns each marked task's start and end by the host's clock, NaN if unknown."""
        concurrent.futures.wait(self._seen.values())
        seen = {index: (math.nan, future.result()) for index, future in self._seen.items()}
        return seen | self.marks.read(self._numbers)


@dataclasses.dataclass(frozen=True)
class TaskMark:
    """The mark of one task. A transport uses either `token` and `add`, or `watch`."""

    step: StepMarks
    index: int

    def token(self) -> jax.Array:
        """Returns an operand for the program that marks the task."""
        return self.step.marks.token(self.index)

    def add(self, result: jax.Array) -> None:
        """Records that program's result for the mark."""
        self.step.add(self.index, result)

    def watch(self, arrays: Sequence[jax.Array]) -> None:
        """See `StepMarks.watch`."""
        self.step.watch(self.index, arrays)


def _seen_s(arrays: Sequence[jax.Array], clock: Callable[[], float]) -> float:
    """Waits for arrays and returns the time; NaN if they were deleted before."""
    try:
        jax.block_until_ready(arrays)
    except RuntimeError:
        return math.nan
    return clock()


def _close(library: NativeLibrary, addresses: Mapping[int, int]) -> None:
    for address in addresses.values():
        library.close_marks(address)
