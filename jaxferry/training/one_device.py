"""The step that one device of several does, for its measurement: the same model on its share of the batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxferry.engine import Placement, Programs, make_placement
from jaxferry.errors import InputError
from jaxferry.partition import Partition
from jaxferry.partition.graph import Graph
from jaxferry.processes.global_arrays import is_raw_key
from jaxferry.training.cuts import Cut, Cutter
from jaxferry.training.measure.shares import Share
from jaxferry.training.model import Model
from jaxferry.training.options import Options
from jaxferry.training.structure import split_flags


def share_of_one(
    model: Model,
    loss_fn: Callable[..., Any],
    options: Options,
    placement: Placement,
    partition: Partition,
    args: Any,
    kwargs: Mapping[str, Any],
) -> Share:
    """What the first device of this process does.

    Args:
      model: the model on all devices.
      loss_fn: its loss function.
      options: those of `train_step`.
      placement: all devices.
      partition: the segments of all devices, whose parameter groups are taken.
      args: the step's arguments, or shapes of them, in all processes.
      kwargs: likewise.

    Raises:
      InputError: if the loss function cannot be traced for them.
    """
    alone = make_placement(placement.device.mesh.local_devices[0])
    own = model.on(alone)
    cutter = Cutter(own, loss_fn, options, alone)
    cutter.known_layers = partition.layers
    variants = _cut(cutter, partition.graph, args, kwargs).variants(options.remat)
    is_scaled = options.loss_scale is not None
    programs = Programs(variants.base, variants.derivatives, alone, own.is_native, is_scaled)
    return Share(variants.base, variants.of(variants.may_recompute), programs, own.optimizer, alone)


def _cut(cutter: Cutter, graph: Graph, args: Any, kwargs: Mapping[str, Any]) -> Cut:
    """The loss function of one device's arguments, by the first rule of what it has a share of that can be traced."""
    errors = []
    for has_rows in (_is_no_state, _is_any, _is_no_vector):
        try:
            return cutter.cut(*_share(graph, has_rows, args, kwargs))
        except Exception as error:  # noqa: BLE001 - the user's function, with arrays of other shapes
            errors.append(error)
    raise InputError(f"the loss function takes no share of its arguments: {errors[0]}") from errors[0]


Rule = Callable[[Graph, Any], bool]


def _is_no_state(graph: Graph, aval: Any) -> bool:
    """Whether an argument is not shaped as running statistics are, that is, like a parameter (`Graph.num_rows`)."""
    is_float = jnp.issubdtype(aval.dtype, jnp.floating)
    return not (is_float and aval.shape in {graph.avals[value].shape for value in graph.parameters})


def _is_any(graph: Graph, aval: Any) -> bool:
    return True


def _is_no_vector(graph: Graph, aval: Any) -> bool:
    return len(aval.shape) > 1 or not jnp.issubdtype(aval.dtype, jnp.floating)


def _share(graph: Graph, has_rows: Rule, args: Any, kwargs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The arguments of one device, as shapes."""
    arrays, flags = split_flags(kwargs)
    leaves, tree = jax.tree.flatten((args, arrays))
    shares = [_shape(graph, has_rows, value, leaf) for value, leaf in zip(graph.batch, leaves, strict=True)]
    args, arrays = jax.tree.unflatten(tree, shares)
    return args, {**arrays, **flags}


def _shape(graph: Graph, has_rows: Rule, value: int, leaf: Any) -> Any:
    if not hasattr(leaf, "shape"):
        return leaf
    aval = graph.avals[value]
    shape, axis = list(aval.shape), graph.split_axis(aval)
    if axis is not None and has_rows(graph, aval) and not is_raw_key(aval.shape, aval.dtype):
        shape[axis] //= graph.num_devices
    return jax.ShapeDtypeStruct(tuple(shape), aval.dtype, weak_type=aval.weak_type)
