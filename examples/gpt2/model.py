"""GPT-2 in Flax linen: pre-LN blocks, GELU, learned positions, the head tied to the token table.

B: batch, T: positions, C: channels. The model does not depend on JaxFerry or on where its parameters live. Two choices
help partitioning: every block makes its own causal mask, and dropout keys travel with the residual stream. So blocks
hold no constants of their own and are all the same program.

Activations have the parameters' dtype: bfloat16 parameters make a bfloat16 model. LayerNorm, softmax and the loss
always compute in float32.
"""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from examples.common.layers import attention, dropout


@dataclasses.dataclass(frozen=True)
class Config:
    """The shape of a GPT-2.

    `dropout` acts on the embeddings and on each block's additions to the residual stream. `attention` is the
    implementation, "xla" or "cudnn"; None for the device's own.
    """

    num_layers: int
    num_heads: int
    channels: int
    max_length: int = 1024
    vocab_size: int = 50257
    dropout: float = 0.0
    epsilon: float = 1e-5
    attention: str | None = None


SIZES = {
    "tiny": Config(num_layers=4, num_heads=4, channels=128, max_length=256, vocab_size=1024),
    "124m": Config(num_layers=12, num_heads=12, channels=768),
    "medium": Config(num_layers=24, num_heads=16, channels=1024),
    "xl": Config(num_layers=48, num_heads=25, channels=1600),
    "2.7b": Config(num_layers=32, num_heads=32, channels=2560),
    "6.7b": Config(num_layers=32, num_heads=32, channels=4096),
}


class Block(nn.Module):
    """One residual block: maps x [B, T, C] and the dropout key, or None, to the same."""

    config: Config

    @nn.compact
    def __call__(self, x, key=None):
        cfg = self.config
        B, T, C = x.shape
        into = nn.initializers.normal(0.02)
        onto_residual = nn.initializers.normal(0.02 * (2 * cfg.num_layers) ** -0.5)

        y = nn.LayerNorm(epsilon=cfg.epsilon, name="ln_1")(x)
        q, k, v = jnp.split(nn.Dense(3 * C, kernel_init=into, name="qkv")(y), 3, axis=-1)
        q, k, v = (z.reshape(B, T, cfg.num_heads, C // cfg.num_heads) for z in (q, k, v))
        y = attention(q, k, v, is_causal=True, implementation=cfg.attention).reshape(B, T, C)
        y, key = dropout(nn.Dense(C, kernel_init=onto_residual, name="proj")(y), cfg.dropout, key)
        x = x + y

        y = nn.LayerNorm(epsilon=cfg.epsilon, name="ln_2")(x)
        y = nn.gelu(nn.Dense(4 * C, kernel_init=into, name="up")(y))
        y, key = dropout(nn.Dense(C, kernel_init=onto_residual, name="down")(y), cfg.dropout, key)
        return x + y, key


class GPT2(nn.Module):
    """Maps tokens [B, T] to logits [B, T, vocab_size]; without a key there is no dropout."""

    config: Config

    @nn.compact
    def __call__(self, tokens, key=None):
        cfg = self.config
        T = tokens.shape[1]
        wte = nn.Embed(cfg.vocab_size, cfg.channels, embedding_init=nn.initializers.normal(0.02), name="wte")
        wpe = nn.Embed(cfg.max_length, cfg.channels, embedding_init=nn.initializers.normal(0.01), name="wpe")
        x, key = dropout(wte(tokens) + wpe(jnp.arange(T)), cfg.dropout, key)
        for i in range(cfg.num_layers):
            x, key = Block(cfg, name=f"h_{i}")(x, key)
        return wte.attend(nn.LayerNorm(epsilon=cfg.epsilon, name="ln_f")(x))


def make_loss(config):
    """Returns the loss function: mean cross entropy of each next token, in nats, as a float32 scalar.

    Its batch holds `tokens`, int32 [B, T + 1], and optionally `key`, a `jax.random` key for dropout.
    """
    model = GPT2(config)

    def loss_fn(params, batch):
        tokens = batch["tokens"]
        logits = model.apply({"params": params}, tokens[:, :-1], batch.get("key"))
        losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), tokens[:, 1:])
        return losses.mean()

    return loss_fn


def make_init(config):
    """Returns the function that initialises float32 parameters from a key."""
    model = GPT2(config)

    def init_fn(rng):
        return model.init(rng, jnp.zeros((1, 1), jnp.int32))["params"]

    return init_fn


def count_parameters(config):
    """Counts the parameters without computing them."""
    shapes = jax.eval_shape(make_init(config), jax.random.key(0))
    return sum(leaf.size for leaf in jax.tree.leaves(shapes))
