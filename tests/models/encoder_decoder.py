"""Encoder-decoder transformers: the encoder's output is alive until the last cross attention."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx

from models import Task, initialise, initialise_nnx, split_nnx


class EncoderLayer(nn.Module):
    """Self-attention and MLP."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + nn.MultiHeadDotProductAttention(2, name="attention")(nn.LayerNorm()(x))
        h = nn.gelu(nn.Dense(4 * x.shape[-1])(nn.LayerNorm()(x)))
        return x + nn.Dense(x.shape[-1])(h)


class DecoderLayer(nn.Module):
    """Causal self-attention, cross attention to the encoder's output, and MLP."""

    @nn.compact
    def __call__(self, x: jax.Array, encoded: jax.Array, mask: jax.Array) -> jax.Array:
        x = x + nn.MultiHeadDotProductAttention(2, name="attention")(nn.LayerNorm()(x), mask=mask)
        x = x + nn.MultiHeadDotProductAttention(2, name="cross_attention")(nn.LayerNorm()(x), encoded)
        h = nn.gelu(nn.Dense(4 * x.shape[-1])(nn.LayerNorm()(x)))
        return x + nn.Dense(x.shape[-1])(h)


class Translator(nn.Module):
    """A T5 in small: one table for source, target and head."""

    vocab: int = 64
    width: int = 16
    depth: int = 3

    @nn.compact
    def __call__(self, source: jax.Array, target: jax.Array) -> jax.Array:
        table = nn.Embed(self.vocab, self.width, name="table")
        x, y = table(source), table(target)
        for i in range(self.depth):
            x = EncoderLayer(name=f"encoder_{i}")(x)
        x = nn.LayerNorm(name="encoder_norm")(x)
        for i in range(self.depth):
            y = DecoderLayer(name=f"decoder_{i}")(y, x, nn.make_causal_mask(target))
        return table.attend(nn.LayerNorm(name="decoder_norm")(y))


def _sentences(vocab: int) -> dict[str, jax.Array]:
    source, target = jax.random.split(jax.random.key(1))
    return {
        "source": jax.random.randint(source, (2, 7), 1, vocab),
        "target": jax.random.randint(target, (2, 6), 1, vocab),
    }


def _translation_loss(logits: jax.Array, target: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, target[:, 1:]).mean()


def linen_translator() -> Task:
    """The linen encoder-decoder on random sentences."""
    model, batch = Translator(), _sentences(64)

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        logits: Any = model.apply({"params": params}, batch["source"], batch["target"][:, :-1])
        return _translation_loss(logits, batch["target"])

    return Task(loss_fn, initialise(model)(jax.random.key(0), batch["source"], batch["target"])["params"], batch)


class NnxDecoderLayer(nnx.Module):
    """Cross attention and MLP."""

    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.norm_1 = nnx.LayerNorm(width, rngs=rngs)
        self.cross = nnx.MultiHeadAttention(2, width, decode=False, rngs=rngs)
        self.norm_2 = nnx.RMSNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array, encoded: jax.Array) -> jax.Array:
        x = x + self.cross(self.norm_1(x), encoded)
        return x + self.down(nnx.silu(self.up(self.norm_2(x))))


class NnxPerceiver(nnx.Module):
    """Latents that attend to the same inputs in each layer."""

    def __init__(self, vocab: int, width: int, depth: int, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(vocab, width, rngs=rngs)
        self.latents = nnx.Param(jax.random.normal(rngs.params(), (5, width)))
        self.layers = nnx.List([NnxDecoderLayer(width, rngs) for _ in range(depth)])
        self.head = nnx.Linear(width, vocab, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        encoded = self.embed(tokens)
        x = jnp.broadcast_to(self.latents[...], (tokens.shape[0], *self.latents.shape))
        for layer in self.layers:
            x = layer(x, encoded)
        return self.head(x)


def nnx_perceiver() -> Task:
    """The NNX model with cross attention."""
    graph, params = split_nnx(initialise_nnx(lambda: NnxPerceiver(64, 16, 3, nnx.Rngs(0))), nnx.Param)

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        logits = nnx.merge(graph, params)(batch["source"])
        return _translation_loss(logits, batch["target"])

    return Task(loss_fn, params, _sentences(64))
