"""Masters and optimizer state on the device: for good, or streamed through it in subgroups.

Masters and optimizer state that stay on devices, where they are updated.

    one device:       the arrays themselves
    several devices:  a share of each array on each device, if the update is element-wise; all of it otherwise

Shares are those of `partition.SharedLayer`: each array is flat, filled up, and split evenly. A gradient arrives in the
same shares, so an update moves nothing between the devices; they gather the new parameters.

Masters and optimizer state that updates stream through the GPU, in subgroups of a unit.

    unit --cut--> subgroups, each some of its parameters --> masters and state in flat vectors in pinned memory

The subgroups of a unit follow each other through the device, so that it never holds the whole unit. They are of equal
size, as planned: a parameter that is updated element-wise is cut where a subgroup ends. What is too small to move, such
as Adam's count, stays on the device.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jaxferry.optimizer.optimizer import HostOptimizer
from jaxferry.optimizer.pieces import Key, copied, stored_key
from jaxferry.optimizer.update_group import Subgroup, UpdateGroup
from jaxferry.partition import Layer, Leaf, Span, aval_bytes, make_layer
from jaxferry.transport import Placement, on_cpu


def unit_on_devices(
    optimizer: HostOptimizer, unit: UpdateGroup, layers: Sequence[Layer], placement: Placement
) -> UpdateGroup:
    """The unit as devices hold it, with shapes instead of arrays.

    Its parts are spans where devices share its arrays, of all their elements.

    Args:
      optimizer: the optimizer.
      unit: the unit; masters and state may be shapes.
      layers: the parameter groups.
      placement: the devices.
    """
    if placement.num_devices == 1 or len(unit.layers) > 1:
        return unit
    trained = layers[unit.layers[0]].trained
    # Parameters that are stored in parts and updated whole stay together.
    is_joined = not unit.parts and any(leaf.part for leaf in trained.leaves)
    if is_joined or not all(map(optimizer.is_elementwise, trained.leaves)):
        return unit
    sizes = [placement.num_devices * -(-leaf.size // placement.num_devices) for leaf in trained.leaves]
    pairs = zip(trained.leaves, sizes, strict=True)
    return optimizer.part_of(unit, [(leaf, Span(0, size, leaf.part)) for leaf, size in pairs])


def num_bytes_on_each(unit: UpdateGroup, placement: Placement) -> int:
    """The bytes of masters and state on each device, of what `unit_on_devices` returns."""
    pairs = [*zip(unit.keys, unit.masters, strict=True), *zip(unit.state_keys, unit.state, strict=True)]
    return sum(aval_bytes(array) // (placement.num_devices if is_shared(key) else 1) for key, array in pairs)


def is_shared(key: Key) -> bool:
    """Whether devices share the array of a key."""
    return isinstance(key[1], Span)


def where_on_devices(unit: UpdateGroup, placement: Placement) -> tuple[list[NamedSharding], list[NamedSharding]]:
    """The shardings of masters and state, of what `unit_on_devices` returns."""
    each = [placement.shared_device if is_shared(key) else placement.device for key in (*unit.keys, *unit.state_keys)]
    return each[: len(unit.masters)], each[len(unit.masters) :]


@dataclasses.dataclass(frozen=True)
class OnDevices:
    """Where the arrays of a unit are while they are on devices, and where they come from.

    Attributes:
      unit: the unit as devices hold it; shapes.
      home: the same in host memory; shapes.
      placement: the devices.
    """

    unit: UpdateGroup
    home: UpdateGroup
    placement: Placement

    @classmethod
    def of(
        cls, optimizer: HostOptimizer, unit: UpdateGroup, layers: Sequence[Layer], placement: Placement
    ) -> OnDevices:
        """For a unit in host memory."""
        shapes: list[list[Any]] = [
            [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays] for arrays in (unit.masters, unit.state)
        ]
        home = dataclasses.replace(unit, masters=shapes[0], state=shapes[1], programs={}, subgroups=[])
        return cls(unit_on_devices(optimizer, home, layers, placement), home, placement)

    @property
    def num_bytes(self) -> int:
        """The bytes on each device."""
        return num_bytes_on_each(self.unit, self.placement)

    def placed(self, masters: Sequence[jax.Array], state: Sequence[jax.Array]) -> tuple[list[Any], list[Any]]:
        """Copies on the devices of arrays in host memory."""
        return (
            self._placed(masters, self.home.keys, self.unit.keys, self.unit.masters),
            self._placed(state, self.home.state_keys, self.unit.state_keys, self.unit.state),
        )

    def masters_at_home(self, masters: Sequence[jax.Array]) -> list[jax.Array]:
        """Copies in host memory of masters on the devices."""
        return self._at_home(masters, self.unit.keys, self.home.keys, self.home.masters)

    def state_at_home(self, state: Sequence[jax.Array]) -> list[jax.Array]:
        """Likewise of the optimizer's state."""
        return self._at_home(state, self.unit.state_keys, self.home.state_keys, self.home.state)

    def replaced(self, state: Sequence[jax.Array], leaves: Mapping[Key, jax.Array]) -> list[jax.Array]:
        """The state on the devices with some leaves from host memory, given by their keys there."""
        return [
            self._on_devices(leaves[stored_key(key)], key, aval) if stored_key(key) in leaves else array
            for key, aval, array in zip(self.unit.state_keys, self.unit.state, state, strict=True)
        ]

    def _placed(
        self, arrays: Sequence[jax.Array], keys: Sequence[Key], wanted: Sequence[Key], avals: Sequence[Any]
    ) -> list[jax.Array]:
        found = dict(zip(keys, arrays, strict=True))
        return [self._on_devices(found[stored_key(key)], key, aval) for key, aval in zip(wanted, avals, strict=True)]

    def _on_devices(self, array: jax.Array, key: Key, aval: Any) -> jax.Array:
        if not is_shared(key):
            return copied(array, self.placement.device)
        filled = np.zeros(aval.shape, aval.dtype)
        filled[: array.size] = np.asarray(array).reshape(-1)
        return jax.device_put(filled, self.placement.shared_device)

    def _at_home(
        self, arrays: Sequence[jax.Array], keys: Sequence[Key], wanted: Sequence[Key], avals: Sequence[Any]
    ) -> list[jax.Array]:
        found = {stored_key(key): (key, array) for key, array in zip(keys, arrays, strict=True)}
        return [self._in_host_memory(*found[key], aval) for key, aval in zip(wanted, avals, strict=True)]

    def _in_host_memory(self, key: Key, array: jax.Array, aval: Any) -> jax.Array:
        if not is_shared(key):
            return copied(array, self.placement.host)
        size = int(np.prod(aval.shape, dtype=np.int64))
        return jax.device_put(np.array(array)[:size].reshape(aval.shape), self.placement.host)


