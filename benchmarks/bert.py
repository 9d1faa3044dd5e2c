"""BERT-base in Flax linen, for benchmarks: post-norm blocks, learned positions, a masked-language-model head on the
token table."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax


@dataclasses.dataclass(frozen=True)
class Config:
    """The shape of a BERT; the defaults are those of BERT-base (Devlin et al., 2019)."""

    num_layers: int = 12
    num_heads: int = 12
    channels: int = 768
    max_length: int = 512
    vocab_size: int = 30522
    num_types: int = 2


class Block(nn.Module):
    """One encoder block: maps x [B, T, C] to the same shape."""

    config: Config

    @nn.compact
    def __call__(self, x):
        cfg = self.config
        B, T, C = x.shape
        q, k, v = (nn.Dense(C, name=name)(x).reshape(B, T, cfg.num_heads, -1) for name in ("query", "key", "value"))
        y = jax.nn.dot_product_attention(q, k, v).reshape(B, T, C)
        x = nn.LayerNorm(name="attention_norm")(x + nn.Dense(C, name="attention_output")(y))
        y = nn.Dense(C, name="output")(nn.gelu(nn.Dense(4 * C, name="intermediate")(x)))
        return nn.LayerNorm(name="output_norm")(x + y)


class Bert(nn.Module):
    """Maps tokens [B, T] to logits [B, T, vocab_size]."""

    config: Config

    @nn.compact
    def __call__(self, tokens):
        cfg = self.config
        table = nn.Embed(cfg.vocab_size, cfg.channels, name="tokens")
        x = table(tokens) + nn.Embed(cfg.max_length, cfg.channels, name="positions")(jnp.arange(tokens.shape[1]))
        x = x + nn.Embed(cfg.num_types, cfg.channels, name="types")(jnp.zeros_like(tokens))
        x = nn.LayerNorm(name="embedding_norm")(x)
        for i in range(cfg.num_layers):
            x = Block(cfg, name=f"block_{i}")(x)
        x = nn.LayerNorm(name="head_norm")(nn.gelu(nn.Dense(cfg.channels, name="head")(x)))
        return table.attend(x)


def make_loss(config):
    """Returns the mean cross entropy of masked tokens; batch: `tokens`, `labels` [B, T] (-1: not masked)."""
    model = Bert(config)

    def loss_fn(params, batch):
        logits = model.apply({"params": params}, batch["tokens"])
        is_masked = batch["labels"] >= 0
        labels = jnp.where(is_masked, batch["labels"], 0)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels)
        return jnp.sum(losses * is_masked) / jnp.maximum(jnp.sum(is_masked), 1)

    return loss_fn


def make_init(config):
    """Returns the function that initialises parameters from a key."""
    return lambda rng: Bert(config).init(rng, jnp.zeros((1, 1), jnp.int32))["params"]
