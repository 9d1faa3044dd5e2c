"""The optimizer step on the CPU backend: one donated jitted update for each layer, shared by equal layers.

    gradient vectors --unscale, clip--> update --> master, state (in place), compute copy (in place)

Where the optimizer is one of `jaxferry.optimizers` and the native library is there, that is one operation (`fused.py`),
else a program that XLA makes of Optax's. Masters and state are leaves of the model's own tree; gradients and the
compute copy are flat vectors. Parameters that are stored in parts are updated by part where that is the same
(`parts.py`), else whole, together with all layers that hold parts of them.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxferry.engine.fused import clip_factor, fused_rule, fused_update
from jaxferry.engine.parts import PartOptimizer, part_aval
from jaxferry.engine.pieces import Key
from jaxferry.engine.placement import Placement
from jaxferry.engine.separable import WholeUpdate, init_content, part_content
from jaxferry.engine.subtree import path_names, select, subtree
from jaxferry.engine.units import put_together, taken_apart, updated_together
from jaxferry.optimizers import HostRule
from jaxferry.partition import Layer, Part

NOT_SEPARABLE = (
    "the optimizer looks at all parameters at once{where}; it is run as one update after the last gradient, "
    "so updates do not overlap the backward (for clipping by global norm use clip_norm= instead)"
)
NOT_BY_PART = (
    "the optimizer looks at whole stacked parameters ({leaves}: {reason}); the layers that hold parts of them have one "
    "update after the last gradient, so their updates do not overlap the backward"
)


@dataclasses.dataclass
class Unit:
    """What one update covers: a layer, or all layers if the optimizer is not separable.

    Attributes:
      layers: indices of the layers.
      leaves: indices of their parameters in the model's own tree, ascending.
      masters: master parameters in the order of `leaves`, in host memory.
      state: leaves of the Optax state, in host memory.
      state_keys: their paths, and which part of a stacked parameter they belong to.
      programs: the compiled update, by which of the layers are read at all.
      parts: which part each master is of its leaf; empty if all are whole.
    """

    layers: tuple[int, ...]
    leaves: tuple[int, ...]
    masters: list[jax.Array]
    state: list[jax.Array]
    state_keys: list[Key]
    programs: dict[tuple[bool, ...], Any] = dataclasses.field(default_factory=dict)
    parts: tuple[Part | None, ...] = ()

    @property
    def keys(self) -> list[tuple[int, Part | None]]:
        """What the masters are."""
        return list(zip(self.leaves, self.parts or [None] * len(self.leaves), strict=True))


class HostOptimizer:
    """Runs an Optax transformation over units of a model's tree.

    Args:
      optimizer: the transformation.
      tree: the structure of the parameters.
      avals: shapes and master dtypes of the parameters.
      placement: where arrays live.
      clip_norm: global norm to clip gradients to, or None.

    Attributes:
      avals: shapes and master dtypes of the parameters.
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
    ) -> None:
        self._optimizer, self._tree, self.avals = optimizer, tree, list(avals)
        self._placement, self._clip_norm = placement, clip_norm
        self._whole = WholeUpdate(optimizer, tree, avals)
        self._programs: dict[Any, Any] = {}
        self.is_joint = self._whole.mixes()
        if self.is_joint:
            warnings.warn(NOT_SEPARABLE.format(where=""), stacklevel=4)

    def check_parts(self, layers: Sequence[Layer]) -> None:
        """Makes the optimizer joint if the update of a layer alone differs from its part of the whole update.

        Layers whose parts are equal share the program that was made for the first of them, so only that is compared.
        """
        self._check_parts_of_leaves(layers)
        checked = set()
        for layer in () if self.is_joint else layers:
            leaves = [leaf.source for leaf in layer.leaves]
            if any(leaf.part is not None for leaf in layer.leaves):
                continue  # its update is made of the whole update's own equations
            content = self._whole.content(leaves)
            if content is not None and content in checked:
                continue
            checked.add(content)
            if content is None or content != self._part_content(leaves):
                self.is_joint = True
                warnings.warn(NOT_SEPARABLE.format(where=f" (seen at layer {layer.name!r})"), stacklevel=4)
                break

    def _check_parts_of_leaves(self, layers: Sequence[Layer]) -> None:
        stacked = {leaf.source for layer in layers for leaf in layer.leaves if leaf.part is not None}
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
        return PartOptimizer(self._optimizer, self._tree, self.avals, self._whole)

    def _part_content(self, leaves: Sequence[int]) -> Any:
        """What the update of a part alone does; None where the optimizer takes no part (a mask given whole)."""
        try:
            return part_content(self._optimizer, self._tree, self.avals, leaves)
        except (ValueError, TypeError, KeyError, AttributeError):
            return None

    def units_of(self, layers: Sequence[Layer]) -> list[Unit]:
        """The units of these layers, with shapes in place of arrays."""
        if self.is_joint:
            return [self._unit(tuple(range(len(layers))), range(len(self.avals)))]
        units = []
        for group in updated_together(layers, self._not_by_part):
            leaves = [leaf for i in group for leaf in layers[i].leaves]
            parts = tuple(leaf.part for leaf in leaves)
            is_whole = len(group) > 1 or not self._not_by_part.isdisjoint(leaf.source for leaf in leaves)
            if is_whole or not any(parts):
                units.append(self._unit(group, sorted({leaf.source for leaf in leaves})))
            else:
                units.append(self._unit(group, [leaf.source for leaf in leaves], parts))
        return units

    def is_by_layer(self, layers: Sequence[Layer]) -> bool:
        """Whether each layer is a unit."""
        return all(len(unit.layers) == 1 for unit in self.units_of(layers))

    def _unit(self, layers: Sequence[int], leaves: Sequence[int], parts: tuple[Part | None, ...] = ()) -> Unit:
        if parts:
            held = list(zip(leaves, parts, strict=True))
            masters: list[Any] = [part_aval(self.avals[leaf], part) for leaf, part in held]
            state: list[Any] = [*self._by_part.state_avals(held)]
            keys = self._by_part.state_keys(held)
        else:
            abstract = self.abstract_state(leaves)
            masters, state = [self.avals[leaf] for leaf in leaves], jax.tree.leaves(abstract)
            keys = [(name, None) for name in path_names(abstract)]
        return Unit(tuple(layers), tuple(leaves), masters, state, keys, parts=parts)

    def abstract_state(self, leaves: Sequence[int]) -> Any:
        """Shapes of the Optax state of these leaves."""
        return jax.eval_shape(self._optimizer.init, subtree(self._tree, select(self.avals, leaves)))

    def state_shapes(self) -> dict[str, Any]:
        """Shapes of the whole Optax state by path."""
        state = self.abstract_state(range(len(self.avals)))
        return dict(zip(path_names(state), jax.tree.leaves(state), strict=True))

    def init_state(self, unit: Unit, masters: Sequence[jax.Array]) -> list[jax.Array]:
        """The initial Optax state of a unit, in host memory."""
        leaves, held = unit.leaves, unit.keys

        def init(masters: Any) -> list[jax.Array]:
            masters = jax.device_put(masters, jax.memory.Space.Device)
            if unit.parts:
                return self._by_part.init(held, masters)
            return jax.tree.leaves(self._optimizer.init(subtree(self._tree, dict(zip(leaves, masters, strict=True)))))

        key: Any = ("init", leaves, tuple(master.shape for master in masters))
        if not unit.parts:
            key = init_content(self._optimizer, self._tree, self.avals, leaves) or key
        if key not in self._programs:
            self._programs[key] = jax.jit(init, out_shardings=self._placement.host)
        state: list[jax.Array] = self._programs[key](masters)
        return state

    def compile_updates(self, units: Sequence[Unit], layers: Sequence[Layer], is_read: Sequence[bool]) -> None:
        """Makes the compiled update of every unit in `unit.programs`; equal units share it.

        It maps `(masters, state, vectors, gradients, norm, scale)` to `(masters, state, vectors)`. `vectors` and
        `gradients` hold the flat vectors of each layer of the unit, `gradients` an empty tuple for a layer that no
        segment reads. Gradients are divided by `scale` before anything else; `norm` is the global norm after that. Both
        are fp32 scalars. The first three arguments are donated. The old `vectors` only lend their memory; where the CPU
        backend cannot reach pinned memory they are empty tuples.
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

    def update_key(self, unit: Unit, layers: Sequence[Layer], is_read: Sequence[bool]) -> Any:
        """What the update of a unit depends on: units with equal keys share it."""
        layouts = tuple(layers[i].layout for i in unit.layers)
        shapes = tuple(tuple(master.shape) for master in unit.masters)
        content = self._whole.content(unit.leaves) or unit.leaves
        return (content, shapes, layouts, tuple(is_read[i] for i in unit.layers))

    def update_text(self, unit: Unit, layers: Sequence[Layer], is_read: Sequence[bool]) -> str:
        """The update of a unit as XLA is given it; masters and state may be shapes."""
        text: str = self._lower(unit, layers, tuple(is_read[i] for i in unit.layers)).as_text()
        return text

    def _lower(self, unit: Unit, layers: Sequence[Layer], reads: Sequence[bool]) -> Any:
        place, unit_layers = self._placement, [layers[i] for i in unit.layers]
        state = self.abstract_state(unit.leaves)
        rule = self._rule(unit, state, unit_layers, reads)
        if rule is not None:
            update: Any = functools.partial(self._fused_update, rule, self._decays(rule, unit))
        elif unit.parts:
            update = functools.partial(self._part_update, unit.keys)
        else:
            update = self._optax_update

        def flat_update(masters: Any, state_leaves: Any, vectors: Any, gradients: Any, *numbers: jax.Array) -> Any:
            # Operands of several memory kinds do not mix; on a CPU this placement is free of copies.
            host = (masters, state_leaves, vectors, gradients)
            masters, state_leaves, vectors, gradients = jax.device_put(host, jax.memory.Space.Device)
            params, before = masters, state_leaves
            if rule is not None or not unit.parts:
                params = subtree(self._tree, dict(zip(unit.leaves, masters, strict=True)))
                before = jax.tree.unflatten(jax.tree.structure(state), state_leaves)
            params, after, packed = update(unit_layers, params, before, vectors, gradients, *numbers)
            return jax.tree.leaves(params), jax.tree.leaves(after), packed

        def struct(x: Any, where: Any) -> Any:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)

        arrived = [tuple(struct(v, place.update_output) for v in layer.vectors) for layer in unit_layers]
        gradients = [vectors if is_read else () for vectors, is_read in zip(arrived, reads, strict=True)]
        vectors = arrived if place.is_cpu else [() for _ in arrived]
        number = jax.ShapeDtypeStruct((), jnp.float32, sharding=place.host_compute)
        return jax.jit(
            flat_update,
            donate_argnums=(0, 1, 2),
            keep_unused=True,
            out_shardings=(place.host, place.host, place.update_output),
        ).lower(
            [struct(m, place.host) for m in unit.masters],
            [struct(s, place.host) for s in unit.state],
            vectors,
            gradients,
            number,
            number,
        )

    def _rule(self, unit: Unit, state: Any, layers: Sequence[Layer], reads: Sequence[bool]) -> HostRule | None:
        """The rule of the native library for a unit; None where it has to be left to Optax."""
        if unit.parts:
            is_tree = len(set(unit.leaves)) == len(unit.leaves)
            if not is_tree or [name for name, _ in unit.state_keys] != path_names(state):
                return None
        elif any(leaf.part is not None for layer in layers for leaf in layer.leaves):
            return None
        return fused_rule(self._optimizer, state, layers, reads)

    def _decays(self, rule: HostRule, unit: Unit) -> list[bool] | None:
        """Which masters of a unit of parts decay: as the mask says of the model's own tree."""
        if not unit.parts:
            return None
        found: list[bool] = []
        whole = jax.tree.unflatten(self._tree, self.avals)
        jax.eval_shape(lambda params: found.extend(rule.decays(params)), whole)
        return [found[leaf] for leaf in unit.leaves]

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
        by_leaf = self._clipped(_by_leaf(layers, gradients, scale), norm)
        masters, state = self._by_part.update(held, [by_leaf[index] for index in sorted(by_leaf)], masters, state)
        return masters, state, _packed(layers, dict(zip(sorted(by_leaf), masters, strict=True)), vectors)

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
        by_leaf = put_together(layers, self._clipped(_by_leaf(layers, gradients, scale), norm))
        updates, state = self._optimizer.update(subtree(self._tree, by_leaf), state, params)
        params = optax.apply_updates(params, updates)
        masters = dict(zip(sorted(by_leaf), jax.tree.leaves(params), strict=True))
        return params, state, _packed(layers, taken_apart(layers, masters), vectors)

    def _clipped(self, gradients: dict[int, jax.Array], norm: jax.Array) -> dict[int, jax.Array]:
        """Scales gradients to `clip_norm` if `norm` exceeds it: `optax.clip_by_global_norm`, with the norm given."""
        if self._clip_norm is None:
            return gradients
        limit = jnp.float32(self._clip_norm)
        return {
            i: jnp.where(norm < limit, g, (g / norm.astype(g.dtype)) * limit.astype(g.dtype))
            for i, g in gradients.items()
        }


def _by_leaf(layers: Sequence[Layer], gradients: Sequence[Any], scale: jax.Array) -> dict[int, jax.Array]:
    """Gradients by leaf index in the master dtypes, divided by the scale; zeros for a layer that has none."""
    found: dict[int, jax.Array] = {}
    for layer, vectors in zip(layers, gradients, strict=True):
        arrays = layer.unpack(vectors) if vectors else [jnp.zeros(leaf.shape) for leaf in layer.leaves]
        wide = [a.astype(leaf.master_dtype) for leaf, a in zip(layer.leaves, arrays, strict=True)]
        found |= {leaf.index: a / scale.astype(a.dtype) for leaf, a in zip(layer.leaves, wide, strict=True)}
    return found


def _packed(layers: Sequence[Layer], masters: dict[int, jax.Array], vectors: Sequence[Any]) -> list[Any]:
    """The compute copy of each layer."""
    return [
        layer.pack([masters[leaf.index] for leaf in layer.leaves], into or None)
        for layer, into in zip(layers, vectors, strict=True)
    ]
