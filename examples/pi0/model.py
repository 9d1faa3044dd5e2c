"""A model with pi0's structure and sizes, to plan and test without openpi: linen modules in an NNX model.

A vision encoder turns each image into tokens. These and a prompt are the prefix, which a language model reads. The
robot's state and noisy actions are the suffix, which an action expert reads: a smaller transformer with weights of its
own, whose tokens attend to the prefix. Each block runs both, so the scan over blocks carries a pair. The loss is that
of flow matching: the expert predicts the velocity from the actions to the noise.

B: batch, T: tokens, C: channels, H: heads, D: channels per head. Parameters are named as in openpi.
"""

import dataclasses
import functools

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
from flax import nnx

IMAGES = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")


@dataclasses.dataclass(frozen=True)
class Transformer:
    """The shape of a transformer; a language model and its action expert have as many layers and heads."""

    num_layers: int
    num_heads: int
    channels: int
    hidden: int
    head_channels: int = 0


@dataclasses.dataclass(frozen=True)
class Config:
    """The shape of a pi0; `dtype` is that of the activations, `shortest` the shortest period of the embedded time."""

    vision: Transformer
    language: Transformer
    expert: Transformer
    vocab_size: int = 257_152
    image_size: int = 224
    patch: int = 14
    prompt: int = 48
    horizon: int = 50
    action_size: int = 32
    dtype: str = "bfloat16"
    shortest: float = 4e-3


SIZES = {
    "tiny": Config(
        Transformer(3, 2, 16, 32),
        Transformer(4, 2, 32, 64, 16),
        Transformer(4, 2, 16, 32, 16),
        vocab_size=64,
        image_size=28,
        prompt=5,
        horizon=6,
        action_size=4,
        dtype="float32",
        shortest=0.4,  # in fp32, angles of thousands of radians would depend on how XLA rounds the time
    ),
    "base": Config(
        Transformer(27, 16, 1152, 4304), Transformer(18, 8, 2048, 16_384, 256), Transformer(18, 8, 1024, 4096, 256)
    ),
}


@flax.struct.dataclass
class Observation:
    """What the robot sees: float32 images [B, size, size, 3], whether each is one, its state, and int32 prompts."""

    images: dict
    image_masks: dict
    state: jax.Array
    tokenized_prompt: jax.Array
    tokenized_prompt_mask: jax.Array


class VisionBlock(nn.Module):
    config: Transformer
    dtype: str

    @nn.compact
    def __call__(self, x, _):
        y = nn.LayerNorm(dtype=self.dtype)(x)
        y = nn.MultiHeadDotProductAttention(self.config.num_heads, dtype=self.dtype)(y, y)
        x = x + y
        y = nn.Dense(self.config.hidden, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x))
        return x + nn.Dense(self.config.channels, dtype=self.dtype)(nn.gelu(y)), None


class Vision(nn.Module):
    """Maps images [B, size, size, 3] to tokens [B, T, channels of the language model]."""

    config: Config

    @nn.compact
    def __call__(self, image):
        own, size = self.config.vision, (self.config.patch,) * 2
        x = nn.Conv(own.channels, size, strides=size, padding="VALID", name="embedding")(image)
        x = x.reshape(len(x), -1, own.channels)
        x += self.param("pos_embedding", nn.initializers.normal(own.channels**-0.5), (1, *x.shape[1:]))
        blocks = scanned(VisionBlock, own.num_layers)(own, self.config.dtype, name="encoderblock")
        x, _ = blocks(x.astype(self.config.dtype), None)
        x = nn.LayerNorm(dtype=self.config.dtype, name="encoder_norm")(x)
        return nn.Dense(self.config.language.channels, dtype=self.config.dtype, name="head")(x)


class Norm(nn.Module):
    @nn.compact
    def __call__(self, x):
        scale = self.param("scale", nn.initializers.zeros, x.shape[-1:])
        wide = x.astype(jnp.float32)
        wide *= jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6)
        return (wide * (1 + scale)).astype(x.dtype)


