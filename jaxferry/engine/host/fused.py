"""The update of a unit as one native operation; `optimizer.py` compiles it if the optimizer has a native rule.

factors (from counts, norm, scale)  +  gradient vectors, masters, moments, compute copy  --host_step-->  in place
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxferry.native import is_available
from jaxferry.native.host_step import FACTORS, StepPart, host_step
from jaxferry.native.operations import DTYPES
from jaxferry.optimizers import FusedTransformation, HostRule
from jaxferry.partition import Layer


def fused_rule(optimizer: Any, state: Any, layers: Sequence[Layer], reads: Sequence[bool]) -> HostRule | None:
    """Returns the library's rule for the update of these layers; None if Optax has to do it.

    Args:
      optimizer: the Optax transformation.
      state: shapes of its state for these layers.
      layers: the layers of the unit.
      reads: for each layer whether it has a gradient.
    """
    rule = optimizer.rule if isinstance(optimizer, FusedTransformation) else None
    if rule is None or not all(reads) or not rule.fits(state):
        return None
    leaves = [leaf for layer in layers for leaf in layer.leaves]
    if not all(leaf.master_dtype == np.float32 and leaf.dtype in DTYPES for leaf in leaves):
        return None
    return rule if is_available("cpu") else None


def clip_factor(norm: jax.Array, clip_norm: float | None) -> jax.Array:
    """Returns the factor that clips gradients of this global norm to `clip_norm`; fp32 scalars."""
    one = jnp.float32(1)
    return one if clip_norm is None else jnp.where(norm < clip_norm, one, jnp.float32(clip_norm) / norm)


def fused_update(
    rule: HostRule,
    layers: Sequence[Layer],
    params: Any,
    state: Any,
    copies: Sequence[Sequence[Any]] | jax.Array,
    gradients: Sequence[Sequence[jax.Array]],
    clip: jax.Array,
    scale: jax.Array,
    decays: Sequence[bool] | None = None,
) -> tuple[Any, Any, list[tuple[jax.Array, ...]]]:
    """Returns parameters, state and compute copy after a step; for a jitted function of the CPU backend.

    Args:
      rule: the optimizer's rule.
      layers: the layers of the unit.
      params: the tree of their masters; its leaves are the layers' leaves in ascending order of their indices.
      state: the Optax state.
      copies: each layer's flat vectors, or shapes to allocate them; or the addresses of all, see `host_step`.
      gradients: each layer's flat vectors.
      clip: fp32 scalar; multiplies gradients after the division by `scale`.
      scale: fp32 scalar; divides gradients.
      decays: for each master whether it decays; None for the rule's own answer.
    """
    masters, tree = jax.tree.flatten(params)
    decays = rule.decays(params) if decays is None else decays
    places = sorted((leaf.index, number, leaf) for number, layer in enumerate(layers) for leaf in layer.leaves)
    starts = np.cumsum([0, *(len(layer.vectors) for layer in layers)])
    parts = [
        StepPart(int(starts[number]) + leaf.vector, leaf.offset, decay)
        for (_, number, leaf), decay in zip(places, decays, strict=True)
    ]
    factors = {"unscale": 1 / scale, "clip": clip, **rule.factors(state)}
    masters, moments, packed = host_step(
        rule.step,
        parts,
        jnp.stack([factors[name] for name in FACTORS]),
        [vector for vectors in gradients for vector in vectors],
        masters,
        [jax.tree.leaves(moment) for moment in rule.moments(state)],
        copies if isinstance(copies, jax.Array) else [vector for vectors in copies for vector in vectors],
        [vector.dtype for layer in layers for vector in layer.vectors],
    )
    state = rule.advance(state, [jax.tree.unflatten(tree, moment) for moment in moments])
    # Slices of nothing are empty: copies at addresses are not returned.
    by_layer = [tuple(packed[start:end]) for start, end in itertools.pairwise(starts)]
    return jax.tree.unflatten(tree, masters), state, by_layer
