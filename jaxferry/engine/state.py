"""The training state: everything that outlives a step, in host memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxferry.engine.host_optimizer import HostOptimizer, Unit
from jaxferry.engine.lanes import Lanes, Work
from jaxferry.engine.loss_scale import UNSCALED, LossScale
from jaxferry.engine.placement import Placement
from jaxferry.engine.subtree import path_names
from jaxferry.engine.transfers import DeviceLayer, HostGradient, Vectors
from jaxferry.errors import StateError, TaskError
from jaxferry.partition import Layer


@dataclasses.dataclass(frozen=True)
class Accumulated:
    """Gradients of micro-batches since the last update.

    Attributes:
      num_batches: how many there were.
      on_host: sums in host memory, by layer.
      on_device: sums on the device, by layer.
      is_finite: whether all their losses were finite.
    """

    num_batches: int = 0
    on_host: Mapping[int, HostGradient] = dataclasses.field(default_factory=dict)
    on_device: Mapping[int, list[jax.Array]] = dataclasses.field(default_factory=dict)
    is_finite: bool = True


@dataclasses.dataclass
class UnderWay:
    """A step whose updates have not all ended, or which failed.

    Attributes:
      work: what is under way.
      lanes: what does it.
      finish: called once it is done, if the step had not returned before.
      is_reported: whether its failure has been raised.
    """

    work: Work
    lanes: Lanes
    finish: Callable[[], Any] | None = None
    is_reported: bool = False


def task_error(work: Work) -> TaskError:
    """The error for a failure, with the layer."""
    if work.failure is None:
        raise ValueError("nothing has failed")
    task, error = work.list.tasks[work.failure.index], work.failure.error
    layer = task.name.removeprefix(f"{task.kind.value} ")
    is_lost = " (it is tried again when the state is next used or saved)" if work.is_committed else ""
    return TaskError(f"the {task.kind.value} of layer {layer!r} failed: {error}{is_lost}", layer)


class TrainState:
    """Master parameters (fp32), optimizer state and their compute copy, all in host memory.

    A frozen parameter is kept in the dtype in which it was given. If that is the compute dtype, the compute copy is all
    that there is of it; else it has a copy in its own dtype as well.

    `step(state, batch)` updates it in place and returns the same object. It is made by `step.init`, `step.init_from` or
    `step.restore`.

    Attributes:
      step: number of steps taken, that is, of batches that have been trained on.
      layers: the layers that the state is arranged in.
      vectors: for each layer its flat vectors in pinned memory, in the compute dtype (once a program needs them).
      resident: device copies of RESIDENT layers, by layer.
      optimizer: what updates it.
      damage: what went wrong if a failure left the state between two steps, else None.
      in_flight: the last step, while its updates are under way.
      accumulated: what micro-batches have left for the next update.
      loss_scale: what the loss is multiplied by for the backward.
    """

    def __init__(
        self,
        tree: jax.tree_util.PyTreeDef,
        optimizer: HostOptimizer,
        placement: Placement,
        layers: Sequence[Layer],
        masters: Sequence[jax.Array],
        state: Mapping[str, jax.Array] | None = None,
        step: int = 0,
        loss_scale: LossScale = UNSCALED,
    ) -> None:
        self.step, self.loss_scale = step, loss_scale
        self.layers: tuple[Layer, ...] = tuple(layers)
        self.vectors: list[Vectors] = []
        self._is_arranged = False
        self.resident: dict[int, DeviceLayer] = {}
        self.damage: str | None = None
        self.in_flight: UnderWay | None = None
        self.accumulated = Accumulated()
        self._tree, self.optimizer, self._placement = tree, optimizer, placement
        self._frozen: dict[int, jax.Array] = {}
        self.units = self._make_units(list(masters), None if state is None else dict(state))

    @property
    def params(self) -> Any:
        """The current master parameters in the model's own tree, as NumPy arrays (copies). Waits for updates.

        Frozen parameters are among them, with the bits with which they were given.
        """
        return jax.tree.unflatten(self._tree, [np.array(master) for master in self.masters()])

    @property
    def opt_state(self) -> Any:
        """The current state of the optimizer as Optax makes it, of NumPy arrays (copies). Waits for updates.

        For what is read from there, such as an average of the parameters or the hyperparameters of a schedule.
        """
        leaves = self.optimizer_state()
        return self.optimizer.whole_state({name: _copied(leaf) for name, leaf in leaves.items()})

    def check(self) -> None:
        """Raises `StateError` if a failure left the state between two steps."""
        if self.damage is not None:
            raise StateError(f"this state lies between two steps, because {self.damage}: restore a checkpoint")

    def report(self) -> None:
        """Raises what failed in the last step, once; the next call tries that again.

        Raises:
          TaskError: the first time.
          StateError: if what failed fails again.
        """
        self.check()
        known = self.in_flight
        if known is None or known.work.failure is None:
            return
        if not known.is_reported:
            known.is_reported = True
            raise task_error(known.work) from known.work.failure.error
        known.lanes.resume(known.work)
        known.work.wait()
        if known.work.failure is not None:
            self.damage = f"{task_error(known.work)}"
            self.check()
        self._put_down(known)

    def settle(self) -> None:
        """Waits until every update in flight has ended; raises as `report` does."""
        if self.in_flight is not None:
            self.in_flight.work.wait()
        self.report()
        if self.in_flight is not None:
            self._put_down(self.in_flight)

    @property
    def updated_step(self) -> int:
        """The number of steps up to the last update: without what has been accumulated since."""
        return self.step - self.accumulated.num_batches

    def forget_accumulated(self) -> None:
        """Goes back to the last update."""
        self.step, self.accumulated = self.updated_step, Accumulated()

    def _put_down(self, known: UnderWay) -> None:
        self.in_flight = None
        if known.finish is not None:
            known.finish()

    def masters(self) -> list[jax.Array]:
        """The master parameters in the order of the flattened tree."""
        self.settle()
        by_leaf = {leaf: master for u in self.units for leaf, master in zip(u.leaves, u.masters, strict=True)}
        by_leaf |= self._frozen
        for layer, vectors in zip(self.layers, self.vectors, strict=False):
            missing = [leaf for leaf in layer.leaves if leaf.index not in by_leaf]
            numbers = {leaf.vector for leaf in missing}
            flat = {number: np.asarray(jax.device_put(vectors[number], self._placement.host)) for number in numbers}
            for leaf in missing:
                part = flat[leaf.vector][leaf.offset : leaf.offset + leaf.size].reshape(leaf.shape)
                by_leaf[leaf.index] = jax.device_put(part, self._placement.host, may_alias=False)
        return [by_leaf[leaf] for leaf in range(len(by_leaf))]

    def optimizer_state(self) -> dict[str, jax.Array]:
        """The leaves of the optimizer's state by path; what all layers have alike (a count) is there once."""
        self.settle()
        return {name: leaf for unit in self.units for name, leaf in zip(unit.state_names, unit.state, strict=True)}

    def arrange(self, layers: Sequence[Layer]) -> None:
        """Arranges the state in these layers; does nothing if it is so already."""
        if self.layers == tuple(layers) and self._is_arranged:
            return
        if self.accumulated.num_batches:
            raise StateError(
                "a batch of another structure, whose layers differ, came while gradients were being accumulated: give "
                "it after an update"
            )
        masters, state = self.masters(), self.optimizer_state()
        self.layers, self.resident = tuple(layers), {}
        self.optimizer.check_parts(layers)
        self.units = self._make_units(masters, state)
        self._is_arranged, self.vectors = True, []

    def fill(self) -> None:
        """Makes `vectors`, the compute copy of the parameters, if it is not there."""
        if len(self.vectors) == len(self.layers):
            return
        self.settle()
        trained = {leaf: master for u in self.units for leaf, master in zip(u.leaves, u.masters, strict=True)}
        programs = {layer.layout: self._packing(layer) for layer in self.layers}
        for layer in self.layers[len(self.vectors) :]:
            leaves = [trained[i] if i in trained else self._frozen[i] for i in (leaf.index for leaf in layer.leaves)]
            self.vectors.append(to_pinned(programs[layer.layout](leaves), self._placement))
            for leaf in layer.leaves:
                if not leaf.is_trained and leaf.dtype == leaf.master_dtype:
                    del self._frozen[leaf.index]

    def block_until_ready(self) -> None:
        """Waits until every update in flight has ended."""
        self.settle()
        jax.block_until_ready([(unit.masters, unit.state) for unit in self.units])

    def _make_units(self, masters: list[jax.Array], state: dict[str, jax.Array] | None) -> list[Unit]:
        frozen = [leaf.index for layer in self.layers for leaf in layer.leaves if not leaf.is_trained]
        self._frozen = {leaf: masters[leaf] for leaf in frozen}
        taken: set[str] = set()
        units = []
        for layers, leaves in self.optimizer.units_of(self.layers):
            chosen = [masters[leaf] for leaf in leaves]
            if state is None:
                own = self.optimizer.init_state(leaves, chosen)
            else:
                names = path_names(self.optimizer.abstract_state(leaves))
                # An update works in place, so what layers have alike needs a buffer for each.
                own = {name: self._copy(state[name]) if name in taken else state[name] for name in names}
            taken.update(own)
            units.append(Unit(layers, leaves, chosen, list(own.values()), list(own)))
        return units

    def _copy(self, array: jax.Array) -> jax.Array:
        return jax.device_put(np.array(array), self._placement.host, may_alias=False)

    def _packing(self, layer: Layer) -> Callable[[Sequence[jax.Array]], Vectors]:
        def pack(masters: Any) -> Vectors:
            return layer.pack(jax.device_put(masters, jax.memory.Space.Device))

        return jax.jit(pack, out_shardings=self._placement.update_output)


def _copied(leaf: jax.Array) -> Any:
    """A copy as a NumPy array; PRNG keys stay what they are."""
    return leaf if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else np.array(leaf)


def to_pinned(vectors: Vectors, placement: Placement) -> Vectors:
    """Brings vectors from the CPU backend into pinned memory of the device, where they are not there already."""
    return vectors if placement.is_cpu else tuple(jax.device_put(v, placement.pinned) for v in vectors)
