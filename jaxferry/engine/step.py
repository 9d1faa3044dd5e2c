"""One step in progress: what its instructions read and write, and how it ends.

begin --instructions--> committed      the state is that after the step
|-> rolled back    no update had begun: the state is that before the step
`-> damaged        an update had begun: every use of the state says so
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import math
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxferry.engine.device_updates import DeviceUpdates
from jaxferry.engine.gradients import Norms, StepGradients
from jaxferry.engine.lanes import Failure, Lanes, StepRun
from jaxferry.engine.pending import DeviceCopies, PrefetchSlot, task_errors
from jaxferry.engine.programs import Programs
from jaxferry.engine.ready_tasks import TaskList
from jaxferry.engine.recorder import Recorder
from jaxferry.engine.state import TrainState
from jaxferry.engine.streamed_updates import StreamingStep
from jaxferry.optimizer import HostOptimizer
from jaxferry.step import Operation, StepProgram, Value
from jaxferry.transport import Placement, TaskMark, Transport


@dataclasses.dataclass(frozen=True)
class StepResult:
    """The result of a step.

    Attributes:
      loss: scalar on the device, times the micro-batch's weight.
      weight: the sum of the weights of the micro-batches up to this one.
      mean_loss: their mean loss by weight; None unless they state weights and this is the last one.
      grad_norm: global norm of the gradients before clipping, fp32 scalar in host memory, of the last micro-batch.
      is_finite: whether the loss is finite, and all gradients if nonfinite ones skip the step.
      finite: for each segment, whether its outputs are finite; boolean scalars on the device.
      nonfinite_gradient: the first layer whose gradient is not finite; None if all are, or before the last micro-batch.
      device_param_bytes_peak: the most bytes of parameters on the device at any time.
    """

    loss: jax.Array
    weight: float
    mean_loss: Any
    aux: list[Any]
    grad_norm: jax.Array | None
    is_finite: bool
    is_applied: bool
    loss_scale: float
    finite: list[jax.Array]
    nonfinite_gradient: str | None
    device_param_bytes_peak: int


@dataclasses.dataclass(frozen=True)
class Rules:
    """When updates may run, and which are skipped.

    Attributes:
      clips: whether updates need the global norm.
      skip_nonfinite: whether a nonfinite loss or gradient skips the whole step.
      checks_gradients: whether a nonfinite gradient skips the update, which waits for the global norm.
      accumulate: the number of micro-batches per update, which takes their mean gradient.
      is_weighted: whether the loss is multiplied by the micro-batch's weight, the first auxiliary output.
    """

    clips: bool = False
    skip_nonfinite: bool = False
    checks_gradients: bool = False
    accumulate: int = 1
    is_weighted: bool = False

    @property
    def need_all_gradients(self) -> bool:
        """Whether no update may start before all gradients are on the host; accumulation is irreversible."""
        return self.clips or self.skip_nonfinite or self.checks_gradients or self.accumulate > 1


@dataclasses.dataclass(frozen=True, eq=False)
class Resources:
    """What all steps of a training step share."""

    placement: Placement
    transport: Transport
    lanes: Lanes
    optimizer: HostOptimizer
    prefetch: PrefetchSlot
    recorder: Recorder | None


@dataclasses.dataclass(frozen=True, eq=False)
class RunnableStep:
    """A step program with everything needed to run it.

    `loads_ahead` may run before the step is called. With `is_first`, no update starts before every gradient is on the
    host: see `StepRunner`. `constants` are the model's, on the device.
    """

    program: StepProgram
    tasks: TaskList
    programs: Programs
    resources: Resources
    rules: Rules
    norms: Norms
    device_updates: DeviceUpdates
    constants: dict[int, jax.Array]
    loads_ahead: tuple[int, ...] = ()
    is_first: bool = False

    @functools.cached_property
    def compiled(self) -> tuple[Any, ...]:
        """The program of each instruction; None for one that writes to host memory: see `StepGradients.key`."""
        keys = (instruction.key for instruction in self.program.instructions)
        return tuple(None if key is None or key.writes_host else self.programs[key] for key in keys)


class StepContext:
    """The data of one step in progress.

    Attributes:
      does_what_it_issues: whether each lane's thread does the work itself; on an accelerator, a thread only issues it.
      values: the values between programs, by number, and residuals; likewise the values' `cotangents`.
      offloaded: those that wait in pinned host memory for their backward.
      fetched: the arrays there of values that are back on the device, or on their way.
      seed: the factor on the loss, on the device; empty without loss scaling.
      finite: for each segment, whether its outputs are finite.
      num_programs: number of programs issued.
      num_updates: number of update tasks done, on the host, or on the device if that does all.
      is_updating: whether an update may have changed the state.
    """

    work: StepRun

    def __init__(
        self,
        runnable: RunnableStep,
        state: TrainState,
        batch: Sequence[Any],
        copies: DeviceCopies,
        extra_args: Mapping[str, Any] | None = None,
    ) -> None:
        self.runnable, self.program, self.copies = runnable, runnable.program, copies
        # Not the state, which refers to this step: dropped, it is free once the updates in flight have ended.
        self.host, self.resident = state.host, state.resident
        placement, rules, accumulated = runnable.resources.placement, runnable.rules, state.accumulated
        self.instructions, self.compiled = runnable.program.instructions, runnable.compiled
        self.values = self._given(batch)
        self.does_what_it_issues = placement.is_cpu
        self._waits = placement.is_cpu or placement.takes_turns
        self.offloaded: dict[Value, jax.Array] = {}
        self.fetched: list[jax.Array] = []
        self.cotangents: dict[int, jax.Array] = {}
        self.is_last = copies.is_last = accumulated.num_batches == rules.accumulate - 1
        transport = runnable.resources.transport
        self.gradients = StepGradients(
            self.program, transport, runnable.norms, accumulated, self.is_last, runnable.device_updates
        )
        self.streaming = StreamingStep(runnable.device_updates.streamed, state.host, state.resident, placement)
        scale = self._loss_scale = state.loss_scale.value
        is_scaled = runnable.programs.is_scaled
        self.seed = (placement.put_alike(np.float32(scale)),) if is_scaled else ()
        self.finite: list[jax.Array] = []
        self.num_programs = self.num_updates = 0
        self.updated: set[int] = set()
        self.is_updating = False
        self._was_finite = accumulated.is_finite
        num = collections.Counter(instruction.operation for instruction in self.instructions)
        self._num_left = num[Operation.UPDATE] or num[Operation.UPDATE_ON_DEVICE]
        self._extra_args = {} if extra_args is None else extra_args
        self._earlier_weight, self._earlier_loss = accumulated.weight, accumulated.loss
        self._is_finite: bool | None = None
        self._verdict: tuple[bool, jax.Array | None] | None = None
        self._lock = threading.Lock()

    def _given(self, batch: Sequence[Any]) -> dict[Value, Any]:
        placement, partition = self.runnable.resources.placement, self.program.partition
        # A CPU reads NumPy's memory in place, so copy it: the caller may change it before the step has ended.
        own = [np.array(leaf) if isinstance(leaf, np.ndarray) and placement.is_cpu else leaf for leaf in batch]
        graph = partition.graph
        with task_errors():
            leaves = [placement.put(graph, number, leaf) for number, leaf in zip(graph.batch, own, strict=True)]
            made, self._prelude = placement.in_turn(self.runnable.programs.run_prelude(leaves, placement.is_cpu))
        values: dict[Value, Any] = dict(zip(partition.graph.batch, leaves, strict=True))
        values |= self.runnable.constants.items()
        values |= zip(partition.prelude_outputs, made, strict=True)
        return values

    @property
    def has_added(self) -> bool:
        """Whether sums of earlier micro-batches may have changed."""
        return self.gradients.has_added

    @property
    def is_last_update(self) -> bool:
        """Whether the current update task is the last one; the host's, if it has any."""
        return self.num_updates == self._num_left - 1

    def ran(self, made: Any) -> Any:
        """Waits for results if threads do the work themselves, so that errors surface before anything changes."""
        return jax.block_until_ready(made) if self._waits else made

    def mark(self, index: int) -> TaskMark | None:
        """Records when a task's copy starts and ends; None without a recorder."""
        return None if self.copies.marks is None else self.copies.marks.of(index)

    def cotangent(self, value: int) -> jax.Array:
        """The cotangent of a value; zeros if no later segment reads it."""
        if value in self.cotangents:
            return self.cotangents[value]
        aval = self.program.partition.graph.avals[value]
        placement, graph = self.runnable.resources.placement, self.program.partition.graph
        return jnp.zeros(aval.shape, aval.dtype, device=placement.of(graph, aval))

    @functools.cached_property
    def weight(self) -> float:
        """The sum of the weights of this micro-batch and of the earlier ones; negative infinity if one is negative."""
        if not self.runnable.rules.is_weighted:
            return self._earlier_weight + 1
        atom = self.program.partition.aux[0]
        own: Any = self.values[atom] if isinstance(atom, int) else atom.val
        weight = float(np.asarray(own))
        return self._earlier_weight + (-math.inf if weight < 0 else weight)

    @functools.cached_property
    def loss(self) -> Any:
        """The sum of the losses of this micro-batch and of the earlier ones, each times its weight; waits for it."""
        own = np.asarray(self.values[self.program.partition.loss])
        return self._earlier_loss + own.astype(jnp.promote_types(own.dtype, jnp.float32))

    @functools.cached_property
    def scale(self) -> np.floating:
        """The divisor of the gradients of the last micro-batch, an fp32 number."""
        return np.float32(self._loss_scale * self.weight)

    def extra(self, on_device: bool) -> list[Any]:
        """What `HostOptimizer.extra` describes; with `on_device`, nothing waits for the loss of a single batch."""
        optimizer, loss = self.runnable.resources.optimizer, self.program.partition.loss
        if not optimizer.extra:
            return []
        is_mean = not on_device or self.runnable.rules.accumulate > 1
        return optimizer.extra_of(self.loss / self.weight if is_mean else self.values[loss], self._extra_args)

    def judged(self) -> tuple[bool, jax.Array | None]:
        """Whether everything is finite, and with the last micro-batch the global norm of the mean gradient."""
        with self._lock:
            if self._verdict is None:
                self._verdict = self._judge()
            return self._verdict

    def _judge(self) -> tuple[bool, jax.Array | None]:
        is_finite, rules = self.is_finite(), self.runnable.rules
        if not self.is_last:
            return is_finite, None
        norm = self.runnable.norms.total(self.gradients.norms.squared(), self.scale)
        if rules.skip_nonfinite or rules.checks_gradients:
            is_finite = is_finite and bool(np.isfinite(np.asarray(norm)))
        if rules.is_weighted:
            is_finite = is_finite and 0 < self.weight < np.inf
        return is_finite, norm

    def is_finite(self) -> bool:
        """Whether the losses of this micro-batch and of the earlier ones are finite."""
        if self._is_finite is None:
            self._is_finite = self._was_finite and bool(np.isfinite(self.loss))
        return self._is_finite

    def earliest_failure(self, seen: Failure) -> Failure:
        """The failure behind one that a task has seen.

        An accelerator reports late that a program has failed, to whoever waits for a result of it or of a later one.
        The flags of the forwards, which stay until the step ends, fail with their program.
        """
        forwards = [call.index for call in self.instructions if call.operation in (Operation.FORWARD, Operation.LOSS)]
        for index, flag in [*((None, flag) for flag in self._prelude), *zip(forwards, self.finite, strict=False)]:
            try:
                jax.block_until_ready(flag)
            except Exception as error:  # noqa: BLE001 - raised by the caller
                return Failure(index, error)
        return seen

    def release(self) -> None:
        """Frees the inputs of the step's results; updates may still be running."""
        loss = self.program.partition.loss
        self.values, self.finite, self.fetched, self._prelude = {loss: self.values[loss]}, [], [], []
        self.gradients.norms.release()

    def drop(self) -> None:
        """Frees everything that the step has on the device, in any state."""
        self.gradients.forget_inflight()
        self.streaming.drop()
        with contextlib.suppress(Exception):  # the step has failed
            # The device may still read or write the pinned memory of moved values.
            jax.block_until_ready([*self.values.values(), *self.offloaded.values()])
        self.copies.drop_all()
