"""The host optimizer: which parameters are updated together, and their updates.

Each layer has an update of its own if that gives the same result as the update of the whole tree; otherwise all layers
have one. Parameters that are stored in parts are updated by part if that gives the same result (`separable.py`),
otherwise whole, together with all layers that hold parts of them.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import optax

from jaxferry.errors import InputError
from jaxferry.optimizer.optimized_tree import OptimizedTree
from jaxferry.optimizer.pieces import Key
from jaxferry.optimizer.separable import part_aval
from jaxferry.optimizer.update_group import UpdateGroup, path_names, updated_together
from jaxferry.optimizer.update_programs import UpdatePrograms
from jaxferry.partition import Layer, Leaf, Part, Span
from jaxferry.transport import Placement

NOT_SEPARABLE = (
    "the optimizer looks at all parameters at once, or cannot be shown not to{where}; it runs as one update after the "
    "last gradient, so updates do not overlap the backward (for clipping by global norm use clip_norm= instead)"
)
NOT_BY_PART = (
    "the optimizer looks at whole stacked parameters ({leaves}: {reason}); the layers that hold parts of them have one "
    "update after the last gradient, so their updates do not overlap the backward"
)
HELD_WHOLE = (
    "the optimizer does not update each element of {leaves} alone ({reason}): every process holds such layers whole, "
    "with their optimizer state, and repeats their updates"
)
LATE_JOINT = (
    "the optimizer updates layer {name!r} otherwise than within the whole model, so each process would have to hold "
    "all layers whole, but updates others element by element: use an optimizer that does either for all"
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

    Attributes:
      avals: shapes and master dtypes of the parameters.
      frozen: leaves without update and gradient: the hidden ones, and those that the transformation itself freezes.
      whole: of several processes, the leaves that each holds whole, since their update is not element-wise.
      is_joint: whether all layers form one unit, because the optimizer is not separable.
      updates: the compiled updates.
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
    ) -> None:
        self.avals = list(avals)
        self._tree = whole_tree = OptimizedTree(optimizer, tree, avals, hidden)
        self.updates = UpdatePrograms(whole_tree, placement, clip_norm)
        self.frozen = frozenset(hidden)
        if (found := whole_tree.whole.frozen()) and whole_tree.takes_parts(
            [[i for i in whole_tree.shown if i not in found]]
        ):
            self.frozen |= found
        self._prunes_whole = whole_tree.prunes
        self.is_joint = whole_tree.whole.mixes()
        if self.is_joint:
            warnings.warn(NOT_SEPARABLE.format(where=""), stacklevel=4)
        self._ownership = placement.ownership
        self.whole = frozenset[int]() if self._ownership.is_all else self._find_whole()

    def _find_whole(self) -> frozenset[int]:
        """Finds the leaves that every process must hold whole, and warns about them."""
        trained = [leaf for leaf in self._tree.shown if leaf not in self.frozen]
        reasons = {leaf: reason for leaf in trained if (reason := self._tree.by_part.obstacle(leaf)) is not None}
        if reasons:
            names = path_names(jax.tree.unflatten(self._tree.tree, self.avals))
            named = ", ".join(names[leaf] for leaf in list(reasons)[:3]) + (", ..." if len(reasons) > 3 else "")
            warnings.warn(HELD_WHOLE.format(leaves=named, reason=next(iter(reasons.values()))), stacklevel=5)
        return frozenset(trained if self.is_joint else reasons)

    def check_parts(self, layers: Sequence[Layer]) -> None:
        """Makes the optimizer joint if the update of a layer alone differs from its part of the whole update.

        Layers with equal parts share the first one's program, so only that program is compared. Units of parts need no
        comparison: they run the whole update's own equations.
        """
        self._check_stacked(layers)
        alone = {layers[group[0]].name: leaves for group, leaves, parts in self._covered(layers) if not parts}
        if alone and not self.is_joint and not self._tree.takes_parts(list(alone.values())):
            name = next(name for name, leaves in alone.items() if not self._tree.takes_parts([leaves]))
            if not self._ownership.is_all and not all(layer.is_whole for layer in layers if layer.trained.leaves):
                raise InputError(LATE_JOINT.format(name=name))
            self.is_joint = True
            self._tree.prunes = self._prunes_whole
            warnings.warn(NOT_SEPARABLE.format(where=f" (seen at layer {name!r})"), stacklevel=4)

    def _check_stacked(self, layers: Sequence[Layer]) -> None:
        """Finds the stacked parameters whose parts cannot be updated separately, and warns about them."""
        stacked = {leaf.source for layer in layers for leaf in layer.trained.leaves if leaf.part is not None}
        if self.is_joint or not stacked:
            return
        names = path_names(jax.tree.unflatten(self._tree.tree, self.avals))
        reasons: dict[str, list[int]] = {}
        for leaf in sorted(stacked - self._not_by_part):
            obstacle = self._tree.by_part.obstacle(leaf)
            if obstacle is not None:
                reasons.setdefault(obstacle, []).append(leaf)
        for reason, leaves in reasons.items():
            named = ", ".join(names[leaf] for leaf in leaves[:3]) + (", ..." if len(leaves) > 3 else "")
            warnings.warn(NOT_BY_PART.format(leaves=named, reason=reason), stacklevel=5)
            self._not_by_part |= frozenset(leaves)

    def units_of(self, layers: Sequence[Layer]) -> list[UpdateGroup]:
        """Returns the units of these layers, with shapes instead of arrays."""
        return [self._unit(*covered) for covered in self._covered(layers)]

    def _covered(
        self, layers: Sequence[Layer]
    ) -> list[tuple[tuple[int, ...], tuple[int, ...], tuple[Part | Span | None, ...]]]:
        """Returns the layers, leaves and parts of each unit; parts are empty if the unit holds whole leaves."""
        held = {i: layer.trained.leaves for i, layer in enumerate(layers) if layer.trained.leaves}
        covered = []
        together = updated_together([layer.trained for layer in layers], self._not_by_part)
        for group in [tuple(held)] if self.is_joint else [group for group in together if group[0] in held]:
            leaves = [leaf for i in group for leaf in held[i]]
            is_whole = len(group) > 1 or self.is_joint or any(leaf.source in self._not_by_part for leaf in leaves)
            own, layer = self._ownership, layers[group[0]]
            parts = () if is_whole else tuple(own.span(layer, leaf) or leaf.part for leaf in leaves)
            if any(parts):
                covered.append((group, tuple(leaf.source for leaf in leaves), parts))
            else:
                covered.append((group, tuple(sorted({leaf.source for leaf in leaves})), ()))
        return covered

    def is_by_layer(self, layers: Sequence[Layer]) -> bool:
        """Whether each layer has an update of its own."""
        return not self.is_joint and all(len(unit.layers) == 1 for unit in self.units_of(layers))

    def is_elementwise(self, leaf: Leaf) -> bool:
        """Whether any elements of a parameter are updated alone exactly as within the whole."""
        return self._tree.by_part.obstacle(leaf.source) is None

    def part_of(self, unit: UpdateGroup, held: Sequence[tuple[Leaf, Span | None]]) -> UpdateGroup:
        """Returns the update of some parameters of a unit alone, with shapes instead of arrays.

        Args:
          unit: the unit.
          held: these parameters, each with its elements if they are not all; only where `is_elementwise`.
        """
        if not held:
            return UpdateGroup(unit.layers, (), [], [], [])
        if unit.parts or any(span for _, span in held):
            parts = tuple(span or (leaf.part if unit.parts else None) for leaf, span in held)
            return self._unit(unit.layers, tuple(leaf.source for leaf, _ in held), parts)
        return self._unit(unit.layers, tuple(sorted({leaf.source for leaf, _ in held})), ())

    def takes_parts_of(self, unit: UpdateGroup, parts: Sequence[Sequence[Leaf]]) -> bool:
        """Whether each of these parts of a unit's parameters is updated alone exactly as within the unit."""
        leaves = [sorted({leaf.source for leaf in part}) for part in parts if part]
        return bool(unit.parts) or leaves == [sorted(set(unit.leaves))] or all(map(self._tree.takes, leaves))

    def _unit(
        self, layers: tuple[int, ...], leaves: tuple[int, ...], parts: tuple[Part | Span | None, ...]
    ) -> UpdateGroup:
        if parts:
            held: list[Key] = list(zip(leaves, parts, strict=True))
            masters: list[Any] = [part_aval(self.avals[leaf], part) for leaf, part in held]
            state: list[Any] = [*self._tree.by_part.state_avals(held)]
            keys = self._tree.by_part.state_keys(held)
        else:
            abstract = self._tree.state(leaves)
            masters, state = [self.avals[leaf] for leaf in leaves], jax.tree.leaves(abstract)
            keys = [(name, None) for name in path_names(abstract)]
        return UpdateGroup(layers, leaves, masters, state, keys, parts=parts)

    def state_shapes(self) -> Mapping[str, Any]:
        """Shapes of the whole Optax state by path."""
        return self._state_shapes

    @functools.cached_property
    def _state_shapes(self) -> dict[str, Any]:
        state = self._tree.state(self._tree.shown)
        return dict(zip(path_names(state), jax.tree.leaves(state), strict=True))

    def state_tree(self) -> Any:
        """The whole Optax state, of shape structs."""
        return self._tree.state(self._tree.shown)

    def whole_state(self, leaves: Mapping[str, Any]) -> Any:
        """The Optax state with these leaves, by path."""
        state = self._tree.state(self._tree.shown)
        return jax.tree.unflatten(jax.tree.structure(state), [leaves[name] for name in path_names(state)])
