"""The host optimizer: which parameters are updated together, and their updates.

Each layer has an update of its own if no parameter's update depends on another one; otherwise all layers have one.
Parameters that are stored in parts are updated by part if their update is element-wise (`replay.py`), otherwise whole,
together with all layers that hold parts of them. Also what a user gives a state: parameters, the optimizer's state,
hyperparameters.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax

from jaxferry.errors import InputError
from jaxferry.native import MOMENT_BLOCK
from jaxferry.optimizer.pieces import Key, part_aval
from jaxferry.optimizer.replay import TreeUpdate
from jaxferry.optimizer.update_group import UpdateGroup, path_names, updated_together
from jaxferry.optimizer.update_programs import UpdatePrograms
from jaxferry.partition import BYTES, Layer, Leaf, Span, check_byte_order
from jaxferry.settings import users_stacklevel
from jaxferry.transport import Placement

_PIECE_BYTES = 32 * 2**20


@dataclasses.dataclass(frozen=True, eq=False)
class LazyParameter:
    """A parameter that is not copied yet; `np.asarray` copies it, an index copies some elements.

    `read` copies elements of the parameter `leaf`; with `as_bytes`, of the bytes in which it is stored. `aval` is as
    the user sees it, `stored` as it is stored.
    """

    read: Callable[..., np.ndarray] = dataclasses.field(repr=False)
    leaf: int
    aval: Any
    stored: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return tuple(self.aval.shape)

    @property
    def dtype(self) -> Any:
        """Its dtype: that of its master, unless it is stored as bytes."""
        return self.aval.dtype

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        found = self.read(self.leaf, ...)
        return found if dtype is None else found.astype(dtype, copy=False)

    def __getitem__(self, index: Any) -> np.ndarray:
        return self.read(self.leaf, index)

    def read_into(self, made: np.ndarray, span: Span | None = None) -> None:
        """Reads it, or some elements of it, into an array of any dtype; a few rows at a time.

        An array of bytes receives a parameter that is stored as bytes as it is stored.
        """
        as_bytes = self.stored is not self.aval and made.dtype in BYTES
        aval = self.stored if as_bytes else self.aval
        if not aval.shape:
            whole = self.read(self.leaf, ..., as_bytes=as_bytes)
            made[...] = whole if span is None else span.of(whole)
            return
        row = math.prod(aval.shape[1:])
        rows = max(1, _PIECE_BYTES // max(1, row * np.dtype(aval.dtype).itemsize))
        # Where several processes hold elements each, all read the same rows at a time.
        for first in range(0, aval.shape[0], rows):
            found = self.read(self.leaf, slice(first, first + rows), as_bytes=as_bytes)
            if span is None:
                made[first : first + rows] = found
            else:
                span.put(made, first * row, found)


def given_leaves(what: str, tree: Any, expected: Any) -> list[Any]:
    """The leaves of a given tree; raises InputError if structure, a shape or the kind of a dtype differs."""
    leaves, wanted = jax.tree.leaves(tree), jax.tree.leaves(expected)
    structure: Any = jax.tree.structure(tree)
    if structure != jax.tree.structure(expected):
        names, known = ({name or "a bare leaf" for name in path_names(each)} for each in (tree, expected))
        found = [f"it lacks {name}" for name in sorted(known - names)[:3]]
        found += [f"{name} is new" for name in sorted(names - known)[:3]]
        raise InputError(f"{what} must be a tree like its current value: {'; '.join(found) or 'nodes differ'}")
    for name, leaf, known_leaf in zip(path_names(expected), leaves, wanted, strict=True):
        _check_leaf(f"{what}, leaf {name},", leaf, known_leaf)
    return leaves


def taken_extra_args(kwargs: dict[str, Any], known: Mapping[str, Any] | None) -> dict[str, Any]:
    """Removes `extra_args` from a step's keyword arguments; returns them as NumPy arrays that the caller cannot change.

    `known` is what steps take that give none; None if the optimizer was declared to have none.

    Raises:
      InputError: as for `given_leaves`.
    """
    if known is None:
        return {}
    own = kwargs.pop("extra_args", {})
    if not isinstance(own, Mapping) or not all(isinstance(name, str) for name in own):
        raise InputError(f"extra_args must map names to numbers, arrays or trees of them, got {own!r}")
    args = {**known, **own}
    leaves = zip(given_leaves("extra_args", args, known), jax.tree.leaves(known), strict=True)
    return jax.tree.unflatten(jax.tree.structure(known), [np.array(leaf, own.dtype) for leaf, own in leaves])


def hyperparameters(known: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The leaves of an optimizer's state that hold hyperparameters of `optax.inject_hyperparams`, by path.

    Raises:
      InputError: if the state holds no such hyperparameter, a schedule sets it, or the value does not fit.
    """
    found: dict[str, Any] = {}
    names = sorted({match[1] for path in known if (match := re.search(r"\.hyperparams\['(\w+)'\]$", path))})
    for name, value in values.items():
        paths = [path for path in known if path.endswith(f".hyperparams['{name}']")]
        if not paths:
            has = f"it has {', '.join(names)}" if names else "wrap it in optax.inject_hyperparams to have some"
            raise InputError(f"the optimizer's state has no hyperparameter {name!r}: {has}")
        if any(f".hyperparams_states['{name}']" in path for path in known):
            raise InputError(
                f"hyperparameter {name!r} follows a schedule, which sets it in every update: pass a number"
            )
        for path in paths:
            _check_leaf(f"hyperparameter {name!r}", value, known[path])
            found[path] = np.asarray(value)
    return found


