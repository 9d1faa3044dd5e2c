"""The update of some parameters, replayed from the traced update of the whole tree.

    optimizer --trace once, on the model's own tree--> equations --those that a group's outputs need--> its update

Optax sees the tree, the shapes and the paths that the user knows, so masks, labels and schedules mean what they say.
The update of a group of whole parameters runs the equations that its outputs depend on, so it equals the whole update
by construction. If an output of one parameter depends on another, as with clipping by global norm, all layers have one
update. Parts of a parameter are updated alone if the equations are element-wise: the same equations run on the part.
Moments in codes of 8 bits have a scale for each block of elements: parts of whole blocks are updated alone too.
Otherwise (factored moments, norms of a parameter) the parts are updated together.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxferry.errors import InputError
from jaxferry.native import MOMENT_BLOCK
from jaxferry.optimizer.moments import BLOCKWISE_ADAM, scale_shape
from jaxferry.optimizer.pieces import Key, Where, cut_like, part_aval
from jaxferry.optimizer.transformations import Settled, extra_arguments, masked, traced, update_of, visible_state
from jaxferry.optimizer.update_group import path_names
from jaxferry.partition import (
    ELEMENTWISE,
    Atom,
    Canonical,
    Equation,
    Graph,
    bind,
    bytes_of,
    evaluate,
    live_equations,
)

SHARED = -1  # the owner of state that belongs to no single parameter
Keys = Sequence[tuple[int, Where]]
"""Leaves of the model's tree, each with its part or some of its elements; None for a whole leaf."""

_SAME_ZEROS = frozenset({"broadcast_in_dim", "convert_element_type", "copy", "copy_p", "reshape"})


