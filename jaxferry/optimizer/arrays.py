"""A training state's arrays in host memory, arranged in parameter groups."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxferry.native import host_sums
from jaxferry.optimizer.on_devices import OnDevices, Streamed, subgroups_of
from jaxferry.optimizer.on_disk import OnDisk, put_on_disk
from jaxferry.optimizer.optimizer import HostOptimizer
from jaxferry.optimizer.pieces import Key, Pieces, Stored, Where, WholeCopies, cut, on_host
from jaxferry.optimizer.scratch import Scratch
from jaxferry.optimizer.split_masters import LazyArray, MasterForm
from jaxferry.optimizer.update_group import UpdateGroup
from jaxferry.optimizer.update_programs import split_unit
from jaxferry.partition import Layer, Leaf
from jaxferry.processes import empty
from jaxferry.transport import (
    ORPHANED_COPIES,
    Placement,
    Vectors,
    can_view,
    from_shares,
    on_cpu,
    shares_of,
    to_pinned,
    unwritten,
)


@dataclasses.dataclass(frozen=True)
class Disk:
    """A scratch file, and the function that says which parameter groups have masters and state there."""

    scratch: Scratch
    groups: Callable[[Sequence[Layer]], frozenset[int]]


class HostArrays:
    """Masters, optimizer state and compute copy.

    Masters, by index in the flattened tree, and state, by path, are emptied; without state, it is the initial one.

    Attributes:
      layers: the parameter groups in which the arrays are arranged.
      units: the update groups, with masters and optimizer state.
      whole_copies: of several processes, what programs read in place of `vectors`.
    """

    def __init__(
        self,
        optimizer: HostOptimizer,
        placement: Placement,
        layers: Sequence[Layer],
        masters: dict[int, Stored],
        state: dict[str, Stored] | None,
        disk: Disk | None = None,
    ) -> None:
        self.layers: tuple[Layer, ...] = tuple(layers)
        self._optimizer, self._placement, self._disk = optimizer, placement, disk
        # What holds the vectors outlives this object until the device has read them.
        self._held: list[list[Vectors]] = [[]]
        ORPHANED_COPIES.keep(self, placement, self._held)
        self._filling: concurrent.futures.Future[None] | None = None
        self._stops_filling = False
        self.whole_copies = WholeCopies(placement)
        self._frozen: dict[Key, jax.Array] = {}
        self._stale: set[int] = set()
        self._packings: dict[Any, Callable[[Sequence[jax.Array]], Vectors]] = {}
        pieces = Pieces(masters, placement)
        known = None if state is None else Pieces(state, placement)
        # The caller's references are removed, so that arrays that are cut do not exist twice.
        masters.clear()
        if state is not None:
            state.clear()
        self.units = self._make_units(pieces, known)
        self._unit_of: dict[int, UpdateGroup] = {}

    def unit_of(self, group: int) -> UpdateGroup:
        """The update group that covers a parameter group."""
        unit = self._unit_of.get(group)
        if unit is None:
            self._unit_of = {each: unit for unit in self.units for each in unit.layers}
            unit = self._unit_of[group]
        return unit

    @property
    def vectors(self) -> list[Vectors]:
        """For each group its flat vectors in pinned memory, in the compute dtype (once `fill` has made them)."""
        self._end_filling()
        return self._held[0]

    def readable(self, group: int) -> list[jax.Array]:
        """The vectors from which programs read a group in host memory; see `Placement.readable`."""
        return self.whole_copies.of(group, self.layers[group], self.vectors[group])

    @property
    def on_device(self) -> frozenset[int]:
        """The groups whose masters and optimizer state are on the device."""
        return frozenset(group for unit in self.units if unit.is_on_device for group in unit.layers)

    @property
    def device_bytes(self) -> int:
        """The bytes of masters and optimizer state on each device."""
        return sum(unit.elsewhere.num_bytes for unit in self.units if unit.elsewhere is not None)

    @property
    def streamed(self) -> dict[int, int]:
        """The groups whose updates stream through the GPU, each with its number of subgroups."""
        return {unit.layers[0]: len(unit.subgroups) for unit in self.units if unit.subgroups}

    def to_device(self, unit: UpdateGroup) -> None:
        """Moves the masters and the optimizer state of a unit to the device, where they stay."""
        self.to_host(unit)
        OnDevices.move(self._optimizer, unit, self.layers, self._placement)

    def to_stream(self, unit: UpdateGroup, count: int) -> None:
        """Moves them into flat vectors in pinned memory, in so many subgroups."""
        self.to_host(unit)
        subgroups = subgroups_of(self._optimizer, unit, self.layers, count)
        Streamed.move(unit, subgroups, self._placement, self._packed)

    def to_host(self, unit: UpdateGroup) -> None:
        """Moves them to ordinary host memory."""
        if unit.is_on_disk:
            unit.elsewhere.read(unit)
        elif not unit.is_on_host:
            unit.masters, unit.state, unit.elsewhere = unit.masters_at_home(), unit.state_at_home(), None
            self._refresh(self._stale.intersection(unit.layers))
            self._split(unit)

    def to_disk(self, unit: UpdateGroup) -> None:
        """Moves them to the scratch file, if that is their home and they are in host memory."""
        if self._disk is not None and unit.is_on_host and self._disk.groups(self.layers).issuperset(unit.layers):
            OnDisk.move(unit, self._disk.scratch, self._placement)

    def bring_home(self) -> None:
        """Moves everything that is on the device to host memory."""
        for unit in self.units:
            if unit.is_on_device:
                self.to_host(unit)

    def note_update(self, unit: UpdateGroup) -> None:
        """Notes that a unit was updated on the device: its `vectors` are older than its masters."""
        self._stale |= set(unit.layers)

    def refresh(self, but: Collection[int] = ()) -> None:
        """Makes the `vectors` anew of groups that were updated on the device, but for some."""
        self._refresh(self._stale.difference(but))

    def _refresh(self, groups: set[int]) -> None:
        if not groups:
            return
        trained = self._trained([unit for unit in self.units if groups.intersection(unit.layers)])
        for group in sorted(groups):
            layer, old = self.layers[group], self.vectors[group]
            own = layer.trained
            arrays = [self._master_of(own, leaf, trained) for leaf in own.leaves]
            made = self._packed(own, arrays)
            self.vectors[group] = (*made, *old[len(made) :])
            ORPHANED_COPIES.drop(self._placement, old)
        self._stale = self._stale - groups

    def masters(self) -> dict[int, Stored]:
        """Returns the stored parameters by leaf, without copies where they are in host memory.

        Frozen ones may exist only in the compute copy: they are NumPy views of it.
        """
        return _stored({**self._trained(), **self._frozen_parts()}, self._optimizer.avals)

    def master(self, leaf: int) -> Stored:
        """Returns one of them."""
        units = [unit for unit in self.units if leaf in unit.leaves]
        found = self._trained(units) if units else self._frozen_parts(leaf)
        return _stored({leaf: found[leaf]}, self._optimizer.avals)[leaf]

    def _frozen_parts(self, only: int | None = None) -> dict[int, dict[Where, Any]]:
        """Returns the frozen parameters, or one of them, by leaf and part."""
        found: dict[int, dict[Any, Any]] = {}
        pairs_of_layers = zip(self.layers, self.vectors, strict=False)
        _add(found, ((key, array) for key, array in self._frozen.items() if only in (None, key[0])))
        for layer, vectors in pairs_of_layers:
            keys = [self._key(layer, leaf) for leaf in layer.leaves]
            pairs = zip(keys, self._placement.ownership.of(layer).leaves, strict=True)
            missing = [
                (key, leaf)
                for key, leaf in pairs
                if not leaf.is_trained and key not in self._frozen and only in (None, key[0])
            ]
            numbers = {leaf.vector for _, leaf in missing}
            if self._placement.num_devices == 1 or not numbers:
                own = {number: on_cpu([vectors[number]], self._placement)[0] for number in numbers}
            else:
                own = dict(enumerate(from_shares(vectors, self._placement, layer)))
            flat = {number: np.asarray(own[number]) for number in numbers}
            for (name, part), leaf in missing:
                array = flat[leaf.vector][leaf.offset : leaf.offset + leaf.size].reshape(leaf.shape)
                found.setdefault(name, {})[part] = array
        return dict(found)

    def optimizer_state(self) -> dict[str, Stored]:
        """Returns the stored leaves of the optimizer's state, by path."""
        found: dict[str, dict[Where, Any]] = {}
        for unit in self.units:
            _add(found, zip(unit.state_keys, unit.state_at_home(), strict=True))
        return _stored(found, self._optimizer.state_shapes)

    @property
    def copy_bytes(self) -> dict[str, int]:
        """The bytes that a copy of masters and optimizer state takes of host memory, by what they are for."""
        own = [leaf for layer in self.layers for leaf in self._placement.ownership.of(layer).leaves]
        frozen = {leaf.source: leaf.size * leaf.master_dtype.itemsize for leaf in own if not leaf.is_trained}
        trained = sum(unit.num_bytes for unit in self.units if not unit.is_on_disk)
        return {"master parameters and optimizer state": trained, "frozen parameters": sum(frozen.values())}

    @property
    def elsewhere_bytes(self) -> int:
        """The bytes of masters and optimizer state of which `masters` and `optimizer_state` make copies."""
        return sum(unit.num_bytes for unit in self.units if not (unit.is_on_host or unit.is_on_disk))

    def copies(self) -> tuple[dict[int, Stored], dict[str, Stored]]:
        """Returns what `masters` and `optimizer_state` do, as copies that later steps do not change."""
        found_masters: dict[int, dict[Where, Any]] = {}
        found_state: dict[str, dict[Where, Any]] = {}
        for unit in self.units:
            for found, keys, arrays in (
                (found_masters, unit.keys, unit.masters_at_home()),
                (found_state, unit.state_keys, unit.state_at_home()),
            ):
                own = map(functools.partial(self._copied, unit), arrays)
                _add(found, zip(keys, own, strict=True))
        for name, parts in self._frozen_parts().items():
            found_masters[name] = {part: on_host(array, self._placement) for part, array in parts.items()}
        return _stored(found_masters, self._optimizer.avals), _stored(found_state, self._optimizer.state_shapes)

    def _copied(self, unit: UpdateGroup, array: Any) -> Any:
        """A copy of a unit's array where it is: in host memory, or in the scratch file. Others are copies already."""
        if self._disk is not None and unit.is_on_disk:
            return put_on_disk(on_host(array, self._placement), self._disk.scratch)
        return on_host(array, self._placement) if unit.is_on_host else array

    def arrange(self, layers: Sequence[Layer]) -> None:
        """Arranges the arrays in these parameter groups; `vectors` is empty afterwards.

        If that fails, nothing has changed.
        """
        self._end_filling(at_once=True)
        masters, state = Pieces(self.masters(), self._placement), Pieces(self.optimizer_state(), self._placement)
        before = self.layers
        # Only the pieces hold the arrays now, so that arrays that are cut do not exist twice.
        self.layers, self.units, self._frozen, self._unit_of = tuple(layers), [], {}, {}
        self._drop_vectors()
        try:
            self.units = self._make_units(masters, state)
        except BaseException:
            self.layers = before
            masters, state = Pieces(masters.left(), self._placement), Pieces(state.left(), self._placement)
            self.units = self._make_units(masters, state)
            raise

    def replace_masters(self, masters: dict[int, Stored]) -> None:
        """Replaces all parameters, by index in the flattened tree; `vectors` is empty afterwards."""
        self._end_filling(at_once=True)
        for unit in self.units:
            if not unit.is_on_disk:
                self.to_host(unit)
        pieces = Pieces(masters, self._placement)
        masters.clear()
        frozen = self._take_frozen(pieces)
        made = [[pieces.take(key) for key in unit.keys] for unit in self.units]
        for unit, own in zip(self.units, made, strict=True):
            self.to_host(unit)
            unit.masters = own
            self.to_disk(unit)
        self._frozen = frozen
        self._drop_vectors()

    def replace_state(self, leaves: Mapping[str, Stored]) -> None:
        """Replaces some leaves of the optimizer's state, by path."""
        pieces = Pieces(leaves, self._placement)
        made = [{key: pieces.take(key) for key in unit.state_keys if key[0] in leaves} for unit in self.units]
        for unit, new in zip(self.units, made, strict=True):
            if unit.elsewhere is not None and unit.elsewhere.replace_state(unit, new):
                continue
            if new:
                self.to_host(unit)
                unit.state = [new.get(key, leaf) for key, leaf in zip(unit.state_keys, unit.state, strict=True)]
                self.to_disk(unit)

    def fill(self) -> None:
        """Makes the `vectors` that do not exist."""
        while len(self.vectors) < len(self.layers):
            self._fill_next()

    def begin_fill(self, submit: Callable[..., concurrent.futures.Future[None]]) -> None:
        """Lets a thread make them: to pin memory takes long. Whatever reads or replaces them waits for the thread."""
        if len(self.vectors) < len(self.layers):
            self._stops_filling = False
            self._filling = submit(_fill_while_held, weakref.ref(self))

    def _fill_next(self) -> bool:
        """Makes the vectors of the first group that has none; returns whether more groups have none."""
        made, group = self._held[0], len(self._held[0])
        if self._stops_filling or group == len(self.layers):
            return False
        layer, trained = self.layers[group], self._trained([unit for unit in self.units if group in unit.layers])
        made.append(self._packed(layer, [self._master_of(layer, leaf, trained) for leaf in layer.leaves]))
        for leaf in layer.leaves:
            if not leaf.is_trained and leaf.dtype == leaf.master_dtype:
                del self._frozen[self._key(layer, leaf)]
        if layer.trained.leaves:
            self._split(self.unit_of(group))
        return True

    def _split(self, unit: UpdateGroup) -> None:
        """Stores masters of a unit in host memory by their compute copy, if it exists and updates can work so."""
        made = self._held[0]
        if max(unit.layers) >= len(made):
            return
        form = self._optimizer.updates.form_of(unit, self.layers)
        if form is not MasterForm.WHOLE:
            layers = [self.layers[group].trained for group in unit.layers]
            was_on_disk = unit.is_on_disk
            if was_on_disk:
                self.to_host(unit)
            split_unit(unit, layers, [made[group] for group in unit.layers], form, self._placement)
            if was_on_disk:
                self.to_disk(unit)

    def _end_filling(self, at_once: bool = False) -> None:
        """Waits until no thread makes vectors; `fill` makes those that it could not make, and raises the error."""
        if self._filling is not None:
            self._stops_filling |= at_once
            if not (at_once and self._filling.cancel()):
                concurrent.futures.wait([self._filling])
            self._filling, self._stops_filling = None, False

    def _drop_vectors(self) -> None:
        ORPHANED_COPIES.drop(self._placement, self._held[0])
        self.whole_copies.drop()
        self._held[0], self._stale = [], set()

    def _trained(self, units: Sequence[UpdateGroup] | None = None) -> dict[int, dict[Where, Any]]:
        """Returns the stored masters of trained parameters, by leaf and part; of some units, or all."""
        found: dict[int, dict[Where, Any]] = {}
        for unit in self.units if units is None else units:
            _add(found, zip(unit.keys, unit.masters_at_home(), strict=True))
        return found

    def _key(self, layer: Layer, leaf: Leaf) -> Key:
        """How a group's parameter is stored, or would be if its update took parts of it."""
        return leaf.source, self._placement.ownership.span(layer, leaf) or leaf.part

    def _master_of(self, layer: Layer, leaf: Leaf, trained: Mapping[int, Mapping[Where, Any]]) -> Any:
        """Returns the master of a group's leaf; cuts it if it is stored whole."""
        name, part = self._key(layer, leaf)
        if not leaf.is_trained:
            return self._frozen[name, part]
        known = trained[name]
        if leaf.part is None or part in known:
            return known[part]
        return cut(known[None], leaf.part, self._placement)

    def _make_units(self, masters: Pieces, state: Pieces | None) -> list[UpdateGroup]:
        self._frozen = self._take_frozen(masters)
        units = self._optimizer.units_of(self.layers)
        on_disk = frozenset[int]() if self._disk is None else self._disk.groups(self.layers)
        for unit in units:
            lazily = on_disk.issuperset(unit.layers)
            unit.masters = [masters.take(key, lazily) for key in unit.keys]
            if state is None:
                unit.state = self._optimizer.updates.init_state(unit, unit.masters)
            else:
                unit.state = [state.take(key, lazily) for key in unit.state_keys]
            self.to_disk(unit)
            if unit.is_on_disk:
                for key, array in zip(unit.keys, unit.masters_at_home(), strict=True):
                    masters.put(key, array)
                if state is not None:
                    for key, array in zip(unit.state_keys, unit.state_at_home(), strict=True):
                        state.put(key, array)
        return units

    def _take_frozen(self, masters: Pieces) -> dict[Key, jax.Array]:
        keys = [self._key(layer, leaf) for layer in self.layers for leaf in layer.leaves if not leaf.is_trained]
        return {key: masters.take(key) for key in keys}

    def _packed(self, layer: Layer, arrays: Sequence[jax.Array]) -> Vectors:
        """A layer's arrays in host memory, or what this process holds of them, in new vectors in pinned memory."""
        placement = self._placement
        if not (placement.is_cpu or can_view(placement)):
            in_memory = [on_host(array, placement) if isinstance(array, LazyArray) else array for array in arrays]
            return to_pinned(self._packing(placement.ownership.of(layer))(in_memory), placement, layer)
        if placement.num_devices == 1:
            made = tuple(unwritten(v.shape, v.dtype, placement, is_pinned=True) for v in layer.vectors)
        else:
            there, where = placement.ownership.shared(layer), placement.pinned_of(layer)
            made = tuple(empty(v.size, v.dtype, where) for v in there.vectors)
        shares = [shares_of(vector, placement) for vector in made]
        for (leaf, pieces), array in zip(placement.ownership.placed(layer), arrays, strict=True):
            flat = np.asarray(array).reshape(-1)
            for piece in pieces:
                host_sums.copy(piece.of(shares[leaf.vector]), flat[piece.first : piece.stop])
        return made

    def _packing(self, layer: Layer) -> Callable[[Sequence[jax.Array]], Vectors]:
        def pack(masters: Any) -> Vectors:
            return layer.pack(jax.device_put(masters, jax.memory.Space.Device))

        if layer.layout not in self._packings:
            self._packings[layer.layout] = jax.jit(pack, out_shardings=self._placement.update_output)
        return self._packings[layer.layout]


def _fill_while_held(arrays: weakref.ref[HostArrays]) -> None:
    """Makes vectors as long as somebody else holds the arrays; the body of a thread."""
    while (held := arrays()) is not None and held._fill_next():
        del held  # it may be the last reference, and the next turn asks anew


def _add(found: dict[Any, dict[Where, Any]], arrays: Iterable[tuple[Key, Any]]) -> None:
    for (name, where), array in arrays:
        found.setdefault(name, {})[where] = array


def _stored(found: Mapping[Any, Mapping[Where, Any]], avals: Any) -> dict[Any, Stored]:
    return {name: Stored(pieces, tuple(avals[name].shape), avals[name].dtype) for name, pieces in found.items()}
