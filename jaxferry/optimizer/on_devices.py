"""Masters and optimizer state that stay on devices, where they are updated.

    one device:       the arrays themselves
    several devices:  a share of each array on each device, if the update is element-wise; all of it otherwise

Shares are those of `partition.SharedLayer`: each array is flat, filled up, and split evenly. A gradient arrives in the
same shares, so an update moves nothing between the devices; they gather the new parameters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxferry.optimizer.optimizer import HostOptimizer
from jaxferry.optimizer.pieces import Key, copied, stored_key
from jaxferry.optimizer.update_group import UpdateGroup
from jaxferry.partition import Layer, Span
from jaxferry.partition.graph import aval_bytes
from jaxferry.transport.placement import Placement


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
