"""Rounded values as programs store them.

XLA may compute with more bits than a program says (`xla_allow_excess_precision`, on by default): where a value is cast
to 16 bits and used again in fp32, it drops both casts. The stored array may then be infinite while the same program
finds its norm finite.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

_FULL_BITS = 32


def as_stored(values: Any) -> Any:
    """Returns values, within a jitted function, so that what reads them there gets the bits that the program stores.

    A barrier behind each value of fewer than 32 bits keeps XLA from looking through the value's cast. Others are
    returned unchanged.

    Args:
      values: a tree of arrays.
    """

    def stored(value: jax.Array) -> jax.Array:
        is_rounded = jnp.issubdtype(value.dtype, jnp.floating) and jnp.finfo(value.dtype).bits < _FULL_BITS
        return jax.lax.optimization_barrier(value) if is_rounded else value

    return jax.tree.map(stored, values)
