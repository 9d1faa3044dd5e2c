"""A residual network in Flax linen with batch normalisation; the loss function also returns running averages.

B: batch. The model does not depend on JaxFerry or on where its parameters live. Training uses the batch's means and
variances and moves the running averages towards them. Running averages are not parameters: they enter the next step
with its batch. Activations have the parameters' dtype; statistics and the loss are always computed in float32.
"""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax


@dataclasses.dataclass(frozen=True)
class Config:
    """The shape of a ResNet: blocks per stage, channels of the first stage; `is_small` is for very small images."""

    stages: tuple[int, ...]
    width: int = 64
    is_bottleneck: bool = False
    is_small: bool = False
    image_size: int = 224
    num_colours: int = 3
    num_classes: int = 1000


SIZES = {
    "tiny": Config((1, 2, 1), width=16, is_small=True, image_size=8, num_colours=1, num_classes=10),
    "18": Config((2, 2, 2, 2)),
    "50": Config((3, 4, 6, 3), is_bottleneck=True),
}


class Block(nn.Module):
    """One residual block: two 3x3 convolutions, or one between two 1x1 (a bottleneck)."""

    width: int
    stride: int
    is_bottleneck: bool

    @nn.compact
    def __call__(self, x, train):
        conv = functools.partial(nn.Conv, use_bias=False, padding="SAME")
        norm = functools.partial(nn.BatchNorm, use_running_average=not train, momentum=0.9)
        strides = (self.stride, self.stride)
        if self.is_bottleneck:
            y = nn.relu(norm(name="bn_1")(conv(self.width, (1, 1), name="conv_1")(x)))
            y = nn.relu(norm(name="bn_2")(conv(self.width, (3, 3), strides, name="conv_2")(y)))
            y = norm(name="bn_3")(conv(4 * self.width, (1, 1), name="conv_3")(y))
        else:
            y = nn.relu(norm(name="bn_1")(conv(self.width, (3, 3), strides, name="conv_1")(x)))
            y = norm(name="bn_2")(conv(self.width, (3, 3), name="conv_2")(y))
        if x.shape != y.shape:
            x = norm(name="bn_skip")(conv(y.shape[-1], (1, 1), strides, name="conv_skip")(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    """Maps images [B, image_size, image_size, num_colours] to logits [B, num_classes]."""

    config: Config

    @nn.compact
    def __call__(self, images, train):
        cfg = self.config
        size, strides = ((3, 3), (1, 1)) if cfg.is_small else ((7, 7), (2, 2))
        x = nn.Conv(cfg.width, size, strides, padding="SAME", use_bias=False, name="conv_stem")(images)
        x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9, name="bn_stem")(x))
        if not cfg.is_small:
            x = nn.max_pool(x, (3, 3), (2, 2), padding="SAME")
        number = 0
        for stage, num_blocks in enumerate(cfg.stages):
            for i in range(num_blocks):
                stride = 2 if stage and i == 0 else 1
                x = Block(cfg.width << stage, stride, cfg.is_bottleneck, name=f"block_{number}")(x, train)
                number += 1
        return nn.Dense(cfg.num_classes, name="head")(x.mean(axis=(1, 2)))


def make_predict(config):
    """Returns the function `(params, images, batch_stats) -> logits`, which normalises with the running averages."""
    model = ResNet(config)

    def predict(params, images, batch_stats):
        images = images.astype(params["head"]["kernel"].dtype)
        return model.apply({"params": params, "batch_stats": batch_stats}, images, train=False)

    return predict


def make_loss(config):
    """Returns the loss function: mean cross entropy, in nats, as a float32 scalar, with auxiliary outputs.

    Its batch holds `images`, float32 [B, image_size, image_size, num_colours], `labels`, int32 [B], and `batch_stats`,
    the running averages. The auxiliary outputs are the new `batch_stats` and the `accuracy`.
    """
    model = ResNet(config)

    def loss_fn(params, batch):
        variables = {"params": params, "batch_stats": batch["batch_stats"]}
        images = batch["images"].astype(params["head"]["kernel"].dtype)
        logits, changed = model.apply(variables, images, train=True, mutable="batch_stats")
        losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), batch["labels"])
        accuracy = (logits.argmax(-1) == batch["labels"]).mean()
        return losses.mean(), {"accuracy": accuracy, "batch_stats": changed["batch_stats"]}

    return loss_fn


def make_init(config):
    """Returns the function that initialises float32 parameters from a key."""

    def init_fn(rng):
        return make_variables(config, rng)["params"]

    return init_fn


def make_batch_stats(config):
    """Returns the initial running averages: means 0, variances 1."""
    # Under jit, parameters that are not returned are not computed.
    return jax.jit(lambda: make_variables(config, jax.random.key(0))["batch_stats"])()


def make_variables(config, rng):
    images = jnp.zeros((1, config.image_size, config.image_size, config.num_colours))
    return ResNet(config).init(rng, images, train=False)
