"""An Optax transformation as users write it: what its update takes, its traces, its state."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxferry.errors import InputError
from jaxferry.partition import Graph, graph_of, result_shapes


def graphs_of(function: Callable[..., Any], *args: Any) -> tuple[Graph, Graph]:
    """Traces a function; returns its graph, and that with calls of jitted functions, which XLA rounds otherwise."""
    leaves, tree = jax.tree.flatten(args)
    closed, shape = jax.make_jaxpr(lambda x: function(*jax.tree.unflatten(tree, x)), return_shape=True)(leaves)
    made = [graph_of(closed, len(leaves), jax.tree.structure(shape), keeps_calls) for keeps_calls in (False, True)]
    return made[0], made[1]


def extra_arguments(optimizer: optax.GradientTransformation, given: Mapping[str, Any], params: Any) -> dict[str, Any]:
    """Returns shapes of the keyword arguments that an update takes: of the loss, `value`, and of those given."""
    taken = inspect.signature(optimizer.update).parameters.values()
    takes_all, names = any(each.kind is each.VAR_KEYWORD for each in taken), {each.name for each in taken}
    wide = jnp.result_type(jnp.float32, *(leaf.dtype for leaf in jax.tree.leaves(params)))
    found = {name: own for name, own in {"value": np.empty((), wide), **given}.items() if takes_all or name in names}
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), found)


def update_of(optimizer: optax.GradientTransformation) -> Callable[..., Any]:
    """Returns `optimizer.update` with the gradients, parameters, state and keyword arguments in this order."""

    def update(gradients: Any, params: Any, state: Any, extra_args: Mapping[str, Any]) -> Any:
        return optimizer.update(gradients, state, params, **extra_args)

    return update


def update_graphs(
    optimizer: optax.GradientTransformation, params: Any, state: Any, extra_args: Mapping[str, Any]
) -> tuple[Graph, Graph]:
    """Traces an update; the outputs are the updates, then the new state."""
    try:
        return graphs_of(update_of(optimizer), params, params, state, extra_args)
    except TypeError as error:
        if "required keyword-only argument" not in str(error):
            raise
        raise InputError(
            f"the optimizer needs more than gradients, state, parameters and the loss (value=): {error}; name arrays "
            "in extra_args=, or use another optimizer"
        ) from error


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

    Args:
      optimizer: the transformation.
      params: shapes of the parameters, in a tree that masks hidden ones.
      state: shapes of the state of these.
    """
    leaves, tree = jax.tree.flatten(params)
    try:
        # A mask or labels given as a tree of the whole model fit only the whole tree.
        result_shapes(optimizer.init, _pruned(masked(tree, {0: leaves[0]})))
        return result_shapes(optimizer.init, _pruned(params))
    except (ValueError, TypeError, KeyError, AttributeError):
        return state
