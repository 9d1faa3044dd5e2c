"""The structure of a call: everything that a partition depends on. Array values are not part of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxferry.errors import InputError


def split_flags(kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Splits keyword arguments into traced ones and static flags (booleans, strings and None)."""
    flags = {name: value for name, value in kwargs.items() if value is None or isinstance(value, bool | str)}
    return {name: value for name, value in kwargs.items() if name not in flags}, flags


def structure_of(args: Any, kwargs: Mapping[str, Any]) -> Any:
    """The structure: the tree, the shapes and dtypes (weak or not) of its leaves, and the flags.

    Raises:
      InputError: if a leaf is traced.
    """
    arrays, flags = split_flags(kwargs)
    leaves, structure = jax.tree.flatten((args, arrays))
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        raise InputError(
            "a step moves layers between host and device and compiles its own programs: it cannot be called under "
            "jax.jit, jax.grad or another transformation; pass concrete arrays"
        )
    kinds = tuple((np.shape(leaf), jax.dtypes.result_type(leaf), _is_weak(leaf)) for leaf in leaves)
    return structure, kinds, tuple(sorted(flags.items(), key=repr))


def _is_weak(leaf: Any) -> bool:
    """Whether a leaf is weakly typed, as Python's numbers are."""
    return isinstance(leaf, int | float | complex) or bool(getattr(leaf, "weak_type", False))
