"""Which optimizers update layers apart with the bits of the whole, and how parts of stacked parameters are updated.

Decides from an optimizer's own program whether it may run layer by layer.

The update of the whole tree is traced once, with shapes. If no output of one leaf (its update, its state) depends on
the gradient, parameter or state of another, the optimizer is separable: a layer's update can start before the other
gradients exist. Clipping by global norm is an example of an optimizer that is not separable.

Independence alone does not prove that the update of a part equals that part of the update: an optimizer may depend on
the tree's structure (noise with one key per leaf, drawn in order). So the two programs are compared as well, equation
by equation.

The same trace identifies frozen parameters: those whose update is always zero, and whose gradient nothing reads.

The update of parts of stacked parameters, derived from the update of the whole parameters.

Optax receives the model's own tree: masks, labels and schedules depend on the shapes and paths that the user knows. The
update is traced on this tree. If it treats a stacked parameter element-wise, the same equations run on each part.
Otherwise (factored moments, norms of a parameter) the parts are updated together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxferry.errors import InputError
from jaxferry.optimizer.pieces import Key
from jaxferry.optimizer.update_group import path_names, subtree
from jaxferry.partition import (
    ELEMENTWISE,
    Atom,
    Canonical,
    Equation,
    Graph,
    Part,
    Span,
    bytes_of,
    evaluate,
    live_equations,
    result_shapes,
    trace,
)

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


Held = Sequence[tuple[int, Part | Span | None]]
"""Leaves of the model's tree, each with its part or some of its elements; None for a whole leaf."""


