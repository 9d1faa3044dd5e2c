"""Parts of a parameter tree in a form that Optax transformations accept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import optax


def subtree(tree: jax.tree_util.PyTreeDef, leaves: Mapping[int, Any], prune: bool = True) -> Any:
    """Returns the tree with only the leaves whose indices are given, at their own paths.

    Dictionaries lose their other entries. In other containers (lists, NNX states) an `optax.MaskedNode` replaces each
    missing leaf, as Optax itself does to hide parameters from a transformation. With `prune=False` this applies to
    dictionaries too, so that masks and labels given as a tree of the whole model still fit.
    """
    slots = [leaves.get(index, optax.MaskedNode()) for index in range(tree.num_leaves)]
    whole = jax.tree.unflatten(tree, slots)
    return _prune(whole) if prune else whole


def _prune(node: Any) -> Any:
    if type(node) is dict:
        return {key: _prune(child) for key, child in node.items() if jax.tree.leaves(child)}
    return node


def path_names(tree: Any) -> list[str]:
    """Returns the path of each leaf as a string, as `jax.tree_util.keystr` writes it."""
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]


def select(leaves: Sequence[Any], indices: Sequence[int]) -> dict[int, Any]:
    """Returns the chosen leaves by index."""
    return {index: leaves[index] for index in indices}
