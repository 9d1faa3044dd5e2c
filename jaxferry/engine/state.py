"""The training state: everything that outlives a step, in host memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from jaxferry.engine.host.arrays import HostArrays
from jaxferry.engine.host.optimizer import HostOptimizer
from jaxferry.engine.host.pieces import Stacked, joined, together
from jaxferry.engine.interrupts import deferred_interrupts
from jaxferry.engine.lanes import StepRun
from jaxferry.engine.loss_scale import UNSCALED, LossScale
from jaxferry.engine.placement import Placement
from jaxferry.engine.prefetch import Prefetch
from jaxferry.engine.transport.base import DeviceLayer, HostGradient, Transport
from jaxferry.errors import StateError, TaskError
from jaxferry.partition import Layer
from jaxferry.schedule import Kind


@dataclasses.dataclass(frozen=True)
class Accumulated:
    """Gradients of micro-batches since the last update.

    Attributes:
      num_batches: number of micro-batches.
      on_host: sums in host memory, by parameter group.
      on_device: sums on the device, by parameter group.
      is_finite: whether all their losses were finite.
    """

    num_batches: int = 0
    on_host: Mapping[int, HostGradient] = dataclasses.field(default_factory=dict)
    on_device: Mapping[int, list[jax.Array]] = dataclasses.field(default_factory=dict)
    is_finite: bool = True

    def offloaded(self, group: int, transport: Transport) -> Accumulated:
        """Returns the same sums with one group's moved to host memory."""
        on_device = dict(self.on_device)
        stored = transport.store(group, on_device.pop(group), self.on_host.get(group))
        jax.block_until_ready(transport.gather(group, stored))
        return dataclasses.replace(self, on_host={**self.on_host, group: stored}, on_device=on_device)


@dataclasses.dataclass(frozen=True)
class Counts:
    """The fields of a state that a step changes, besides the arrays."""

    step: int
    accumulated: Accumulated
    loss_scale: LossScale


class EndingStep(Protocol):
    """A failed step, as the state sees it."""

    @property
    def is_updating(self) -> bool:
        """Whether an update may have changed the state."""
        ...

    @property
    def has_added(self) -> bool:
        """Whether sums of earlier micro-batches may have changed."""
        ...


@dataclasses.dataclass(frozen=True)
class PendingStep:
    """A step that has returned, but whose updates may still be in flight.

    Attributes:
      work: the run of its tasks.
      step: the step.
      before: the state's counts before the step.
    """

    work: StepRun
    step: EndingStep
    before: Counts


class LateFailure(Exception):
    """A device error that surfaces while another task is issued; the error itself is the `__cause__`.

    Attributes:
      index: the task that failed.
    """

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.index = index


ROLLED_BACK = "the state is that before the step"
TO_LAST_UPDATE = "the state is that after the last update"


def task_error(work: StepRun, outcome: str) -> TaskError:
    """Makes the error for a failed task; the message names the layer.

    Args:
      work: the failed run.
      outcome: what happened to the state, in words.
    """
    assert work.failure is not None
    index, error = work.failure.index, work.failure.error
    if isinstance(error, LateFailure) and error.__cause__ is not None:
        index, error = error.index, error.__cause__
    task = work.list.tasks[index]
    layer = task.name.removeprefix(f"{task.kind.value} ")
    is_last = task.segment == max(other.segment for other in work.list.tasks)
    # The last segment's forward and backward are one program.
    what = "forward or backward" if task.kind is Kind.FORWARD and is_last else task.kind.value
    return TaskError(f"the {what} of layer {layer!r} failed: {error} ({outcome})", layer)


