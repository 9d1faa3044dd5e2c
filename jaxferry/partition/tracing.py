"""Traces a function on its parameters in the compute dtype.

params, args -> shapes -> jaxpr -> graph -> scans over layers unrolled
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jaxferry.errors import InputError, PartitionError
from jaxferry.partition.byte_order import check_byte_order
from jaxferry.partition.graph import Builder, Graph, bits_of, graph_of, known_jaxpr
from jaxferry.partition.groups import Path, leaf_paths
from jaxferry.partition.layout import Layer
from jaxferry.partition.packed import check_storable, reading_stored, stored_struct
from jaxferry.partition.scans import find_scans
from jaxferry.partition.stacking import Stack, Stored, stored_in, stored_leaves
from jaxferry.partition.unroll import unroll


@dataclasses.dataclass(frozen=True)
class Traced:
    """A function traced on parameters in the compute dtype, its scans over layers unrolled.

    Attributes:
      graph: the trace.
      stored: its parameters.
      master_dtypes: their master dtypes.
      frozen: indices of the frozen ones.
      notes: parameters whose scans could not be unrolled.
    """

    graph: Graph
    stored: list[Stored]
    master_dtypes: list[np.dtype]
    frozen: frozenset[int]
    notes: tuple[str, ...]


def trace(
    function: Callable[..., Any],
    params: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    dtype: Any,
    layers: Sequence[Layer] | None,
    frozen: Collection[int],
    num_devices: int,
    num_processes: int,
) -> Traced:
    """Traces a function on shapes; args as for `partition`, of which `dtype` is the `compute_dtype`.

    Raises:
      InputError: as in `partition`, of the parameters.
    """
    keys = leaf_paths(params)
    abstract, dtypes = abstract_params(params, ["/".join(path) for path in keys], dtype, frozen)
    closed, out_tree = known_jaxpr(function, abstract, args, kwargs or {})
    graph, stored, notes = _unroll_scans(graph_of(closed, len(keys), out_tree), keys, layers)
    frozen = frozenset(index for index, leaf in enumerate(stored) if leaf.source in frozen)
    graph = reading_stored(graph, stored, frozen)
    graph = dataclasses.replace(graph, num_devices=num_devices, num_processes=num_processes)
    return Traced(graph, stored, [dtypes[leaf.source] for leaf in stored], frozen, notes)


def traced_jaxpr(
    function: Callable[..., Any], params: Any, args: Any, kwargs: Any, dtype: Any, frozen: Collection[int]
) -> core.ClosedJaxpr:
    """The jaxpr that `partition` cuts: the same object as long as the function, all shapes and JAX's settings are.

    Args as for `partition`; `dtype` is its `compute_dtype`.
    """
    paths = ["/".join(path) for path in leaf_paths(params)]
    abstract, _ = abstract_params(params, paths, dtype, frozen)
    return known_jaxpr(function, abstract, args, kwargs)[0]


def copying_parameters(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function so that it returns copies of parameters, never the parameters themselves."""

    def copied(params: Any, *args: Any, **kwargs: Any) -> Any:
        given = {id(leaf) for leaf in jax.tree.leaves(params)}
        results = function(params, *args, **kwargs)
        return jax.tree.map(lambda leaf: jnp.array(leaf, copy=True) if id(leaf) in given else leaf, results)

    return copied


def _unroll_scans(
    graph: Graph, keys: Sequence[Path], layers: Sequence[Layer] | None
) -> tuple[Graph, list[Stored], tuple[str, ...]]:
    """Unrolls scans over layers. Returns the new graph, its parameters, and notes on scans that stay.

    Given layers determine which leaves are cut and how.
    """
    if layers is None:
        scans = find_scans(graph)
        stored = stored_leaves(keys, scans.stacks)
        stacks = scans.stacks
    else:
        stored = stored_in(layers)
        stacks = {
            leaf.source: Stack(leaf.part.length, leaf.part.axis, leaf.source)
            for leaf in stored
            if leaf.part is not None
        }
        scans = find_scans(graph, stacks)
    notes = tuple(
        f"not cut by layer though scanned over: {', '.join(repr('/'.join(keys[leaf])) for leaf in leaves)}: {reason}"
        for reason, leaves in scans.notes
    )
    return unroll(graph, scans, stacks), stored, notes


