"""Transformer-XL in Flax linen (Dai et al. 2019): relative positions, and a memory of earlier segments.

B: batch, T: positions of the segment, M: positions of its memory, K = M + T, H: heads, C: channels. The model does not
depend on JaxFerry or on where its parameters live. Blocks are post-LN; the head is tied to the token table.

Each block's memory is a separate leaf of the batch, and each new memory a separate output, so that no memory travels
through other blocks. Activations and memory have the parameters' dtype; LayerNorm, softmax and the loss always compute
in float32.
"""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from examples.common.layers import dropout


@dataclasses.dataclass(frozen=True)
class Config:
    """The shape of a Transformer-XL; `dropout` acts on the embeddings and on additions to the residual stream."""

    num_layers: int
    num_heads: int
    channels: int
    vocab_size: int
    dropout: float = 0.0


# MemFerry's sizes (section V-A). The paper gives the ends of the range and the ranges of width and vocabulary; the rest
# is interpolated as in benchmarks/papers/paper_models.py.
SIZES = {
    "tiny": Config(num_layers=4, num_heads=4, channels=128, vocab_size=1024),
    "0.7b": Config(num_layers=12, num_heads=16, channels=2048, vocab_size=32768),
    "1b": Config(num_layers=17, num_heads=16, channels=2048, vocab_size=37664),
    "1.7b": Config(num_layers=23, num_heads=18, channels=2304, vocab_size=49056),
    "2.4b": Config(num_layers=26, num_heads=20, channels=2560, vocab_size=60480),
    "3.6b": Config(num_layers=27, num_heads=24, channels=3072, vocab_size=80032),
    "4.3b": Config(num_layers=28, num_heads=26, channels=3328, vocab_size=91424),
    "5.5b": Config(num_layers=31, num_heads=28, channels=3584, vocab_size=110976),
    "6.7b": Config(num_layers=28, num_heads=32, channels=4096, vocab_size=130528),
}

normal = nn.initializers.normal(0.02)
Dense = functools.partial(nn.Dense, kernel_init=normal)
Projection = functools.partial(Dense, use_bias=False)


class Block(nn.Module):
    """One block: takes x [B, T, C], the memory [B, M, C] of its earlier inputs, and the dropout key or None.

    Returns x, the new memory (the last M inputs, without a gradient), and the key.
    """

    config: Config

    @nn.compact
    def __call__(self, x, memory, key=None):
        cfg = self.config
        C, M = cfg.channels, memory.shape[1]
        past = jnp.concatenate([jax.lax.stop_gradient(memory.astype(x.dtype)), x], axis=1)
        y, key = dropout(Attention(cfg, name="attention")(x, past), cfg.dropout, key)
        x = nn.LayerNorm(name="ln_1")(x + y)
        y = nn.relu(Dense(4 * C, name="up")(x))
        y, key = dropout(Dense(C, name="down")(y), cfg.dropout, key)
        return nn.LayerNorm(name="ln_2")(x + y), jax.lax.stop_gradient(past[:, past.shape[1] - M :]), key


class Attention(nn.Module):
    """Attends from x [B, T, C] to `past` [B, K, C], which ends with x, by content and distance (equation in 3.3).

    score(query, key) = (q + u) k + (q + v) W r(distance): u and v weight content and distance, alike for all queries.
    """

    config: Config

    @nn.compact
    def __call__(self, x, past):
        cfg = self.config
        B, T, C = x.shape
        H, K = cfg.num_heads, past.shape[1]
        q = Projection(C, name="query")(x).reshape(B, T, H, -1)
        k, v = (Projection(C, name=name)(past).reshape(B, K, H, -1) for name in ("key", "value"))
        r = Projection(C, name="distance")(waves(K, C).astype(x.dtype)).reshape(K, H, -1)
        by_content, by_distance = (self.param(name, normal, q.shape[2:]).astype(x.dtype) for name in ("u", "v"))

        scores = jnp.einsum("bthd,bkhd->bhtk", q + by_content, k)
        scores += shift(jnp.einsum("bthd,khd->bhtk", q + by_distance, r))
        scores = scores.astype(jnp.float32) * (C // H) ** -0.5
        is_past = jnp.arange(K) <= jnp.arange(T)[:, None] + K - T
        weights = nn.softmax(jnp.where(is_past, scores, -jnp.inf)).astype(x.dtype)
        return Projection(C, name="proj")(jnp.einsum("bhtk,bkhd->bthd", weights, v).reshape(B, T, C))


def waves(K, C):
    """Returns sines and cosines of the distances K - 1 to 0: float32 [K, C]."""
    distances = np.arange(K - 1, -1, -1)
    angles = distances[:, None] / 10000 ** (np.arange(0, C, 2) / C)
    return jnp.asarray(np.concatenate([np.sin(angles), np.cos(angles)], axis=1), jnp.float32)


def shift(scores):
    """Moves scores by distance, [B, H, T, K], to the keys at that distance (appendix B of the paper).

    Column j holds the distance K - 1 - j. Query i is at position K - T + i, so its row shifts left by T - 1 - i; those
    columns that enter from the right are not past keys.
    """
    B, H, T, K = scores.shape
    padded = jnp.pad(scores, ((0, 0), (0, 0), (0, 0), (1, 0)))
    return padded.reshape(B, H, K + 1, T)[:, :, 1:].reshape(B, H, T, K)


class TransformerXL(nn.Module):
    """Maps tokens [B, T] and one memory [B, M, C] per block to logits [B, T, vocab_size] and the new memories."""

    config: Config

    @nn.compact
    def __call__(self, tokens, memory, key=None):
        cfg = self.config
        table = nn.Embed(cfg.vocab_size, cfg.channels, embedding_init=normal, name="tokens")
        x, key = dropout(table(tokens) * cfg.channels**0.5, cfg.dropout, key)
        new = []
        for i in range(cfg.num_layers):
            x, block_memory, key = Block(cfg, name=f"block_{i}")(x, memory[i], key)
            new.append(block_memory)
        bias = self.param("bias", nn.initializers.zeros, (cfg.vocab_size,))
        return table.attend(x) + bias, new


def empty_memory(config, batch_size, length, dtype):
    """Returns the memory before the first segment: zeros, attended to like any other memory."""
    return [np.zeros((batch_size, length, config.channels), dtype) for _ in range(config.num_layers)]


def make_loss(config):
    """Returns the loss function: mean cross entropy of each next token, in nats, as a float32 scalar.

    It also returns a dictionary with the new `memory`. Its batch holds `tokens`, int32 [B, T + 1]; `memory`, one
    [B, M, C] per block; `is_start`, a bool: the segment has no predecessor and the memory counts as empty; and
    optionally `key`, a `jax.random` key for dropout.
    """
    model = TransformerXL(config)

    def loss_fn(params, batch):
        tokens = batch["tokens"]
        memory = [jnp.where(batch["is_start"], 0, block_memory) for block_memory in batch["memory"]]
        logits, memory = model.apply({"params": params}, tokens[:, :-1], memory, batch.get("key"))
        losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), tokens[:, 1:])
        return losses.mean(), {"memory": memory}

    return loss_fn


def make_init(config):
    """Returns the function that initialises float32 parameters from a key."""
    model = TransformerXL(config)

    def init_fn(rng):
        return model.init(rng, jnp.zeros((1, 1), jnp.int32), empty_memory(config, 1, 0, np.float32))["params"]

    return init_fn