class PairBlock(nn.Module):
    """A block of both transformers: maps a list of tokens [B, T, C] to the same."""

    configs: tuple[Transformer, ...]

    @nn.compact
    def __call__(self, xs, shared):
        positions, mask = shared
        own, queries, keys, values = self.configs, [], [], []
        for i, (x, config) in enumerate(zip(xs, own, strict=True)):
            y = Norm(name=named("pre_attention_norm", i))(x)
            width = config.num_heads, config.channels, config.head_channels
            queries.append(jnp.einsum("btc,hcd->bthd", y, self.matrix(named("q", i), width, x.dtype)))
            k, v = jnp.einsum("btc,zcd->zbtd", y, self.matrix(named("kv", i), (2, *width[1:]), x.dtype))
            keys.append(k)
            values.append(v)
        q, k, v = (jnp.concatenate(parts, 1) for parts in (queries, keys, values))
        q, k = rotated(q, positions) * own[0].head_channels ** -0.5, rotated(k[:, :, None], positions)[:, :, 0]
        scores = jnp.einsum("bthd,bsd->bhts", q, k, preferred_element_type=jnp.float32)
        weights = jax.nn.softmax(jnp.where(mask[:, None], scores, -1e30), -1).astype(q.dtype)
        mixed, begin, results = jnp.einsum("bhts,bsd->bthd", weights, v), 0, []
        for i, (x, config) in enumerate(zip(xs, own, strict=True)):
            width = config.num_heads, config.head_channels, config.channels
            part, begin = mixed[:, begin : begin + x.shape[1]], begin + x.shape[1]
            x = x + jnp.einsum("bthd,hdc->btc", part, self.matrix(named("attn_vec", i), width, x.dtype))
            y = Norm(name=named("pre_ffw_norm", i))(x)
            gate, up = jnp.einsum(
                "btc,zcf->zbtf", y, self.matrix(named("gating", i), (2, config.channels, config.hidden), x.dtype)
            )
            down = self.matrix(named("linear", i), (config.hidden, config.channels), x.dtype)
            results.append(x + (nn.gelu(gate) * up) @ down)
        return results, None

    def matrix(self, name, shape, dtype):
        return self.param(name, nn.initializers.normal(shape[-2] ** -0.5), shape).astype(dtype)


class Language(nn.Module):
    """The language model and its action expert."""

    config: Config

    def setup(self):
        own = self.config.language, self.config.expert
        table = nn.initializers.normal(own[0].channels ** -0.5)
        self.table = self.param("input_embedding", table, (self.config.vocab_size, own[0].channels))
        self.layers = scanned(PairBlock, own[0].num_layers)(own)
        self.final_norms = [Norm(name=named("final_norm", i)) for i in range(len(own))]

    def embed(self, tokens):
        return self.table[tokens].astype(self.config.dtype) * self.config.language.channels**0.5

    def __call__(self, tokens, xs, positions, mask):
        xs = [self.embed(tokens) if x is None else x for x in xs]
        xs, _ = self.layers([x.astype(self.config.dtype) for x in xs], (positions, mask))
        return [norm(x) for norm, x in zip(self.final_norms, xs, strict=True)]


