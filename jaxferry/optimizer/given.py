"""What a user gives a state: whole parameters, the optimizer's state, hyperparameters; parameters read lazily."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxferry.errors import InputError
from jaxferry.optimizer.update_group import path_names
from jaxferry.partition import BYTES, Span, check_byte_order

_PIECE_BYTES = 32 * 2**20


@dataclasses.dataclass(frozen=True, eq=False)
class LazyParameter:
    """A parameter that is not copied yet; `np.asarray` copies it, an index copies some elements.

    Attributes:
      read: returns a copy of the elements at an index of NumPy's, of the parameter of a number; with `as_bytes`, of
        the bytes in which it is stored.
      leaf: its number in the flattened tree of parameters.
      aval: its shape and dtype, as the user sees them: that of its master, unless it is stored as bytes.
      stored: those in which it is stored.
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


def given_leaves(what: str, given: Any, expected: Any) -> list[Any]:
    """The leaves of a given tree.

    Args:
      what: what it is assigned to, for errors.
      given: the tree, of arrays.
      expected: a tree of the same structure, of shape structs.

    Raises:
      InputError: if structure, a shape or the kind of a dtype differs.
    """
    leaves, wanted = jax.tree.leaves(given), jax.tree.leaves(expected)
    tree: Any = jax.tree.structure(given)
    if tree != jax.tree.structure(expected):
        names, known = ({name or "a bare leaf" for name in path_names(each)} for each in (given, expected))
        found = [f"it lacks {name}" for name in sorted(known - names)[:3]]
        found += [f"{name} is new" for name in sorted(names - known)[:3]]
        raise InputError(f"{what} must be a tree like its current value: {'; '.join(found) or 'nodes differ'}")
    for name, leaf, known_leaf in zip(path_names(expected), leaves, wanted, strict=True):
        _check_leaf(f"{what}, leaf {name},", leaf, known_leaf)
    return leaves


def taken_extra_args(kwargs: dict[str, Any], known: Mapping[str, Any] | None) -> dict[str, Any]:
    """The optimizer's extra arguments of a step, as NumPy arrays that the caller cannot change.

    Args:
      kwargs: the step's keyword arguments, of which `extra_args` is removed.
      known: what steps take that give none; None if the optimizer was declared to have none.

    Raises:
      InputError: as for `given_leaves`.
    """
    if known is None:
        return {}
    own = kwargs.pop("extra_args", {})
    if not isinstance(own, Mapping) or not all(isinstance(name, str) for name in own):
        raise InputError(f"extra_args must map names to numbers, arrays or trees of them, got {own!r}")
    given = {**known, **own}
    leaves = zip(given_leaves("extra_args", given, known), jax.tree.leaves(known), strict=True)
    return jax.tree.unflatten(jax.tree.structure(known), [np.array(leaf, own.dtype) for leaf, own in leaves])


def hyperparameters(known: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The leaves of an optimizer's state that hold hyperparameters of `optax.inject_hyperparams`, by path.

    Args:
      known: all leaves of the state, by path.
      values: new values by name.

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
