"""Adam's moments in bfloat16: `optax.scale_by_adam`, whose state has 4 bytes a parameter in place of 8.

Arithmetic is that of fp32. Moments change by a part of 1 - b1 and 1 - b2 in a step, often less than half the distance
of two bf16 numbers: to nearest, they would not change at all. They are rounded up or down at random, so that the mean
is kept (stochastic rounding, Gupta et al. 2015, "Deep learning with limited numerical precision"). Chance is a hash of
an element's gradient, its moments before the step and the number of the step: the same bits in every run and under
every plan that only moves data. The native library has the same hash (`xla_ffi/cpu/host_step_kernel.inc`).
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxferry.errors import InputError

_OF_SEED, _FIRST_FACTOR, _SECOND_FACTOR = 0x9E3779B9, 0x85EBCA6B, 0xC2B2AE35


def scale_by_adam_in_bfloat16(*args: Any, **options: Any) -> optax.GradientTransformation:
    """`optax.scale_by_adam`, with its arguments, and moments in bfloat16."""
    wide = optax.scale_by_adam(*args, **options)

    def init(params: Any) -> optax.ScaleByAdamState:
        if any(jnp.iscomplexobj(leaf) for leaf in jax.tree.leaves(params)):
            raise InputError('moments="bfloat16" needs real parameters: take moments="float32" for complex ones')
        state = wide.init(params)
        return state._replace(**{name: _cast(getattr(state, name), jnp.bfloat16) for name in ("mu", "nu")})

    def update(gradients: Any, state: Any, params: Any = None) -> tuple[Any, optax.ScaleByAdamState]:
        own = {name: _cast(getattr(state, name), jnp.float32) for name in ("mu", "nu")}
        updates, new = wide.update(gradients, state._replace(**own), params)
        seed = state.count.astype(jnp.uint32) * jnp.uint32(_OF_SEED)
        noise = jax.tree.map(functools.partial(_noise, seed), gradients, own["mu"], own["nu"])
        mu = jax.tree.map(lambda moment, both: _dithered(moment, both & 0xFFFF), new.mu, noise)
        nu = jax.tree.map(lambda moment, both: _dithered(moment, both >> 16), new.nu, noise)
        return updates, new._replace(mu=mu, nu=nu)

    return optax.GradientTransformation(init, update)


def _cast(moments: Any, dtype: Any) -> Any:
    return jax.tree.map(lambda moment: moment.astype(dtype), moments)


def _bits(numbers: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(numbers.astype(jnp.float32), jnp.uint32)


def _noise(seed: jax.Array, gradient: jax.Array, first: jax.Array, second: jax.Array) -> jax.Array:
    """Two random numbers of 16 bits for each element, in one of 32."""
    noise = _bits(gradient) ^ _bits(second) ^ (_bits(first) >> 16) ^ seed
    noise = (noise ^ (noise >> 16)) * jnp.uint32(_FIRST_FACTOR)
    return (noise ^ (noise >> 13)) * jnp.uint32(_SECOND_FACTOR)


def _dithered(moment: jax.Array, noise: jax.Array) -> jax.Array:
    """Rounds fp32 numbers to bf16, up or down by random numbers of 16 bits."""
    bits = _bits(moment)
    rounded = jnp.where(jnp.isnan(moment), (bits >> 16) | 0x40, (bits + noise) >> 16)
    return jax.lax.bitcast_convert_type(rounded.astype(jnp.uint16), jnp.bfloat16)
