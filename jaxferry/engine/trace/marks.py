"""When tasks start and end on a device that works by itself, where one thread issues for all its lanes.

    load, store (ferry)   an event on the queue before its copies, one behind them      start, end
    program               an event on the program's stream behind it; it started        start, end
                          when the mark before had, or the last wait for a queue
    without the library   a thread waits for what a task gives                          end

A mark is part of a program or a tiny one behind it, so its place is that of what it marks. Nobody waits for one before
somebody reads: a step issues some more, and goes on. Which task a mark belongs to is told by a token, a byte of device
memory for each task: its address is the name, and its marks are counted.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import math
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxferry.engine.placement import Placement
from jaxferry.native import NativeLibrary, targets

UNDER_WAY = 2
"""Steps whose marks come while those of the last finished ones are still wanted: one that goes on, one that failed."""

_MOST_COPIES = 64


class Marks:
    """The marks of one list of tasks.

    Args:
      placement: the device.
      num_steps: of how many of the last steps they are kept.
      library: the native library that moves layers; None to have threads wait for results.
      clock: what those threads read, in seconds.
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
        # Programs end in their order. A copy's buffer may be deleted as soon as it has been read, so that somebody must
        # be waiting for it by then.
        self._programs = ThreadPoolExecutor(1, thread_name_prefix="jaxferry marks of programs")
        self._copies = ThreadPoolExecutor(_MOST_COPIES, thread_name_prefix="jaxferry marks of copies")
        if library is not None:
            weakref.finalize(self, _close, library, self._addresses)

    def begin(self) -> StepMarks:
        """The marks of another step."""
        return StepMarks(self)

    def token(self, index: int) -> jax.Array:
        """What the marks of a task are told by."""
        if index not in self._tokens:
            assert self._library is not None
            token = jax.device_put(np.zeros(1, np.uint8), self._device, may_alias=False)
            self._addresses[index] = token.unsafe_buffer_pointer()
            self._library.open_marks(self._addresses[index], self._num_kept)
            self._tokens[index] = token
        return self._tokens[index]

    def count(self, index: int, result: jax.Array) -> int:
        """Takes the result of a program that marks a task, and says which of the task's marks that is."""
        self._results[index] = result
        number = self._counts[index]
        self._counts[index] += 1
        return number

    def after(self, index: int, result: jax.Array) -> int | Future[float]:
        """Marks the program whose result this is: by a number, or by the time at which it was seen to have ended."""
        if self._library is None:
            return self._programs.submit(_seen_s, [self._probe(result)], self._clock)
        return self.count(index, self._mark(self.token(index), result))

    def when(self, arrays: Sequence[jax.Array]) -> Future[float]:
        """The time at which arrays are there; NaN if they are deleted before anybody looks."""
        if any(array.is_deleted() for array in arrays):
            return self._copies.submit(lambda: math.nan)
        # JAX keeps nothing of an array alive for a thread that waits for it while another one deletes it: it crashes.
        own = [array.addressable_data(0) for array in arrays]
        return self._copies.submit(_seen_s, own, self._clock)

    def read(self, numbers: Mapping[int, int]) -> dict[int, tuple[float, float]]:
        """Start and end of tasks by the numbers of their marks."""
        if self._library is None or not numbers:
            return {}
        # Whatever has been issued has been marked then, and whatever has been marked has ended. Of a program that has
        # failed nothing is known here; its own step tells why.
        with contextlib.suppress(RuntimeError):
            jax.block_until_ready(list(self._results.values()))
        self._library.synchronize()
        addresses = [self._addresses[index] for index in numbers]
        return dict(zip(numbers, self._library.read_marks(addresses, list(numbers.values())), strict=True))


class StepMarks:
    """The marks of one step; made by `Marks.begin`."""

    def __init__(self, marks: Marks) -> None:
        self._marks = marks
        self._numbers: dict[int, int] = {}
        self._seen: dict[int, Future[float]] = {}

    def of(self, index: int) -> TaskMark:
        """For whoever does a task's work."""
        return TaskMark(self, index)

    def token(self, index: int) -> jax.Array:
        """See `Marks.token`."""
        return self._marks.token(index)

    def add(self, index: int, result: jax.Array) -> None:
        """The task was marked by the program whose result this is."""
        self._numbers[index] = self._marks.count(index, result)

    def after(self, index: int, results: Any) -> None:
        """Marks the end of a program.

        Args:
          index: its task.
          results: what it has returned, or a part of that.
        """
        mark = self._marks.after(index, jax.tree.leaves(results)[0])
        if isinstance(mark, int):
            self._numbers[index] = mark
        else:
            self._seen[index] = mark

    def watch(self, index: int, arrays: Sequence[jax.Array]) -> None:
        """The task has ended when these arrays are there."""
        self._seen[index] = self._marks.when(arrays)

    def times(self) -> dict[int, tuple[float, float]]:
        """Start and end of each task that was marked, in seconds of the host's clock; NaN for what is not known.

        Waits for those that are under way.
        """
        concurrent.futures.wait(self._seen.values())
        seen = {index: (math.nan, future.result()) for index, future in self._seen.items()}
        return seen | self._marks.read(self._numbers)


@dataclasses.dataclass(frozen=True)
class TaskMark:
    """How a transport marks the task that it works for: by `token` and `add`, or by `watch`."""

    step: StepMarks
    index: int

    def token(self) -> jax.Array:
        """An operand of the program that marks it."""
        return self.step.token(self.index)

    def add(self, result: jax.Array) -> None:
        """What that program returned for the mark."""
        self.step.add(self.index, result)

    def watch(self, arrays: Sequence[jax.Array]) -> None:
        """See `StepMarks.watch`."""
        self.step.watch(self.index, arrays)


def _seen_s(arrays: Sequence[jax.Array], clock: Callable[[], float]) -> float:
    """The time at which arrays are there; NaN if they were deleted before anybody looked."""
    try:
        jax.block_until_ready(arrays)
    except RuntimeError:
        return math.nan
    return clock()


def _close(library: NativeLibrary, addresses: Mapping[int, int]) -> None:
    for address in addresses.values():
        library.close_marks(address)
