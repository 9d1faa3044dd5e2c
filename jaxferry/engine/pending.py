"""What a state remembers of steps that have not ended, and which thread may use it.

A training step and its states belong to the process that made them, and to one of its threads at a time. A forked
child has none of its parent's threads, and would wait for them forever. Two threads that run steps of one state would
wait for each other's tasks; one that reads a state would meet arrays that an update of the other donated. The user
runs under settings of JAX of its own, which the owner leaves meanwhile (`settings`).

Some loads of the next step run before it is called. A load waits only for the update of its group, which often ends
while the previous step is still running, or while the caller prepares the next batch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Protocol, TypeVar

import jax
import numpy as np

from jaxferry.engine.lanes import StepRun
from jaxferry.errors import JaxFerryError, StateError, TaskError, described, internal_errors, is_internal
from jaxferry.partition import Layer, Partition, SharedLayer
from jaxferry.settings import own_settings
from jaxferry.step import Kind, StepProgram
from jaxferry.transport import DeviceLayer, HostGradient, Placement, StepMarks, TaskMark, Transport, Vectors

ROLLED_BACK = "the state is that before the step"
TO_LAST_UPDATE = "the state is that after the last update"
_BEFORE_ALL_LAYERS = "what depends on the batch alone, before the first layer,"


class Owner:
    """The process in which this object was made, and the thread in an entry of the training step or of a state."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._lock = threading.RLock()
        self._user: tuple[str, str] | None = None

    def check(self) -> None:
        """Raises StateError in another process, that is a forked child of this one."""
        if os.getpid() != self._process:
            raise StateError(
                "this training step and its states belong to the parent process, and a forked child has none of its "
                "threads: start processes by multiprocessing's 'spawn' or 'forkserver', and pass them NumPy arrays "
                "(state.params)"
            )

    @contextlib.contextmanager
    def using(self, entry: str, state: Any = None) -> Iterator[None]:
        """Reserves step and states for the calling thread while the block runs, under the engine's settings of JAX.

        It never waits. `entry` is named in another thread's error; `state` is what it may change, for the text of an
        internal error.

        Raises:
          InternalError: for an error of the block that is JaxFerry's own mistake.
          StateError: if another thread is in an entry, or this is a forked child.
          InputError: if a setting of JAX's forbids every program.
        """
        self.check()
        if not self._lock.acquire(blocking=False):
            thread, running = self._user or ("another", "another entry")
            raise StateError(
                f"thread {threading.current_thread().name!r} called {entry} while thread {thread!r} was in {running}: "
                "one thread at a time may use a training step and its states; call them from one thread or under a "
                "lock of your own (save(wait=False) writes beside steps; another train_step may run beside this one)"
            )
        before = self._user
        try:
            self._user = before or (threading.current_thread().name, entry)
            with internal_errors(functools.partial(_state_after, state, getattr(state, "step", None))), own_settings():
                yield
        finally:
            self._user = before
            self._lock.release()


def _state_after(state: Any, step: int | None) -> str:
    """What an entry has left of a state whose step number was `step`, in words."""
    if step is None:
        return ""
    if state.damage is not None:
        return "the state is damaged"
    return ROLLED_BACK if state.step == step else f"state.step is {state.step}, the number of the next batch"


_Entry = TypeVar("_Entry", bound=Callable[..., Any])


def by_one_thread(entry: _Entry) -> _Entry:
    """Makes a method an entry of its object's `owner`."""

    @functools.wraps(entry)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.owner.using(entry.__qualname__, self):
            return entry(self, *args, **kwargs)

    made: Any = call
    return made


LARGEST = 2.0**24
GROWTH_STEPS = 2000  # the number of consecutive updates with finite gradients after which the factor is doubled


