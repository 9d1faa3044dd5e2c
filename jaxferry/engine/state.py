"""The training state: everything that outlives a step, in host memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np

from jaxferry.engine.lanes import StepRun
from jaxferry.engine.pending import (
    ROLLED_BACK,
    TO_LAST_UPDATE,
    UNSCALED,
    Accumulated,
    Counts,
    EndingStep,
    LossScale,
    Owner,
    PendingStep,
    Prefetch,
    by_one_thread,
    task_error,
)
from jaxferry.errors import StateError, described
from jaxferry.optimizer import (
    Disk,
    HostArrays,
    HostOptimizer,
    LazyParameter,
    Stored,
    given_leaves,
    host_memory,
    hyperparameters,
    numpy_bytes,
    on_host,
    stored_whole,
)
from jaxferry.partition import Layer, aval_bytes, from_bytes, is_stored_as_bytes, to_bytes
from jaxferry.processes import is_key
from jaxferry.transport import DeviceLayer, Placement, Transport, deferred_interrupts
from jaxferry.units import format_bytes

_FREE_FIRST = "or free other states and copies first"
_READ_BY_LEAF = "or read the parameters one by one (state.lazy_params)"


class TrainState:
    """Master parameters (fp32), optimizer state and their compute copy, all in host memory.

    A frozen parameter keeps its dtype. If that is the compute dtype, the compute copy is its only copy; otherwise there
    is a second one in its own dtype.

    `step(state, batch)` updates the state in place and returns it; `copy` keeps one.

    Attributes:
      step: number of steps taken, which is the number of the next batch.
      host: its arrays, arranged in parameter groups.
      resident, kept: device copies of RESIDENT groups; copies that stay until the micro-batches' update; by group.
      optimizer: the host optimizer.
      damage: the error message if a failed update left the state between two steps, else None.
      checkpoint: the folder of the last save or restore; None if there is none.
      extra: the user's own arrays in the checkpoint that the state was restored from, by name.
      pending, prefetch: the last step, while its updates are in flight; the copies loaded for the next step.
      accumulated: sums of micro-batches since the last update.
      loss_scale: the factor that multiplies the loss for the backward.
      held_bytes: the host memory that training it takes in this process.
      owner: the process, and the thread at a time, that may use the state, with the other states of its step.
    """

    def __init__(
        self,
        params: Any,
        optimizer: HostOptimizer,
        placement: Placement,
        layers: Sequence[Layer],
        masters: dict[int, Stored],
        owner: Owner,
        held_bytes: int,
        state: dict[str, Stored] | None = None,
        step: int = 0,
        loss_scale: LossScale = UNSCALED,
        disk: Disk | None = None,
    ) -> None:
        self.step, self.loss_scale, self._disk = step, loss_scale, disk
        self.host = HostArrays(optimizer, placement, layers, masters, state, disk)
        self._is_arranged = False
        self.resident: dict[int, DeviceLayer] = {}
        self.kept: dict[int, DeviceLayer] = {}
        self.damage: str | None = None
        self.checkpoint: str | None = None
        self.extra: dict[str, np.ndarray] = {}
        self.pending: PendingStep | None = None
        self.prefetch: Prefetch | None = None
        self.accumulated = Accumulated()
        self._params, self._tree = params, jax.tree.structure(params)
        self.optimizer, self._placement = optimizer, placement
        self.owner, self.held_bytes = owner, held_bytes

    def __repr__(self) -> str:
        held, num = sum(unit.stored_bytes for unit in self.host.units), sum(aval.size for aval in self.optimizer.avals)
        found = [f"step {self.step}", f"{num:,} parameters in {len(self.host.layers)} layers"]
        found.append(f"masters and optimizer state {format_bytes(held)}")
        if self.accumulated.num_batches:
            found.append(f"{self.accumulated.num_batches} micro-batches since the last update")
        return f"<TrainState: {', '.join(found)}{', damaged' if self.damage is not None else ''}>"

    @property
    @by_one_thread
    def params(self) -> Any:
        """The current master parameters in the model's own tree, as NumPy arrays (copies). Waits for updates.

        Where several processes train, each must ask for them at the same time, and receives the whole parameters.
        Frozen parameters are included, bit-identical to the given ones. Changes of the copies change nothing; assign a
        tree to replace the parameters: `state.params = tree`. Its arrays are copied, in the masters' dtypes.

        Raises:
          HostMemoryError: if host memory cannot hold the copies; nothing is allocated then.
          InputError: if an assigned tree has another structure or other shapes.
          StateError: if it is assigned while gradients are accumulated.
        """
        self.settle()
        shown = self._shown
        host_memory.check(
            {"parameters": numpy_bytes(shown)}, "a copy of the parameters", _READ_BY_LEAF, self.held_bytes
        )
        by_leaf, pairs = self.host.masters(), zip(self.optimizer.avals, shown, strict=True)
        packed = [own.dtype if own is not aval else None for aval, own in pairs]
        # Without the arrays that have been read, only one parameter exists twice.
        masters = [self._copied_whole(by_leaf.pop(leaf), dtype) for leaf, dtype in enumerate(packed)]
        return jax.tree.unflatten(self._tree, masters)

    @params.setter
    @by_one_thread
    def params(self, tree: Any) -> None:
        shown = self._shown
        leaves = given_leaves("state.params", tree, jax.tree.unflatten(self._tree, shown))
        if self.accumulated.num_batches:
            raise StateError("state.params is assigned while gradients are accumulated: assign it after an update")
        self.settle()
        masters = self._given(dict(enumerate(leaves)), dict(enumerate(self.optimizer.avals)), shown)
        with deferred_interrupts():
            if self.prefetch is not None:
                self.prefetch.work.stop()  # the next step frees the copies of the old parameters
            self.resident = {}
            self.kept.clear()
            with self._damaged_by("state.params"):
                self.host.replace_masters(masters)

    @property
    @by_one_thread
    def lazy_params(self) -> Any:
        """The master parameters in the model's own tree, not copied yet: `np.asarray(leaf)` copies one parameter.

        Each leaf has `shape` and `dtype`, and reads the parameter that the state has then. So a model can be exported,
        or `init` another state, where host memory has no room for a copy of all parameters. Where several processes
        train, all must read each leaf at the same time, in the same order. PRNG keys, which NumPy cannot hold, are
        JAX's own arrays, read at once: with them, all processes ask for the tree together.
        """
        pairs = enumerate(zip(self._shown, self.optimizer.avals, strict=True))
        read = self.read_parameter
        leaves = [read(leaf) if is_key(own[0]) else LazyParameter(read, leaf, *own) for leaf, own in pairs]
        return jax.tree.unflatten(self._tree, leaves)

    @by_one_thread
    def read_parameter(self, leaf: int, index: Any = ..., *, as_bytes: bool = False) -> np.ndarray:
        """Returns a copy of one parameter, or of the elements at an index of NumPy's; waits for updates.

        Args:
          leaf: its number in the flattened tree.
          index: which elements.
          as_bytes: whether a parameter that is stored as bytes (`partition.packed`) stays so; the index is of these.
        """
        self.settle()
        aval, shown = self.optimizer.avals[leaf], self._shown[leaf]
        if as_bytes or shown is aval:
            return self.host.master(leaf).elements(self._placement, index)
        # Elements are packed along the last axis: rows are cut before they are unpacked.
        is_rows = isinstance(index, slice) and len(shown.shape) > 1
        stored = self.host.master(leaf).elements(self._placement, index if is_rows else ...)
        found = from_bytes(stored, shown.dtype)
        found = found if is_rows or index is ... else found[index]
        return found if is_key(found) else np.array(found, copy=None)

    @property
    @by_one_thread
    def opt_state(self) -> Any:
        """The optimizer's current state in Optax's form, as NumPy arrays (copies). Waits for updates.

        It gives access to values such as an average of the parameters. Changes of the copies change nothing; assign a
        tree to replace the state: `state.opt_state = tree`. `set_hyperparams` replaces only hyperparameters. Where
        several processes train, all ask for it together, as for `params`.

        Raises:
          HostMemoryError: if host memory cannot hold the copies; nothing is allocated then.
          InputError: if an assigned tree has another structure or other shapes.
        """
        self.settle()
        shapes = self.optimizer.state_shapes
        needed = {"optimizer state": numpy_bytes(shapes.values())}
        host_memory.check(needed, "a copy of the optimizer's state", _FREE_FIRST, self.held_bytes)
        found = self.host.optimizer_state()
        return self.optimizer.whole_state({name: self._copied_whole(found.pop(name)) for name in shapes})

    @opt_state.setter
    @by_one_thread
    def opt_state(self, state: Any) -> None:
        self._replace_state(dict(zip(self.optimizer.state_shapes, self.optimizer.given_state(state), strict=True)))

    @by_one_thread
    def set_hyperparams(self, **values: Any) -> None:
        """Sets hyperparameters of an optimizer that is wrapped in `optax.inject_hyperparams`. Waits for updates.

        Args:
          **values: numbers by name, such as `learning_rate=1e-4`; the next update uses them.

        Raises:
          InputError: if the optimizer has no such hyperparameter, or a schedule sets it.
        """
        self._replace_state(hyperparameters(self.optimizer.state_shapes, values))

    @by_one_thread
    def copy(self) -> TrainState:
        """Returns an independent copy, also in host memory, that later steps do not change. Waits for updates.

        With `accumulate` it is the state after the last update, as in a checkpoint.

        Raises:
          HostMemoryError: if host memory cannot hold it; nothing is allocated then.
        """
        masters, optimizer = self.copies("a copy of the state")
        args = (self._params, self.optimizer, self._placement, self.host.layers, masters, self.owner, self.held_bytes)
        made = TrainState(*args, optimizer, self.updated_step, self.loss_scale, self._disk)
        made._is_arranged, made.checkpoint = self._is_arranged, self.checkpoint
        return made

    __copy__ = copy

    def __deepcopy__(self, memo: Any) -> TrainState:
        return self.copy()

    def __reduce__(self) -> Any:
        raise TypeError("a TrainState cannot be pickled: step.save(state, path) keeps it on disk")

    def copies(self, what: str) -> tuple[dict[int, Stored], dict[str, Stored]]:
        """Returns copies of masters and optimizer state as they are stored; what they are for is named in errors."""
        self.settle()
        host_memory.check(self.host.copy_bytes, what, _FREE_FIRST, self.held_bytes)
        return self.host.copies()

    @property
    def _shown(self) -> list[Any]:
        """Shape and dtype of each master parameter, as the user sees it."""
        pairs = zip(jax.tree.leaves(self._params), self.optimizer.avals, strict=True)
        return [own if is_stored_as_bytes(own, aval) else aval for own, aval in pairs]

    def _replace_state(self, leaves: Mapping[str, Any]) -> None:
        """Replaces leaves of the optimizer's state, which are copied in their own dtypes."""
        own = self._given(leaves, self.optimizer.state_shapes)
        self.settle()
        with deferred_interrupts(), self._damaged_by("the optimizer's state"):
            self.host.replace_state(own)

    @contextlib.contextmanager
    def _damaged_by(self, what: str) -> Iterator[None]:
        """Marks the state as damaged if an assignment fails: with a scratch file, layers are replaced one by one."""
        try:
            yield
        except BaseException as error:
            if self._disk is not None:
                self.damage = f"an assignment to {what} failed halfway: {described(error)} ({self._between()})"
            raise

    def _between(self) -> str:
        remedy = "restore a checkpoint" if self.checkpoint is None else f"restore {self.checkpoint}"
        return f"the state lies between two steps: {remedy}"

    def _given(
        self, leaves: Mapping[Any, Any], avals: Mapping[Any, Any], shown: Sequence[Any] | None = None
    ) -> dict[Any, Stored]:
        """Whole arrays of the user as they are stored: copies, unless the process keeps only some elements of them.

        `avals` are as stored; `shown` as the user sees parameters, by number, and None for the optimizer's state.
        """

        def stored(name: Any) -> Any:
            leaf, aval = leaves[name], avals[name]
            return (
                leaf
                if shown is None or shown[name] is aval
                else to_bytes(leaf if is_key(leaf) else np.asarray(leaf, shown[name].dtype))
            )

        if self._placement.ownership.is_all:
            needed = {"given arrays": sum(aval_bytes(avals[name]) for name in leaves)}
            host_memory.check(needed, "an assignment to the state", _FREE_FIRST, self.held_bytes)
            return {name: stored_whole(on_host(stored(name), self._placement, avals[name].dtype)) for name in leaves}
        return {
            name: stored_whole(leaf if is_key(leaf) else np.asarray(stored(name), avals[name].dtype))
            for name, leaf in leaves.items()
        }

    def _whole(self, stored: Stored) -> Any:
        return stored.pieces[None] if is_key(stored) else stored.array(self._placement)

    def _copied_whole(self, stored: Stored, packed_dtype: Any = None) -> Any:
        """A copy as a NumPy array, unpacked if the user sees it in another dtype; PRNG keys as they are."""
        found = self._whole(stored)
        if packed_dtype is not None:
            return from_bytes(found, packed_dtype)
        # Of others than whole arrays, it is a copy.
        return np.array(found) if None in stored.pieces and not is_key(stored) else found

    def check(self) -> None:
        """Raises an error if the updates of the last step failed, or if the state is damaged.

        Raises:
          TaskError: if no update had begun; the state is rolled back.
          StateError: if an update had begun; the state lies between two steps. Or if this is a forked child.
        """
        self.owner.check()
        pending = self.pending
        if pending is not None and pending.work.failure is not None:
            self.pending = None
            pending.work.wait()
            outcome = self.end_failed(pending.step, pending.work, pending.before)
            if self.damage is None:
                raise task_error(pending.work, outcome) from pending.work.failure.error
        if self.damage is not None:
            raise StateError(self.damage)

    def end_failed(self, step: EndingStep, work: StepRun, before: Counts, error: BaseException | None = None) -> str:
        """Rolls back a failed step without work in flight, or marks the state as damaged; returns which, in words."""
        if step.is_updating:
            outcome = self._between()
            cause = "" if error is None else f": {described(error)}"
            failed = f"a program of the step failed{cause}" if work.failure is None else str(task_error(work, outcome))
            self.damage = failed if work.failure is not None else f"{failed} ({outcome})"
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

    def finish(self) -> None:
        """Waits for all updates in flight; `check` raises their errors."""
        if self.pending is not None:
            self.pending.work.wait()

    @by_one_thread
    def settle(self) -> None:
        """Waits for all updates in flight; raises as `check` does."""
        self.owner.check()
        self.finish()
        self.check()
        self.pending = None

    @property
    def updated_step(self) -> int:
        """The number of steps up to the last update, without micro-batches accumulated since."""
        return self.step - self.accumulated.num_batches

    def forget_accumulated(self) -> None:
        """Rolls back to the last update."""
        self.step, self.accumulated = self.updated_step, Accumulated()

    @by_one_thread
    def masters(self) -> list[Any]:
        """Returns the master parameters in the tree's order, without copies: later updates change them.

        Those that are split (`optimizer.SplitMaster`) are read by NumPy, which joins them.
        """
        return self.stored()[0]

    @by_one_thread
    def stored(self, copied: bool = False) -> tuple[list[Any], dict[str, Any]]:
        """Returns the master parameters and the leaves of the optimizer's state, in the form of `masters`.

        With `copied` all are copies; else those of layers that are updated on the device are.
        """
        self.settle()
        if copied:
            masters, state = self.copies("a copy of the state")
        else:
            elsewhere = {"state that is updated on the device": self.host.elsewhere_bytes}
            host_memory.check(elsewhere, "a copy of a part of the state", _FREE_FIRST, self.held_bytes)
            masters, state = self.host.masters(), self.host.optimizer_state()
        return (
            [masters[leaf].pieces.get(None, masters[leaf]) for leaf in range(len(masters))],
            {name: stored.pieces.get(None, stored) for name, stored in state.items()},
        )

    @by_one_thread
    def optimizer_state(self) -> dict[str, Any]:
        """Returns the leaves of the optimizer's state by path, joined if stored in parts; updates change whole ones."""
        self.settle()
        return {name: self._whole(stored) for name, stored in self.host.optimizer_state().items()}

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
            self.kept.clear()
            self.host.arrange(layers)
            self._is_arranged = True

    def begin(self, layers: Sequence[Layer], submit: Callable[..., Future[None]]) -> None:
        """Arranges a new state in its groups, and lets a thread make its compute copy: `HostArrays.begin_fill`."""
        if not self._is_arranged:
            self.arrange(layers)
        if self.host.layers == tuple(layers):
            self.host.begin_fill(submit)

    def drop_kept(self, transport: Transport) -> None:
        """Frees the copies that stay between micro-batches; the next one loads them again."""
        while self.kept:
            transport.drop(self.kept.popitem()[1])

    def fill(self) -> None:
        """Makes the compute copy of the parameters, if it does not exist."""
        if len(self.host.vectors) < len(self.host.layers):
            self.settle()
            self.host.fill()

    @by_one_thread
    def block_until_ready(self) -> None:
        """Waits for all updates in flight, and for all loads for the next step that can run."""
        self.settle()
        if self.prefetch is not None:
            self.prefetch.work.wait_ahead()
        jax.block_until_ready([(unit.masters, unit.state) for unit in self.host.units])
