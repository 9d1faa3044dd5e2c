"""Update groups: which layers share one update, and the arrays that they hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxferry.optimizer.pieces import Key
from jaxferry.optimizer.split_masters import SplitMaster
from jaxferry.partition import Layer, Part, Span, aval_bytes
from jaxferry.step import Arrival
from jaxferry.transport import Vectors

OfLayers = Sequence[Vectors]  # vectors of each layer of a unit


def path_names(tree: Any) -> list[str]:
    """Returns the path of each leaf as a string, as `jax.tree_util.keystr` writes it."""
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]


@dataclasses.dataclass
class UpdateGroup:
    """What one update covers: a layer, or all layers if the optimizer is not separable.

    Attributes:
      keys: indices of their parameters in the model's own tree, each with its part, or some elements, if not all.
      masters: master parameters in the order of `keys`.
      state: leaves of the Optax state.
      state_keys: their paths, and which part of a stacked parameter they belong to.
      programs: its updates (`update_programs.Update`), by how the gradients of its layers arrive.
      elsewhere: where masters and state are if not in ordinary host memory (`on_devices.Elsewhere`); else None.
      on_disk: where masters and state are in a scratch file (`scratch.OnDisk`), also while an update has read them;
        None if they never are.
      prepared: what an update has prepared for masters and state as they are.
    """

    layers: tuple[int, ...]
    keys: list[Key]
    masters: list[Any]
    state: list[jax.Array]
    state_keys: list[Key]
    programs: dict[tuple[Arrival, ...], Any] = dataclasses.field(default_factory=dict)
    elsewhere: Any = None
    on_disk: Any = None
    prepared: Any = dataclasses.field(default=None, init=False, repr=False, compare=False)

    def __setattr__(self, name: str, value: Any) -> None:
        """Replaces a field; what is prepared for other arrays would keep these alive."""
        if name in ("masters", "state"):
            super().__setattr__("prepared", None)
        super().__setattr__(name, value)

    def program(self, arrivals: Sequence[Arrival]) -> Any:
        """The update for gradients that arrive so, by parameter group."""
        return self.programs[tuple([arrivals[group] for group in self.layers])]

    @property
    def is_on_host(self) -> bool:
        """Whether masters and state are in ordinary host memory, where the host updates them."""
        return self.elsewhere is None

    @property
    def is_on_device(self) -> bool:
        """Whether masters and state stay on the device."""
        return not self.is_on_host and not self.is_on_disk and not self.elsewhere.subgroups

    @property
    def is_on_disk(self) -> bool:
        """Whether masters and state are in a scratch file, from which an update on the host reads them."""
        return self.elsewhere is not None and self.elsewhere is self.on_disk

    @property
    def subgroups(self) -> Sequence[Subgroup]:
        """What holds masters and state if updates stream them through the GPU; else nothing."""
        found: Sequence[Subgroup] = () if self.elsewhere is None else self.elsewhere.subgroups
        return found

    def masters_at_home(self) -> list[jax.Array]:
        """Masters in ordinary host memory: copies if they are elsewhere."""
        found: list[jax.Array] = self.masters if self.elsewhere is None else self.elsewhere.masters(self)
        return found

    def state_at_home(self) -> list[jax.Array]:
        """Likewise the optimizer's state."""
        found: list[jax.Array] = self.state if self.elsewhere is None else self.elsewhere.state(self)
        return found

    @property
    def num_bytes(self) -> int:
        """The bytes of masters and state, all masters whole, as a copy has them."""
        return sum(map(aval_bytes, (*self.masters, *self.state)))

    @property
    def stored_bytes(self) -> int:
        """Their bytes as they are stored."""
        rests = [master.rest if isinstance(master, SplitMaster) else master for master in self.masters]
        return sum(map(aval_bytes, (*rests, *self.state)))

    @property
    def leaves(self) -> tuple[int, ...]:
        """The indices of the parameters."""
        return tuple(leaf for leaf, _ in self.keys)

    @property
    def is_by_part(self) -> bool:
        """Whether it holds parts, or some elements, of a parameter."""
        return any(part for _, part in self.keys)

    def joins_parts_of(self, layers: Iterable[Layer]) -> bool:
        """Whether parameters that are stored in parts are updated whole, so that their parts stay together."""
        return not self.is_by_part and any(leaf.part for layer in layers for leaf in layer.leaves)

    def by_key(self, masters: Sequence[Any], state: Sequence[Any]) -> dict[Key, Any]:
        """Returns masters and state of this unit by their keys."""
        return dict(zip((*self.keys, *self.state_keys), (*masters, *state), strict=True))


