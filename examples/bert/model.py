"""BERT in Flax linen: post-LN encoder, and two heads: masked tokens (on the token table), and whether B follows A.

B: batch, T: positions, C: channels, P: masked tokens of a row. The model knows nothing of JaxFerry and of where its
parameters live. RoBERTa is a configuration of it.

Activations have the dtype of the parameters: bfloat16 parameters make a bfloat16 model. LayerNorm, softmax and the
losses compute in float32 all the same.
"""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from examples.common.layers import dropout


@dataclasses.dataclass(frozen=True)
class Config:
    """The shape of a BERT; the defaults are those of BERT-base, uncased (Devlin et al. 2019).

    Attributes:
      max_length: positions of a row.
      num_types: segments that a row may consist of, each with an embedding.
      first_position: the row of the position table that a row's first token takes.
      predicts_next: whether there is the second head, with its pooler.
      pad: the token that fills rows up and that no other attends to.
      epsilon: of all LayerNorms.
      dropout: acts on the embeddings and on what attention and feed-forward add to the residual stream.
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


SIZES = {
    "tiny": Config(num_layers=4, num_heads=4, channels=128, max_length=256, vocab_size=2048),
    "base": Config(),
    "large": Config(num_layers=24, num_heads=16, channels=1024),
}

normal = nn.initializers.normal(0.02)
Dense = functools.partial(nn.Dense, kernel_init=normal)


class Block(nn.Module):
    """One encoder block: x [B, T, C] and the dropout key, or None, go in and come out.

    `is_token`, bool [B, T], says which positions are no padding.
    """

    config: Config

    @nn.compact
    def __call__(self, x, is_token, key=None):
        cfg = self.config
        B, T, C = x.shape
        q, k, v = (Dense(C, name=name)(x).reshape(B, T, cfg.num_heads, -1) for name in ("query", "key", "value"))
        y = jax.nn.dot_product_attention(q, k, v, mask=is_token[:, None, None]).reshape(B, T, C)
        y, key = dropout(Dense(C, name="proj")(y), cfg.dropout, key)
        x = nn.LayerNorm(cfg.epsilon, name="ln_1")(x + y)

        y = nn.gelu(Dense(4 * C, name="up")(x), approximate=False)
        y, key = dropout(Dense(C, name="down")(y), cfg.dropout, key)
        return nn.LayerNorm(cfg.epsilon, name="ln_2")(x + y), key


class Bert(nn.Module):
    """Tokens and types [B, T] to logits of the tokens at `positions` [B, P]: [B, P, vocab_size].

    With them come, if the model predicts the next sentence, the logits [B, 2] that B does not, or does, follow A.
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
        # Picked only here, as a selection right behind the last block would become a part of it: another program.
        x = jnp.take_along_axis(x, positions[..., None], axis=1)
        bias = self.param("bias", nn.initializers.zeros, (cfg.vocab_size,))
        return table.attend(x) + bias, follows


def make_loss(config):
    """The function to minimise: the sum of both heads' mean cross entropies, in nats, as a float32 scalar.

    Beside it comes a dictionary of what is told: `masked_accuracy` and, with the second head, `masked_loss`,
    `next_loss`, `next_accuracy`.

    Its batch holds `tokens` and `types`, int32 [B, T]; `positions`, `labels`, int32 [B, P], and `weights`, float32
    [B, P], of the masked tokens, weight 0 where there are fewer than P; `follows`, int32 [B], for the second head; and
    may hold `key`, a key of `jax.random`, for dropout.
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
    """The weighted mean of -log p(label), and the share of labels that are the likeliest."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels)
    hits = logits.argmax(-1) == labels
    return (losses * weights).sum() / weights.sum(), (hits * weights).sum() / weights.sum()


def make_init(config):
    """The function that makes fresh float32 parameters from a key."""
    model = Bert(config)

    def init_fn(rng):
        one = jnp.zeros((1, 1), jnp.int32)
        return model.init(rng, one, one, one)["params"]

    return init_fn
