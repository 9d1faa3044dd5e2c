"""Numbers and names the parts of stacked parameters.

A model that scans over its layers has one leaf for all of them, for example `layers/attn/kernel` of shape [12, ...].
It is stored as `layers/0/attn/kernel`, `layers/1/attn/kernel`, ...: siblings, as in a model without a scan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from jaxferry.partition.groups import ITERATION, Path, common_modules
from jaxferry.partition.layout import Layer, Part


@dataclasses.dataclass(frozen=True)
class Stored:
    """A parameter in its stored form.

    Attributes:
      source: the leaf of the model's flattened tree that it belongs to.
      part: the part of that leaf; None for the whole leaf.
      path: its path.
      keys: its path as `group_leaves` takes it: the modules of an iteration lie below the iteration's number.
    """

    source: int
    part: Part | None
    path: str
    keys: Path


@dataclasses.dataclass(frozen=True)
class Stack:
    """How a stacked leaf is cut.

    Attributes:
      length: number of parts.
      axis: the stacking axis.
      family: a number that leaves share if the same scans read them.
    """

    length: int
    axis: int
    family: int


def stored_leaves(paths: Sequence[Path], stacks: Mapping[int, Stack]) -> list[Stored]:
    """Returns the stored parameters in order: each leaf, or its parts in its place."""
    prefixes = _prefixes(paths, stacks)
    stored: list[Stored] = []
    for leaf, path in enumerate(paths):
        stack = stacks.get(leaf)
        if stack is None:
            stored.append(Stored(leaf, None, "/".join(path), path))
            continue
        depth, prefix = prefixes[stack.family]
        for number in range(stack.length):
            above, below = (*prefix, str(number)), path[depth:]
            part = Part(number, stack.length, stack.axis)
            # `group_leaves` opens numbered modules only if they contain modules, so each iteration gets one.
            stored.append(Stored(leaf, part, "/".join((*above, *below)), (*above, ITERATION, *below)))
    return stored


def stored_in(layers: Sequence[Layer]) -> list[Stored]:
    """Returns the stored parameters of existing layers, in order."""
    leaves = sorted((leaf for layer in layers for leaf in layer.leaves), key=lambda leaf: leaf.index)
    return [Stored(leaf.source, leaf.part, leaf.path, tuple(leaf.path.split("/"))) for leaf in leaves]


def _prefixes(paths: Sequence[Path], stacks: Mapping[int, Stack]) -> dict[int, tuple[int, Path]]:
    """Returns for each family the number of keys that its paths share, and the path that precedes the numbers."""
    families: dict[int, list[int]] = {}
    for leaf, stack in stacks.items():
        families.setdefault(stack.family, []).append(leaf)
    prefixes: dict[int, tuple[int, Path]] = {}
    taken: set[Path] = set()
    for family, leaves in families.items():
        depth = common_modules([paths[leaf] for leaf in leaves])
        common = paths[leaves[0]][:depth]
        names = [common] if common else []
        names += [(*common, "scan"), *((*common, f"scan_{count}") for count in range(2, len(families) + 2))]
        prefix = next(name for name in names if name not in taken)
        taken.add(prefix)
        prefixes[family] = depth, prefix
    return prefixes
