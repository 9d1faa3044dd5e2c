"""Updates of parameter groups whose master parameters and optimizer state live on the device.

    gradients of each use --sum, unscale, clip--> Optax --> masters, state, copy of the parameters (all in place)

Nothing waits for the host: where no update needs the norm of all gradients, the program itself leaves everything as it
was if the loss is not finite.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxferry.engine.host.update_group import UpdateGroup
from jaxferry.engine.host.update_programs import UpdatePrograms
from jaxferry.engine.placement import Placement
from jaxferry.engine.programs import squared_norm
from jaxferry.engine.transport.base import split
from jaxferry.partition import Gradient, Layer, RowGradient

Uses = Sequence[Sequence[Gradient]]
"""The gradients of a layer, one list for each segment that reads it, as its program returns them."""


class DeviceUpdates:
    """The compiled updates on the device.

    Args:
      updates: the optimizer's updates.
      layers: the parameter groups.
      placement: where arrays live.
    """

    def __init__(self, updates: UpdatePrograms, layers: Sequence[Layer], placement: Placement) -> None:
        self._updates, self._placement = updates, placement
        self._layers = [layer.trained for layer in layers]
        self._programs: dict[Any, Callable[..., Any]] = {}

    def update(
        self,
        unit: UpdateGroup,
        copies: Sequence[Sequence[jax.Array]],
        gradients: Sequence[Uses],
        norm: np.floating,
        scale: np.floating,
        loss: jax.Array,
    ) -> tuple[list[jax.Array], list[jax.Array], list[list[jax.Array]]]:
        """Updates a unit.

        Args:
          unit: the unit; its masters and state are on the device and are donated.
          copies: for each of its layers the trained parameters in the compute dtype, on the device; donated.
          gradients: for each of its layers its uses; none for a layer that no segment reads.
          norm: the global norm of the gradients after the division by `scale`; read only if the optimizer clips.
          scale: divides the gradients.
          loss: nothing changes unless it is finite, a scalar on the device.

        Returns:
          Masters, state and copies.
        """
        layers = [self._layers[group] for group in unit.layers]
        key = (self._updates.key(unit, self._layers, [True] * len(self._layers)), unit.leaves)
        if key not in self._programs:
            self._programs[key] = self._jitted(unit, layers)
        program = self._programs[key]
        made: Any = program(unit.masters, unit.state, copies, gradients, norm, scale, loss)
        return made

    def fold(self, group: int, uses: Uses) -> list[jax.Array]:
        """Adds up the uses of a group: one dense gradient in fp32, joined as by `Layer.join_small`."""
        layer = self._layers[group]
        folded: list[jax.Array] = self._of(layer, "fold", layer.join_small)(uses)
        return folded

    def squared_norm(self, group: int, uses: Uses) -> jax.Array:
        """The squared norm of the sum of the uses, an fp32 scalar on the device."""
        layer = self._layers[group]
        norm: jax.Array = self._of(layer, "norm", squared_norm)(uses)
        return norm

    def _of(self, layer: Layer, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The program that computes a function of the sum of a layer's uses; layers of one layout share it."""
        key = (name, layer.layout)
        if key not in self._programs:
            made = jax.jit(lambda uses: function(_total(layer, uses)), out_shardings=self._placement.device)
            self._programs[key] = made
        return self._programs[key]

    def temporary_bytes(self, unit: UpdateGroup) -> int:
        """An upper bound of the device memory that an element-wise update needs besides arguments and results.

        The sum of several gradients, or of rows, exists as a whole; one dense gradient is read in place.
        """
        return sum(4 * self._layers[group].num_parameters for group in unit.layers)

    def _jitted(self, unit: UpdateGroup, layers: Sequence[Layer]) -> Callable[..., Any]:
        plain = self._updates.plain(unit, layers)

        def update(
            masters: Any, state: Any, copies: Any, gradients: Any, norm: jax.Array, scale: jax.Array, loss: jax.Array
        ) -> Any:
            found: dict[int, jax.Array] = {}
            for layer, uses in zip(layers, gradients, strict=True):
                for leaf, gradient in zip(layer.leaves, _total(layer, uses), strict=True):
                    found[leaf.index] = gradient / scale.astype(gradient.dtype)
            new_masters, new_state, by_leaf = plain(masters, state, found, norm)
            new_copies = [[by_leaf[leaf.index].astype(leaf.dtype) for leaf in layer.leaves] for layer in layers]
            made = (new_masters, new_state, new_copies)
            is_finite = jnp.isfinite(loss)
            return jax.tree.map(lambda new, old: jnp.where(is_finite, new, old), made, (masters, state, copies))

        return jax.jit(update, donate_argnums=(0, 1, 2), out_shardings=self._placement.device)


def _total(layer: Layer, uses: Uses) -> list[jax.Array]:
    """The sum over all uses, in the master dtypes, one array for each leaf; zeros without any."""
    total = None
    for use in uses:
        whole = [g.dense() if isinstance(g, RowGradient) else g for g in split(layer, use)]
        wide = [g.astype(leaf.master_dtype) for leaf, g in zip(layer.leaves, whole, strict=True)]
        total = wide if total is None else [a + b for a, b in zip(total, wide, strict=True)]
    return [jnp.zeros(leaf.shape, leaf.master_dtype) for leaf in layer.leaves] if total is None else total