_ALIGNMENT = 16
"""Parameters are cut at multiples of so many elements: a cache line of fp32."""

_Share = list[tuple[Leaf, Span | None]]
"""The parameters of a subgroup, each with its elements if they are not all."""


def subgroups_of(optimizer: HostOptimizer, unit: UpdateGroup, layers: Sequence[Layer], count: int) -> list[Subgroup]:
    """Cuts a unit into subgroups of about equal bytes; without arrays.

    Args:
      optimizer: the host optimizer.
      unit: the unit of one layer; masters and state may be shapes.
      layers: the parameter groups.
      count: the number of subgroups. Some hold nothing if parameters that cannot be cut are larger than their share.
    """
    trained = layers[unit.layers[0]].trained
    shares = _shares(trained, count, {leaf.index for leaf in trained.leaves if optimizer.is_elementwise(leaf)})
    # Parameters that are stored in parts and updated whole stay together.
    is_joined = not unit.parts and any(leaf.part for leaf in trained.leaves)
    if is_joined or optimizer.is_joint:
        shares = [[(leaf, None) for leaf in trained.leaves], *([] for _ in shares[1:])]
    units = [optimizer.part_of(unit, share) for share in shares]
    found = []
    for own, share in zip(units, shares, strict=True):
        vectors = sorted({leaf.vector for leaf, _ in share})
        layer = Layer(trained.name, tuple(_held(leaf, span, vectors) for leaf, span in share))
        spans = {leaf.index: span for leaf, span in share if span}
        found.append(Subgroup(own, layer, spans, tuple(vectors), _layout(trained.name, own)))
    return found


def _held(leaf: Leaf, span: Span | None, vectors: Sequence[int]) -> Leaf:
    """A leaf of a subgroup, in its place in these vectors of the unit's layer."""
    leaf = dataclasses.replace(leaf, vector=vectors.index(leaf.vector))
    return leaf if span is None else dataclasses.replace(leaf, shape=(span.size,), offset=leaf.offset + span.start)


def stream(
    unit: UpdateGroup, subgroups: list[Subgroup], placement: Placement, pack: Callable[[Layer, list[Any]], Any]
) -> None:
    """Moves a unit's masters and state from host memory into the vectors of its subgroups.

    Args:
      unit: the unit; holds shapes afterwards.
      subgroups: of the unit, as made by `subgroups_of`.
      placement: where arrays live.
      pack: returns new vectors of a layer in pinned memory, with the content of arrays in host memory.
    """
    masters = dict(zip(unit.keys, unit.masters, strict=True))
    state = dict(zip(unit.state_keys, unit.state, strict=True))
    for each in subgroups:
        arrays = [_piece(masters, key) for key in each.unit.keys]
        arrays += [_piece(state, key) for key in each.unit.state_keys]
        if each.streamed.leaves:
            each.vectors = pack(each.streamed, [arrays[i] for i in each.moved])
        moved, num = set(each.moved), len(each.unit.masters)
        each.unit.state = [
            leaf if num + i in moved else copied(arrays[num + i], placement.device)
            for i, leaf in enumerate(each.unit.state)
        ]
    unit.masters, unit.state = _shapes(unit.masters), _shapes(unit.state)
    unit.subgroups = subgroups


def masters_of(unit: UpdateGroup, placement: Placement) -> list[jax.Array]:
    """Copies of a streamed unit's masters in host memory."""
    found: dict[Key, Any] = {}
    for each in unit.subgroups:
        found |= zip(each.unit.keys, _views(each, placement)[: len(each.unit.masters)], strict=True)
    return _copies(found, unit.keys, unit.masters, placement)