@dataclasses.dataclass(frozen=True)
class LossScale:
    """The factor that prevents underflow of small 16-bit gradients, and the updates since its last change.

    It multiplies the loss before the backward and divides the gradients in the update, in fp32. If it is too large,
    gradients become infinite: the update is then skipped, exactly, and the factor halved (Micikevicius et al., Mixed
    Precision Training, 2018, section 3.2). Dynamic factors are powers of two, so scaling is exact.
    """

    value: float = 2.0**16
    is_dynamic: bool = True
    num_finite: int = 0

    def after(self, is_finite: bool) -> LossScale:
        """Returns the factor for the next update."""
        if not self.is_dynamic:
            return self
        if not is_finite:
            return LossScale(max(self.value / 2, 1.0))
        if self.num_finite + 1 < GROWTH_STEPS:
            return dataclasses.replace(self, num_finite=self.num_finite + 1)
        return LossScale(min(self.value * 2, max(self.value, LARGEST)))


UNSCALED = LossScale(1.0, is_dynamic=False)  # the identity: no scaling


@dataclasses.dataclass(frozen=True)
class Accumulated:
    """Gradients of micro-batches since the last update: sums by parameter group, `on_host` and `on_device`.

    `weight` is the sum of the micro-batches' weights, 1 each unless the loss function states them, `loss` that of their
    losses, each times its weight; `is_finite` says whether all losses were.
    """

    num_batches: int = 0
    weight: float = 0.0
    loss: Any = 0
    on_host: Mapping[int, HostGradient] = dataclasses.field(default_factory=dict)
    on_device: Mapping[int, list[jax.Array]] = dataclasses.field(default_factory=dict)
    is_finite: bool = True

    def check_last(self, partition: Partition) -> None:
        """Raises `StateError` if the last micro-batch before an update does not read a layer that has a sum.

        Its program says how gradients arrive for updates, and moves sums to them.
        """
        unread = [group for group in {*self.on_host, *self.on_device} if not partition.num_uses[group]]
        if unread:
            name = partition.layers[min(unread)].name
            raise StateError(
                f"the last micro-batch before an update does not read layer {name!r}, of which earlier ones have a "
                "gradient: pass one that reads it last"
            )

    def offloaded(self, group: int, transport: Transport) -> Accumulated:
        """Returns the same sums with one group's moved to host memory."""
        on_device = dict(self.on_device)
        stored = transport.store(group, on_device.pop(group), self.on_host.get(group), is_sum=True)
        jax.block_until_ready(transport.gather(group, stored))
        return dataclasses.replace(self, on_host={**self.on_host, group: stored}, on_device=on_device)

    def brought(self, group: int, transport: Transport, layer: Layer, placement: Placement) -> Accumulated:
        """Returns the same sums with one group's moved from host memory to the device, as its update adds them up."""
        on_host = dict(self.on_host)
        stored, arrays = on_host.pop(group), []
        flat = [np.asarray(vector) for vector in transport.gather(group, stored)]
        for transfer in layer.transfers:
            leaves = [layer.leaves[i] for i in transfer.leaves]
            end = transfer.offset + sum(leaf.size for leaf in leaves)
            part = flat[transfer.vector][transfer.offset : end].astype(leaves[0].master_dtype)
            arrays.append(part.reshape(leaves[0].shape) if len(leaves) == 1 else part)
        shared = placement.ownership.shared(layer)
        if isinstance(shared, SharedLayer):
            arrays = shared.shares_of_joined(arrays)
        brought = jax.block_until_ready(jax.device_put(arrays, placement.shares_of(layer)))
        transport.recycle(group, stored)
        return dataclasses.replace(self, on_host=on_host, on_device={**self.on_device, group: brought})


@dataclasses.dataclass(frozen=True)
class Counts:
    """The fields of a state that a step changes, besides the arrays."""

    step: int
    accumulated: Accumulated
    loss_scale: LossScale


class EndingStep(Protocol):
    """A failed step as the state sees it; `is_updating`: an update may have changed the state."""

    is_updating: bool

    @property
    def has_added(self) -> bool:
        """Whether sums of earlier micro-batches may have changed."""


