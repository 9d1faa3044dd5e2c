"""Decides from an optimizer's own program whether it may run layer by layer.

The update of the whole tree is traced once, with shapes. If no output of one leaf (its update, its state) depends on
the gradient, parameter or state of another, the optimizer is separable: a layer's update can start before the other
gradients exist. Clipping by global norm is an example of an optimizer that is not separable.

Independence alone does not prove that the update of a part equals that part of the update: an optimizer may depend on
the tree's structure (noise with one key per leaf, drawn in order). So the two programs are compared as well, equation
by equation.

The same trace identifies frozen parameters: those whose update is always zero, and whose gradient nothing reads.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax

from jaxferry.errors import InputError
from jaxferry.optimizer.subtree import path_names, subtree
from jaxferry.partition.graph import Equation, Graph, result_shapes, trace
from jaxferry.partition.keys import Canonical, bytes_of

SHARED = -1
"""The owner of state that belongs to no single parameter."""

_SAME_ZEROS = frozenset({"broadcast_in_dim", "convert_element_type", "copy", "copy_p", "reshape"})


class WholeUpdate:
    """The traced update of a whole tree of parameters.

    Args:
      optimizer: the transformation.
      tree: the structure of the parameters.
      avals: their shapes and master dtypes.
      hidden: leaves that the optimizer does not see, by index.

    Attributes:
      leaves: the leaves that it sees.
      graph: the trace; maps gradients, parameters and state to updates and state.
      state_names: paths of the leaves of the state.
      state_avals: their shapes and dtypes.
      owners: the leaf that each leaf of the state belongs to, or `SHARED`.
    """

    def __init__(
        self,
        optimizer: optax.GradientTransformation,
        tree: jax.tree_util.PyTreeDef,
        avals: Sequence[Any],
        hidden: Collection[int] = (),
    ) -> None:
        self.leaves = [leaf for leaf in range(len(avals)) if leaf not in hidden]
        params = subtree(tree, {leaf: avals[leaf] for leaf in self.leaves}, prune=False)
        state = result_shapes(optimizer.init, params)
        names = dict(zip(path_names(params), self.leaves, strict=True))
        self.state_names, self.state_avals = path_names(state), jax.tree.leaves(state)
        self.owners = [_owner(name, names) for name in self.state_names]
        self.graph = trace_update(optimizer, params, state)
        self._made_by = _makers(self.graph)
        self._contents: dict[tuple[int, ...], Any] = {}

    def mixes(self) -> bool:
        """Whether an output of one leaf depends on another leaf."""
        if any(equation.has_effects for equation in self.graph.equations):
            return True
        owners = [*self.leaves, *self.owners]
        return any(made_from - {owner} for owner, made_from in zip(owners, self._sources(), strict=True))

    def frozen(self) -> frozenset[int]:
        """Returns leaves whose update is always zero, that own no state and on which no other output depends."""
        found = {
            leaf
            for leaf, atom in zip(self.leaves, self.graph.outputs, strict=False)
            if self._is_zero(atom) and leaf not in self.owners
        }
        if any(equation.has_effects for equation in self.graph.equations):
            return frozenset()
        return frozenset(found).difference(*self._sources()) if found else frozenset()

    def _sources(self) -> list[frozenset[int]]:
        """Returns for each output the leaves on which it depends, through their gradient, parameter or state."""
        graph = self.graph
        sources: dict[int, frozenset[int]] = {}
        owners = [*self.leaves, *self.leaves, *self.owners]
        for value, owner in zip((*graph.parameters, *graph.batch), owners, strict=True):
            sources[value] = frozenset() if owner == SHARED else frozenset([owner])
        for equation in graph.equations:
            made_from = frozenset().union(*(sources.get(value, frozenset()) for value in equation.reads))
            sources |= dict.fromkeys(equation.outputs, made_from)
        return [sources.get(atom, frozenset()) if isinstance(atom, int) else frozenset() for atom in graph.outputs]

    def _is_zero(self, atom: Any) -> bool:
        """Whether an output is a constant zero."""
        if not isinstance(atom, int):
            return not np.any(np.asarray(atom.val))
        if atom in self.graph.constants:
            return not np.any(np.asarray(self.graph.constants[atom]))
        equation = self._made_by.get(atom)
        if equation is None or equation.primitive.name not in _SAME_ZEROS:
            return False
        return self._is_zero(equation.inputs[0])

    def content(self, leaves: Sequence[int]) -> Any:
        """Returns a digest of the update of these leaves and of the shared state; None if it has no digest."""
        key = tuple(leaves)
        if key not in self._contents:
            self._contents[key] = self._content(leaves)
        return self._contents[key]

    def _content(self, leaves: Sequence[int]) -> Any:
        graph, count, chosen = self.graph, len(self.leaves), set(leaves)
        places = [place for place, leaf in enumerate(self.leaves) if leaf in chosen]
        kept_state = [i for i, owner in enumerate(self.owners) if owner == SHARED or owner in chosen]
        wanted = [*places, *(count + i for i in kept_state)]
        inputs = (*graph.parameters, *graph.batch)
        kept = [*places, *(count + place for place in places), *(2 * count + i for i in kept_state)]
        return _content(graph, self._made_by, [inputs[i] for i in kept], [graph.outputs[i] for i in wanted])


def trace_update(optimizer: optax.GradientTransformation, params: Any, state: Any) -> Graph:
    """Traces `optimizer.update(gradients, state, params)`; the outputs are the updates, then the new state."""

    def update(gradients: Any, params: Any, state: Any) -> Any:
        return optimizer.update(gradients, state, params)

    try:
        return trace(update, params, (params, state), {})
    except TypeError as error:
        if "required keyword-only argument" not in str(error):
            raise
        raise InputError(
            f"the optimizer needs more than gradients, state and parameters: {error}; use one that does not. "
            "Instead of a transformation that reads the loss (value=), wrap the optimizer in optax.inject_hyperparams "
            "and call state.set_hyperparams(learning_rate=...)"
        ) from error


def part_content(
    optimizer: optax.GradientTransformation,
    tree: jax.tree_util.PyTreeDef,
    avals: Sequence[Any],
    leaves: Sequence[int],
    prune: bool = True,
) -> Any:
    """Returns the digest of the update of a part alone; equals `WholeUpdate.content` if the arithmetic is the same.

    `prune` is passed to `subtree`, here and in `init_content`.
    """
    params = subtree(tree, {leaf: avals[leaf] for leaf in leaves}, prune)
    graph = trace_update(optimizer, params, result_shapes(optimizer.init, params))
    return _content(graph, _makers(graph), (*graph.parameters, *graph.batch), graph.outputs)


def init_content(
    optimizer: optax.GradientTransformation,
    tree: jax.tree_util.PyTreeDef,
    avals: Sequence[Any],
    leaves: Sequence[int],
    prune: bool = True,
) -> Any:
    """Returns the digest of the initialisation of a part's state; None if it has no digest."""
    graph = trace(optimizer.init, subtree(tree, {leaf: avals[leaf] for leaf in leaves}, prune), (), {})
    return _content(graph, _makers(graph), graph.parameters, graph.outputs)


