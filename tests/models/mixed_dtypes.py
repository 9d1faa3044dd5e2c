"""Parameters of several dtypes in one tree."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp

from models import BlockNet, Task, language_model


class MixedBlock(nn.Module):
    """Kernels in bfloat16, norms and biases in float32; computes in float32."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        h = nn.LayerNorm(name="norm", param_dtype=jnp.float32)(x)
        h = nn.gelu(nn.Dense(64, name="up", param_dtype=jnp.bfloat16, dtype=jnp.float32)(h))
        kernel = self.param("down", nn.initializers.lecun_normal(dtype=jnp.float16), (64, x.shape[-1]), jnp.float16)
        return x + h @ kernel.astype(jnp.float32)


def linen_mixed_dtypes() -> Task:
    """float32, bfloat16 and float16 parameters within one block."""
    table = functools.partial(nn.Embed, param_dtype=jnp.bfloat16, dtype=jnp.float32)
    return language_model(BlockNet(MixedBlock, table=table))