@dataclasses.dataclass(frozen=True)
class PendingStep:
    """A step that has returned, but whose updates may still be in flight, with the state's counts before it."""

    work: StepRun
    step: EndingStep
    before: Counts


class DeviceCopies:
    """The device copies that one step loads.

    Loads take copies that an earlier micro-batch has left in `kept`, by group; drops leave them there unless the update
    follows (`is_last`). With `expects_kept`, the micro-batch before may still be running, and leaves the copies that
    stay. A program takes such a copy when it needs it, since the load may run too early.
    """

    def __init__(
        self,
        program: StepProgram,
        transport: Transport,
        placement: Placement,
        vectors: list[Vectors],
        marks: StepMarks | None,
        kept: dict[int, DeviceLayer],
    ) -> None:
        self._program, self._transport, self._vectors = program, transport, vectors
        self._placement, self.marks, self._kept = placement, marks, kept
        self._held: dict[int, DeviceLayer] = {}
        self._num_left = dict(program.loaded)
        self.is_last, self.expects_kept = True, False

    def __len__(self) -> int:
        return len(self._held)

    @property
    def arrays(self) -> list[jax.Array]:
        """All arrays that currently hold copies."""
        return [array for copy in self._held.values() for array in copy.arrays]

    def load(self, index: int) -> None:
        """Runs the load with this index; see `lanes.Action`."""
        group = self._program.instructions[index].group
        is_first = self._num_left[group] == self._program.loaded[group]
        self._num_left[group] -= 1
        if index not in self._held and not (is_first and self.expects_kept and group in self._program.kept):
            self._take(index, None if self.marks is None else self.marks.of(index))

    def _take(self, index: int, mark: TaskMark | None = None) -> DeviceLayer:
        """Takes the copy of a load: one that stays from an earlier load of the group, or a new one."""
        group = self._program.instructions[index].group
        copy = self._kept.pop(group, None)
        if copy is None:
            copy = self._transport.load(group, self._vectors[group], mark)
            wait_for_copy(copy, self._placement)
        self._held[index] = copy
        return copy

    def _copy(self, index: int) -> DeviceLayer:
        copy = self._held.get(index)
        return self._take(index) if copy is None else copy

    def parameters(self, index: int) -> list[jax.Array]:
        """The parameters that the load with this index copied."""
        return self._copy(index).parameters()

    def arriving(self, index: int) -> tuple[DeviceLayer, Vectors]:
        """The copy of this load for a program that waits for it, and the vectors that the load reads."""
        return self._copy(index), self._vectors[self._program.instructions[index].group]

    def drop(self, index: int, is_reused: bool = True) -> None:
        """Frees the copy of a load once the programs that read it have run, or leaves it to a later load."""
        copy, group = self._copy(index), self._program.instructions[index].group
        del self._held[index]
        if group in self._program.kept and (self._num_left[group] or not self.is_last):
            assert group not in self._kept, "two copies of a group stay"
            self._kept[group] = copy
        else:
            # Before the update the next load does not wait for the gradient that the last reader makes.
            self._transport.drop(copy, is_reused, self.is_last and group in self._program.reserved)

    def take_over(self, earlier: DeviceCopies, loads: Collection[int]) -> None:
        """Takes the copies that these loads have made for a step with like tasks; frees its other copies."""
        self._held = {index: copy for index, copy in earlier._held.items() if index in loads}
        earlier._held = {index: copy for index, copy in earlier._held.items() if index not in loads}
        earlier.drop_all()

    def forget(self, index: int) -> None:
        """Gives up the copy of a load whose arrays a failed program has taken."""
        self._transport.take(self._held.pop(index))

    def drop_all(self) -> None:
        """Frees every copy."""
        while self._held:
            self._transport.drop(self._held.popitem()[1])


