"""Mutable collections beside batch statistics: a codebook that follows its inputs, spectral norms, a memory."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from models import Task
from models.convolutional import with_statistics


class Codebook(nn.Module):
    """Vector quantization with a codebook that is a moving average, not a parameter; straight-through gradients."""

    size: int = 12

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        codes = self.variable(
            "codebook", "codes", lambda: jax.random.normal(jax.random.key(5), (self.size, x.shape[-1]))
        )
        counts = self.variable("codebook", "counts", lambda: jnp.ones(self.size))
        distances = ((x[:, None] - codes.value) ** 2).sum(-1)
        nearest = distances.argmin(-1)
        chosen = codes.value[nearest]
        if self.is_mutable_collection("codebook"):
            hits = jax.nn.one_hot(nearest, self.size)
            counts.value = 0.9 * counts.value + 0.1 * hits.sum(0)
            means = hits.T @ jax.lax.stop_gradient(x) / jnp.maximum(hits.sum(0), 1)[:, None]
            codes.value = jnp.where(hits.sum(0)[:, None] > 0, 0.9 * codes.value + 0.1 * means, codes.value)
        return x + jax.lax.stop_gradient(chosen - x)


class QuantizedAutoencoder(nn.Module):
    """Encoder with spectral norms, codebook, decoder; a memory keeps the last encoder output."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        h = nn.relu(nn.SpectralNorm(nn.Dense(24, name="up"), name="up_norm")(x, update_stats=True))
        h = nn.SpectralNorm(nn.Dense(8, name="down"), name="down_norm")(h, update_stats=True)
        memory = self.variable("memory", "last", jnp.zeros, h.shape)
        before, memory.value = memory.value, jax.lax.stop_gradient(h)
        h = Codebook(name="codebook")(h) + 0.1 * before
        return nn.Dense(x.shape[-1], name="reader")(nn.relu(nn.Dense(24, name="decoder")(h)))


def linen_collections() -> Task:
    """Three mutable collections, all handed in and out."""
    batch = {"x": jax.random.normal(jax.random.key(1), (8, 16))}
    return with_statistics(QuantizedAutoencoder(), batch, "x", _reconstruction)


def _reconstruction(outputs: jax.Array, batch: Any) -> jax.Array:
    return ((outputs - batch["x"]) ** 2).mean()
