"""Masters and optimizer state that updates stream through the GPU, in subgroups of a unit.

    unit --cut--> subgroups, each some of its parameters --> masters and state in flat vectors in pinned memory

The subgroups of a unit follow each other through the device, so that it never holds the whole unit. What is too small
to move, such as Adam's count, stays on the device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxferry.engine.host.optimizer import HostOptimizer
from jaxferry.engine.host.pieces import Key, on_host
from jaxferry.engine.host.pinned import on_cpu, to_pinned
from jaxferry.engine.host.update_group import Subgroup, UpdateGroup
from jaxferry.engine.placement import Placement
from jaxferry.partition import Layer, Leaf, make_layer


def subgroups_of(optimizer: HostOptimizer, unit: UpdateGroup, layers: Sequence[Layer], count: int) -> list[Subgroup]:
    """Cuts a unit into subgroups of about equal bytes, at most one for each parameter; without arrays.

    Args:
      optimizer: the host optimizer.
      unit: the unit of one layer; masters and state may be shapes.
      layers: the parameter groups.
      count: the number of subgroups. Some hold nothing if single parameters are larger than their share.
    """
    trained = layers[unit.layers[0]].trained
    shares = _shares(trained, count)
    if not optimizer.takes_parts_of(unit, shares):
        shares = [list(trained.leaves), *([] for _ in shares[1:])]
    units = [optimizer.part_of(unit, leaves) for leaves in shares]
    found = []
    for own, leaves in zip(units, shares, strict=True):
        vectors = sorted({leaf.vector for leaf in leaves})
        numbered = (dataclasses.replace(leaf, vector=vectors.index(leaf.vector)) for leaf in leaves)
        layer = Layer(trained.name, tuple(numbered))
        found.append(Subgroup(own, layer, tuple(vectors), _layout(trained.name, own)))
    return found


def stream(unit: UpdateGroup, subgroups: list[Subgroup], placement: Placement, pack: Callable[[Layer], Any]) -> None:
    """Moves a unit's masters and state from host memory into the vectors of its subgroups.

    Args:
      unit: the unit; holds shapes afterwards.
      subgroups: of the unit, as made by `subgroups_of`.
      placement: where arrays live.
      pack: returns the program that packs arrays in host memory into the vectors of a layer.
    """
    masters = dict(zip(unit.keys, unit.masters, strict=True))
    state = dict(zip(unit.state_keys, unit.state, strict=True))
    for each in subgroups:
        arrays = [*map(masters.__getitem__, each.unit.keys), *map(state.__getitem__, each.unit.state_keys)]
        if each.streamed.leaves:
            each.vectors = to_pinned(pack(each.streamed)([arrays[i] for i in each.moved]), placement)
        moved, num = set(each.moved), len(each.unit.masters)
        each.unit.state = [
            leaf if num + i in moved else jax.device_put(_own(arrays[num + i]), placement.device)
            for i, leaf in enumerate(each.unit.state)
        ]
    unit.masters, unit.state = _shapes(unit.masters), _shapes(unit.state)
    unit.subgroups = subgroups


def masters_of(unit: UpdateGroup, placement: Placement) -> list[jax.Array]:
    """Copies of a streamed unit's masters in host memory."""
    found: dict[Key, jax.Array] = {}
    for each in unit.subgroups:
        found |= zip(each.unit.keys, _copies(each, range(len(each.unit.masters)), placement), strict=True)
    return [found[key] for key in unit.keys]


def state_of(unit: UpdateGroup, placement: Placement) -> list[jax.Array]:
    """Copies of a streamed unit's optimizer state in host memory."""
    found: dict[Key, jax.Array] = {}
    for each in unit.subgroups:
        first = len(each.unit.masters)
        chosen = range(first, first + len(each.unit.state))
        found |= zip(each.unit.state_keys, _copies(each, chosen, placement), strict=True)
    return [found[key] for key in unit.state_keys]


def replace_state(unit: UpdateGroup, leaves: Mapping[Key, jax.Array], placement: Placement) -> bool:
    """Replaces leaves of a streamed unit's state; False, and nothing is done, if one of them moves."""
    for each in unit.subgroups:
        num, moved = len(each.unit.masters), set(each.moved)
        if any(key in leaves and num + i in moved for i, key in enumerate(each.unit.state_keys)):
            return False
    for each in unit.subgroups:
        pairs = zip(each.unit.state_keys, each.unit.state, strict=True)
        each.unit.state = [
            jax.device_put(_own(leaves[key]), placement.device) if key in leaves else leaf for key, leaf in pairs
        ]
    return True


def _copies(subgroup: Subgroup, chosen: Sequence[int], placement: Placement) -> list[jax.Array]:
    """Copies in host memory of some of a subgroup's masters and state, by their places in `[*masters, *state]`."""
    flat = [np.asarray(vector) for vector in on_cpu(subgroup.vectors, placement)]
    arrays: list[Any] = [*subgroup.unit.masters, *subgroup.unit.state]
    for leaf in subgroup.streamed.leaves:
        arrays[leaf.index] = flat[leaf.vector][leaf.offset : leaf.offset + leaf.size].reshape(leaf.shape)
    return [_copied(arrays[i], placement) for i in chosen]


def _shares(layer: Layer, count: int) -> list[list[Leaf]]:
    """Spreads the leaves of a layer over shares, in the order of their offsets."""
    shares: list[list[Leaf]] = [[] for _ in range(count)]
    total, before = max(layer.num_parameters, 1), 0
    for leaf in sorted(layer.leaves, key=lambda leaf: (leaf.vector, leaf.offset)):
        shares[min(count - 1, (2 * before + leaf.size) * count // (2 * total))].append(leaf)
        before += leaf.size
    return [[leaf for leaf in layer.leaves if leaf in share] for share in shares]


def _layout(name: str, unit: UpdateGroup) -> Layer:
    arrays, num = [*unit.masters, *unit.state], len(unit.masters)
    is_moved = [i < num or (a.ndim > 0 and jnp.issubdtype(a.dtype, jnp.floating)) for i, a in enumerate(arrays)]
    moved = [i for i, moves in enumerate(is_moved) if moves]
    paths = [str(i) for i in range(len(arrays))]
    return make_layer(name, moved, paths, arrays, [array.dtype for array in arrays])


def _shapes(arrays: Sequence[Any]) -> list[Any]:
    return [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays]


def _own(array: Any) -> Any:
    """An array that another client can take; keys of random numbers go through `device_put` itself."""
    return array if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key) else np.array(array)


def _copied(array: Any, placement: Placement) -> jax.Array:
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        return jax.device_put(array, placement.host, may_alias=False)
    return on_host(np.asarray(array), placement)
