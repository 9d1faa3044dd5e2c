"""Masters and optimizer state on the device: for good, or streamed through it in subgroups.

    one device:       the arrays themselves
    several devices:  a share of each array on each device, if the update is element-wise; all of it otherwise

Shares are those of `partition.SharedLayer`: each array is flat, filled up, and split evenly. A gradient arrives in the
same shares, so an update moves nothing between the devices; they gather the new parameters.

    unit --cut--> subgroups, each some of its parameters --> masters and state in flat vectors in pinned memory

The subgroups of a unit follow each other through the device, so that it never holds the whole unit. They are of equal
size, as planned: a parameter that is updated element-wise, or by block, is cut where a subgroup ends. What is too small
to move, such as Adam's count, stays on the device.
"""

from __future__ import annotations

import abc
import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jaxferry.native import MOMENT_BLOCK
from jaxferry.optimizer.optimizer import HostOptimizer
from jaxferry.optimizer.pieces import Key, copied, stored_key
from jaxferry.optimizer.update_group import Subgroup, UpdateGroup
from jaxferry.partition import Layer, Leaf, Span, aval_bytes, make_layer
from jaxferry.transport import Placement, on_cpu


def unit_on_devices(
    optimizer: HostOptimizer, unit: UpdateGroup, layers: Sequence[Layer], placement: Placement
) -> UpdateGroup:
    """The unit as devices hold it, with shapes for arrays; where devices share these, its parts are whole spans."""
    if placement.num_devices == 1 or len(unit.layers) > 1:
        return unit
    trained = layers[unit.layers[0]].trained
    if unit.joins_parts_of([trained]) or not all(map(optimizer.is_elementwise, trained.leaves)):
        return unit
    sizes = [placement.num_devices * -(-leaf.size // placement.num_devices) for leaf in trained.leaves]
    pairs = zip(trained.leaves, sizes, strict=True)
    return optimizer.part_of(unit, [(leaf, Span(0, size, leaf.part)) for leaf, size in pairs])


def num_bytes_on_each(unit: UpdateGroup, placement: Placement) -> int:
    """The bytes of masters and state on each device, of what `unit_on_devices` returns."""
    found = unit.by_key(unit.masters, unit.state).items()
    return sum(aval_bytes(array) // (placement.num_devices if is_shared(key) else 1) for key, array in found)


def is_shared(key: Key) -> bool:
    """Whether devices share the array of a key."""
    return isinstance(key[1], Span)


def where_on_devices(unit: UpdateGroup, placement: Placement) -> tuple[list[NamedSharding], list[NamedSharding]]:
    """The shardings of masters and state, of what `unit_on_devices` returns."""
    each = [placement.shared_device if is_shared(key) else placement.device for key in (*unit.keys, *unit.state_keys)]
    return each[: len(unit.masters)], each[len(unit.masters) :]


@dataclasses.dataclass(frozen=True)
class Elsewhere(abc.ABC):
    """Where masters and state of a unit are, other than in ordinary host memory.

    `home` is the unit in host memory, with shapes. `subgroups` stream through the GPU; none if all stays on the
    device.
    """

    home: UpdateGroup
    placement: Placement
    subgroups: Sequence[Subgroup] = ()

    @property
    def num_bytes(self) -> int:
        """The bytes that stay on each device, but for counts."""
        return 0

    def masters(self, unit: UpdateGroup) -> list[jax.Array]:
        """Returns copies of the unit's masters in host memory."""
        return self._copies(unit, self.home.keys, self.home.masters)

    def state(self, unit: UpdateGroup) -> list[jax.Array]:
        """Returns copies of the unit's optimizer state in host memory."""
        return self._copies(unit, self.home.state_keys, self.home.state)

    @abc.abstractmethod
    def replace_state(self, unit: UpdateGroup, leaves: Mapping[Key, jax.Array]) -> bool:
        """Replaces leaves of the unit's state where they are; False, and nothing is done, if that is not possible."""

    @abc.abstractmethod
    def _arrays(self, unit: UpdateGroup) -> dict[Key, Any]:
        """The unit's masters and state where they are, or views of them; all, or the elements of a span."""

    def _copies(self, unit: UpdateGroup, keys: Sequence[Key], avals: Sequence[Any]) -> list[Any]:
        found, copies = self._arrays(unit), []
        for key, aval in zip(keys, avals, strict=True):
            array = found.get(key)
            if array is None:
                spans = sorted((k for k in found if is_shared(k) and stored_key(k) == key), key=_start)
                # Shares of devices are filled up.
                flat = np.concatenate([np.asarray(found[span]) for span in spans])[: math.prod(aval.shape)]
                array = flat.reshape(aval.shape)
            copies.append(copied(array, self.placement.host))
        return copies


@dataclasses.dataclass(frozen=True, kw_only=True)
class OnDevices(Elsewhere):
    """Masters and state that stay on devices; `there` is the unit as devices hold it, in shapes."""

    there: UpdateGroup

    @classmethod
    def move(cls, optimizer: HostOptimizer, unit: UpdateGroup, layers: Sequence[Layer], placement: Placement) -> None:
        """Moves a unit's masters and state from host memory to the devices."""
        home, found = home_of(unit), unit.by_key(unit.masters, unit.state)
        made = cls(home, placement, there=unit_on_devices(optimizer, home, layers, placement))
        there = made.there
        unit.masters = [made._placed(found, *own) for own in zip(there.keys, there.masters, strict=True)]
        unit.state = [made._placed(found, *own) for own in zip(there.state_keys, there.state, strict=True)]
        unit.elsewhere = made

    @property
    def num_bytes(self) -> int:
        """The bytes on each device."""
        return num_bytes_on_each(self.there, self.placement)

    def replace_state(self, unit: UpdateGroup, leaves: Mapping[Key, jax.Array]) -> bool:
        """See `Elsewhere`."""
        unit.state = [
            self._placed(leaves, key, aval) if stored_key(key) in leaves else array
            for key, aval, array in zip(self.there.state_keys, self.there.state, unit.state, strict=True)
        ]
        return True

    def _arrays(self, unit: UpdateGroup) -> dict[Key, Any]:
        return self.there.by_key(unit.masters, unit.state)

    def _placed(self, arrays: Mapping[Key, jax.Array], key: Key, aval: Any) -> jax.Array:
        array = arrays[stored_key(key)]
        if not is_shared(key):
            return copied(array, self.placement.device)
        filled = np.zeros(aval.shape, aval.dtype)
        filled[: array.size] = np.asarray(array).reshape(-1)
        return jax.device_put(filled, self.placement.shared_device)


def home_of(unit: UpdateGroup) -> UpdateGroup:
    """The unit with shapes for arrays."""
    masters, state = _shapes(unit.masters), _shapes(unit.state)
    return dataclasses.replace(unit, masters=masters, state=state, programs={}, elsewhere=None, on_disk=None)


_ALIGNMENT = 16  # parameters are cut at multiples of so many elements: a cache line of fp32
_Share = list[tuple[Leaf, Span | None]]  # the parameters of a subgroup, each with its elements if they are not all


def subgroups_of(optimizer: HostOptimizer, unit: UpdateGroup, layers: Sequence[Layer], count: int) -> list[Subgroup]:
    """Cuts a unit of one layer into `count` subgroups of about equal bytes; without arrays.

    Some hold nothing if parameters that cannot be cut are larger than their share.
    """
    trained = layers[unit.layers[0]].trained
    cuts = {leaf.index: MOMENT_BLOCK for leaf in trained.leaves if optimizer.is_blockwise(leaf)}
    cuts |= {leaf.index: _ALIGNMENT for leaf in trained.leaves if optimizer.is_elementwise(leaf)}
    shares = _shares(trained, count, cuts)
    if unit.joins_parts_of([trained]) or optimizer.is_joint:
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


@dataclasses.dataclass(frozen=True)
class Streamed(Elsewhere):
    """Masters and state in vectors of subgroups, in pinned memory; the unit itself holds shapes."""

    @classmethod
    def move(
        cls,
        unit: UpdateGroup,
        subgroups: Sequence[Subgroup],
        placement: Placement,
        pack: Callable[[Layer, list[Any]], Any],
    ) -> None:
        """Moves a unit's masters and state from host memory into the vectors of its subgroups."""
        found = unit.by_key(unit.masters, unit.state)
        for each in subgroups:
            arrays = [_piece(found, key) for key in (*each.unit.keys, *each.unit.state_keys)]
            if each.streamed.leaves:
                each.vectors = pack(each.streamed, [arrays[i] for i in each.moved])
            moved, num = set(each.moved), len(each.unit.masters)
            each.unit.state = [
                leaf if num + i in moved else copied(arrays[num + i], placement.device)
                for i, leaf in enumerate(each.unit.state)
            ]
        home = home_of(unit)
        unit.masters, unit.state, unit.elsewhere = home.masters, home.state, cls(home, placement, subgroups)

    def replace_state(self, unit: UpdateGroup, leaves: Mapping[Key, jax.Array]) -> bool:
        """See `Elsewhere`; leaves that move cannot be replaced."""
        for each in self.subgroups:
            num, moved = len(each.unit.masters), set(each.moved)
            if any(stored_key(key) in leaves and num + i in moved for i, key in enumerate(each.unit.state_keys)):
                return False
        for each in self.subgroups:
            pairs = zip(each.unit.state_keys, each.unit.state, strict=True)
            each.unit.state = [
                copied(_piece(leaves, key), self.placement.device) if stored_key(key) in leaves else leaf
                for key, leaf in pairs
            ]
        return True

    def _arrays(self, unit: UpdateGroup) -> dict[Key, Any]:
        found: dict[Key, Any] = {}
        for each in self.subgroups:
            flat = [np.asarray(vector) for vector in on_cpu(each.vectors, self.placement)]
            arrays: list[Any] = [*each.unit.masters, *each.unit.state]
            for leaf in each.streamed.leaves:
                arrays[leaf.index] = flat[leaf.vector][leaf.offset : leaf.offset + leaf.size].reshape(leaf.shape)
            found |= zip((*each.unit.keys, *each.unit.state_keys), arrays, strict=True)
        return found


def _piece(arrays: Mapping[Key, Any], key: Key) -> Any:
    """The array of a key, or its elements as a view."""
    _, part = key
    array = arrays[stored_key(key)]
    return part.of(np.asarray(array)) if isinstance(part, Span) else array


def _start(key: Key) -> int:
    _, span = key
    assert isinstance(span, Span)
    return span.start


def _shares(layer: Layer, count: int, cuts: Mapping[int, int]) -> list[_Share]:
    """Spreads a layer's leaves over shares; those of a share lie side by side, as one transfer moves small ones."""
    ordered = sorted(layer.leaves, key=lambda leaf: (leaf.vector, leaf.offset))
    first = dict(zip([leaf.index for leaf in ordered], itertools.accumulate((x.size for x in ordered), initial=0)))
    ends = [_end(ordered, first, layer.num_parameters * number // count, cuts) for number in range(1, count)]
    shares: list[_Share] = []
    for low, high in itertools.pairwise([0, *ends, layer.num_parameters]):
        shares.append([])
        for leaf in layer.leaves:
            start, stop = max(low - first[leaf.index], 0), min(high - first[leaf.index], leaf.size)
            if start < stop or (leaf.size == 0 and len(shares) == 1):
                is_all = leaf.size in (0, stop - start)
                shares[-1].append((leaf, None if is_all else Span(start, stop, leaf.part)))
    return shares


def _end(ordered: Sequence[Leaf], first: Mapping[int, int], wanted: int, cuts: Mapping[int, int]) -> int:
    """The element at which a share may end that is to end at this one; `first` holds that of each leaf.

    `cuts` has the leaves that may be cut, each with the number whose multiples it may be cut at.
    """
    leaf = next(leaf for leaf in reversed(ordered) if first[leaf.index] <= wanted)
    inner = min(wanted - first[leaf.index], leaf.size)
    if leaf.index in cuts:
        return first[leaf.index] + inner // cuts[leaf.index] * cuts[leaf.index]
    return first[leaf.index] + (leaf.size if 2 * inner >= leaf.size else 0)


def _layout(name: str, unit: UpdateGroup) -> Layer:
    arrays, num = [*unit.masters, *unit.state], len(unit.masters)
    of_moments = [a.ndim > 0 and (a.dtype == np.uint8 or jnp.issubdtype(a.dtype, jnp.floating)) for a in arrays]
    moved = [i for i, is_moment in enumerate(of_moments) if i < num or is_moment]
    paths = [str(i) for i in range(len(arrays))]
    return make_layer(name, moved, paths, arrays, [array.dtype for array in arrays])


def _shapes(arrays: Sequence[Any]) -> list[Any]:
    return [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays]
