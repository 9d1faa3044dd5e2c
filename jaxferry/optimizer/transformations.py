"""An Optax transformation as users write it: what its update takes, its traces, its state."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxferry.errors import InputError, call_users
from jaxferry.optimizer.update_group import path_names
from jaxferry.partition import Graph, bytes_of, graph_of, no_arrays, refuse_leaks, result_shapes


def graphs_of(function: Callable[..., Any], *args: Any) -> tuple[Graph, Graph]:
    """Traces a function; returns its graph, and that with calls of jitted functions, which XLA rounds otherwise."""
    leaves, tree = jax.tree.flatten(args)

    @functools.wraps(function)  # JAX's errors name it and its file
    def of_leaves(leaves: Any) -> Any:
        return call_users(function, *jax.tree.unflatten(tree, leaves))

    closed, shape = jax.make_jaxpr(of_leaves, return_shape=True)(leaves)
    refuse_leaks(closed, len(leaves))
    made = [graph_of(closed, len(leaves), jax.tree.structure(shape), keeps_calls) for keeps_calls in (False, True)]
    return made[0], made[1]


def extra_arguments(
    optimizer: optax.GradientTransformation, extra_args: Mapping[str, Any], params: Any
) -> dict[str, Any]:
    """Returns shapes of the keyword arguments that an update takes: of the loss, `value`, and of those given."""
    taken = call_users(inspect.signature, optimizer.update).parameters.values()
    takes_all, names = any(each.kind is each.VAR_KEYWORD for each in taken), {each.name for each in taken}
    wide = jnp.result_type(jnp.float32, *(leaf.dtype for leaf in jax.tree.leaves(params)))
    known = {"value": np.empty((), wide), **extra_args}
    found = {name: own for name, own in known.items() if takes_all or name in names}
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), found)


def update_of(optimizer: Any) -> Callable[..., Any]:
    """Returns `optimizer.update` with the gradients, parameters, state and keyword arguments in this order."""

    def update(gradients: Any, params: Any, state: Any, extra_args: Mapping[str, Any]) -> Any:
        try:
            made = call_users(optimizer.update, gradients, state, params, **extra_args)
        except TypeError as error:
            if "required keyword-only argument" not in str(error):
                raise
            raise InputError(
                f"the optimizer needs more than gradients, state, parameters and the loss (value=): {error}; name "
                "arrays in extra_args=, or use another optimizer: one that calls the loss function again, as line "
                "searches (optax.lbfgs) do, cannot be trained with"
            ) from error
        _check_update(made, gradients)
        return made

    return update


def init_of(optimizer: Any) -> Callable[..., Any]:
    """Returns `optimizer.init`, whose state must be arrays."""

    def init(params: Any) -> Any:
        made = call_users(optimizer.init, params)
        if found := no_arrays(made):
            raise InputError(f"the optimizer's init must return a tree of arrays, it returned {found}")
        return made

    return init


def _check_update(made: Any, gradients: Any) -> None:
    """Raises InputError unless an update has returned arrays: one for each gradient, and a state."""
    if not isinstance(made, tuple | list) or len(made) != 2:
        found = "None" if made is None else f"a {type(made).__name__}"
        found += f" of {len(made)}" if isinstance(made, tuple | list) else ""
        raise InputError(f"the optimizer's update must return (updates, state), it returned {found}")
    for what, tree in zip(("updates", "a state"), made, strict=True):
        if found := no_arrays(tree):
            raise InputError(f"the optimizer's update must return {what} of arrays, it returned {found}")
    own, wanted = path_names(made[0]), path_names(gradients)
    if own != wanted:
        lacking, added = ([name for name in one if name not in other] for one, other in ((wanted, own), (own, wanted)))
        found = "; ".join(f"{what} {names[0]}" for what, names in (("lack", lacking), ("add", added)) if names)
        raise InputError(
            f"the optimizer's updates must have the tree of the gradients: they {found or 'have another order'}"
        )


@dataclasses.dataclass(frozen=True)
class Traced:
    """A traced transformation, with a state whose structure no update changes: if need be, a `Settled` one.

    `state` has shapes. `init` has the graphs of `init(params)`, `update` of `update_of(optimizer)`, whose results are
    the updates, then the new state.
    """

    optimizer: Any
    state: Any
    init: tuple[Graph, Graph]
    update: tuple[Graph, Graph]


def traced(optimizer: Any, params: Any, extra_args: Mapping[str, Any]) -> Traced:
    """Traces a transformation; raises `InputError` if its update needs other arguments, or never settles."""
    init = graphs_of(init_of(optimizer), params)
    state = _result(init)
    update = graphs_of(update_of(optimizer), params, params, state, extra_args)
    _, after = _result(update)
    if _form(state) == _form(after):
        return Traced(optimizer, state, init, update)
    _, again = result_shapes(update_of(optimizer), params, params, after, extra_args)
    if _form(after) != _form(again):
        raise InputError(
            f"the optimizer's {_differing(after, again)} has another structure, shape or dtype after the second update "
            "than after the first, and training needs a state that keeps those of the first: leave that "
            "transformation out"
        )
    return traced(Settled(optimizer, params, state, after, extra_args), params, extra_args)


class SettlingState(NamedTuple):
    """The state of a `Settled` transformation; `is_settled` is 0 before the first update, then 1.

    `state` is as an update leaves it; before, zeros replace what the initial state does not have. `initial` are, by
    path, the leaves that only the initial state has.
    """

    is_settled: Any
    state: Any
    initial: dict[str, Any]


class Settled:
    """A transformation whose first update changes the structure of its state, with a state of one structure.

    In a Python loop, a jitted step is traced once more after the first one; here one program has both updates.
    """

    def __init__(self, optimizer: Any, params: Any, first: Any, later: Any, extra_args: Mapping[str, Any]) -> None:
        self._optimizer, self._first, self._later = optimizer, first, later
        names = _named(later)
        self._alone = {name: aval for name, aval in _named(first).items() if names.get(name) != aval}
        state = result_shapes(self.init, params)
        # If all that was added is overwritten, as by `optax.monitor`, the first update is like the later ones.
        first_jaxpr, later_jaxpr = (
            jax.make_jaxpr(update)(params, params, state, extra_args)
            for update in (self._update_first, self._update_later)
        )
        constants = [list(map(bytes_of, jaxpr.consts)) for jaxpr in (first_jaxpr, later_jaxpr)]
        self._is_same = str(first_jaxpr) == str(later_jaxpr) and constants[0] == constants[1]

    def init(self, params: Any) -> SettlingState:
        """Returns the initial state."""
        return self.stored(self._optimizer.init(params))

    def update(self, gradients: Any, state: SettlingState, params: Any, **extra_args: Any) -> tuple[Any, SettlingState]:
        """Returns the updates and the new state."""
        if self._is_same:
            updates, leaves = self._update_later(gradients, params, state, extra_args)
        else:
            updates, leaves = jax.lax.cond(
                state.is_settled > 0, self._update_later, self._update_first, gradients, params, state, extra_args
            )
        after = jax.tree.unflatten(jax.tree.structure(self._later), leaves)
        return updates, SettlingState(jnp.int32(1), after, state.initial)

    def stored(self, own: Any) -> SettlingState:
        """Returns a state of the transformation's own, initial or not, in one structure."""
        if _form(own) != _form(self._first):
            zeros = {name: jnp.zeros(*aval) for name, aval in self._alone.items()}
            return SettlingState(np.int32(1), own, zeros)
        known = dict(zip(path_names(own), jax.tree.leaves(own), strict=True))
        initial = {name: known.pop(name) for name in self._alone}
        leaves = [known[name] if name in known else jnp.zeros(*aval) for name, aval in _named(self._later).items()]
        return SettlingState(jnp.int32(0), jax.tree.unflatten(jax.tree.structure(self._later), leaves), initial)

    def shown(self, state: SettlingState) -> Any:
        """Returns the transformation's own state: the initial one, or that after an update."""
        return state.state if state.is_settled else self._initial(state)

    def _initial(self, state: SettlingState) -> Any:
        known = dict(zip(path_names(state.state), jax.tree.leaves(state.state), strict=True)) | state.initial
        return jax.tree.unflatten(jax.tree.structure(self._first), [known[name] for name in path_names(self._first)])

    def _update_first(self, gradients: Any, params: Any, state: SettlingState, extra_args: Any) -> Any:
        return self._updated(gradients, params, self._initial(state), extra_args)

    def _update_later(self, gradients: Any, params: Any, state: SettlingState, extra_args: Any) -> Any:
        return self._updated(gradients, params, state.state, extra_args)

    def _updated(self, gradients: Any, params: Any, state: Any, extra_args: Any) -> Any:
        updates, after = update_of(self._optimizer)(gradients, params, state, extra_args)
        pairs = zip(jax.tree.leaves(after), jax.tree.leaves(self._later), strict=True)
        return updates, [jnp.asarray(leaf, aval.dtype) for leaf, aval in pairs]


