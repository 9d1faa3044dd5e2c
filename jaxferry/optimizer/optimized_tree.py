"""An Optax transformation on the tree of a model, or on the parts of it that layers hold."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import optax

from jaxferry.optimizer.separable import PartOptimizer, WholeUpdate, part_content
from jaxferry.optimizer.update_group import select, subtree
from jaxferry.partition import result_shapes


class OptimizedTree:
    """A transformation and the tree that it is for.

    Args:
      optimizer: the transformation.
      tree: the structure of the parameters.
      avals: shapes and master dtypes of the parameters.
      hidden: leaves that the user has frozen; the transformation does not see them.

    Attributes:
      whole: the update of the whole tree.
      shown: the leaves that the transformation sees.
      prunes: whether the tree of a part lacks the other leaves; otherwise it masks them (`subtree`).
    """

    def __init__(
        self,
        optimizer: optax.GradientTransformation,
        tree: jax.tree_util.PyTreeDef,
        avals: Sequence[Any],
        hidden: Collection[int],
    ) -> None:
        self.optimizer, self.tree, self.avals = optimizer, tree, list(avals)
        self.whole = WholeUpdate(optimizer, tree, avals, hidden)
        self.shown = [leaf for leaf in range(len(avals)) if leaf not in hidden]
        self.prunes = False
        self._contents: dict[tuple[tuple[int, ...], bool], Any] = {}
        self._taken: dict[Any, bool] = {}
        self._states: dict[tuple[tuple[int, ...], bool], Any] = {}

    @functools.cached_property
    def by_part(self) -> PartOptimizer:
        """The transformation on parts of stacked parameters."""
        return PartOptimizer(self.optimizer, self.subtree_of(self.shown), self.whole)

    def subtree(self, leaves: Mapping[int, Any]) -> Any:
        """The tree that the transformation receives for these leaves."""
        return subtree(self.tree, leaves, self.prunes)

    def subtree_of(self, leaves: Sequence[int]) -> Any:
        """Shapes of these leaves, in a tree that masks all others."""
        return subtree(self.tree, select(self.avals, leaves), prune=False)

    def state(self, leaves: Sequence[int]) -> Any:
        """Shapes of the Optax state of these leaves."""
        key = tuple(leaves), self.prunes
        if key not in self._states:
            self._states[key] = result_shapes(self.optimizer.init, self.subtree(select(self.avals, leaves)))
        return self._states[key]

    def takes_parts(self, parts: Sequence[Sequence[int]]) -> bool:
        """Whether each of these parts is updated alone exactly as within the whole tree; sets `prunes` if so.

        Tries trees without the missing leaves first, then trees that mask them. Uses the first form that the
        transformation accepts.
        """
        first: dict[Any, Sequence[int]] = {}
        for leaves in parts:
            first.setdefault(self.whole.content(leaves), leaves)
        for prune in (True, False):
            if all(content and content == self._content(leaves, prune) for content, leaves in first.items()):
                self.prunes = prune
                return True
        return False

    def takes(self, leaves: Sequence[int]) -> bool:
        """Whether these leaves are updated alone as within the whole tree, in the form that `takes_parts` chose."""
        content = self.whole.content(leaves)
        if content is not None and content not in self._taken:
            self._taken[content] = content == self._content(leaves, self.prunes)
        return self._taken.get(content, False)

    def _content(self, leaves: Sequence[int], prune: bool) -> Any:
        """The digest of the update of a part alone; None if the transformation does not accept such a tree."""
        key = tuple(leaves), prune
        if key not in self._contents:
            try:
                self._contents[key] = part_content(self.optimizer, self.tree, self.avals, leaves, prune)
            except (ValueError, TypeError, KeyError, AttributeError):
                self._contents[key] = None
        return self._contents[key]