class TrainState:
    """Master parameters (fp32), optimizer state and their compute copy, all in host memory.

    A frozen parameter keeps its dtype. If that is the compute dtype, the compute copy is its only copy; otherwise there
    is a second one in its own dtype.

    `step(state, batch)` updates the state in place and returns the same object. `step.init`, `step.init_from` and
    `step.restore` make states.

    Attributes:
      step: number of steps taken, which is the number of the next batch.
      host: its arrays, arranged in parameter groups.
      resident: device copies of RESIDENT groups, by index.
      optimizer: the host optimizer.
      damage: the error message if a failed update left the state between two steps, else None.
      checkpoint: the folder of the last save or restore; None if there is none.
      pending: the last step, while its updates are in flight.
      prefetch: the copies loaded, or in flight, for the next step.
      accumulated: sums of micro-batches since the last update.
      loss_scale: the factor that multiplies the loss for the backward.
    """

    def __init__(
        self,
        tree: jax.tree_util.PyTreeDef,
        optimizer: HostOptimizer,
        placement: Placement,
        layers: Sequence[Layer],
        masters: list[jax.Array],
        state: dict[str, jax.Array] | None = None,
        step: int = 0,
        loss_scale: LossScale = UNSCALED,
    ) -> None:
        self.step, self.loss_scale = step, loss_scale
        self.host = HostArrays(optimizer, placement, layers, masters, state)
        self._is_arranged = False
        self.resident: dict[int, DeviceLayer] = {}
        self.damage: str | None = None
        self.checkpoint: str | None = None
        self.pending: PendingStep | None = None
        self.prefetch: Prefetch | None = None
        self.accumulated = Accumulated()
        self._tree, self.optimizer = tree, optimizer

    @property
    def params(self) -> Any:
        """The current master parameters in the model's own tree, as NumPy arrays (copies). Waits for updates.

        Frozen parameters are included, bit-identical to the given ones.
        """
        masters = [m.whole() if isinstance(m, Stacked) else np.array(m) for m in self.masters()]
        return jax.tree.unflatten(self._tree, masters)

    @property
    def opt_state(self) -> Any:
        """The optimizer's current state in Optax's form, as NumPy arrays (copies). Waits for updates.

        It gives access to values such as an average of the parameters or the hyperparameters of a schedule.
        """
        leaves = self.optimizer_state()
        return self.optimizer.whole_state({name: _copied(leaf) for name, leaf in leaves.items()})

    def check(self) -> None:
        """Raises an error if the updates of the last step failed, or if the state is damaged.

        Raises:
          TaskError: if no update had begun; the state is rolled back.
          StateError: if an update had begun; the state lies between two steps.
        """
        pending = self.pending
        if pending is not None and pending.work.failure is not None:
            self.pending = None
            pending.work.wait()
            outcome = self.end_failed(pending.step, pending.work, pending.before)
            if self.damage is None:
                raise task_error(pending.work, outcome) from pending.work.failure.error
        if self.damage is not None:
            raise StateError(self.damage)

    def end_failed(self, step: EndingStep, work: StepRun, before: Counts) -> str:
        """Rolls back a failed step, or marks the state as damaged; returns the outcome in words.

        Args:
          step: the failed step; it must have no work in flight.
          work: the run of its tasks.
          before: the state's counts before the step.
        """
        if step.is_updating:
            remedy = "restore a checkpoint" if self.checkpoint is None else f"restore {self.checkpoint}"
            outcome = f"the state lies between two steps: {remedy}"
            self.damage = str(task_error(work, outcome))
            return outcome
        self.step, self.accumulated, self.loss_scale = before.step, before.accumulated, before.loss_scale
        if step.has_added:
            self.forget_accumulated()
            return TO_LAST_UPDATE
        return ROLLED_BACK

    @property
    def counts(self) -> Counts:
        """The fields that a step changes, besides the arrays."""
        return Counts(self.step, self.accumulated, self.loss_scale)

    def settle(self) -> None:
        """Waits for all updates in flight; raises as `check` does."""
        if self.pending is not None:
            self.pending.work.wait()
        self.check()
        self.pending = None

    @property
    def updated_step(self) -> int:
        """The number of steps up to the last update, without micro-batches accumulated since."""
        return self.step - self.accumulated.num_batches

    def forget_accumulated(self) -> None:
        """Rolls back to the last update."""
        self.step, self.accumulated = self.updated_step, Accumulated()

    def masters(self) -> list[Any]:
        """Returns the master parameters in the order of the flattened tree; a `Stacked` for one stored in parts."""
        self.settle()
        by_leaf = self.host.masters()
        return [together(by_leaf[leaf]) for leaf in range(len(by_leaf))]

    def optimizer_state(self) -> dict[str, Any]:
        """Returns the leaves of the optimizer's state by path; leaves shared by all layers (a count) occur once.

        Leaves of parameters that are stored in parts are joined, as copies.
        """
        self.settle()
        return {name: joined(parts) for name, parts in self.host.optimizer_state().items()}

    def stored_optimizer_state(self) -> dict[str, Any]:
        """Returns the same leaves without copies: a `Stacked` for a leaf stored in parts."""
        self.settle()
        return {name: together(parts) for name, parts in self.host.optimizer_state().items()}

    def arrange(self, layers: Sequence[Layer]) -> None:
        """Arranges the state in these parameter groups; does nothing if it is so already."""
        if self.host.layers == tuple(layers) and self._is_arranged:
            return
        if self.accumulated.num_batches:
            raise StateError(
                "a batch of another structure, with other layers, arrived while gradients are accumulated: pass it "
                "after an update"
            )
        self.settle()
        self.optimizer.check_parts(layers)
        with deferred_interrupts():
            self.resident = {}
            self.host.arrange(layers)
        self._is_arranged = True

    def fill(self) -> None:
        """Makes the compute copy of the parameters, if it does not exist."""
        if len(self.host.vectors) < len(self.host.layers):
            self.settle()
            self.host.fill()

    def block_until_ready(self) -> None:
        """Waits for all updates in flight, and for all loads for the next step that can run."""
        self.settle()
        if self.prefetch is not None:
            self.prefetch.work.wait_ahead()
        jax.block_until_ready([(unit.masters, unit.state) for unit in self.host.units])


def _copied(leaf: Any) -> Any:
    """Returns a copy as a NumPy array; returns PRNG keys unchanged."""
    return leaf if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else np.array(leaf)
