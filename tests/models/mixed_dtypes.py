"""Parameters of several dtypes in one tree."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from models import Task, initialise, next_token_loss


class MixedBlock(nn.Module):
    """Kernels in bfloat16, norms and biases in float32; computes in float32."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        h = nn.LayerNorm(name="norm", param_dtype=jnp.float32)(x)
        h = nn.gelu(nn.Dense(64, name="up", param_dtype=jnp.bfloat16, dtype=jnp.float32)(h))
        kernel = self.param("down", nn.initializers.lecun_normal(dtype=jnp.float16), (64, x.shape[-1]), jnp.float16)
        return x + h @ kernel.astype(jnp.float32)


class MixedNet(nn.Module):
    """A language model of such blocks."""

    vocab: int = 64
    width: int = 16
    depth: int = 3

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(self.vocab, self.width, name="embed", param_dtype=jnp.bfloat16, dtype=jnp.float32)(tokens)
        for i in range(self.depth):
            x = MixedBlock(name=f"block_{i}")(x)
        return nn.Dense(self.vocab, name="head")(x)


def linen_mixed_dtypes() -> Task:
    """float32, bfloat16 and float16 parameters within one block."""
    model, batch = MixedNet(), jax.random.randint(jax.random.key(1), (2, 9), 0, 64)

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        logits: Any = model.apply({"params": params}, batch[:, :-1])
        return next_token_loss(logits, batch)

    return Task(loss_fn, initialise(model)(jax.random.key(0), batch[:, :-1])["params"], batch)
