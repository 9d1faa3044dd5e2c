"""Reads the `trainable` argument: which parameters are frozen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxferry.errors import InputError
from jaxferry.partition.groups import leaf_paths

Trainable = Callable[[str], bool] | Any
"""A function of a parameter's path, such as "h_0/attn/kernel", or a tree of booleans; one boolean may stand for a
whole subtree of parameters."""


def frozen_leaves(trainable: Trainable | None, params: Any) -> frozenset[int]:
    """Returns the indices of the frozen leaves of `params`; none if `trainable` is None.

    Raises:
      InputError: if `trainable` is neither such a function nor such a tree, or freezes every parameter.
    """
    if trainable is None:
        return frozenset()
    paths = ["/".join(path) for path in leaf_paths(params)]
    chosen = [trainable(path) for path in paths] if callable(trainable) else _spread(trainable, params)
    for path, value in zip(paths, chosen, strict=True):
        if not isinstance(value, bool | np.bool_):
            raise InputError(f"trainable must say True or False for every parameter, got {value!r} for {path!r}")
    if not any(chosen):
        raise InputError(f"trainable leaves no parameter to train: it is False for all {len(paths)}")
    return frozenset(index for index, value in enumerate(chosen) if not value)


def _spread(tree: Any, params: Any) -> list[Any]:
    """Returns the leaf of `tree` that applies to each parameter."""
    try:
        spread = jax.tree.map(lambda value, part: [value] * len(jax.tree.leaves(part)), tree, params)
    except ValueError as error:
        raise InputError(f"trainable is not a tree of booleans that matches the parameters: {error}") from error
    return [value for values in jax.tree.leaves(spread, is_leaf=lambda x: isinstance(x, list)) for value in values]
