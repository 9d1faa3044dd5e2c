"""Master parameters in host memory, from arrays or from an initialiser that is run layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxferry.engine.placement import Placement
from jaxferry.partition import Layer
from jaxferry.partition.graph import evaluate, live_equations, trace


def masters_from_arrays(leaves: Sequence[Any], dtypes: Sequence[np.dtype], placement: Placement) -> list[jax.Array]:
    """Copies parameters (NumPy or JAX arrays) leaf by leaf into host memory, in their master dtypes."""
    return [
        jax.device_put(np.asarray(leaf).astype(dtype, copy=False), placement.host, may_alias=False)
        for leaf, dtype in zip(leaves, dtypes, strict=True)
    ]


def masters_layer_by_layer(
    init_fn: Callable[[Any], Any], rng: Any, layers: Sequence[Layer], placement: Placement
) -> list[jax.Array]:
    """Runs `init_fn(rng)` on the CPU backend, one layer at a time, each with only the equations that it needs.

    The results are those of calling `init_fn` there without `jit`.
    """
    # A jitted sampler gives other last bits when its operations are run one by one.
    graph = trace(init_fn, rng, (), {}, keep_single=True)
    cpu = next(iter(placement.host.device_set))
    masters: dict[int, jax.Array] = {}
    with jax.default_device(cpu):
        given = dict(zip(graph.parameters, (jax.device_put(leaf, cpu) for leaf in jax.tree.leaves(rng)), strict=True))
        for layer in layers:
            atoms = [graph.outputs[leaf.index] for leaf in layer.leaves]
            values = {**graph.constants, **given}
            evaluate(live_equations(graph.equations, atoms), values)
            arrays = [values[atom] if isinstance(atom, int) else atom.val for atom in atoms]
            dtypes = [leaf.master_dtype for leaf in layer.leaves]
            made = masters_from_arrays(arrays, dtypes, placement)
            masters |= {leaf.index: master for leaf, master in zip(layer.leaves, made, strict=True)}
    return [masters[index] for index in range(len(masters))]