def _check_leaf(what: str, leaf: Any, expected: Any) -> None:
    check_byte_order(leaf, what)
    if isinstance(leaf, jax.ShapeDtypeStruct):
        raise InputError(f"{what} must be an array or a number, got a shape alone")
    shape, wanted = np.shape(leaf), tuple(expected.shape)
    if shape != wanted:
        raise InputError(f"{what} must have shape {wanted}, got {shape}")
    dtype = leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype
    if not _fits(dtype, expected.dtype):
        raise InputError(f"{what} must have a dtype that {expected.dtype} can hold, got {dtype}")


def _fits(dtype: Any, into: Any) -> bool:
    """Whether values of a dtype keep their kind in the other: reals stay reals, keys stay keys."""
    extended = jax.dtypes.extended
    if jax.dtypes.issubdtype(dtype, extended) or jax.dtypes.issubdtype(into, extended):
        return bool(dtype == into)
    kinds: Sequence[Any] = (np.bool_, np.integer, np.floating, np.complexfloating)
    ranks = [[jax.dtypes.issubdtype(each, kind) for kind in kinds] for each in (dtype, into)]
    return all(any(rank) for rank in ranks) and ranks[0].index(True) <= ranks[1].index(True)


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

    It does not see `hidden` leaves, which the user has frozen; `avals` have master dtypes.

    Attributes:
      frozen: leaves without update and gradient: the hidden ones, and those that the transformation itself freezes.
      whole: of several processes, the leaves that each holds whole, since their update is not element-wise.
      is_joint: whether all layers form one unit, because the optimizer is not separable.
      extra: shapes of what an update reads besides gradients and state: the loss, and the user's own arguments.
    """

    _not_by_part: frozenset[int] = frozenset()  # leaves that layers hold parts of and that are updated whole

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
            warnings.warn(NOT_SEPARABLE, stacklevel=users_stacklevel())
        self._ownership = placement.ownership
        self.whole = frozenset[int]() if self._ownership.is_all else self._find_whole()

    def _find_whole(self) -> frozenset[int]:
        """Finds the leaves that every process must hold whole, and warns about them."""
        trained = [leaf for leaf in self._tree.leaves if leaf not in self.frozen]
        reasons = {leaf: reason for leaf in trained if (reason := self._tree.obstacle(leaf)) is not None}
        if reasons:
            reason = next(iter(reasons.values()))
            warnings.warn(
                HELD_WHOLE.format(leaves=self._named(list(reasons)), reason=reason), stacklevel=users_stacklevel()
            )
        return frozenset(trained if self.is_joint else reasons)

    def check_parts(self, layers: Sequence[Layer]) -> None:
        """Finds the stacked parameters whose parts cannot be updated separately, and warns about them."""
        stacked = {leaf.source: leaf.part.axis for layer in layers for leaf in layer.trained.leaves if leaf.part}
        if self.is_joint or not stacked:
            return
        reasons: dict[str, list[int]] = {}
        for leaf in sorted(stacked.keys() - self._not_by_part):
            has_blocks = stacked[leaf] == 0 and math.prod(self.avals[leaf].shape[1:]) % MOMENT_BLOCK == 0
            obstacle = self._tree.obstacle(leaf, by_block=has_blocks)
            if obstacle is not None:
                reasons.setdefault(obstacle, []).append(leaf)
        for reason, leaves in reasons.items():
            warnings.warn(NOT_BY_PART.format(leaves=self._named(leaves), reason=reason), stacklevel=users_stacklevel())
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

    def is_blockwise(self, leaf: Leaf) -> bool:
        """Whether any whole blocks of a parameter's elements are."""
        return self._tree.obstacle(leaf.source, by_block=True) is None

    def part_of(self, unit: UpdateGroup, held: Sequence[tuple[Leaf, Span | None]]) -> UpdateGroup:
        """Returns the update of some parameters of a unit alone, with shapes instead of arrays.

        Some parameters may be spans of their elements, where `is_elementwise`, or of blocks, where `is_blockwise`.
        """
        if not held:
            return UpdateGroup(unit.layers, [], [], [], [])
        keys = [(leaf.source, span or (leaf.part if unit.is_by_part else None)) for leaf, span in held]
        return self._unit(unit.layers, keys)

    def _unit(self, layers: tuple[int, ...], held: Sequence[Key]) -> UpdateGroup:
        keys = list(held) if any(part for _, part in held) else sorted(set(held))
        masters: list[Any] = [part_aval(self.avals[leaf], part) for leaf, part in keys]
        state: list[Any] = [*self._tree.state_avals(keys)]
        return UpdateGroup(layers, keys, masters, state, self._tree.state_keys(keys))

    @functools.cached_property
    def state_shapes(self) -> Mapping[str, Any]:
        """Shapes of the whole Optax state by path."""
        state = self._tree.visible_state
        return dict(zip(path_names(state), jax.tree.leaves(state), strict=True))

    def whole_state(self, leaves: Mapping[str, Any]) -> Any:
        """The Optax state with these leaves, by path, as the user knows it."""
        structure = jax.tree.structure(self._tree.visible_state)
        return self._tree.shown(jax.tree.unflatten(structure, [leaves[name] for name in self.state_shapes]))

    def given_state(self, state: Any) -> list[Any]:
        """The leaves of such a state of the user's."""
        return given_leaves("state.opt_state", self._tree.stored(state), self._tree.visible_state)
