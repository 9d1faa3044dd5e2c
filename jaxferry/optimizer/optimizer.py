"""The host optimizer: which parameters are updated together, and their updates.

Each layer has an update of its own if no parameter's update depends on another one; otherwise all layers have one.
Parameters that are stored in parts are updated by part if their update is element-wise (`replay.py`), otherwise whole,
together with all layers that hold parts of them.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import optax

from jaxferry.optimizer.given import given_leaves
from jaxferry.optimizer.pieces import Key
from jaxferry.optimizer.replay import TreeUpdate, part_aval
from jaxferry.optimizer.update_group import UpdateGroup, path_names, updated_together
from jaxferry.optimizer.update_programs import UpdatePrograms
from jaxferry.partition import Layer, Leaf, Span
from jaxferry.transport import Placement

NOT_SEPARABLE = (
    "the optimizer looks at all parameters at once; it runs as one update after the last gradient, so updates do not "
    "overlap the backward (for clipping by global norm use clip_norm= instead)"
)
NOT_BY_PART = (
    "the optimizer looks at whole stacked parameters ({leaves}: {reason}); the layers that hold parts of them have one "
    "update after the last gradient, so their updates do not overlap the backward"
)
HELD_WHOLE = (
    "the optimizer does not update each element of {leaves} alone ({reason}): every process holds such layers whole, "
    "with their optimizer state, and repeats their updates"
)


class HostOptimizer:
    """Runs an Optax transformation over units of a model's tree.

    Args:
      optimizer: the transformation.
      tree: the structure of the parameters.
      avals: shapes and master dtypes of the parameters.
      placement: where arrays live.
      clip_norm: global norm to clip gradients to, or None.
      hidden: leaves that the user has frozen; the transformation does not see them.
      extra_args: the user's own arguments of its update, by name; arrays.

    Attributes:
      avals: shapes and master dtypes of the parameters.
      frozen: leaves without update and gradient: the hidden ones, and those that the transformation itself freezes.
      whole: of several processes, the leaves that each holds whole, since their update is not element-wise.
      is_joint: whether all layers form one unit, because the optimizer is not separable.
      updates: the compiled updates.
      extra: shapes of what an update reads besides gradients and state: the loss, and the user's own arguments.
    """

    _not_by_part: frozenset[int] = frozenset()
    """Leaves that layers hold parts of and that are updated whole."""

    def __init__(
        self,
        optimizer: optax.GradientTransformation,
        tree: jax.tree_util.PyTreeDef,
        avals: Sequence[Any],
        placement: Placement,
        clip_norm: float | None,
        hidden: Collection[int] = (),
        extra_args: Mapping[str, Any] | None = None,
    ) -> None:
        self.avals, self._names = list(avals), path_names(jax.tree.unflatten(tree, avals))
        self._tree = TreeUpdate(optimizer, tree, avals, hidden, extra_args)
        self.extra, self.extra_of, self.jaxprs = self._tree.extra, self._tree.extra_of, self._tree.jaxprs
        self.updates = UpdatePrograms(self._tree, placement, clip_norm)
        self.frozen = self._tree.frozen().union(hidden)
        self.is_joint = self._tree.mixes
        if self.is_joint:
            warnings.warn(NOT_SEPARABLE, stacklevel=4)
        self._ownership = placement.ownership
        self.whole = frozenset[int]() if self._ownership.is_all else self._find_whole()

    def _find_whole(self) -> frozenset[int]:
        """Finds the leaves that every process must hold whole, and warns about them."""
        trained = [leaf for leaf in self._tree.leaves if leaf not in self.frozen]
        reasons = {leaf: reason for leaf in trained if (reason := self._tree.obstacle(leaf)) is not None}
        if reasons:
            reason = next(iter(reasons.values()))
            warnings.warn(HELD_WHOLE.format(leaves=self._named(list(reasons)), reason=reason), stacklevel=5)
        return frozenset(trained if self.is_joint else reasons)

    def check_parts(self, layers: Sequence[Layer]) -> None:
        """Finds the stacked parameters whose parts cannot be updated separately, and warns about them."""
        stacked = {leaf.source for layer in layers for leaf in layer.trained.leaves if leaf.part is not None}
        if self.is_joint or not stacked:
            return
        reasons: dict[str, list[int]] = {}
        for leaf in sorted(stacked - self._not_by_part):
            obstacle = self._tree.obstacle(leaf)
            if obstacle is not None:
                reasons.setdefault(obstacle, []).append(leaf)
        for reason, leaves in reasons.items():
            warnings.warn(NOT_BY_PART.format(leaves=self._named(leaves), reason=reason), stacklevel=4)
            self._not_by_part |= frozenset(leaves)

    def _named(self, leaves: Sequence[int]) -> str:
        return ", ".join(self._names[leaf] for leaf in leaves[:3]) + (", ..." if len(leaves) > 3 else "")

    def units_of(self, layers: Sequence[Layer]) -> list[UpdateGroup]:
        """Returns the units of these layers, with shapes instead of arrays."""
        held = {i: layer.trained.leaves for i, layer in enumerate(layers) if layer.trained.leaves}
        units, own = [], self._ownership
        together = updated_together([layer.trained for layer in layers], self._not_by_part)
        for group in [tuple(held)] if self.is_joint else [group for group in together if group[0] in held]:
            leaves, layer = [leaf for i in group for leaf in held[i]], layers[group[0]]
            is_whole = len(group) > 1 or self.is_joint or any(leaf.source in self._not_by_part for leaf in leaves)
            parts = [None if is_whole else own.span(layer, leaf) or leaf.part for leaf in leaves]
            units.append(self._unit(group, [(leaf.source, part) for leaf, part in zip(leaves, parts, strict=True)]))
        return units

    def is_by_layer(self, layers: Sequence[Layer]) -> bool:
        """Whether each layer has an update of its own."""
        return not self.is_joint and all(len(unit.layers) == 1 for unit in self.units_of(layers))

    def is_elementwise(self, leaf: Leaf) -> bool:
        """Whether any elements of a parameter are updated alone exactly as within the whole."""
        return self._tree.obstacle(leaf.source) is None

    def part_of(self, unit: UpdateGroup, held: Sequence[tuple[Leaf, Span | None]]) -> UpdateGroup:
        """Returns the update of some parameters of a unit alone, with shapes instead of arrays.

        Args:
          unit: the unit.
          held: these parameters, each with its elements if they are not all; only where `is_elementwise`.
        """
        if not held:
            return UpdateGroup(unit.layers, [], [], [], [])
        keys = [(leaf.source, span or (leaf.part if unit.is_by_part else None)) for leaf, span in held]
        return self._unit(unit.layers, keys)

    def _unit(self, layers: tuple[int, ...], held: Sequence[Key]) -> UpdateGroup:
        """Returns the unit of whole parameters, given any number of times, or of parts."""
        keys = list(held) if any(part for _, part in held) else sorted(set(held))
        masters: list[Any] = [part_aval(self.avals[leaf], part) for leaf, part in keys]
        state: list[Any] = [*self._tree.state_avals(keys)]
        return UpdateGroup(layers, keys, masters, state, self._tree.state_keys(keys))

    def state_shapes(self) -> Mapping[str, Any]:
        """Shapes of the whole Optax state by path."""
        return self._state_shapes

    @functools.cached_property
    def _state_shapes(self) -> dict[str, Any]:
        state = self.state_tree()
        return dict(zip(path_names(state), jax.tree.leaves(state), strict=True))

    def state_tree(self) -> Any:
        """The whole Optax state, of shape structs."""
        return self._tree.visible_state

    def whole_state(self, leaves: Mapping[str, Any]) -> Any:
        """The Optax state with these leaves, by path, as the user knows it."""
        state = self.state_tree()
        return self._tree.shown(
            jax.tree.unflatten(jax.tree.structure(state), [leaves[name] for name in path_names(state)])
        )

    def given_state(self, given: Any) -> list[Any]:
        """The leaves of such a state of the user's."""
        return given_leaves("state.opt_state", self._tree.stored(given), self.state_tree())