def abstract_params(
    params: Any, paths: Sequence[str], compute_dtype: Any, frozen: Collection[int]
) -> tuple[Any, list[np.dtype]]:
    """Returns shape structs in the compute dtype, and the dtypes of the master parameters."""
    leaves, tree = jax.tree.flatten(params)
    if not leaves:
        raise InputError("params holds no parameter: pass a tree with at least one array")
    dtypes = []
    for index, (leaf, path) in enumerate(zip(leaves, paths, strict=True)):
        if not hasattr(leaf, "dtype") or not hasattr(leaf, "shape"):
            raise InputError(f"parameter {path!r} is a {type(leaf).__name__}, not an array")
        check_byte_order(leaf, f"parameter {path!r}")
        if index in frozen:
            check_storable(leaf.dtype, f"parameter {path!r}")
            dtypes.append(np.dtype(stored_struct(leaf).dtype))
            continue
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise InputError(
                f"parameter {path!r} has dtype {leaf.dtype}; only real floating-point parameters can be trained: "
                "freeze it by trainable=, or pass it outside params, for instance in the batch"
            )
        if bits_of(leaf.dtype) < 8 or np.asarray(-1, leaf.dtype) != -1:
            raise InputError(
                f"parameter {path!r} has dtype {leaf.dtype}, which cannot hold gradients: freeze it by trainable=, or "
                "pass it in a floating-point dtype of 8 bits or more with a sign"
            )
        # Updates need fp32 precision even if the model is stored in 16 bits.
        dtypes.append(np.dtype(np.float32 if leaf.dtype.itemsize < 4 else leaf.dtype))
    computed = [jax.ShapeDtypeStruct(leaf.shape, _computed_dtype(leaf.dtype, compute_dtype)) for leaf in leaves]
    return jax.tree.unflatten(tree, computed), dtypes


def _computed_dtype(dtype: Any, compute_dtype: Any) -> Any:
    """Returns the dtype that the loss function sees; quantised parameters keep theirs, since the model scales them."""
    is_plain = jnp.issubdtype(dtype, jnp.floating) and np.dtype(dtype).itemsize > 1
    return compute_dtype if compute_dtype is not None and is_plain else dtype


def check_outputs(graph: Graph) -> tuple[int, jax.tree_util.PyTreeDef | None]:
    """Returns the number of the loss and the tree of the auxiliary outputs (None without any)."""
    shape = jax.tree.unflatten(graph.out_tree, range(graph.out_tree.num_leaves))
    has_aux = isinstance(shape, tuple) and len(shape) == 2
    loss = shape[0] if has_aux else shape
    if not isinstance(loss, int):
        raise PartitionError(f"loss_fn must return a scalar, or (scalar, aux); it returns {graph.out_tree}")
    atom = graph.outputs[loss]
    aval: Any = graph.avals[atom] if isinstance(atom, int) else atom.aval
    if aval.shape != () or not jnp.issubdtype(aval.dtype, jnp.floating):
        raise PartitionError(
            f"loss_fn must return a real floating-point scalar, or (scalar, aux); its loss is "
            f"{aval.dtype}[{','.join(map(str, aval.shape))}]"
        )
    if not isinstance(atom, int) or atom in graph.parameters:
        raise PartitionError("the loss is computed from no parameter: does loss_fn use its first argument?")
    held = [path for path in graph.outputs[1:] if isinstance(path, int) and path in graph.parameters]
    if held:
        raise PartitionError("loss_fn returns a parameter as an auxiliary output: read it from state.params instead")
    return atom, jax.tree.structure(shape[1]) if has_aux else None


def ending_with_loss(traced: Traced, loss: int) -> tuple[Traced, int]:
    """Ends the trace with a copy of the loss, which is then made by the last segment; returns the copy's number."""
    graph, builder = traced.graph, Builder.onto(traced.graph)
    aval = graph.avals[loss]
    copy = jax.make_jaxpr(jnp.copy)(jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type))
    [last] = builder.inline(copy, [loss])
    assert isinstance(last, int)
    ended = dataclasses.replace(
        graph,
        equations=(*graph.equations, *builder.equations),
        avals=builder.avals,
        outputs=(last, *graph.outputs[1:]),
    )
    return dataclasses.replace(traced, graph=ended), last