def _makers(graph: Graph) -> dict[int, Equation]:
    return {value: equation for equation in graph.equations for value in equation.outputs}


def _content(graph: Graph, made_by: Mapping[int, Equation], inputs: Sequence[int], outputs: Sequence[Any]) -> Any:
    equations = _in_order_of_need(made_by, outputs)
    read = {value for equation in equations for value in equation.reads} | {v for v in outputs if isinstance(v, int)}
    constants = [value for value in graph.constants if value in read]
    canonical = Canonical()
    content = canonical.equations(equations, (*inputs, *constants), outputs, graph.avals)
    held = [bytes_of(graph.constants[value]) for value in constants]
    return None if canonical.is_opaque else canonical.digest((content, held))


def _in_order_of_need(made_by: Mapping[int, Equation], outputs: Sequence[Any]) -> list[Equation]:
    """Returns the equations depth first from the outputs: an order independent of other traced equations."""
    done: set[int] = set()
    order: list[Equation] = []
    stack = [(made_by[atom], False) for atom in reversed(outputs) if isinstance(atom, int) and atom in made_by]
    while stack:
        equation, operands_done = stack.pop()
        if id(equation) in done:
            continue
        if operands_done:
            done.add(id(equation))
            order.append(equation)
        else:
            stack.append((equation, True))
            stack.extend((made_by[value], False) for value in reversed(equation.reads) if value in made_by)
    return order


def _owner(name: str, names: dict[str, int]) -> int:
    """Returns the parameter that owns a leaf of the state: the one whose path is a suffix of the leaf's path."""
    if "" in names:
        return 0  # the tree is a single array
    for start in range(len(name)):
        if name[start:] in names:
            return names[name[start:]]
    return SHARED
