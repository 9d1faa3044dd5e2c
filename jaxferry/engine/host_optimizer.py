"""The optimizer step on the CPU backend: one donated jitted update for each layer, shared by equal layers.

    gradient vectors --unscale, clip--> update --> master, state (in place), compute copy (in place)

Where the optimizer is one of `jaxferry.optimizers` and the native library is there, that is one operation (`fused.py`),
else a program that XLA makes of Optax's. Masters and state are leaves of the model's own tree; gradients and the
compute copy are flat vectors.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxferry.engine.fused import clip_factor, fused_rule, fused_update
from jaxferry.engine.placement import Placement
from jaxferry.engine.separable import WholeUpdate, init_content, part_content
from jaxferry.engine.subtree import path_names, select, subtree
from jaxferry.optimizers import HostRule
from jaxferry.partition import Layer

NOT_SEPARABLE = (
    "the optimizer looks at all parameters at once{where}; it is run as one update after the last gradient, "
    "so updates do not overlap the backward (for clipping by global norm use clip_norm= instead)"
)


@dataclasses.dataclass
class Unit:
    """What one update covers: a layer, or all layers if the optimizer is not separable.

    Attributes:
      layers: indices of the layers.
      leaves: indices of their parameters, ascending.
      masters: master parameters in the order of `leaves`, in host memory.
      state: leaves of the Optax state, in host memory.
      state_names: their paths.
      programs: the compiled update, by which of the layers are read at all.
    """

    layers: tuple[int, ...]
    leaves: tuple[int, ...]
    masters: list[jax.Array]
    state: list[jax.Array]
    state_names: list[str]
    programs: dict[tuple[bool, ...], Any] = dataclasses.field(default_factory=dict)


class HostOptimizer:
    """Runs an Optax transformation over units of a model's tree.

    Args:
      optimizer: the transformation.
      tree: the structure of the parameters.
      avals: shapes and master dtypes of the parameters.
      placement: where arrays live.
      clip_norm: global norm to clip gradients to, or None.
      hidden: leaves that are frozen whatever the transformation would do: it is not shown them.

    Attributes:
      avals: shapes and master dtypes of the parameters.
      frozen: leaves that are not updated, and whose gradient nobody asks for: those hidden, and those that the
        transformation itself freezes.
      is_joint: whether all layers form one unit, because the optimizer is not separable.
    """

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

        Layers whose parts are equal share the program that was made for the first of them, so only that is compared.
        """
        parts = {layer.name: [leaf.index for leaf in layer.trained.leaves] for layer in layers if layer.trained.leaves}
        if not self.is_joint and not self._takes_parts(list(parts.values())):
            self.is_joint = True
            name = next(name for name, leaves in parts.items() if not self._takes_parts([leaves]))
            self._prunes = self._prunes_whole
            warnings.warn(NOT_SEPARABLE.format(where=f" (seen at layer {name!r})"), stacklevel=4)

    def _takes_parts(self, parts: Sequence[Sequence[int]]) -> bool:
        """Whether the optimizer, given each of these parts alone, does to it what it does to it in the whole.

        Trees without what is missing are tried first, then trees that mark it (`subtree`): what it takes it is given.
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
        """What the update of a part alone does; None where the optimizer does not take such a tree."""
        try:
            return part_content(self._optimizer, self._tree, self.avals, leaves, prune)
        except (ValueError, TypeError, KeyError, AttributeError):
            return None

    def _subtree(self, leaves: Mapping[int, Any]) -> Any:
        """What the optimizer is given of a part of the tree."""
        return subtree(self._tree, leaves, self._prunes)

    def units_of(self, layers: Sequence[Layer]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """The layers and leaves of each unit."""
        parts = {i: tuple(leaf.index for leaf in layer.trained.leaves) for i, layer in enumerate(layers)}
        parts = {i: leaves for i, leaves in parts.items() if leaves}
        if self.is_joint:
            return [(tuple(parts), tuple(sorted(leaf for leaves in parts.values() for leaf in leaves)))]
        return [((i,), leaves) for i, leaves in parts.items()]

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

    def init_state(self, leaves: Sequence[int], masters: Sequence[jax.Array]) -> dict[str, jax.Array]:
        """The initial Optax state of these leaves by path, in host memory."""

        def init(masters: Any) -> list[jax.Array]:
            masters = jax.device_put(masters, jax.memory.Space.Device)
            return jax.tree.leaves(self._optimizer.init(self._subtree(dict(zip(leaves, masters, strict=True)))))

        key = init_content(self._optimizer, self._tree, self.avals, leaves, self._prunes) or tuple(leaves)
        if key not in self._programs:
            self._programs[key] = jax.jit(init, out_shardings=self._placement.host)
        state = self._programs[key](masters)
        return dict(zip(path_names(self.abstract_state(leaves)), state, strict=True))

    def compile_updates(self, units: Sequence[Unit], layers: Sequence[Layer], is_read: Sequence[bool]) -> None:
        """Makes the compiled update of every unit in `unit.programs`; equal units share it.

        It maps `(masters, state, vectors, gradients, norm, scale)` to `(masters, state, vectors)`. `vectors` and
        `gradients` hold the flat vectors of each layer's trained parameters, `gradients` an empty tuple for a layer
        that no segment reads. Gradients are divided by `scale` before anything else; `norm` is the global norm after
        that. Both are fp32 scalars. The first three arguments are donated. The old `vectors` only lend their memory;
        where the CPU backend cannot reach pinned memory they are empty tuples.
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
        layouts = tuple(layers[i].trained.layout for i in unit.layers)
        return (self._whole.content(unit.leaves) or unit.leaves, layouts, tuple(is_read[i] for i in unit.layers))

    def update_text(self, unit: Unit, layers: Sequence[Layer], is_read: Sequence[bool]) -> str:
        """The update of a unit as XLA is given it; masters and state may be shapes."""
        text: str = self._lower(unit, layers, tuple(is_read[i] for i in unit.layers)).as_text()
        return text

    def _lower(self, unit: Unit, layers: Sequence[Layer], reads: Sequence[bool]) -> Any:
        place, unit_layers = self._placement, [layers[i].trained for i in unit.layers]
        state = self.abstract_state(unit.leaves)
        rule = fused_rule(self._optimizer, state, unit_layers, reads)
        update = self._optax_update if rule is None else functools.partial(self._fused_update, rule)

        def flat_update(masters: Any, state_leaves: Any, vectors: Any, gradients: Any, *numbers: jax.Array) -> Any:
            # Operands of several memory kinds do not mix; on a CPU this placement is free of copies.
            host = (masters, state_leaves, vectors, gradients)
            masters, state_leaves, vectors, gradients = jax.device_put(host, jax.memory.Space.Device)
            params = self._subtree(dict(zip(unit.leaves, masters, strict=True)))
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

    def _fused_update(
        self,
        rule: HostRule,
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
        return fused_update(rule, layers, params, state, copies, gradients, clip, scale)

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
        by_leaf = self._clipped(_by_leaf(layers, gradients, scale), norm)
        updates, state = self._optimizer.update(self._subtree(by_leaf), state, params)
        params = optax.apply_updates(params, updates)
        masters = dict(zip(sorted(by_leaf), jax.tree.leaves(params), strict=True))
        packed = [
            layer.pack([masters[leaf.index] for leaf in layer.leaves], into or None)
            for layer, into in zip(layers, vectors, strict=True)
        ]
        return params, state, packed

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
