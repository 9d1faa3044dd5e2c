"""The structure of a call: what a partition depends on besides the values of arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxferry.errors import InputError


def split_flags(kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Keyword arguments that are traced, and those that Python code decides by: booleans, strings and None."""
    flags = {name: value for name, value in kwargs.items() if value is None or isinstance(value, bool | str)}
    return {name: value for name, value in kwargs.items() if name not in flags}, flags


def structure_of(args: Any, kwargs: Mapping[str, Any]) -> Any:
    """What a partition depends on: the tree, the shapes and dtypes (weak or not) of its leaves, and the flags.

    Raises:
      InputError: if a leaf is traced.
    """
    arrays, flags = split_flags(kwargs)
    leaves, structure = jax.tree.flatten((args, arrays))
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        raise InputError(
            "a step moves layers between host and device by itself and compiles what it computes: it cannot be called "
            "under jax.jit, jax.grad or another transformation; give it arrays"
        )
    kinds = tuple((np.shape(leaf), jax.dtypes.result_type(leaf), _is_weak(leaf)) for leaf in leaves)
    return structure, kinds, tuple(sorted(flags.items(), key=repr))


def _is_weak(leaf: Any) -> bool:
    """Whether a leaf takes the dtype of what it is combined with, as Python's numbers do."""
    return isinstance(leaf, int | float | complex) or bool(getattr(leaf, "weak_type", False))