class Pi0(nnx.Module):
    """A vision-language-action model; `compute_loss` as in openpi."""

    def __init__(self, config, rngs):
        self.config, width = config, config.expert.channels
        observation, _ = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), make_batch(config, 1))
        image, prompt = observation.images[IMAGES[0]], observation.tokenized_prompt
        pair = [None, jnp.zeros((1, 1, width))]
        total = config.prompt + 1
        positions, mask = jnp.zeros((1, total), jnp.int32), jnp.ones((1, total, total), bool)
        self.llm, self.img = nnx.bridge.ToNNX(Language(config)), nnx.bridge.ToNNX(Vision(config))
        self.llm.lazy_init(prompt, pair, positions, mask, rngs=rngs)
        self.img.lazy_init(image, rngs=rngs)
        self.state_proj = nnx.Linear(config.action_size, width, rngs=rngs)
        self.action_in_proj = nnx.Linear(config.action_size, width, rngs=rngs)
        self.action_time_mlp_in = nnx.Linear(2 * width, width, rngs=rngs)
        self.action_time_mlp_out = nnx.Linear(width, width, rngs=rngs)
        self.action_out_proj = nnx.Linear(width, config.action_size, rngs=rngs)

    def compute_loss(self, rng, observation, actions, *, train=False):
        """Returns the error of the velocities, float32 [B, horizon]."""
        of_noise, of_time = jax.random.split(rng)
        noise = jax.random.normal(of_noise, actions.shape)
        time = jax.random.beta(of_time, 1.5, 1, actions.shape[:1]) * 0.999 + 0.001
        at = time[:, None, None]
        suffix = self.suffix(observation.state, at * noise + (1 - at) * actions, time)
        seen = [self.img(observation.images[name]) for name in IMAGES]
        prompt = self.llm(observation.tokenized_prompt, method="embed")
        prefix = jnp.concatenate([*seen, prompt], 1)
        is_seen = [
            jnp.repeat(observation.image_masks[n][:, None], x.shape[1], 1) for n, x in zip(IMAGES, seen, strict=True)
        ]
        is_valid = jnp.concatenate([*is_seen, observation.tokenized_prompt_mask, jnp.ones(suffix.shape[:2], bool)], 1)
        # Tokens see their own part and earlier ones: the prefix, the state, the actions.
        part = jnp.repeat(
            jnp.arange(3), jnp.array([prefix.shape[1], 1, self.config.horizon]), total_repeat_length=is_valid.shape[1]
        )
        mask = (part[None, :] <= part[:, None]) & is_valid[:, None, :] & is_valid[:, :, None]
        positions = jnp.cumsum(is_valid, 1) - 1
        _, out = self.llm(observation.tokenized_prompt, [prefix, suffix], positions, mask)
        velocities = self.action_out_proj(out[:, -self.config.horizon :])
        return jnp.mean((velocities - (noise - actions)) ** 2, -1)

    def suffix(self, state, actions, time):
        """The tokens of the state and of noisy actions, [B, 1 + horizon, C]."""
        x = self.action_in_proj(actions)
        half = x.shape[-1] // 2
        periods = jnp.geomspace(self.config.shortest, 4.0, half)
        angles = time[:, None] / periods * 2 * jnp.pi
        clock = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)[:, None].repeat(x.shape[1], 1)
        x = self.action_time_mlp_out(
            nnx.swish(self.action_time_mlp_in(jnp.concatenate([x, clock.astype(x.dtype)], -1)))
        )
        return jnp.concatenate([self.state_proj(state)[:, None], x], 1)


def scanned(block, length):
    """The blocks of a transformer: each runs again in its backward, and all are one scan."""
    again = nn.remat(block, prevent_cse=False, policy=jax.checkpoint_policies.nothing_saveable)
    axes = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
    return nn.scan(again, **axes, in_axes=nn.broadcast, length=length)


def named(name, expert):
    return f"{name}_{expert}" if expert else name


def rotated(x, positions):
    """Rotates pairs of channels of x [B, T, H, D] by angles proportional to the positions [B, T]."""
    half = x.shape[-1] // 2
    angles = positions[:, :, None, None] / 10_000 ** (jnp.arange(half) / half)
    a, b = jnp.split(x.astype(jnp.float32), 2, -1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def make_batch(config, batch_size, key=None):
    """Returns (observation, actions) at random; without a key, their shapes."""

    def made(key):
        keys = jax.random.split(key, len(IMAGES) + 3)
        shape = batch_size, config.image_size, config.image_size, 3
        prompt = jax.random.randint(keys[-3], (batch_size, config.prompt), 0, config.vocab_size)
        observation = Observation(
            {name: jax.random.uniform(k, shape, minval=-1) for name, k in zip(IMAGES, keys, strict=False)},
            {name: jnp.full(batch_size, name != IMAGES[-1]) for name in IMAGES},
            jax.random.normal(keys[-2], (batch_size, config.action_size)),
            prompt,
            jnp.arange(config.prompt) < 1 + jnp.arange(batch_size)[:, None] % config.prompt,
        )
        return observation, jax.random.normal(keys[-1], (batch_size, config.horizon, config.action_size))

    return made(key) if key is not None else jax.eval_shape(made, jax.random.key(0))


def make_create(config):
    """Returns the function that makes the model from a key, as openpi's configurations have it."""
    return functools.partial(_create, config)


def _create(config, key):
    return Pi0(config, nnx.Rngs(key))
