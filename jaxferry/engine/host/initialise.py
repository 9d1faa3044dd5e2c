"""Master parameters in host memory, from arrays or from an initialiser that runs layer by layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxferry.engine.host.pieces import Parts, on_host
from jaxferry.engine.placement import Placement
from jaxferry.partition import Layer, Span
from jaxferry.partition.graph import evaluate, live_equations, trace
from jaxferry.partition.packed import BYTES, as_stored

BLOCK_BYTES = 2 << 20
"""The bytes of a stored array that are in memory at a time, beside its master."""


def masters_from_arrays(
    leaves: Sequence[Any], dtypes: Sequence[np.dtype], placement: Placement, spans: Sequence[Span | None] = ()
) -> dict[int, Parts]:
    """Copies parameters leaf by leaf into host memory, in their master dtypes; returns them by index.

    Args:
      leaves: NumPy or JAX arrays, or anything that `np.asarray` accepts; leaves with methods `blocks` and `rows`, such
        as `pretrained.StoredTensor`, are read piece by piece.
      dtypes: the master dtypes; those of bytes for leaves that are stored as bytes (`partition.packed`).
      placement: where the masters go.
      spans: of each leaf the elements that this process holds, None for all; none for all of all.
    """
    blocks, made = _Blocks(placement), dict[int, Parts]()
    for i, (leaf, dtype, span) in enumerate(zip(leaves, dtypes, spans or [None] * len(leaves), strict=True)):
        if not hasattr(leaf, "blocks"):
            array = as_stored(leaf) if dtype in BYTES else np.asarray(leaf)
            made[i] = {span: on_host(array if span is None else span.of(array), placement, dtype)}
        else:
            made[i] = {span: blocks.master(leaf, dtype) if span is None else _elements(leaf, span, dtype, placement)}
    return made


def _elements(stored: Any, span: Span, dtype: np.dtype, placement: Placement) -> jax.Array:
    """Reads some elements of a stored array, a few rows at a time."""
    made = np.empty(span.size, dtype)
    row = math.prod(stored.shape[1:])
    if span.size and not stored.shape:
        made[:] = np.asarray(stored)
    elif span.size:
        step = max(1, BLOCK_BYTES // max(1, row * stored.dtype.itemsize))
        last = -(-span.stop // row)
        for first in range(span.start // row, last, step):
            found = np.asarray(stored.rows(first, min(first + step, last))).reshape(-1)
            start, stop = max(span.start, first * row), min(span.stop, first * row + found.size)
            made[start - span.start : stop - span.start] = found[start - first * row : stop - first * row]
    return jax.device_put(made, placement.host)


class _Blocks:
    """Fills masters piece by piece in place; programs are shared by equal shapes."""

    def __init__(self, placement: Placement) -> None:
        self._host = placement.host

        def write(master: jax.Array, block: jax.Array, start: Sequence[jax.Array]) -> jax.Array:
            # Operands of different memory kinds do not mix; on a CPU this placement copies nothing.
            master, block = jax.device_put((master, block), jax.memory.Space.Device)
            return jax.lax.dynamic_update_slice(master, block.astype(master.dtype), start)

        def empty(shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
            return jnp.zeros(shape, dtype)

        self._write = jax.jit(write, donate_argnums=0, out_shardings=self._host)
        self._empty = jax.jit(empty, static_argnums=(0, 1), out_shardings=self._host)

    def master(self, stored: Any, dtype: np.dtype) -> jax.Array:
        cpu = next(iter(self._host.device_set))
        with jax.default_device(cpu):
            master: jax.Array = self._empty(tuple(stored.shape), np.dtype(dtype))
            for start, block in stored.blocks(BLOCK_BYTES):
                given = jax.device_put(np.asarray(block, order="C"), self._host, may_alias=False)
                master = self._write(master, given, [np.int32(place) for place in start])
                # Without this, blocks would accumulate.
                master.block_until_ready()
                given.delete()
        return master


def masters_layer_by_layer(
    init_fn: Callable[[Any], Any], rng: Any, layers: Sequence[Layer], placement: Placement
) -> dict[int, Parts]:
    """Runs `init_fn(rng)` on the CPU backend, one layer at a time, each with only the equations that it needs.

    The results equal those of `init_fn` on that backend without `jit`. Of several processes each computes all layers
    and keeps what it owns.
    """
    # A jitted sampler differs in the last bits when its operations run one by one.
    graph = trace(init_fn, rng, (), {}, keep_single=True)
    cpu = next(iter(placement.host.device_set))
    masters: dict[int, Parts] = {}
    with jax.default_device(cpu):
        given = dict(zip(graph.parameters, (jax.device_put(leaf, cpu) for leaf in jax.tree.leaves(rng)), strict=True))
        for layer in layers:
            atoms = [graph.outputs[leaf.index] for leaf in layer.leaves]
            values = {**graph.constants, **given}
            evaluate(live_equations(graph.equations, atoms), values)
            arrays = [values[atom] if isinstance(atom, int) else atom.val for atom in atoms]
            dtypes = [leaf.master_dtype for leaf in layer.leaves]
            spans = [placement.ownership.span(layer, leaf) for leaf in layer.leaves]
            made = masters_from_arrays(arrays, dtypes, placement, spans)
            masters |= {leaf.index: made[i] for i, leaf in enumerate(layer.leaves)}
    return masters