def state_of(unit: UpdateGroup, placement: Placement) -> list[jax.Array]:
    """Copies of a streamed unit's optimizer state in host memory."""
    found: dict[Key, Any] = {}
    for each in unit.subgroups:
        found |= zip(each.unit.state_keys, _views(each, placement)[len(each.unit.masters) :], strict=True)
    return _copies(found, unit.state_keys, unit.state, placement)


def replace_state(unit: UpdateGroup, leaves: Mapping[Key, jax.Array], placement: Placement) -> bool:
    """Replaces leaves of a streamed unit's state; False, and nothing is done, if one of them moves."""
    for each in unit.subgroups:
        num, moved = len(each.unit.masters), set(each.moved)
        if any(stored_key(key) in leaves and num + i in moved for i, key in enumerate(each.unit.state_keys)):
            return False
    for each in unit.subgroups:
        pairs = zip(each.unit.state_keys, each.unit.state, strict=True)
        each.unit.state = [
            copied(_piece(leaves, key), placement.device) if stored_key(key) in leaves else leaf for key, leaf in pairs
        ]
    return True


def _piece(arrays: Mapping[Key, Any], key: Key) -> Any:
    """The array of a key, or its elements as a view."""
    _, part = key
    array = arrays[stored_key(key)]
    return part.of(np.asarray(array)) if isinstance(part, Span) else array


def _views(subgroup: Subgroup, placement: Placement) -> list[Any]:
    """A subgroup's masters, then its state; what moves are views of its vectors."""
    flat = [np.asarray(vector) for vector in on_cpu(subgroup.vectors, placement)]
    arrays: list[Any] = [*subgroup.unit.masters, *subgroup.unit.state]
    for leaf in subgroup.streamed.leaves:
        arrays[leaf.index] = flat[leaf.vector][leaf.offset : leaf.offset + leaf.size].reshape(leaf.shape)
    return arrays


def _copies(found: Mapping[Key, Any], keys: Sequence[Key], avals: Sequence[Any], placement: Placement) -> list[Any]:
    """Copies in host memory of whole arrays, of which some are found in pieces."""
    pieces: dict[Key, list[Key]] = {}
    for key in found:
        pieces.setdefault(stored_key(key), []).append(key)
    copies = []
    for key, aval in zip(keys, avals, strict=True):
        array = found.get(key)
        if array is None:
            ordered = sorted(pieces[key], key=_start)
            array = np.concatenate([np.asarray(found[piece]) for piece in ordered]).reshape(aval.shape)
        copies.append(copied(array, placement.host))
    return copies


def _start(key: Key) -> int:
    _, span = key
    assert isinstance(span, Span)
    return span.start


def _shares(layer: Layer, count: int, can_cut: Collection[int]) -> list[_Share]:
    """Spreads the leaves of a layer over shares; those of a share lie side by side, as one transfer moves small ones.

    Args:
      layer: the layer.
      count: the number of shares.
      can_cut: indices of the leaves that are cut where a share ends; others are whole.
    """
    ordered = sorted(layer.leaves, key=lambda leaf: (leaf.vector, leaf.offset))
    first = dict(zip([leaf.index for leaf in ordered], itertools.accumulate((x.size for x in ordered), initial=0)))
    ends = [_end(ordered, first, layer.num_parameters * number // count, can_cut) for number in range(1, count)]
    shares: list[_Share] = []
    for low, high in itertools.pairwise([0, *ends, layer.num_parameters]):
        shares.append([])
        for leaf in layer.leaves:
            start, stop = max(low - first[leaf.index], 0), min(high - first[leaf.index], leaf.size)
            if start < stop or (leaf.size == 0 and len(shares) == 1):
                is_all = leaf.size in (0, stop - start)
                shares[-1].append((leaf, None if is_all else Span(start, stop, leaf.part)))
    return shares


def _end(ordered: Sequence[Leaf], first: Mapping[int, int], wanted: int, can_cut: Collection[int]) -> int:
    """The element at which a share may end that is to end at this one; `first` holds that of each leaf."""
    leaf = next(leaf for leaf in reversed(ordered) if first[leaf.index] <= wanted)
    inner = min(wanted - first[leaf.index], leaf.size)
    if leaf.index in can_cut:
        return first[leaf.index] + inner // _ALIGNMENT * _ALIGNMENT
    return first[leaf.index] + (leaf.size if 2 * inner >= leaf.size else 0)


def _layout(name: str, unit: UpdateGroup) -> Layer:
    arrays, num = [*unit.masters, *unit.state], len(unit.masters)
    is_moved = [i < num or (a.ndim > 0 and jnp.issubdtype(a.dtype, jnp.floating)) for i, a in enumerate(arrays)]
    moved = [i for i, moves in enumerate(is_moved) if moves]
    paths = [str(i) for i in range(len(arrays))]
    return make_layer(name, moved, paths, arrays, [array.dtype for array in arrays])


def _shapes(arrays: Sequence[Any]) -> list[Any]:
    return [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays]
