"""A part of a parameter tree that an Optax transformation can be given in place of the whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import optax


def subtree(tree: jax.tree_util.PyTreeDef, leaves: Mapping[int, Any], prune: bool = True) -> Any:
    """The tree with only the leaves whose indices are given, at their own paths.

    Dictionaries lose their other entries. In other containers (lists, NNX states) an `optax.MaskedNode`, which holds no
    leaf, takes the place of what is missing; Optax itself marks parameters that a transformation shall not see so. With
    `prune=False` it does so in dictionaries too: masks and labels that are given as a tree of the whole model fit then.
    """
    slots = [leaves.get(index, optax.MaskedNode()) for index in range(tree.num_leaves)]
    whole = jax.tree.unflatten(tree, slots)
    return _prune(whole) if prune else whole


def _prune(node: Any) -> Any:
    if type(node) is dict:
        return {key: _prune(child) for key, child in node.items() if jax.tree.leaves(child)}
    return node


def path_names(tree: Any) -> list[str]:
    """The path of each leaf as one string that `jax.tree_util.keystr` writes."""
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]


def select(leaves: Sequence[Any], indices: Sequence[int]) -> dict[int, Any]:
    """The chosen leaves by index."""
    return {index: leaves[index] for index in indices}