@dataclasses.dataclass
class Subgroup:
    """Parameters of a unit, or elements of them, with their optimizer state, which stream through the GPU together.

    Attributes:
      unit: the update of these parameters alone; masters and state are shapes, but for state that stays on the device.
      trained: these parameters, at their offsets in vectors of the unit's layer, whose numbers are `touched`.
      spans: by index of the leaf, its elements that are of this subgroup; empty for those that are whole.
      streamed: the layout of what moves, in flat vectors of its own: masters, then leaves of the state, by index.
      vectors: these vectors, in pinned memory; empty if only shapes are wanted.
    """

    unit: UpdateGroup
    trained: Layer
    spans: Mapping[int, Span]
    touched: tuple[int, ...]
    streamed: Layer
    vectors: tuple[jax.Array, ...] = ()

    @property
    def moved(self) -> list[int]:
        """Which of the masters, followed by the leaves of the state, move."""
        return [leaf.index for leaf in self.streamed.leaves]


def vectors_arriving(layer: Layer, arrival: Arrival) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The vectors in which the gradient of trained parameters arrives."""
    if arrival is Arrival.NONE:
        return ()
    return layer.wide.vectors if arrival is Arrival.WIDE else layer.vectors


def updated_together(layers: Sequence[Layer], not_by_part: Collection[int]) -> list[tuple[int, ...]]:
    """Groups layers for updates: layers that hold parts of the same leaf go together if that leaf is updated whole.

    All other leaves of which such layers hold parts are then updated whole as well.
    """
    stacked = [{leaf.source for leaf in layer.leaves if leaf.part is not None} for layer in layers]
    whole, more = set[int](), set(not_by_part)
    while more - whole:
        whole |= more
        more = set[int]().union(*(leaves for leaves in stacked if leaves & whole))
    group_of = list(range(len(layers)))
    for leaf in whole:
        groups = {group_of[i] for i, leaves in enumerate(stacked) if leaf in leaves}
        group_of = [min(groups) if group in groups else group for group in group_of]
    return [tuple(i for i, other in enumerate(group_of) if other == group) for group in dict.fromkeys(group_of)]


def by_master(unit: UpdateGroup, layers: Sequence[Layer]) -> Callable[[Mapping[int, jax.Array]], list[jax.Array]]:
    """Returns a function, for a jitted one, of arrays by the leaves' index to a list in the order of the masters."""
    leaves, is_by_part = unit.leaves, unit.is_by_part

    def in_order(arrays: Mapping[int, jax.Array]) -> list[jax.Array]:
        if is_by_part:
            return [arrays[index] for index in sorted(arrays)]
        whole: dict[int, jax.Array] = {}
        parts: dict[int, dict[Part, jax.Array]] = {}
        for leaf in (leaf for layer in layers for leaf in layer.leaves):
            if leaf.part is None:
                whole[leaf.source] = arrays[leaf.index]
            else:
                parts.setdefault(leaf.source, {})[leaf.part] = arrays[leaf.index]
        for source, found in parts.items():
            ordered = sorted(found, key=lambda part: part.number)
            whole[source] = jnp.stack([found[part] for part in ordered], ordered[0].axis)
        return [whole[leaf] for leaf in leaves]

    return in_order


def masters_by_leaf(
    unit: UpdateGroup, layers: Sequence[Layer]
) -> Callable[[Sequence[jax.Array]], dict[int, jax.Array]]:
    """Returns the inverse function of `by_master`."""
    leaves, is_by_part = unit.leaves, unit.is_by_part

    def of_leaves(masters: Sequence[jax.Array]) -> dict[int, jax.Array]:
        held = [leaf for layer in layers for leaf in layer.leaves]
        if is_by_part:
            return dict(zip(sorted(leaf.index for leaf in held), masters, strict=True))
        whole = dict(zip(leaves, masters, strict=True))
        return {
            leaf.index: whole[leaf.source]
            if (part := leaf.part) is None
            else jax.lax.index_in_dim(whole[leaf.source], part.number, part.axis, keepdims=False)
            for leaf in held
        }

    return of_leaves


def by_leaf(layers: Sequence[Layer], gradients: Sequence[Any], scale: jax.Array) -> dict[int, jax.Array]:
    """Returns gradients by leaf index in the master dtypes, divided by `scale`; zeros for a layer without one."""
    found: dict[int, jax.Array] = {}
    for layer, vectors in zip(layers, gradients, strict=True):
        arrays = layer.unpack(vectors) if vectors else [jnp.zeros(leaf.shape) for leaf in layer.leaves]
        wide = [a.astype(leaf.master_dtype) for leaf, a in zip(layer.leaves, arrays, strict=True)]
        found |= {leaf.index: a / scale.astype(a.dtype) for leaf, a in zip(layer.leaves, wide, strict=True)}
    return found


def packed(layers: Sequence[Layer], masters: Mapping[int, jax.Array], vectors: Sequence[Any]) -> list[Any]:
    """Returns the compute copy of each layer."""
    return [
        layer.pack([masters[leaf.index] for leaf in layer.leaves], into or None)
        for layer, into in zip(layers, vectors, strict=True)
    ]
