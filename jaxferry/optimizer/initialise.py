"""Master parameters in host memory, from arrays or from an initialiser that runs layer by layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxferry.errors import InputError, call_users
from jaxferry.native import host_sums
from jaxferry.optimizer.pieces import Stored, filled
from jaxferry.partition import (
    Atom,
    Graph,
    Layer,
    Span,
    evaluate,
    is_stored_as_bytes,
    live_equations,
    no_arrays,
    result_shapes,
    stored_struct,
    to_bytes,
    trace,
)
from jaxferry.transport import Placement

Keep = Callable[[int, Stored], Stored]
BLOCK_BYTES = 2 << 20  # the bytes of a stored array that are in memory at a time, beside its master


def masters_from_arrays(
    leaves: Sequence[Any],
    dtypes: Sequence[np.dtype],
    placement: Placement,
    spans: Sequence[Span | None] = (),
    keep: Keep = lambda index, stored: stored,
) -> dict[int, Stored]:
    """Copies parameters leaf by leaf into host memory, in their master dtypes; returns them by index.

    Args:
      leaves: NumPy or JAX arrays, or anything that `np.asarray` accepts. Leaves with a method `read_into`, such as
        `checkpoint.StoredLeaf`, or with methods `blocks` and `rows`, such as `pretrained.StoredTensor`, are read piece
        by piece.
      dtypes: the master dtypes; those of bytes for leaves that are stored as bytes (`partition.packed`).
      placement: where the masters go.
      spans: of each leaf the elements that this process holds, None for all; none for all of all.
      keep: called with each leaf's index and master once that is made; returns what is kept of it.
    """
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        raise InputError("a state lives in host memory: it cannot be made under jax.jit or another transformation")
    return {
        i: keep(i, host_array(leaf, placement, dtype, span))
        for i, (leaf, dtype, span) in enumerate(zip(leaves, dtypes, spans or [None] * len(leaves), strict=True))
    }


def host_array(leaf: Any, placement: Placement, dtype: np.dtype, span: Span | None = None) -> Stored:
    """Returns a leaf, or some elements of it, in host memory; arguments as for `masters_from_arrays`."""
    is_packed = hasattr(leaf, "dtype") and is_stored_as_bytes(leaf, jax.ShapeDtypeStruct((), dtype))

    def fill(made: np.ndarray) -> None:
        if hasattr(leaf, "read_into"):
            leaf.read_into(made, span)
        elif hasattr(leaf, "blocks") and not is_packed:
            _read_blocks(leaf, made, span)
        elif is_packed and span is None:
            to_bytes(leaf, made)
        else:
            array = to_bytes(leaf) if is_packed else np.asarray(leaf)
            host_sums.copy(made, array if span is None else span.of(array))

    shape = tuple(stored_struct(leaf).shape if is_packed else np.shape(leaf))
    made = filled(shape if span is None else (span.size,), dtype, placement, fill)
    return Stored({span: made}, shape, dtype)


def _read_blocks(stored: Any, made: np.ndarray, span: Span | None) -> None:
    """Reads a stored array, or some elements of it, a few rows at a time."""
    if span is None:
        for start, block in stored.blocks(BLOCK_BYTES):
            made[tuple(slice(first, first + size) for first, size in zip(start, block.shape, strict=True))] = block
    elif span.size and not stored.shape:
        made[:] = np.asarray(stored)
    elif span.size:
        row = math.prod(stored.shape[1:])
        step = max(1, BLOCK_BYTES // max(1, row * stored.dtype.itemsize))
        last = -(-span.stop // row)
        for first in range(span.start // row, last, step):
            span.put(made, first * row, np.asarray(stored.rows(first, min(first + step, last))))


def initial_shapes(init_fn: Callable[[Any], Any], rng: Any) -> Any:
    """Returns the shapes of the parameters that `init_fn(rng)` makes; raises `InputError` if it makes no arrays."""
    if not callable(init_fn):
        raise InputError(f"init_fn must be a function of a PRNG key, got {init_fn!r}")
    if found := no_arrays(rng):
        raise InputError(f"rng must be a PRNG key or a tree of arrays, got {found}")

    def checked(rng: Any) -> Any:
        made = call_users(init_fn, rng)
        if found := no_arrays(made):
            raise InputError(f"init_fn must return a tree of arrays, it returns {found}")
        return made

    return result_shapes(checked, rng)


def masters_layer_by_layer(
    init_fn: Callable[[Any], Any],
    rng: Any,
    layers: Sequence[Layer],
    placement: Placement,
    keep: Keep = lambda index, stored: stored,
) -> dict[int, Stored]:
    """Runs `init_fn(rng)` on the CPU backend, one layer at a time, each with only the equations that it needs.

    One parameter exists beside the masters at a time, with what computes it. The results equal those of `init_fn` on
    that backend without `jit`. Of several processes each computes all layers and keeps what it owns.
    """
    # A jitted sampler differs in the last bits when its operations run one by one.
    graph = trace(init_fn, rng, (), {}, keep_single=True)
    cpu = next(iter(placement.host.device_set))
    masters: dict[int, Stored] = {}
    with jax.default_device(cpu):
        inputs = dict(zip(graph.parameters, (jax.device_put(leaf, cpu) for leaf in jax.tree.leaves(rng)), strict=True))
        for layer in layers:
            spans = {leaf.index: placement.ownership.span(layer, leaf) for leaf in layer.leaves}
            dtypes = {leaf.index: leaf.master_dtype for leaf in layer.leaves}
            outputs = [(graph.outputs[leaf.index], leaf.index) for leaf in layer.leaves]
            for index, array in _arrays_one_by_one(graph, outputs, {**graph.constants, **inputs}):
                masters[index] = keep(index, host_array(array, placement, dtypes[index], spans[index]))
                del array  # before the next one is computed
    return masters


def _arrays_one_by_one(
    graph: Graph, outputs: Sequence[tuple[Atom, int]], values: dict[int, Any]
) -> Iterator[tuple[int, Any]]:
    """Yields arrays with their numbers once they are computed; drops from `values` what no later equation reads."""
    equations = live_equations(graph.equations, [atom for atom, _ in outputs])
    last = {atom: i for i, each in enumerate(equations) for atom in each.inputs if isinstance(atom, int)}
    computed = {atom for each in equations for atom in each.outputs}
    numbers: dict[int, list[int]] = {}
    for atom, number in outputs:
        if isinstance(atom, int) and atom in computed:
            numbers.setdefault(atom, []).append(number)
        else:
            yield number, values[atom] if isinstance(atom, int) else atom.val
    for i, equation in enumerate(equations):
        evaluate([equation], values)
        for atom in equation.outputs:
            for number in numbers.get(atom, ()):
                yield number, values[atom]
        for each in (*equation.inputs, *equation.outputs):
            if isinstance(each, int) and last.get(each, i) <= i:
                values.pop(each, None)
