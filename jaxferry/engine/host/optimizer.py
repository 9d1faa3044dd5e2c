"""The optimizer step on the CPU backend: one donated jitted update per layer, shared by equal layers.

    gradient vectors --unscale, clip--> update --> master, state (in place), compute copy (in place)

With an optimizer of `jaxferry.optimizers` and the native library, the update is one operation (`fused.py`); otherwise
XLA compiles Optax's update. Masters and state are leaves of the model's own tree; gradients and the compute copy are
flat vectors. Parameters that are stored in parts are updated by part if that gives the same result
(`stacked_update.py`), otherwise whole, together with all layers that hold parts of them.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxferry.engine.host.fused import clip_factor, fused_rule, fused_update
from jaxferry.engine.host.separable import WholeUpdate, init_content, part_content
from jaxferry.engine.host.stacked_update import PartOptimizer, part_aval
from jaxferry.engine.host.subtree import path_names, select, subtree
from jaxferry.engine.host.update_group import UpdateGroup, by_leaf, packed, put_together, taken_apart, updated_together
from jaxferry.engine.placement import Placement
from jaxferry.optimizers import FusedTransformation, HostRule
from jaxferry.partition import Layer, Part

NOT_SEPARABLE = (
    "the optimizer looks at all parameters at once, or cannot be shown not to{where}; it runs as one update after the "
    "last gradient, so updates do not overlap the backward (for clipping by global norm use clip_norm= instead)"
)
NOT_BY_PART = (
    "the optimizer looks at whole stacked parameters ({leaves}: {reason}); the layers that hold parts of them have one "
    "update after the last gradient, so their updates do not overlap the backward"
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
      is_joint: whether all layers form one unit, because the optimizer is not separable.
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
        self._optimizer, self._tree, self.avals = optimizer, tree, list(avals)
        self._placement, self._clip_norm = placement, clip_norm
        self._whole = WholeUpdate(optimizer, tree, avals, hidden)
        self._programs: dict[Any, Any] = {}
        self._prunes = False
        self._shown = [leaf for leaf in range(len(avals)) if leaf not in hidden]
        self.frozen = frozenset(hidden)
        if (found := self._whole.frozen()) and self._takes_parts([[i for i in self._shown if i not in found]]):
            self.frozen |= found
        self._prunes_whole = self._prunes
        self.is_joint = self._whole.mixes()
        if self.is_joint:
            warnings.warn(NOT_SEPARABLE.format(where=""), stacklevel=4)

    def check_parts(self, layers: Sequence[Layer]) -> None:
        """Makes the optimizer joint if the update of a layer alone differs from its part of the whole update.

        Layers with equal parts share the first one's program, so only that program is compared. Units of parts need no
        comparison: they run the whole update's own equations.
        """
        self._check_stacked(layers)
        alone = {layers[group[0]].name: leaves for group, leaves, parts in self._covered(layers) if not parts}
        if alone and not self.is_joint and not self._takes_parts(list(alone.values())):
            self.is_joint = True
            name = next(name for name, leaves in alone.items() if not self._takes_parts([leaves]))
            self._prunes = self._prunes_whole
            warnings.warn(NOT_SEPARABLE.format(where=f" (seen at layer {name!r})"), stacklevel=4)

    def _takes_parts(self, parts: Sequence[Sequence[int]]) -> bool:
        """Whether the optimizer updates each of these parts alone exactly as within the whole tree.

        Tries trees without the missing leaves first, then trees that mask them (`subtree`). Uses the first form that
        the optimizer accepts.
        """
        first: dict[Any, Sequence[int]] = {}
        for leaves in parts:
            first.setdefault(self._whole.content(leaves), leaves)
        for prune in (True, False):
            if all(content and content == self._part_content(leaves, prune) for content, leaves in first.items()):
                self._prunes = prune
                return True
        return False

    def _part_content(self, leaves: Sequence[int], prune: bool) -> Any:
        """Returns the digest of the update of a part alone; None if the optimizer does not accept such a tree."""
        try:
            return part_content(self._optimizer, self._tree, self.avals, leaves, prune)
        except (ValueError, TypeError, KeyError, AttributeError):
            return None

    def _subtree(self, leaves: Mapping[int, Any]) -> Any:
        """Returns the tree that the optimizer receives for a part."""
        return subtree(self._tree, leaves, self._prunes)

    def _check_stacked(self, layers: Sequence[Layer]) -> None:
        """Finds the stacked parameters whose parts cannot be updated separately, and warns about them."""
        stacked = {leaf.source for layer in layers for leaf in layer.trained.leaves if leaf.part is not None}
        if self.is_joint or not stacked:
            return
        names = path_names(jax.tree.unflatten(self._tree, self.avals))
        reasons: dict[str, list[int]] = {}
        for leaf in sorted(stacked - self._not_by_part):
            obstacle = self._by_part.obstacle(leaf)
            if obstacle is not None:
                reasons.setdefault(obstacle, []).append(leaf)
        for reason, leaves in reasons.items():
            named = ", ".join(names[leaf] for leaf in leaves[:3]) + (", ..." if len(leaves) > 3 else "")
            warnings.warn(NOT_BY_PART.format(leaves=named, reason=reason), stacklevel=5)
            self._not_by_part |= frozenset(leaves)

    @functools.cached_property
    def _by_part(self) -> PartOptimizer:
        shown = subtree(self._tree, select(self.avals, self._shown), prune=False)
        return PartOptimizer(self._optimizer, shown, self._whole)

    def units_of(self, layers: Sequence[Layer]) -> list[UpdateGroup]:
        """Returns the units of these layers, with shapes instead of arrays."""
        return [self._unit(*covered) for covered in self._covered(layers)]

    def _covered(
        self, layers: Sequence[Layer]
    ) -> list[tuple[tuple[int, ...], tuple[int, ...], tuple[Part | None, ...]]]:
        """Returns the layers, leaves and parts of each unit; parts are empty if the unit holds whole leaves."""
        held = {i: layer.trained.leaves for i, layer in enumerate(layers) if layer.trained.leaves}
        covered = []
        together = updated_together([layer.trained for layer in layers], self._not_by_part)
        for group in [tuple(held)] if self.is_joint else [group for group in together if group[0] in held]:
            leaves = [leaf for i in group for leaf in held[i]]
            is_whole = len(group) > 1 or self.is_joint or any(leaf.source in self._not_by_part for leaf in leaves)
            parts = () if is_whole else tuple(leaf.part for leaf in leaves)
            if any(parts):
                covered.append((group, tuple(leaf.source for leaf in leaves), parts))
            else:
                covered.append((group, tuple(sorted({leaf.source for leaf in leaves})), ()))
        return covered

    def is_by_layer(self, layers: Sequence[Layer]) -> bool:
        """Whether each layer has an update of its own."""
        return not self.is_joint and all(len(unit.layers) == 1 for unit in self.units_of(layers))

    def _unit(self, layers: tuple[int, ...], leaves: tuple[int, ...], parts: tuple[Part | None, ...]) -> UpdateGroup:
        if parts:
            held = list(zip(leaves, parts, strict=True))
            masters: list[Any] = [part_aval(self.avals[leaf], part) for leaf, part in held]
            state: list[Any] = [*self._by_part.state_avals(held)]
            keys = self._by_part.state_keys(held)
        else:
            abstract = self.abstract_state(leaves)
            masters, state = [self.avals[leaf] for leaf in leaves], jax.tree.leaves(abstract)
            keys = [(name, None) for name in path_names(abstract)]
        return UpdateGroup(layers, leaves, masters, state, keys, parts=parts)

    def abstract_state(self, leaves: Sequence[int]) -> Any:
        """Shapes of the Optax state of these leaves."""
        return jax.eval_shape(self._optimizer.init, self._subtree(select(self.avals, leaves)))

    def state_shapes(self) -> dict[str, Any]:
        """Shapes of the whole Optax state by path."""
        state = self.abstract_state(self._shown)
        return dict(zip(path_names(state), jax.tree.leaves(state), strict=True))

    def whole_state(self, leaves: Mapping[str, Any]) -> Any:
        """The Optax state with these leaves, by path."""
        state = self.abstract_state(self._shown)
        return jax.tree.unflatten(jax.tree.structure(state), [leaves[name] for name in path_names(state)])

    def init_state(self, unit: UpdateGroup, masters: Sequence[jax.Array]) -> list[jax.Array]:
        """The initial Optax state of a unit, in host memory."""
        leaves, held = unit.leaves, unit.keys

        def init(masters: Any) -> list[jax.Array]:
            masters = jax.device_put(masters, jax.memory.Space.Device)
            if unit.parts:
                return self._by_part.init(held, masters)
            return jax.tree.leaves(self._optimizer.init(self._subtree(dict(zip(leaves, masters, strict=True)))))

        key: Any = ("init", leaves, tuple(master.shape for master in masters))
        if not unit.parts:
            key = init_content(self._optimizer, self._tree, self.avals, leaves, self._prunes) or key
        if key not in self._programs:
            self._programs[key] = jax.jit(init, out_shardings=self._placement.host)
        state: list[jax.Array] = self._programs[key](masters)
        return state

    def compile_updates(self, units: Sequence[UpdateGroup], layers: Sequence[Layer], is_read: Sequence[bool]) -> None:
        """Stores the compiled update of every unit in `unit.programs`; equal units share it.

        It maps `(masters, state, vectors, gradients, norm, scale)` to `(masters, state, vectors)`. `vectors` and
        `gradients` hold the flat vectors of each layer's trained parameters; `gradients` is an empty tuple for a layer
        that no segment reads. Gradients are divided by `scale` first; `norm` is the global norm after the division.
        Both are fp32 scalars. The first three arguments are donated. The old `vectors` only provide memory; they are
        empty tuples if the CPU backend cannot reach pinned memory.
        """
        lowered: dict[Any, Any] = {}
        wanted = []
        for unit in units:
            reads = tuple(is_read[layer] for layer in unit.layers)
            if reads not in unit.programs:
                key = self.update_key(unit, layers, is_read)
                wanted.append((unit, reads, key))
                if key not in self._programs and key not in lowered:
                    lowered[key] = self._lower(unit, layers, reads)
        with ThreadPoolExecutor() as pool:
            compiled = pool.map(lambda program: program.compile(), lowered.values())
            self._programs |= zip(lowered, compiled, strict=True)
        for unit, reads, key in wanted:
            unit.programs[reads] = self._programs[key]

    def update_key(self, unit: UpdateGroup, layers: Sequence[Layer], is_read: Sequence[bool]) -> Any:
        """Returns everything that the update of a unit depends on: units with equal keys share a program."""
        layouts = tuple(layers[i].trained.layout for i in unit.layers)
        shapes = tuple(tuple(master.shape) for master in unit.masters)
        content = self._whole.content(unit.leaves) or unit.leaves
        return (content, shapes, layouts, tuple(is_read[i] for i in unit.layers))

    def update_text(self, unit: UpdateGroup, layers: Sequence[Layer], is_read: Sequence[bool]) -> str:
        """Returns the text of a unit's update before XLA compiles it; masters and state may be shapes."""
        text: str = self._lower(unit, layers, tuple(is_read[i] for i in unit.layers)).as_text()
        return text

    def _lower(self, unit: UpdateGroup, layers: Sequence[Layer], reads: Sequence[bool]) -> Any:
        place, unit_layers = self._placement, [layers[i].trained for i in unit.layers]
        state = self._state_tree(unit)
        rule = self._rule(unit, state, unit_layers, reads)
        if rule is not None:
            update: Any = functools.partial(self._fused_update, rule, self._decays(rule, unit))
        elif unit.parts:
            update = functools.partial(self._part_update, unit.keys)
        else:
            update = self._optax_update

        def flat_update(masters: Any, state_leaves: Any, vectors: Any, gradients: Any, *numbers: jax.Array) -> Any:
            # Operands of different memory kinds do not mix; on a CPU this placement copies nothing.
            host = (masters, state_leaves, vectors, gradients)
            masters, state_leaves, vectors, gradients = jax.device_put(host, jax.memory.Space.Device)
            params, before = masters, state_leaves
            if rule is not None or not unit.parts:
                params = subtree(
                    self._tree, dict(zip(unit.leaves, masters, strict=True)), self._prunes and not unit.parts
                )
                before = jax.tree.unflatten(jax.tree.structure(state), state_leaves)
            params, after, packed = update(unit_layers, params, before, vectors, gradients, *numbers)
            return jax.tree.leaves(params), jax.tree.leaves(after), packed

        def struct(x: Any, where: Any) -> Any:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)

        arrived = [tuple(struct(v, place.update_output) for v in layer.vectors) for layer in unit_layers]
        gradients = [vectors if is_read else () for vectors, is_read in zip(arrived, reads, strict=True)]
        vectors = arrived if place.is_cpu else [() for _ in arrived]
        number = jax.ShapeDtypeStruct((), jnp.float32, sharding=place.host_compute)
        masters, states = ([struct(x, place.host) for x in leaves] for leaves in (unit.masters, unit.state))

        jitted = jax.jit(
            flat_update,
            donate_argnums=(0, 1, 2),
            keep_unused=True,
            out_shardings=(place.host, place.host, place.update_output),
        )
        return jitted.trace(masters, states, vectors, gradients, number, number).lower()

    def _rule(self, unit: UpdateGroup, state: Any, layers: Sequence[Layer], reads: Sequence[bool]) -> HostRule | None:
        """Returns the native library's rule for a unit; None if Optax has to update it."""
        is_cut = any(leaf.part is not None for layer in layers for leaf in layer.leaves)
        if state is None or (is_cut and not unit.parts) or [name for name, _ in unit.state_keys] != path_names(state):
            return None
        return fused_rule(self._optimizer, state, layers, reads)

    def _state_tree(self, unit: UpdateGroup) -> Any:
        """Returns shapes of a unit's Optax state; None if parts have no usable state tree of their own."""
        if not unit.parts:
            return self.abstract_state(unit.leaves)
        if not isinstance(self._optimizer, FusedTransformation) or len(set(unit.leaves)) < len(unit.leaves):
            return None
        return jax.eval_shape(self._optimizer.init, subtree(self._tree, select(self.avals, unit.leaves), prune=False))

    def _decays(self, rule: HostRule, unit: UpdateGroup) -> list[bool] | None:
        """Returns which masters of a unit of parts decay, by the mask of the model's own tree."""
        if not unit.parts:
            return None
        found: list[bool] = []
        shown = subtree(self._tree, select(self.avals, self._shown), prune=False)
        jax.eval_shape(lambda params: found.extend(rule.decays(params)), shown)
        decays = dict(zip(self._shown, found, strict=True))
        return [decays[leaf] for leaf in unit.leaves]

    def _fused_update(
        self,
        rule: HostRule,
        decays: Sequence[bool] | None,
        layers: Sequence[Layer],
        params: Any,
        state: Any,
        vectors: Any,
        gradients: Any,
        norm: jax.Array,
        scale: jax.Array,
    ) -> Any:
        copies = [into or layer.vectors for layer, into in zip(layers, vectors, strict=True)]
        clip = clip_factor(norm, self._clip_norm)
        return fused_update(rule, layers, params, state, copies, gradients, clip, scale, decays)

    def _part_update(
        self,
        held: Sequence[tuple[int, Part | None]],
        layers: Sequence[Layer],
        masters: Any,
        state: Any,
        vectors: Any,
        gradients: Any,
        norm: jax.Array,
        scale: jax.Array,
    ) -> Any:
        found = self._clipped(by_leaf(layers, gradients, scale), norm)
        masters, state = self._by_part.update(held, [found[index] for index in sorted(found)], masters, state)
        return masters, state, packed(layers, dict(zip(sorted(found), masters, strict=True)), vectors)

    def _optax_update(
        self,
        layers: Sequence[Layer],
        params: Any,
        state: Any,
        vectors: Any,
        gradients: Any,
        norm: jax.Array,
        scale: jax.Array,
    ) -> Any:
        whole = put_together(layers, self._clipped(by_leaf(layers, gradients, scale), norm))
        updates, state = self._optimizer.update(self._subtree(whole), state, params)
        params = optax.apply_updates(params, updates)
        masters = dict(zip(sorted(whole), jax.tree.leaves(params), strict=True))
        return params, state, packed(layers, taken_apart(layers, masters), vectors)

    def _clipped(self, gradients: dict[int, jax.Array], norm: jax.Array) -> dict[int, jax.Array]:
        """Scales gradients to `clip_norm` if `norm` exceeds it: `optax.clip_by_global_norm` with a given norm."""
        if self._clip_norm is None:
            return gradients
        limit = jnp.float32(self._clip_norm)
        return {
            i: jnp.where(norm < limit, g, (g / norm.astype(g.dtype)) * limit.astype(g.dtype))
            for i, g in gradients.items()
        }