class PartOptimizer:
    """Applies an Optax transformation to parts of the leaves of a tree, where that is possible.

    Args:
      optimizer: the transformation.
      params: the tree of parameters that it sees, as shapes and master dtypes.
      whole: the traced update.
    """

    def __init__(self, optimizer: optax.GradientTransformation, params: Any, whole: WholeUpdate) -> None:
        self._whole, leaves, owners = whole, whole.leaves, whole.owners
        shapes = {leaf: tuple(aval.shape) for leaf, aval in zip(leaves, jax.tree.leaves(params), strict=True)}
        self._places = {leaf: place for place, leaf in enumerate(leaves)}
        self._update = _ByPart(whole.graph, [*leaves, *leaves, *owners], [*leaves, *owners], shapes)
        self._init = _ByPart(trace(optimizer.init, params, (), {}), leaves, owners, shapes)

    def obstacle(self, leaf: int) -> str | None:
        """Returns why the parts of a leaf cannot be updated separately; None if they can."""
        return self._update.obstacle(leaf) or self._init.obstacle(leaf)

    def state_keys(self, held: Held) -> list[Key]:
        """Returns the keys of the state's leaves that belong to these parts."""
        names = self._whole.state_names
        return [(names[i], part) for i, part in self._state(held)]

    def state_avals(self, held: Held) -> list[jax.ShapeDtypeStruct]:
        """Returns shapes and dtypes of the leaves that `state_keys` names."""
        avals = self._whole.state_avals
        return [part_aval(avals[i], part) for i, part in self._state(held)]

    def init(self, held: Held, masters: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns the initial state of parts; for a jitted function."""
        made = self._init(held, dict(zip(self._placed(held), masters, strict=True)))
        return [made[place] for place in self._state(held)]

    def update(
        self, held: Held, gradients: Sequence[jax.Array], masters: Sequence[jax.Array], state: Sequence[jax.Array]
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Returns masters and state after a step; for a jitted function."""
        count, placed = len(self._places), self._placed(held)
        arguments: dict[Key, Any] = {}
        for (place, part), gradient, master in zip(placed, gradients, masters, strict=True):
            arguments |= {(place, part): gradient, (count + place, part): master}
        arguments |= {(2 * count + i, part): array for (i, part), array in zip(self._state(held), state, strict=True)}
        made = self._update(held, arguments)
        after: Any = optax.apply_updates(list(masters), [made[key] for key in placed])
        return after, [made[count + i, part] for i, part in self._state(held)]

    def _placed(self, held: Held) -> Held:
        """Returns the same with each leaf's place among the leaves that the optimizer sees."""
        return [(self._places[leaf], part) for leaf, part in held]

    def _state(self, held: Held) -> list[Key]:
        """Returns the leaves of the state that belong to these parts, or are shared."""
        found: list[Key] = []
        for i, owner in enumerate(self._whole.owners):
            found += [(i, None)] if owner == SHARED else [(i, part) for leaf, part in held if leaf == owner]
        return found


def part_aval(aval: Any, part: Part | Span | None) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of a part of an array, or of some of its elements."""
    shape = tuple(aval.shape)
    if isinstance(part, Span):
        shape = (part.size,)
    elif part is not None:
        shape = (*shape[: part.axis], *shape[part.axis + 1 :])
    return jax.ShapeDtypeStruct(shape, aval.dtype)


class _ObstacleError(Exception):
    """Why an output cannot be computed by part."""


@dataclasses.dataclass
class _Recipe:
    """How to compute the outputs of a stacked leaf for one part.

    Attributes:
      outputs: numbers and values of the outputs.
      equations: element-wise equations and broadcasts of scalars, in order.
      scalars: scalars that these equations read, the same for all parts.
      is_of_scalar: whether the leaf is a scalar.
    """

    outputs: list[tuple[int, Atom]]
    is_of_scalar: bool = False
    equations: dict[int, Equation] = dataclasses.field(default_factory=dict)
    scalars: set[int] = dataclasses.field(default_factory=set)


class _ByPart:
    """A traced function of all parameters, run on parts of them.

    Args:
      graph: its trace.
      inputs: the leaf that each input belongs to, or `SHARED`.
      outputs: likewise for each output.
      shapes: of the leaves.
    """

    def __init__(
        self, graph: Graph, inputs: Sequence[int], outputs: Sequence[int], shapes: Mapping[int, tuple[int, ...]]
    ) -> None:
        self._graph, self._shapes = graph, shapes
        self._inputs, self._outputs = list(inputs), list(outputs)
        self._numbers = (*graph.parameters, *graph.batch)
        self._owner = dict(zip(self._numbers, inputs, strict=True))
        self._made_by = {value: equation for equation in graph.equations for value in equation.outputs}
        self._of_leaves = {value for value, owner in self._owner.items() if owner != SHARED}
        for equation in graph.equations:
            if not self._of_leaves.isdisjoint(equation.reads):
                self._of_leaves.update(equation.outputs)
        self._recipes: dict[int, _Recipe | str] = {}

    def obstacle(self, leaf: int) -> str | None:
        """Returns why a leaf cannot be processed by part; None if it can."""
        found = self._recipe(leaf)
        return found if isinstance(found, str) else None

    def __call__(self, held: Held, arguments: Mapping[Key, Any]) -> dict[Key, Any]:
        """Computes the outputs that belong to these parts, or are shared; keys are numbers and parts."""
        graph = self._graph
        values = dict(graph.constants)
        values |= {self._numbers[i]: array for (i, part), array in arguments.items() if part is None}
        whole = {SHARED, *(leaf for leaf, part in held if part is None)}
        direct = {i: atom for i, atom in enumerate(graph.outputs) if self._outputs[i] in whole}
        recipes = {leaf: self._recipe(leaf) for leaf, part in held if part is not None}
        scalars = [value for recipe in recipes.values() if isinstance(recipe, _Recipe) for value in recipe.scalars]
        evaluate(live_equations(graph.equations, [*direct.values(), *scalars]), values)
        made: dict[Key, Any] = {(i, None): _read(atom, values) for i, atom in direct.items()}
        for leaf, part in held:
            recipe = recipes.get(leaf)
            if part is not None and isinstance(recipe, _Recipe):
                own = {i: array for (i, other), array in arguments.items() if other == part and self._inputs[i] == leaf}
                shape = part_aval(jax.ShapeDtypeStruct(self._shapes[leaf], jnp.float32), part).shape
                made |= {(i, part): array for i, array in self._follow(recipe, own, values, shape).items()}
        return made

    def _follow(
        self, recipe: _Recipe, own: Mapping[int, Any], values: Mapping[int, Any], shape: tuple[int, ...]
    ) -> dict[int, Any]:
        known = {**values, **{self._numbers[i]: array for i, array in own.items()}}
        for equation in recipe.equations.values():
            operands = [_read(atom, known) for atom in equation.inputs]
            if recipe.is_of_scalar:  # of which there are arrays here
                operands = [jnp.broadcast_to(operand, shape) for operand in operands]
            if equation.primitive.name == "broadcast_in_dim":
                known[equation.outputs[0]] = jnp.broadcast_to(operands[0], shape)
            else:
                params = equation.primitive.get_bind_params(equation.params)
                with equation.context.manager:
                    known[equation.outputs[0]] = equation.primitive.bind(*operands, **params)
        literals = {
            i: jnp.full(shape, atom.val, jnp.asarray(atom.val).dtype)
            for i, atom in recipe.outputs
            if not isinstance(atom, int)
        }
        return literals | {i: known[atom] for i, atom in recipe.outputs if isinstance(atom, int)}

    def _recipe(self, leaf: int) -> _Recipe | str:
        if leaf not in self._recipes:
            try:
                self._recipes[leaf] = self._find_recipe(leaf)
            except _ObstacleError as error:
                self._recipes[leaf] = str(error)
        return self._recipes[leaf]

    def _find_recipe(self, leaf: int) -> _Recipe:
        outputs = [(i, self._graph.outputs[i]) for i, owner in enumerate(self._outputs) if owner == leaf]
        recipe = _Recipe(outputs, is_of_scalar=not self._shapes[leaf])
        for i, owner in enumerate(self._outputs):
            if owner == SHARED and self._is_of_leaves(self._graph.outputs[i]):
                raise _ObstacleError("what all parameters have in common depends on it")
        for value in (*(v for v, owner in self._owner.items() if owner == leaf), *(a for _, a in recipe.outputs)):
            if self._shape(value) != self._shapes[leaf]:
                raise _ObstacleError("its state has another shape")
        for _, atom in recipe.outputs:
            self._need(leaf, atom, recipe)
        return recipe

    def _need(self, leaf: int, atom: Atom, recipe: _Recipe) -> None:
        """Adds the equations that compute a value of the leaf's shape, depth first."""
        if not isinstance(atom, int) or self._owner.get(atom) == leaf or atom in recipe.equations:
            return
        equation = self._made_by.get(atom)
        if equation is None:
            raise _ObstacleError("it meets an array that has no parts")
        is_fill = equation.primitive.name == "broadcast_in_dim" and not self._shape(equation.inputs[0])
        if not is_fill and equation.primitive.name not in ELEMENTWISE:
            raise _ObstacleError(f"{equation.primitive.name!r} is not element-wise")
        for operand in equation.inputs:
            is_of_leaf = self._shapes[leaf] or self._is_of_leaves(operand)
            if self._shape(operand) == self._shapes[leaf] and is_of_leaf:
                self._need(leaf, operand, recipe)
            elif self._shape(operand) or self._is_of_leaves(operand):
                raise _ObstacleError(f"{self._reduction(leaf, operand, equation).primitive.name!r} is not element-wise")
            elif isinstance(operand, int):
                recipe.scalars.add(operand)
        recipe.equations[atom] = equation

    def _reduction(self, leaf: int, atom: Atom, reader: Equation) -> Equation:
        """Returns the equation that reduces an array of the leaf's shape to a value of another shape."""
        equation = self._made_by.get(atom) if isinstance(atom, int) else None
        if equation is None or any(self._shape(operand) == self._shapes[leaf] for operand in equation.inputs):
            return reader if equation is None else equation
        inputs = [operand for operand in equation.inputs if self._is_of_leaves(operand)]
        return self._reduction(leaf, inputs[0], equation) if inputs else equation

    def _is_of_leaves(self, atom: Atom) -> bool:
        return isinstance(atom, int) and atom in self._of_leaves

    def _shape(self, atom: Atom) -> tuple[int, ...]:
        aval: Any = self._graph.avals[atom] if isinstance(atom, int) else atom.aval
        return tuple(aval.shape)


def _read(atom: Atom, values: Mapping[int, Any]) -> Any:
    return values[atom] if isinstance(atom, int) else atom.val
