"""Adam's moments in bfloat16: `optax.scale_by_adam`, whose state has 4 bytes a parameter in place of 8.

Arithmetic is that of fp32. The first moment is rounded to nearest, as by Optax's `mu_dtype`. The second one changes by
a part of 1 - b2 in a step, less than half the distance of two bf16 numbers: to nearest, it would not change at all. It
is rounded up or down at random, so that the mean is kept (stochastic rounding, Gupta et al. 2015, "Deep learning with
limited numerical precision"). Chance is a hash of the element's gradient and the number of the step: the same bits in
every run and under every plan. The native library has the same hash (`DitheredBfloat16` in `xla_ffi/cpu/bits.h`).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

_OF_SEED, _FIRST_FACTOR, _SECOND_FACTOR = 0x9E3779B9, 0x85EBCA6B, 0xC2B2AE35


def scale_by_adam_in_bfloat16(*args: Any, **options: Any) -> optax.GradientTransformation:
    """`optax.scale_by_adam`, with its arguments, and moments in bfloat16."""
    wide = optax.scale_by_adam(*args, **options)

    def init(params: Any) -> optax.ScaleByAdamState:
        state = wide.init(params)
        return state._replace(**{name: _cast(getattr(state, name), jnp.bfloat16) for name in ("mu", "nu")})

    def update(gradients: Any, state: Any, params: Any = None) -> tuple[Any, optax.ScaleByAdamState]:
        own = {name: _cast(getattr(state, name), jnp.float32) for name in ("mu", "nu")}
        updates, new = wide.update(gradients, state._replace(**own), params)
        seed = state.count.astype(jnp.uint32) * jnp.uint32(_OF_SEED)
        nu = jax.tree.map(lambda moment, gradient: _dithered(moment, gradient, seed), new.nu, gradients)
        return updates, new._replace(mu=_cast(new.mu, jnp.bfloat16), nu=nu)

    return optax.GradientTransformation(init, update)


def _cast(moments: Any, dtype: Any) -> Any:
    return jax.tree.map(lambda moment: moment.astype(dtype), moments)


def _dithered(moment: jax.Array, gradient: jax.Array, seed: jax.Array) -> jax.Array:
    """Rounds fp32 numbers to bf16, up or down by a hash."""
    bits, noise = (jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32) for x in (moment, gradient))
    noise = noise ^ seed
    noise = (noise ^ (noise >> 16)) * jnp.uint32(_FIRST_FACTOR)
    noise = (noise ^ (noise >> 13)) * jnp.uint32(_SECOND_FACTOR)
    rounded = jnp.where(jnp.isnan(moment), (bits >> 16) | 0x40, (bits + (noise >> 16)) >> 16)
    return jax.lax.bitcast_convert_type(rounded.astype(jnp.uint16), jnp.bfloat16)