def _result(graphs: tuple[Graph, Graph]) -> Any:
    avals = map(graphs[0].aval_of, graphs[0].outputs)
    return jax.tree.unflatten(graphs[0].out_tree, [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals])


def _named(state: Any) -> dict[str, tuple[Any, Any]]:
    leaves = zip(path_names(state), jax.tree.leaves(state), strict=True)
    return {name: (np.shape(leaf), jax.dtypes.result_type(leaf)) for name, leaf in leaves}


def _form(state: Any) -> tuple[Any, dict[str, tuple[Any, Any]]]:
    """Returns the structure, with shape and dtype of each leaf."""
    return jax.tree.structure(state), _named(state)


def _differing(one: Any, other: Any) -> str:
    """Returns the name of the innermost state that differs from the other one."""
    if type(one) is type(other) and isinstance(one, tuple) and len(one) == len(other):
        for own, its in zip(one, other, strict=True):
            if isinstance(own, tuple) and _form(own) != _form(its):
                return _differing(own, its)
    return type(one).__name__


def masked(tree: jax.tree_util.PyTreeDef, leaves: Mapping[int, Any]) -> Any:
    """Returns the tree with some of its leaves, and an `optax.MaskedNode` in place of each other one."""
    return jax.tree.unflatten(tree, [leaves.get(index, optax.MaskedNode()) for index in range(tree.num_leaves)])


def _pruned(node: Any) -> Any:
    """Returns a tree without the entries of dictionaries that hold no leaf."""
    if type(node) is dict:
        return {key: _pruned(child) for key, child in node.items() if jax.tree.leaves(child)}
    return node


def visible_state(optimizer: optax.GradientTransformation, params: Any, state: Any) -> Any:
    """Returns shapes of the state in which dictionaries lack hidden parameters.

    If the transformation accepts no trees without these, they are `optax.MaskedNode`s, as in the state that is given.
    """
    leaves, tree = jax.tree.flatten(params)
    try:
        # A mask or labels given as a tree of the whole model fit only the whole tree.
        result_shapes(optimizer.init, _pruned(masked(tree, {0: leaves[0]})))
        return result_shapes(optimizer.init, _pruned(params))
    except (ValueError, TypeError, KeyError, AttributeError):
        return state
