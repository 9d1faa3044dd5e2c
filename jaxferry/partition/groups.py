"""Groups parameters into layers by module path, and says which ones are trained.

The tree of a Flax model mirrors its modules. A subtree is one layer unless it contains repeated modules: siblings with
numbered names and the same modules inside, such as transformer blocks (`h_0`, `h_1`, ... or `layers/0`, `layers/1`,
...), or a list of modules. Such a subtree is opened, and each sibling becomes a layer. So each residual block is one
layer, and so is each module around the blocks (embedding tables, the final norm). A lookup table is always a separate
layer, wherever its module lies, because only its touched rows need to be transferred.
"""

from __future__ import annotations

import collections
import dataclasses
import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxferry.errors import InputError, call_users

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
    if callable(trainable) and not _takes_a_path(trainable):
        raise InputError(
            "trainable must be a function of a parameter's path, such as 'h_0/attn/kernel', or a tree of booleans, got "
            f"{type(trainable).__name__} {getattr(trainable, '__name__', '')}".rstrip()
        )
    chosen = [call_users(trainable, path) for path in paths] if callable(trainable) else _spread(trainable, params)
    for path, value in zip(paths, chosen, strict=True):
        if not isinstance(value, bool | np.bool_):
            said = value if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"
            raise InputError(f"trainable must say True or False for every parameter, got {said!r} for {path!r}")
    if not any(chosen):
        raise InputError(f"trainable leaves no parameter to train: it is False for all {len(paths)}")
    return frozenset(index for index, value in enumerate(chosen) if not value)


def _takes_a_path(function: Callable[..., Any]) -> bool:
    """Whether a function can be called with one argument, as far as its signature says; filters of NNX take two."""
    try:
        inspect.signature(function).bind("")
    except TypeError:
        return False
    except ValueError:
        pass  # no signature is known
    return True


def _spread(tree: Any, params: Any) -> list[Any]:
    """Returns the leaf of `tree` that applies to each parameter."""
    try:
        spread = jax.tree.map(lambda value, part: [value] * len(jax.tree.leaves(part)), tree, params)
    except ValueError as error:
        raise InputError(f"trainable is not a tree of booleans that matches the parameters: {error}") from error
    return [value for values in jax.tree.leaves(spread, is_leaf=lambda x: isinstance(x, list)) for value in values]


Path = tuple[str, ...]

_NUMBERED = re.compile(r"(.*?)(\d+)")
_WRAPPERS = frozenset({"value", "raw_value"})

ITERATION = "iteration"
"""The module that each iteration of a scan gets, see `stored_leaves`."""

NO_NAME = "(no name)"
"""The name of a layer whose path consists of empty strings."""


@dataclasses.dataclass(frozen=True)
class Group:
    """The leaves of one layer.

    Attributes:
      name: the module path, joined by "/", without the prefix that all paths share.
      leaves: indices into the flattened parameter tree, ascending.
    """

    name: str
    leaves: tuple[int, ...]


def leaf_paths(params: Any) -> list[Path]:
    """Returns the path of each leaf as plain strings: dictionary keys, indices, attribute names.

    Omits the field in which an NNX variable keeps its array.
    """
    paths = []
    for keys, _ in jax.tree_util.tree_flatten_with_path(params)[0]:
        path = tuple(str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in keys)
        paths.append(path[:-1] if len(path) > 1 and path[-1] in _WRAPPERS else path or ("params",))
    return paths


def module_paths(params: Any) -> list[Path]:
    """Returns `leaf_paths` with keys that name several modules, such as Haiku's "block/linear", cut at each."""
    return [tuple("/".join(path).split("/")) for path in leaf_paths(params)]


def group_leaves(paths: Sequence[Path], tables: Collection[int] = ()) -> tuple[Group, ...]:
    """Groups leaves into layers, in order of their first leaf."""
    common = common_modules(paths)
    below = {index: path[common:] for index, path in enumerate(paths) if index not in tables}
    found = [(name, leaves) for name, leaves in _split(below, ())] if below else []
    found += [(paths[index][common:-1] or paths[index][-1:], [index]) for index in tables]
    names = collections.Counter("/".join(name) for name, _ in found)
    groups = [
        Group("/".join(name if names["/".join(name)] == 1 else paths[leaves[0]][common:]) or NO_NAME, tuple(leaves))
        for name, leaves in found
    ]
    return tuple(sorted(groups, key=lambda group: group.leaves))


def modules_of(
    group: Group, paths: Sequence[Path], ranks: Sequence[int], taken: Collection[str] = ()
) -> tuple[Group, ...]:
    """Splits a group as finely as MemFerry plans layers: the matrices of each module, and all vectors together.

    Vectors, such as scales of norms and biases, are so small that a transfer for each would be mostly latency.

    Args:
      group: the group.
      paths: the path of each leaf of the tree.
      ranks: the number of axes of each leaf.
      taken: the names of other groups; a module of that name, such as one that also holds a lookup table, gets that of
        its first leaf.
    """
    common, found = common_modules(paths), dict[str, list[int]]()
    for index in group.leaves:
        module = "/".join(key for key in paths[index][common:-1] if key != ITERATION) or group.name
        found.setdefault(module if ranks[index] > 1 else f"{group.name}/vectors", []).append(index)
    if len(found) == 1:
        return (group,)
    return tuple(
        Group("/".join(paths[leaves[0]][common:]) if name in taken else name, tuple(leaves))
        for name, leaves in found.items()
    )


def common_modules(paths: Sequence[Path]) -> int:
    """Returns how many leading keys all module paths share; such keys distinguish nothing."""
    modules = [path[:-1] for path in paths]
    depth = 0
    while all(len(module) > depth for module in modules) and len({module[depth] for module in modules}) == 1:
        depth += 1
    return depth


def _split(below: Mapping[int, Path], prefix: Path) -> Iterator[tuple[Path, list[int]]]:
    """Yields the layers of an opened subtree; `below` maps each of its leaves to its path within the subtree."""
    children: dict[str, dict[int, Path]] = {}
    for index, path in below.items():
        children.setdefault(path[0], {})[index] = path[1:]
    repeated = _repeated(children)
    for key, leaves in children.items():
        if key not in repeated and _opens(leaves):
            yield from _split(leaves, (*prefix, key))
        else:
            yield (*prefix, key), list(leaves)


def _opens(below: Mapping[int, Path]) -> bool:
    """Whether this subtree contains repeated modules or a list of modules at any depth."""
    children: dict[str, dict[int, Path]] = {}
    for index, path in below.items():
        if len(path) > 1:
            children.setdefault(path[0], {})[index] = path[1:]
    is_list = any(key.isdigit() for key in children)
    return is_list or bool(_repeated(children)) or any(_opens(leaves) for leaves in children.values())


def _repeated(children: Mapping[str, Mapping[int, Path]]) -> set[str]:
    """Returns children whose names differ only in a number and that hold the same modules, or a list's parameters."""
    families: dict[tuple[str, frozenset[Path]], list[str]] = {}
    for key, leaves in children.items():
        # Haiku names the modules of a class "block", "block_1", "block_2".
        match = _NUMBERED.fullmatch(f"{key}_0" if f"{key}_1" in children else key)
        if match and any(len(path) > (1 if match[1] else 0) for path in leaves.values()):
            families.setdefault((match[1], frozenset(leaves.values())), []).append(key)
    return {key for family in families.values() if len(family) > 1 for key in family}
