"""What is alive within one step, and what it gives back."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import jax

from jaxferry.engine.lanes import Work
from jaxferry.engine.marks import StepMarks, TaskMark
from jaxferry.engine.state import TrainState
from jaxferry.engine.transfers import DeviceLayer, HostGradient, Vectors


@dataclasses.dataclass(frozen=True)
class StepResult:
    """What a step gives back.

    Attributes:
      loss: scalar on the device.
      aux: the auxiliary outputs, flattened.
      grad_norm: global norm of the gradients before clipping, fp32 scalar in host memory; None for a micro-batch that
        is not the last one before an update.
      is_finite: whether the loss (and, where steps are to be skipped for them, all gradients) are finite.
      is_applied: whether the state was updated.
      loss_scale: what the loss was multiplied by for the backward.
      finite: for each segment, whether its outputs are finite; boolean scalars on the device.
      device_param_bytes_peak: the most bytes of parameters that were on the device at a time.
    """

    loss: jax.Array
    aux: list[Any]
    grad_norm: jax.Array | None
    is_finite: bool
    is_applied: bool
    loss_scale: float
    finite: list[jax.Array]
    device_param_bytes_peak: int


@dataclasses.dataclass
class Started:
    """A backward program that may still fail, with what it takes to try it again.

    Attributes:
      place: its place in the script.
      segment: its segment.
      cotangents: all that there were before it.
      made: some of what it makes; None as long as it has not even been issued.
    """

    place: int
    segment: int
    cotangents: dict[int, jax.Array]
    made: Any = None

    def has_run(self, waits: bool = False) -> bool:
        """Whether it has run without an error.

        Args:
          waits: whether to wait until that is known.
        """
        if self.made is None:
            return False
        known = [array for array in jax.tree.leaves(self.made) if not array.is_deleted()]
        if not waits and not all(array.is_ready() for array in known):
            return False
        try:
            jax.block_until_ready(known)
        except RuntimeError:
            return False
        return True


class Flight:
    """What is alive within one step.

    Attributes:
      work: what runs the step's tasks.
      batch: the leaves of the batch, on the device, as long as they may be needed again.
      done: tasks that another attempt at the step need not do.
      earlier: layers with gradients of earlier micro-batches, to which those of this one are added.
      started: backward programs that are not known to have run, in order.
      stored: segments whose gradients are in `gradients` or `sums`.
      has_added: whether one may have been added to.
      is_updating: whether an update may have changed the state.
      marks: notes when they start and end on the device; None if nobody wants to know, or the threads see it.
      values: of the step's equations between programs, by number.
      away: those of them that wait for their backward in pinned host memory; they are in `values` no more.
      units: what updates each layer.
      copies: what has been loaded, by the task that did.
      saved: residuals, by segment.
      cotangents: by number of the value.
      leaving: gradients on the device, by segment.
      sums: those of layers that are added up on the device, with those of earlier micro-batches.
      is_last: whether this is the last micro-batch before an update.
      scale: what gradients are to be divided by, in host memory.
      seed: what the loss is multiplied by, on the device; nothing if it is not.
      was_finite: whether all losses of earlier micro-batches were finite.
      gradients: by layer, in host memory or on their way.
      landing: transfers that have been issued and not waited for: their task, and the layer.
      num_arrived: how many gradients of each layer are in host memory.
      device_norms: squared norm of the last gradient of each layer, where the program computed it.
      norms: squared norm of each layer's whole gradient.
      finite: for each segment, whether its outputs are finite.
      num_programs: how many programs have been issued.
      num_updates: how many update tasks have been done.
      updated: units that have been updated, and whose compute copy has been written.
      packed: by unit, the new compute copy of one whose masters are updated already.
    """

    work: Work
    marks: StepMarks | None = None
    scale: jax.Array
    seed: tuple[jax.Array, ...] = ()

    def __init__(self, batch: Sequence[Any], values: dict[int, Any], state: TrainState, is_last: bool = True) -> None:
        self.batch, self.values = batch, values
        self.away: dict[int, jax.Array] = {}
        self.done: frozenset[int] = frozenset()
        self.earlier = frozenset((*state.accumulated.on_host, *state.accumulated.on_device))
        self.started: collections.deque[Started] = collections.deque()
        self.stored: set[int] = set()
        self.has_added = self.is_updating = False
        self.units = {layer: unit for unit in state.units for layer in unit.layers}
        self.copies: dict[int, DeviceLayer] = {}
        self.saved: dict[int, list[Any]] = {}
        self.cotangents: dict[int, jax.Array] = {}
        self.leaving: dict[int, Any] = {}
        self.sums: dict[int, list[jax.Array]] = dict(state.accumulated.on_device)
        self.is_last, self.was_finite = is_last, state.accumulated.is_finite
        self.gradients: dict[int, HostGradient] = dict(state.accumulated.on_host)
        self.landing: collections.deque[tuple[int, int]] = collections.deque()
        self.num_arrived: collections.Counter[int] = collections.Counter()
        self.device_norms: dict[int, jax.Array | None] = {}
        self.norms: dict[int, Future[jax.Array]] = {}
        self.finite: list[jax.Array] = []
        self.num_programs = self.num_updates = 0
        self.updated: set[int] = set()
        self.packed: dict[int, Sequence[Vectors]] = {}
        self._verdict: tuple[bool, jax.Array | None] | None = None
        self._lock = threading.Lock()

    def mark(self, index: int) -> TaskMark | None:
        """How a transport notes when a task's copy starts and ends."""
        return None if self.marks is None else self.marks.of(index)

    def judged(self, judge: Callable[[Flight], tuple[bool, jax.Array | None]]) -> tuple[bool, jax.Array | None]:
        """What `judge` says, asked once, whichever thread comes first."""
        with self._lock:
            if self._verdict is None:
                self._verdict = judge(self)
            return self._verdict

    def start(self, place: int, segment: int) -> Started:
        """Notes that a backward program is about to be issued."""
        self.started.append(Started(place, segment, dict(self.cotangents)))
        return self.started[-1]

    def release(self, num_kept: int | None = None) -> None:
        """Forgets what was kept for backward programs that have run; waits until at most `num_kept` are left."""
        with contextlib.suppress(IndexError):  # another thread may forget them all
            while self.started[0].has_run(waits=num_kept is not None and len(self.started) > num_kept):
                self.started.popleft()

    def failed(self) -> Started | None:
        """The first backward program that has not run; waits for those that are under way."""
        while self.started and self.started[0].has_run(waits=True):
            self.started.popleft()
        return self.started[0] if self.started else None

    def forget_verdict(self) -> None:
        """Makes `judged` ask again."""
        self._verdict = None
