"""A vision transformer in Flax linen: patches, a class token, pre-LN blocks, GELU, a head on the class token.

B: batch, N: patches, C: channels. The model does not depend on JaxFerry or on where its parameters live. Activations
have the parameters' dtype; LayerNorm, softmax and the loss always compute in float32.
"""

import dataclasses

import flax.linen as nn
import jax.numpy as jnp
import optax

from examples.common.layers import attention


@dataclasses.dataclass(frozen=True)
class Config:
    """The shape of a ViT for square images of `image_size`, cut into squares of `patch` pixels.

    `attention` is the implementation, "xla" or "cudnn"; None for the device's own.
    """

    num_layers: int
    num_heads: int
    channels: int
    patch: int = 16
    image_size: int = 224
    num_colours: int = 3
    num_classes: int = 1000
    epsilon: float = 1e-6
    attention: str | None = None


SIZES = {
    "tiny": Config(4, 4, 64, patch=2, image_size=8, num_colours=1, num_classes=10),
    "base": Config(num_layers=12, num_heads=12, channels=768),
    "large": Config(num_layers=24, num_heads=16, channels=1024),
}


class Block(nn.Module):
    """One residual block: maps x [B, N, C] to the same shape."""

    config: Config

    @nn.compact
    def __call__(self, x):
        cfg = self.config
        B, N, C = x.shape
        init = nn.initializers.xavier_uniform()

        y = nn.LayerNorm(epsilon=cfg.epsilon, name="ln_1")(x)
        q, k, v = jnp.split(nn.Dense(3 * C, kernel_init=init, name="qkv")(y), 3, axis=-1)
        q, k, v = (z.reshape(B, N, cfg.num_heads, C // cfg.num_heads) for z in (q, k, v))
        y = attention(q, k, v, implementation=cfg.attention).reshape(B, N, C)
        x = x + nn.Dense(C, kernel_init=init, name="proj")(y)

        y = nn.LayerNorm(epsilon=cfg.epsilon, name="ln_2")(x)
        y = nn.gelu(nn.Dense(4 * C, kernel_init=init, name="up")(y), approximate=False)
        return x + nn.Dense(C, kernel_init=init, name="down")(y)


class ViT(nn.Module):
    """Maps images [B, image_size, image_size, num_colours] to logits [B, num_classes]."""

    config: Config

    @nn.compact
    def __call__(self, images):
        cfg = self.config
        patch = (cfg.patch, cfg.patch)
        x = nn.Conv(cfg.channels, patch, strides=patch, padding="VALID", name="patches")(images)
        x = x.reshape(len(x), -1, cfg.channels)
        token = self.param("class_token", nn.initializers.zeros, (1, 1, cfg.channels))
        positions = self.param("positions", nn.initializers.normal(0.02), (1, x.shape[1] + 1, cfg.channels))
        x = jnp.concatenate([jnp.broadcast_to(token, (len(x), 1, cfg.channels)), x], axis=1) + positions
        for i in range(cfg.num_layers):
            x = Block(cfg, name=f"block_{i}")(x)
        x = nn.LayerNorm(epsilon=cfg.epsilon, name="ln")(x)
        return nn.Dense(cfg.num_classes, kernel_init=nn.initializers.zeros, name="head")(x[:, 0])


def make_predict(config):
    """Returns the function `(params, images) -> logits`."""
    model = ViT(config)

    def predict(params, images):
        return model.apply({"params": params}, images.astype(params["positions"].dtype))

    return predict


def make_loss(config):
    """Returns the loss function: mean cross entropy, in nats, as a float32 scalar, with the accuracy.

    Its batch holds `images`, float32 [B, image_size, image_size, num_colours], and `labels`, int32 [B].
    """
    predict = make_predict(config)

    def loss_fn(params, batch):
        logits = predict(params, batch["images"]).astype(jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
        return losses.mean(), {"accuracy": (logits.argmax(-1) == batch["labels"]).mean()}

    return loss_fn


def make_init(config):
    """Returns the function that initialises float32 parameters from a key."""
    model = ViT(config)

    def init_fn(rng):
        images = jnp.zeros((1, config.image_size, config.image_size, config.num_colours))
        return model.init(rng, images)["params"]

    return init_fn
