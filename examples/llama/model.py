"""Llama and Qwen2 in Flax NNX: RMSNorm, rotary positions, grouped-query attention, SwiGLU, optional LoRA adapters.

B: batch, T: positions, C: channels, H: heads, K: key and value heads, D: channels per head, S: cache length. The model
does not depend on JaxFerry or on where its parameters live. Every block makes its own rotations and mask, so that all
blocks are the same program.

Activations have the parameters' dtype. RMSNorm, softmax, rotations and the loss always compute in float32.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from examples.common.layers import attention

INIT = nnx.initializers.normal(0.02)


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's scaled rotations: slow ones turn `factor` times slower, fast ones are unchanged, others in between.

    Slow ones turn fewer than `low` times within the original training `length`, fast ones more than `high` times.
    """

    factor: float
    low: float
    high: float
    length: int


@dataclasses.dataclass(frozen=True)
class Config:
    """The shape of a Llama.

    `has_bias` is whether queries, keys and values have biases, as in Qwen2. `lora_rank` is the rank of all linear
    layers' adapters; 0 for no adapters. `attention` is the implementation without caches, "xla" or "cudnn"; None for
    the device's own.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    channels: int
    hidden: int
    max_length: int
    vocab_size: int
    rope_base: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    is_tied: bool = False
    has_bias: bool = False
    epsilon: float = 1e-5
    lora_rank: int = 0
    lora_alpha: float = 16.0
    attention: str | None = None


SIZES = {
    "tiny": Config(4, 4, 2, 128, 352, max_length=256, vocab_size=1024),
    "3.2-1b": Config(
        16,
        32,
        8,
        2048,
        8192,
        max_length=131_072,
        vocab_size=128_256,
        rope_base=500_000.0,
        rope_scaling=RopeScaling(factor=32.0, low=1.0, high=4.0, length=8192),
        is_tied=True,
    ),
    "3.2-3b": Config(
        28,
        24,
        8,
        3072,
        8192,
        max_length=131_072,
        vocab_size=128_256,
        rope_base=500_000.0,
        rope_scaling=RopeScaling(factor=32.0, low=1.0, high=4.0, length=8192),
        is_tied=True,
    ),
    "2-7b": Config(32, 32, 32, 4096, 11_008, max_length=4096, vocab_size=32_000),
    "2-13b": Config(40, 40, 40, 5120, 13_824, max_length=4096, vocab_size=32_000),
    "3-8b": Config(32, 32, 8, 4096, 14_336, max_length=8192, vocab_size=128_256, rope_base=500_000.0),
    "qwen2.5-0.5b": Config(24, 14, 2, 896, 4864, 32_768, 151_936, 1e6, is_tied=True, has_bias=True, epsilon=1e-6),
    "qwen2.5-1.5b": Config(28, 12, 2, 1536, 8960, 32_768, 151_936, 1e6, is_tied=True, has_bias=True, epsilon=1e-6),
}


class Linear(nnx.Module):
    """Maps x [..., inner] to [..., outer]; with a rank, adds the product with two thin matrices."""

    def __init__(self, inner, outer, config, rngs, has_bias=False):
        self.kernel = nnx.Param(INIT(rngs.params(), (inner, outer)))
        self.bias = nnx.Param(jnp.zeros(outer)) if has_bias else None
        self.rank, self.scale = config.lora_rank, config.lora_alpha / max(1, config.lora_rank)
        if self.rank:
            # The second matrix starts as zeros, so that the adapter initially adds nothing.
            self.lora_a = nnx.LoRAParam(nnx.initializers.he_uniform()(rngs.params(), (inner, self.rank)))
            self.lora_b = nnx.LoRAParam(jnp.zeros((self.rank, outer)))

    def __call__(self, x):
        y = x @ self.kernel[...]
        y = y if self.bias is None else y + self.bias[...]
        return y + (x @ self.lora_a[...]) @ self.lora_b[...] * self.scale if self.rank else y


class Attention(nnx.Module):
    """Maps x [B, T, C] to [B, T, C]; returns the cache of keys and values [2, B, S, K, D], if any, with those of x."""

    def __init__(self, config, rngs):
        self.config, self.width = config, config.channels // config.num_heads
        kv = config.num_kv_heads * self.width
        self.q = Linear(config.channels, config.channels, config, rngs, config.has_bias)
        self.k = Linear(config.channels, kv, config, rngs, config.has_bias)
        self.v = Linear(config.channels, kv, config, rngs, config.has_bias)
        self.o = Linear(config.channels, config.channels, config, rngs)

    def __call__(self, x, cache, position):
        B, T, C = x.shape
        positions = position + jnp.arange(T)
        q, k, v = (z.reshape(B, T, -1, self.width) for z in (self.q(x), self.k(x), self.v(x)))
        q, k = (rotate(z, positions, self.config) for z in (q, k))
        if cache is None:
            y = attention(q, k, v, is_causal=True, implementation=self.config.attention)
        else:
            cache = jax.lax.dynamic_update_slice(cache, jnp.stack([k, v]).astype(cache.dtype), (0, 0, position, 0, 0))
            k, v = cache.astype(q.dtype)
            seen = jnp.arange(cache.shape[2]) <= positions[:, None]
            y = jax.nn.dot_product_attention(q, k, v, mask=seen[None, None])
        return self.o(y.reshape(B, T, C)), cache


class MLP(nnx.Module):
    def __init__(self, config, rngs):
        self.gate = Linear(config.channels, config.hidden, config, rngs)
        self.up = Linear(config.channels, config.hidden, config, rngs)
        self.down = Linear(config.hidden, config.channels, config, rngs)

    def __call__(self, x):
        return self.down(nnx.silu(self.gate(x)) * self.up(x))


class Block(nnx.Module):
    def __init__(self, config, rngs):
        self.attn_norm, self.attn = make_norm(config, rngs), Attention(config, rngs)
        self.mlp_norm, self.mlp = make_norm(config, rngs), MLP(config, rngs)

    def __call__(self, x, cache, position):
        y, cache = self.attn(self.attn_norm(x), cache, position)
        x = x + y
        return x + self.mlp(self.mlp_norm(x)), cache


class Llama(nnx.Module):
    """Maps tokens [B, T] to logits [B, T, vocab_size], in the parameters' dtype.

    With caches, one per block, the tokens follow `position` cached ones. Only the last position's logits
    [B, 1, vocab_size] are computed, and the caches are returned with the tokens' keys and values.
    """

    def __init__(self, config, rngs):
        self.embed = nnx.Embed(
            config.vocab_size, config.channels, embedding_init=INIT, promote_dtype=keep_dtype, rngs=rngs
        )
        self.layers = nnx.List([Block(config, rngs) for _ in range(config.num_layers)])
        self.norm = make_norm(config, rngs)
        # Neither the head nor the table has adapters.
        plain = dataclasses.replace(config, lora_rank=0)
        self.head = None if config.is_tied else Linear(config.channels, config.vocab_size, plain, rngs)

    def __call__(self, tokens, caches=None, position=0):
        x, grown = self.embed(tokens), []
        for layer, cache in zip(self.layers, caches or [None] * len(self.layers), strict=True):
            x, cache = layer(x, cache, position)
            grown.append(cache)
        x = self.norm(x if caches is None else x[:, -1:])
        logits = self.embed.attend(x) if self.head is None else self.head(x)
        return logits if caches is None else (logits, grown)


def keep_dtype(arrays, **kwargs):
    """Leaves arrays as they are: `nnx.Embed` would cast the table to the dtype that it was made with, float32."""
    return arrays


def make_norm(config, rngs):
    return nnx.RMSNorm(config.channels, epsilon=config.epsilon, rngs=rngs)


def rotate(x, positions, config):
    """Rotates pairs of channels of x [B, T, heads, D] by angles proportional to the position.

    Channel i of the first half is paired with channel i of the second half, as in Hugging Face's checkpoints.
    """
    half = x.shape[-1] // 2
    frequencies = config.rope_base ** -(jnp.arange(half, dtype=jnp.float32) / half)
    if config.rope_scaling is not None:
        frequencies = stretched(frequencies, config.rope_scaling)
    angles = positions[:, None].astype(jnp.float32) * frequencies
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    a, b = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def stretched(frequencies, scaling):
    turns = scaling.length * frequencies / (2 * jnp.pi)
    kept = jnp.clip((turns - scaling.low) / (scaling.high - scaling.low), 0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)


@functools.cache
def make_graph(config):
    """Returns the model's structure without its parameters, for `nnx.merge`."""
    return nnx.split(nnx.eval_shape(lambda: Llama(config, nnx.Rngs(0))), nnx.Param)[0]


def make_loss(config):
    """Returns the loss function: mean cross entropy of each next token, in nats, as a float32 scalar.

    Its batch holds `tokens`, int32 [B, T + 1].
    """
    graph = make_graph(config)

    def loss_fn(params, batch):
        tokens = batch["tokens"]
        logits = nnx.merge(graph, params)(tokens[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), tokens[:, 1:])
        return losses.mean()

    return loss_fn


def make_init(config):
    """Returns the function that initialises float32 parameters from a key."""

    def init_fn(rng):
        return nnx.split(Llama(config, nnx.Rngs(rng)), nnx.Param)[1]

    return init_fn


def make_caches(config, batch_size, length, dtype):
    """Returns empty caches for `batch_size` rows and `length` positions."""
    width = config.channels // config.num_heads
    shape = (2, batch_size, length, config.num_kv_heads, width)
    return [jnp.zeros(shape, dtype) for _ in range(config.num_layers)]