def wait_for_copy(copy: DeviceLayer, placement: Placement) -> None:
    """Waits for a copy if the lanes' threads do the work themselves."""
    if placement.is_cpu:
        jax.block_until_ready(copy.parameters())


@dataclasses.dataclass(eq=False)
class Prefetch:
    """A step that has not been called yet, with some groups already on the device or in flight."""

    work: StepRun
    copies: DeviceCopies

    def discard(self) -> None:
        """Waits for loads in flight, and frees all copies."""
        self.work.stop()
        self.copies.drop_all()


class Keeper(Protocol):
    """A state with copies that stay between micro-batches, and updates that its last step has left to the next one."""

    def finish(self) -> None:
        """Waits for these updates; their errors are raised when the state is used."""

    def drop_kept(self, transport: Transport) -> None:
        """Frees them."""


class PrefetchSlot:
    """Ensures that at most one state of a training step has something on the device between two steps.

    That is, prefetched copies, copies that stay, or gradients of updates that are left to the next step.
    """

    def __init__(self) -> None:
        self._known: Prefetch | None = None
        self._keeper: tuple[weakref.ref[Keeper], Transport] | None = None
        self._last: StepRun | None = None

    def note(self, work: StepRun) -> None:
        """Remembers the run of the keeper's last step, whose updates may be in flight when the keeper is dropped."""
        self._last = work

    def keep(self, keeper: Keeper, transport: Transport) -> None:
        """Lets only this state keep copies between micro-batches, and leave updates to its next step."""
        if self._keeper is None or self._keeper[0]() is not keeper:
            self._drop_kept()
        self._keeper = (weakref.ref(keeper), transport)

    def clear(self) -> None:
        """Frees all of these copies, so that something else may run."""
        self.take(None)
        self._drop_kept()

    def _drop_kept(self) -> None:
        known, last = self._keeper, self._last
        self._keeper = self._last = None
        if known is not None and (keeper := known[0]()) is not None:
            keeper.finish()
            keeper.drop_kept(known[1])
        elif last is not None:
            last.stop()

    def put(self, prefetch: Prefetch) -> None:
        """Remembers a prefetch until it is taken."""
        self._known = prefetch

    def take(self, prefetch: Prefetch | None) -> None:
        """Forgets the remembered prefetch, and frees it unless it is the given one, which its caller uses or frees."""
        known, self._known = self._known, None
        if known is not None and known is not prefetch:
            known.discard()


class LateFailure(Exception):
    """A device error of the task `index` that surfaces while another one is issued; the error is the `__cause__`."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.index = index


@contextlib.contextmanager
def task_errors(what: str = _BEFORE_ALL_LAYERS, layer: str = "") -> Iterator[None]:
    """Turns errors of the block into a `TaskError` that says what has failed; no update has begun yet."""
    try:
        yield
    except JaxFerryError:
        raise
    except Exception as error:
        raise TaskError(f"{what} failed: {described(error)} ({ROLLED_BACK})", layer) from error


def task_error(work: StepRun, outcome: str) -> TaskError:
    """Makes the error for a failed task; the message names the layer and what happened to the state."""
    assert work.failure is not None
    index, error = work.failure.index, work.failure.error
    if isinstance(error, LateFailure) and error.__cause__ is not None:
        index, error = error.index, error.__cause__
    if index is None:
        what = "the step" if is_internal(error) else _BEFORE_ALL_LAYERS
        return TaskError(f"{what} failed: {described(error)} ({outcome})", "")
    task = work.list.tasks[index]
    layer = task.name.removeprefix(f"{task.kind.value} ")
    is_last = task.segment == max(other.segment for other in work.list.tasks)
    # The last segment's forward and backward are one program.
    what = "forward or backward" if task.kind is Kind.FORWARD and is_last else task.kind.value
    return TaskError(f"the {what} of layer {layer!r} failed: {described(error)} ({outcome})", layer)
