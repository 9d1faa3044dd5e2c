"""The step that one device of several does, for its measurement: the same model on its share of the batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax

from jaxferry.compile.cuts import Cutter
from jaxferry.engine import Placement, Programs, make_placement
from jaxferry.measure.shares import Share
from jaxferry.model import Model
from jaxferry.options import Options
from jaxferry.partition import Partition
from jaxferry.partition.graph import Graph
from jaxferry.structure import split_flags


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
    """
    alone = make_placement(placement.device.mesh.local_devices[0])
    own = model.on(alone)
    cutter = Cutter(own, loss_fn, options, alone)
    cutter.known_layers = partition.layers
    variants = cutter.cut(*_share(partition.graph, args, kwargs)).variants(options.remat)
    is_scaled = options.loss_scale is not None
    programs = Programs(variants.base, variants.derivatives, alone, own.is_native, is_scaled)
    return Share(variants.base, variants.of(variants.may_recompute), programs, own.optimizer, alone)


def _share(graph: Graph, args: Any, kwargs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The arguments of one device, as shapes."""
    arrays, flags = split_flags(kwargs)
    leaves, tree = jax.tree.flatten((args, arrays))
    shares = [_shape(graph, value, leaf) for value, leaf in zip(graph.batch, leaves, strict=True)]
    args, arrays = jax.tree.unflatten(tree, shares)
    return args, {**arrays, **flags}


def _shape(graph: Graph, value: int, leaf: Any) -> Any:
    if not hasattr(leaf, "shape"):
        return leaf
    aval = graph.avals[value]
    shape, axis = list(aval.shape), graph.split_axis(aval)
    if axis is not None:
        shape[axis] //= graph.num_devices
    return jax.ShapeDtypeStruct(tuple(shape), aval.dtype, weak_type=aval.weak_type)
