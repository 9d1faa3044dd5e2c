"""BERT in Flax linen: a post-LN encoder with two heads, for masked tokens (tied to the token table) and whether B
follows A.

B: batch, T: positions, C: channels, P: masked tokens per row. The model does not depend on JaxFerry or on where its
parameters live. RoBERTa is a configuration of it.

Activations have the parameters' dtype: bfloat16 parameters make a bfloat16 model. LayerNorm, softmax and the losses
always compute in float32.
"""

import dataclasses
import functools

import flax.linen as nn
import jax.numpy as jnp
import optax

from examples.common.layers import attention, dropout


@dataclasses.dataclass(frozen=True)
class Config:
    """The shape of a BERT; the defaults are those of BERT-base, uncased (Devlin et al. 2019).

    Attributes:
      max_length: maximum length of a row.
      num_types: number of segment types, each with an embedding.
      first_position: the position-table row of a row's first token.
      predicts_next: whether the model has the second head and its pooler.
      pad: the padding token, at the end of a row, which no token attends to.
      epsilon: epsilon of all LayerNorms.
      dropout: acts on the embeddings and on the outputs of attention and feed-forward.
      attention: the implementation, "xla" or "cudnn"; None for the device's own.
    """

    num_layers: int = 12
    num_heads: int = 12
    channels: int = 768
    max_length: int = 512
    vocab_size: int = 30522
    num_types: int = 2
    first_position: int = 0
    predicts_next: bool = True
    pad: int = 0
    epsilon: float = 1e-12
    dropout: float = 0.0
    attention: str | None = None


SIZES = {
    "tiny": Config(num_layers=4, num_heads=4, channels=128, max_length=256, vocab_size=2048),
    "base": Config(),
    "large": Config(num_layers=24, num_heads=16, channels=1024),
}

normal = nn.initializers.normal(0.02)
Dense = functools.partial(nn.Dense, kernel_init=normal)


class Block(nn.Module):
    """One encoder block: maps x [B, T, C] and the dropout key, or None, to the same.

    `is_token`, bool [B, T], is False at padding, which ends a row.
    """

    config: Config

    @nn.compact
    def __call__(self, x, is_token, key=None):
        cfg = self.config
        B, T, C = x.shape
        q, k, v = (Dense(C, name=name)(x).reshape(B, T, cfg.num_heads, -1) for name in ("query", "key", "value"))
        y = attention(q, k, v, is_token=is_token, implementation=cfg.attention).reshape(B, T, C)
        y, key = dropout(Dense(C, name="proj")(y), cfg.dropout, key)
        x = nn.LayerNorm(cfg.epsilon, name="ln_1")(x + y)

        y = nn.gelu(Dense(4 * C, name="up")(x), approximate=False)
        y, key = dropout(Dense(C, name="down")(y), cfg.dropout, key)
        return nn.LayerNorm(cfg.epsilon, name="ln_2")(x + y), key


class Bert(nn.Module):
    """Maps tokens and types [B, T] to logits of the tokens at `positions` [B, P]: [B, P, vocab_size].

    A model that predicts the next sentence also returns the logits [B, 2] that B does not, or does, follow A.
    """

    config: Config

    @nn.compact
    def __call__(self, tokens, types, positions, key=None):
        cfg = self.config
        T = tokens.shape[1]
        table = nn.Embed(cfg.vocab_size, cfg.channels, embedding_init=normal, name="tokens")
        places = nn.Embed(cfg.first_position + cfg.max_length, cfg.channels, embedding_init=normal, name="positions")
        x = table(tokens) + places(cfg.first_position + jnp.arange(T))
        x = x + nn.Embed(cfg.num_types, cfg.channels, embedding_init=normal, name="types")(types)
        x, key = dropout(nn.LayerNorm(cfg.epsilon, name="ln")(x), cfg.dropout, key)
        for i in range(cfg.num_layers):
            x, key = Block(cfg, name=f"block_{i}")(x, tokens != cfg.pad, key)

        follows = None
        if cfg.predicts_next:
            follows = Dense(2, name="next")(nn.tanh(Dense(cfg.channels, name="pooler")(x[:, 0])))
        x = nn.gelu(Dense(cfg.channels, name="transform")(x), approximate=False)
        x = nn.LayerNorm(cfg.epsilon, name="transform_ln")(x)
        # Selected only here: a selection right after the last block would become part of it and change its program.
        x = jnp.take_along_axis(x, positions[..., None], axis=1)
        bias = self.param("bias", nn.initializers.zeros, (cfg.vocab_size,))
        return table.attend(x) + bias, follows


def make_loss(config):
    """Returns the loss function: the sum of both heads' mean cross entropies, in nats, as a float32 scalar.

    It also returns a dictionary to report: `masked_accuracy` and, with the second head, `masked_loss`, `next_loss`,
    `next_accuracy`.

    Its batch holds `tokens` and `types`, int32 [B, T]; `positions` and `labels`, int32 [B, P], and `weights`, float32
    [B, P], of the masked tokens, with weight 0 beyond the last; `follows`, int32 [B], for the second head; and
    optionally `key`, a `jax.random` key for dropout.
    """
    model = Bert(config)

    def loss_fn(params, batch):
        inputs = batch["tokens"], batch["types"], batch["positions"], batch.get("key")
        logits, follows = model.apply({"params": params}, *inputs)
        loss, accuracy = cross_entropy(logits, batch["labels"], batch["weights"])
        if not config.predicts_next:
            return loss, {"masked_accuracy": accuracy}
        next_loss, next_accuracy = cross_entropy(follows, batch["follows"], jnp.ones(follows.shape[0]))
        told = {"masked_loss": loss, "next_loss": next_loss}
        return loss + next_loss, told | {"masked_accuracy": accuracy, "next_accuracy": next_accuracy}

    return loss_fn


def cross_entropy(logits, labels, weights):
    """Returns the weighted mean of -log p(label) and the accuracy."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels)
    hits = logits.argmax(-1) == labels
    return (losses * weights).sum() / weights.sum(), (hits * weights).sum() / weights.sum()


def make_init(config):
    """Returns the function that initialises float32 parameters from a key."""
    model = Bert(config)

    def init_fn(rng):
        one = jnp.zeros((1, 1), jnp.int32)
        return model.init(rng, one, one, one)["params"]

    return init_fn
