"""What is alive within one step, and what it gives back."""

from __future__ import annotations

import collections
import dataclasses
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import jax

from jaxferry.engine.lanes import Work
from jaxferry.engine.marks import StepMarks, TaskMark
from jaxferry.engine.state import TrainState
from jaxferry.engine.transfers import DeviceLayer, HostGradient


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


class Flight:
    """What is alive within one step.

    Attributes:
      work: what runs the step's tasks.
      marks: notes when they start and end on the device; None if nobody wants to know, or the threads see it.
      values: of the step's equations between programs, by number.
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
      updated: units that have been updated.
    """

    work: Work
    marks: StepMarks | None = None
    scale: jax.Array
    seed: tuple[jax.Array, ...] = ()

    def __init__(self, values: dict[int, Any], state: TrainState, is_last: bool = True) -> None:
        self.values = values
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