class TreeUpdate:
    """An Optax transformation, traced on a tree of parameters; it does not see `hidden` leaves.

    Attributes:
      optimizer: the transformation, as of `transformations.Traced`.
      extra: shapes of what its update reads besides gradients, state and parameters: the loss, and of `extra_args`.
      leaves: the leaves that it sees.
      params: their shapes, in a tree that masks the others.
    """

    def __init__(
        self,
        optimizer: optax.GradientTransformation,
        tree: jax.tree_util.PyTreeDef,
        avals: Sequence[Any],
        hidden: Collection[int] = (),
        extra_args: Mapping[str, Any] | None = None,
    ) -> None:
        self.leaves = [leaf for leaf in range(len(avals)) if leaf not in hidden]
        self.params = masked(tree, {leaf: avals[leaf] for leaf in self.leaves})
        self._extra_args = extra_arguments(optimizer, {} if extra_args is None else extra_args, self.params)
        found = traced(optimizer, self.params, self._extra_args)
        self.optimizer, self._state = found.optimizer, found.state
        self._state_avals, self._state_names = jax.tree.leaves(found.state), path_names(found.state)
        names = dict(zip(path_names(self.params), self.leaves, strict=True))
        self._owners = owners = [_owner(name, names) for name in self._state_names]
        extra = jax.tree.leaves(self._extra_args)
        self._shapes = of_leaves = {leaf: tuple(avals[leaf].shape) for leaf in self.leaves}
        inputs = [*self.leaves, *self.leaves, *owners, *[SHARED] * len(extra)]
        self._update = _Replay(found.update, inputs, [*self.leaves, *owners], of_leaves)
        first, read = len(inputs) - len(extra), self._update.inputs_read()
        self._extra = {first + i: i for i in range(len(extra)) if first + i in read}
        self.extra = [extra[i] for i in self._extra.values()]
        known = jax.tree.leaves({name: [name] * len(jax.tree.leaves(own)) for name, own in self._extra_args.items()})
        unread = {*(extra_args or {})}.difference(known[i] for i in self._extra.values())
        if unread:
            raise InputError(f"extra_args names {min(unread)!r}, which the optimizer does not read: leave it out")
        self._init = _Replay(found.init, self.leaves, owners, of_leaves)
        self._places = {leaf: place for place, leaf in enumerate(self.leaves)}

    @functools.cached_property
    def mixes(self) -> bool:
        """Whether an output of one leaf depends on another leaf, or the update has effects."""
        return self._update.has_effects or self._update.mixes() or self._init.mixes()

    def frozen(self) -> frozenset[int]:
        """Returns leaves whose update is always zero, that own no state and on which no other output depends."""
        if self._update.has_effects:
            return frozenset()
        zeros = {leaf for place, leaf in enumerate(self.leaves) if self._update.is_zero(place)}
        return frozenset(zeros.difference(self._owners, *self._update.sources, *self._init.sources))

    def obstacle(self, leaf: int, by_block: bool = False) -> str | None:
        """Returns why the parts of a leaf, with `by_block` those of whole blocks, cannot be updated alone, or None."""
        found = self._update.obstacle(leaf) or self._init.obstacle(leaf)
        if found is None and not by_block and self._update.is_by_block(leaf):
            return f"{MOMENT_BLOCK} elements of its moments share a scale"
        return found

    def content(self, leaves: Sequence[int]) -> str | None:
        """Returns a digest of the update of these leaves, equal for equal layers; None if it has no digest."""
        return self._update.content(leaves)

    def init_content(self, leaves: Sequence[int]) -> str | None:
        """Returns a digest of the initial state of these leaves; None if it has no digest."""
        return self._init.content(leaves)

    def state_of(self, leaves: Collection[int]) -> Any:
        """Returns shapes of the state of these leaves in the whole state's tree, with None in other leaves' places."""
        own = {SHARED, *leaves}
        kept = [a if owner in own else None for a, owner in zip(self._state_avals, self._owners, strict=True)]
        return jax.tree.unflatten(jax.tree.structure(self._state), kept)

    @functools.cached_property
    def visible_state(self) -> Any:
        """Shapes of the whole state as users see it; see `transformations.visible_state`."""
        return self._state if self.mixes else visible_state(self.optimizer, self.params, self._state)

    def shown(self, state: Any) -> Any:
        """Returns the whole state as the user's transformation has it."""
        return self.optimizer.shown(state) if isinstance(self.optimizer, Settled) else state

    def stored(self, shown: Any) -> Any:
        """Returns the whole state, of what `shown` returns."""
        return self.optimizer.stored(shown) if isinstance(self.optimizer, Settled) else shown

    def state_keys(self, keys: Keys) -> list[Key]:
        """Returns the keys of the state's leaves that belong to these parts, or are shared."""
        return [(self._state_names[i], part) for i, part in self._state_numbers(keys)]

    def state_avals(self, keys: Keys) -> list[jax.ShapeDtypeStruct]:
        """Returns shapes and dtypes of the leaves that `state_keys` names."""
        return [part_aval(self._state_avals[i], part) for i, part in self._state_numbers(keys)]

    def init(self, keys: Keys, masters: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns the initial state of parts; for a jitted function."""
        made = self._init(keys, dict(zip(self._placed(keys), masters, strict=True)))
        return [made[number] for number in self._state_numbers(keys)]

    def extra_of(self, value: Any, extra_args: Mapping[str, Any]) -> list[Any]:
        """Returns what `extra` describes."""
        leaves = jax.tree.leaves({"value": value, **extra_args})
        return [leaves[i].astype(aval.dtype) for i, aval in zip(self._extra.values(), self.extra, strict=True)]

    def jaxprs(self) -> list[Any]:
        """Traces `init` and `update` anew."""
        init, update = self.optimizer.init, update_of(self.optimizer)
        return [
            jax.make_jaxpr(init)(self.params),
            jax.make_jaxpr(update)(self.params, self.params, self._state, self._extra_args),
        ]

    def update(
        self,
        keys: Keys,
        gradients: Sequence[jax.Array],
        masters: Sequence[jax.Array],
        state: Sequence[jax.Array],
        extra: Sequence[Any] = (),
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Returns masters and state after a step; for a jitted function."""
        count, placed, numbers = len(self.leaves), self._placed(keys), self._state_numbers(keys)
        arguments: dict[Key, Any] = dict(zip(placed, gradients, strict=True))
        arguments |= {(count + i, part): array for (i, part), array in zip(placed, masters, strict=True)}
        arguments |= {(2 * count + i, part): array for (i, part), array in zip(numbers, state, strict=True)}
        arguments |= {(i, None): array for i, array in zip(self._extra, extra, strict=True)}
        made = self._update(keys, arguments)
        after: Any = optax.apply_updates(list(masters), [made[key] for key in placed])
        return after, [made[count + i, part] for i, part in numbers]

    def _placed(self, keys: Keys) -> Keys:
        """Returns the same with each leaf's place among the leaves that the optimizer sees."""
        return [(self._places[leaf], part) for leaf, part in keys]

    def _state_numbers(self, keys: Keys) -> list[Key]:
        """Returns numbers and parts of the leaves of the state that belong to these parts, or are shared."""
        parts: dict[int, list[Where]] = {SHARED: [None]}
        for leaf, part in keys:
            parts.setdefault(leaf, []).append(part)
        return [
            (i, cut_like(part, aval.shape, self._shapes.get(owner, ())))
            for i, (owner, aval) in enumerate(zip(self._owners, self._state_avals, strict=True))
            for part in parts.get(owner, ())
        ]


def _owner(name: str, names: dict[str, int]) -> int:
    """Returns the parameter that owns a leaf of the state: the one whose path is a suffix of the leaf's path."""
    if "" in names:
        return 0  # the tree is a single array
    for start in range(len(name)):
        if name[start:] in names:
            return names[name[start:]]
    return SHARED


class _ObstacleError(Exception):
    """Why an output cannot be computed by part."""


@dataclasses.dataclass
class _Recipe:
    """How to compute the outputs of a stacked leaf for one part: element-wise equations and broadcasts, in order.

    `outputs` are numbers and values; `scalars` are read by the equations and the same for all parts. Equations are by
    their first result; `is_by_block` if one needs whole blocks.
    """

    outputs: list[tuple[int, Atom]]
    is_of_scalar: bool = False
    is_by_block: bool = False
    equations: dict[int, Equation] = dataclasses.field(default_factory=dict)
    scalars: set[int] = dataclasses.field(default_factory=set)


class _Replay:
    """A traced function of all parameters (`graphs_of`), run on some of them or on parts of them.

    `inputs` and `outputs` name the leaf that each belongs to, or `SHARED`; `shapes` are of the leaves.
    """

    def __init__(
        self,
        graphs: tuple[Graph, Graph],
        inputs: Sequence[int],
        outputs: Sequence[int],
        shapes: Mapping[int, tuple[int, ...]],
    ) -> None:
        (graph, self._calling), self._shapes = graphs, shapes
        self._graph, self._numbers = graph, graph.parameters
        self._inputs, self._outputs = list(inputs), list(outputs)
        self._owner = dict(zip(self._numbers, inputs, strict=True))
        self._made_by = {value: equation for equation in graph.equations for value in equation.outputs}
        self._of_leaves = {value for value, owner in self._owner.items() if owner != SHARED}
        for equation in graph.equations:
            if not self._of_leaves.isdisjoint(equation.reads):
                self._of_leaves.update(equation.outputs)
        self._recipes: dict[int, _Recipe | str] = {}
        self._contents: dict[tuple[int, ...], str | None] = {}

    @property
    def has_effects(self) -> bool:
        return any(equation.has_effects for equation in self._graph.equations)

    def inputs_read(self) -> frozenset[int]:
        """The numbers of the inputs on which an output depends."""
        graph = self._graph
        read = {value for equation in live_equations(graph.equations, graph.outputs) for value in equation.reads}
        read.update(atom for atom in graph.outputs if isinstance(atom, int))
        return frozenset(number for number, value in enumerate(self._numbers) if value in read)

    def mixes(self) -> bool:
        return any(made_from - {owner} for owner, made_from in zip(self._outputs, self.sources, strict=True))

    @functools.cached_property
    def sources(self) -> list[frozenset[int]]:
        """For each output the leaves on which it depends."""
        found = {value: frozenset({owner} - {SHARED}) for value, owner in self._owner.items()}
        for equation in self._graph.equations:
            made_from = frozenset[int]().union(*(found.get(value, frozenset()) for value in equation.reads))
            found |= dict.fromkeys(equation.outputs, made_from)
        return [found.get(atom, frozenset()) if isinstance(atom, int) else frozenset() for atom in self._graph.outputs]

    def is_zero(self, output: int) -> bool:
        atom = self._graph.outputs[output]
        while isinstance(atom, int) and atom not in self._graph.constants:
            equation = self._made_by.get(atom)
            if equation is None or equation.primitive.name not in _SAME_ZEROS:
                return False
            atom = equation.inputs[0]
        return not np.any(np.asarray(self._graph.constants[atom] if isinstance(atom, int) else atom.val))

    def content(self, leaves: Sequence[int]) -> str | None:
        """Returns a digest of the equations for whole leaves and what is shared; None if there is none."""
        key = tuple(leaves)
        if key not in self._contents:
            self._contents[key] = self._content({SHARED, *leaves})
        return self._contents[key]

    def _content(self, owners: Collection[int]) -> str | None:
        graph = self._graph
        inputs = [value for value, owner in zip(self._numbers, self._inputs, strict=True) if owner in owners]
        outputs = [atom for atom, owner in zip(graph.outputs, self._outputs, strict=True) if owner in owners]
        equations = _in_order_of_need(self._made_by, outputs)
        read = {a for equation in equations for a in equation.reads} | {a for a in outputs if isinstance(a, int)}
        constants = [value for value in graph.constants if value in read]
        canonical = Canonical()
        content = canonical.equations(equations, (*inputs, *constants), outputs, graph.avals)
        known = [bytes_of(graph.constants[value]) for value in constants]
        return None if canonical.is_opaque else canonical.digest((content, known))

    def obstacle(self, leaf: int) -> str | None:
        """Returns why a leaf cannot be processed by part; None if it can."""
        found = self._recipe(leaf)
        return found if isinstance(found, str) else None

    def is_by_block(self, leaf: int) -> bool:
        found = self._recipe(leaf)
        return isinstance(found, _Recipe) and found.is_by_block

    def __call__(self, keys: Keys, arguments: Mapping[Key, Any]) -> dict[Key, Any]:
        """Computes the outputs that belong to these parts, or are shared; keys are numbers and parts."""
        graph = self._graph if any(part for _, part in keys) else self._calling
        values = dict(graph.constants)
        values |= {self._numbers[i]: array for (i, part), array in arguments.items() if part is None}
        whole = {SHARED, *(leaf for leaf, part in keys if part is None)}
        direct = {i: atom for i, atom in enumerate(graph.outputs) if self._outputs[i] in whole}
        recipes = {leaf: self._recipe(leaf) for leaf, part in keys if part is not None}
        scalars = [value for recipe in recipes.values() if isinstance(recipe, _Recipe) for value in recipe.scalars]
        evaluate(live_equations(graph.equations, [*direct.values(), *scalars]), values)
        made: dict[Key, Any] = {
            (i, None): values[atom] if isinstance(atom, int) else jnp.asarray(atom.val, graph.aval_of(atom).dtype)
            for i, atom in direct.items()
        }
        for leaf, part in keys:
            recipe = recipes.get(leaf)
            if part is not None and isinstance(recipe, _Recipe):
                own = {
                    i: array
                    for (i, other), array in arguments.items()
                    if self._inputs[i] == leaf and other == self._cut(self._numbers[i], leaf, part)
                }
                found = self._follow(recipe, own, values, leaf, part)
                made |= {(i, self._cut(graph.outputs[i], leaf, part)): array for i, array in found.items()}
        return made

    def _cut(self, atom: Atom, leaf: int, part: Where) -> Where:
        return cut_like(part, self._shape(atom), self._shapes[leaf])

    def _follow(
        self, recipe: _Recipe, own: Mapping[int, Any], values: Mapping[int, Any], leaf: int, part: Where
    ) -> dict[int, Any]:
        def shape_of(atom: Atom) -> tuple[int, ...]:
            return tuple(part_aval(self._graph.aval_of(atom), self._cut(atom, leaf, part)).shape)

        known = {**values, **{self._numbers[i]: array for i, array in own.items()}}
        for equation in recipe.equations.values():
            operands = [known[atom] if isinstance(atom, int) else atom.val for atom in equation.inputs]
            if recipe.is_of_scalar:  # of which there are arrays here
                operands = [jnp.broadcast_to(operand, shape_of(equation.outputs[0])) for operand in operands]
            if equation.primitive.name == "broadcast_in_dim":
                known[equation.outputs[0]] = jnp.broadcast_to(operands[0], shape_of(equation.outputs[0]))
            else:
                known.update(zip(equation.outputs, bind(equation, operands, equation.params), strict=True))
        literals = {
            i: jnp.full(shape_of(self._graph.outputs[i]), atom.val, jnp.asarray(atom.val).dtype)
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
        owned, shapes = [value for value, owner in self._owner.items() if owner == leaf], self._shapes_of(leaf)
        if any(self._shape(value) not in shapes for value in (*owned, *(atom for _, atom in recipe.outputs))):
            raise _ObstacleError("its state has another shape")
        for _, atom in recipe.outputs:
            self._need(leaf, atom, recipe)
        has_scales = any(self._shape(value) != shapes[0] for value in owned)
        if has_scales and (recipe.is_of_scalar or not recipe.is_by_block):
            raise _ObstacleError("its state has another shape")
        return recipe

    def _shapes_of(self, leaf: int) -> tuple[tuple[int, ...], ...]:
        """The shapes of a leaf, and of the scales of its blocks."""
        return self._shapes[leaf], scale_shape(self._shapes[leaf])

    def _need(self, leaf: int, atom: Atom, recipe: _Recipe) -> None:
        """Adds the equations that compute a value of the leaf's shape, depth first."""
        if not isinstance(atom, int) or self._owner.get(atom) == leaf:
            return
        equation = self._made_by.get(atom)
        if equation is None:
            raise _ObstacleError("it meets an array that has no parts")
        if equation.outputs[0] in recipe.equations:
            return
        is_by_block = equation.primitive is BLOCKWISE_ADAM
        name, shapes = equation.primitive.name, list(map(self._shape, equation.inputs))
        is_fill = name == "broadcast_in_dim" and not shapes[0]
        # To a dtype of another width, it makes other numbers of elements.
        is_same = name == "bitcast_convert_type" and shapes[0] == self._shape(atom)
        if not (is_fill or is_same or is_by_block) and name not in ELEMENTWISE:
            raise _ObstacleError(f"{equation.primitive.name!r} is not element-wise")
        for operand in equation.inputs:
            is_of_leaf = self._shapes[leaf] or self._is_of_leaves(operand)
            if self._shape(operand) in self._shapes_of(leaf)[: 1 + is_by_block] and is_of_leaf:
                self._need(leaf, operand, recipe)
            elif self._shape(operand) or self._is_of_leaves(operand):
                raise _ObstacleError(f"{self._reduction(leaf, operand, equation).primitive.name!r} is not element-wise")
            elif isinstance(operand, int):
                recipe.scalars.add(operand)
        recipe.equations[equation.outputs[0]] = equation
        recipe.is_by_block |= is_by_block

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
        return tuple(self._graph.aval_of(atom).shape)


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
