"""The structure of a call: everything that a partition depends on. Array values are not part of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxferry.errors import InputError
from jaxferry.partition import check_byte_order
from jaxferry.settings import traced_settings


def split_flags(kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Splits keyword arguments into traced ones and static flags (booleans, strings and None)."""
    flags = {name: value for name, value in kwargs.items() if value is None or isinstance(value, bool | str)}
    return {name: value for name, value in kwargs.items() if name not in flags}, flags


def structure_of(args: Any, kwargs: Mapping[str, Any]) -> Any:
    """The structure: the tree, the shapes and dtypes (weak or not) of its leaves, the flags, and JAX's settings.

    Raises:
      InputError: if a leaf is traced, or is no array or number that JAX can hold.
    """
    arrays, flags = split_flags(kwargs)
    leaves, structure = jax.tree.flatten((args, arrays))
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        raise InputError(
            "a step moves layers between host and device and compiles its own programs: it cannot be called under "
            "jax.jit, jax.grad or another transformation; pass concrete arrays"
        )
    try:
        kinds = tuple((np.shape(leaf), jax.dtypes.result_type(leaf), _is_weak(leaf)) for leaf in leaves)
    except (TypeError, ValueError) as error:
        _name_unfit_leaf(args, arrays)
        raise InputError(f"the arguments must be trees of arrays and numbers: {error}") from error
    return structure, kinds, tuple(sorted(flags.items(), key=repr)), traced_settings()


def _name_unfit_leaf(args: Any, kwargs: Mapping[str, Any]) -> None:
    """Raises InputError for the first leaf that JAX cannot hold."""
    named = [(f"argument {number} after the state", tree) for number, tree in enumerate(args, 1)]
    named += [(f"keyword argument {name!r}", tree) for name, tree in kwargs.items()]
    for name, tree in named:
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
            place = f"{name}, leaf {jax.tree_util.keystr(path)}," if path else f"{name}"
            check_byte_order(leaf, place)
            try:
                jax.dtypes.result_type(leaf)
            except (TypeError, ValueError) as error:
                dtype = f" of dtype {leaf.dtype}" if hasattr(leaf, "dtype") else ""
                raise InputError(
                    f"{place} must be an array or a number, got a {type(leaf).__name__}{dtype}: take it out of the "
                    "batch, or encode it as numbers"
                ) from error


def _is_weak(leaf: Any) -> bool:
    """Whether a leaf is weakly typed, as Python's numbers are."""
    return isinstance(leaf, int | float | complex) or bool(getattr(leaf, "weak_type", False))
