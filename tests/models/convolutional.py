"""Convolutional nets with batch statistics: ResNets in linen and NNX, and a U-Net with its skip connections."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx

from models import Task, initialise, stateful_nnx_task


class ResidualBlock(nn.Module):
    """Two convolutions with BatchNorm, and a projection where the shape changes."""

    features: int
    stride: int = 1

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        y = nn.Conv(self.features, (3, 3), (self.stride, self.stride), use_bias=False)(x)
        y = nn.relu(nn.BatchNorm(not train, momentum=0.9)(y))
        y = nn.BatchNorm(not train, momentum=0.9)(nn.Conv(self.features, (3, 3), use_bias=False)(y))
        if y.shape != x.shape:
            x = nn.Conv(self.features, (1, 1), (self.stride, self.stride), use_bias=False, name="projection")(x)
        return nn.relu(x + y)


class ResNet(nn.Module):
    """A small ResNet of two stages."""

    @nn.compact
    def __call__(self, images: jax.Array, train: bool = True) -> jax.Array:
        x = nn.Conv(8, (3, 3), use_bias=False, name="stem")(images)
        x = nn.relu(nn.BatchNorm(not train, momentum=0.9, name="stem_norm")(x))
        for features, stride in ((8, 1), (8, 1), (16, 2), (16, 1)):
            x = ResidualBlock(features, stride)(x, train)
        return nn.Dense(10, name="head")(x.mean((1, 2)))


def with_statistics(model: nn.Module, batch: dict[str, Any], inputs: str, loss: Any, **kwargs: Any) -> Task:
    """A linen model whose other collections are handed to the loss function and come back as aux."""
    variables: Any = initialise(model)(jax.random.key(0), batch[inputs], **kwargs)
    params = variables.pop("params")

    def loss_fn(params: Any, batch: Any) -> tuple[jax.Array, Any]:
        state = batch["state"]
        outputs, changed = model.apply({"params": params, **state}, batch[inputs], mutable=list(state), **kwargs)
        return loss(outputs, batch), changed

    return Task(loss_fn, params, {**batch, "state": variables}, lambda batch, aux: {**batch, "state": aux})


def _labelled_images(size: int) -> dict[str, jax.Array]:
    return {"images": jax.random.normal(jax.random.key(1), (4, size, size, 3)), "labels": jnp.arange(4) % 10}


def _classification(logits: jax.Array, batch: Any) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()


def linen_resnet() -> Task:
    """The linen ResNet; batch statistics come back as aux."""
    return with_statistics(ResNet(), _labelled_images(8), "images", _classification)


class NnxResidualBlock(nnx.Module):
    """Two convolutions with BatchNorm."""

    def __init__(self, features: int, rngs: nnx.Rngs) -> None:
        self.conv_1 = nnx.Conv(features, features, (3, 3), use_bias=False, rngs=rngs)
        self.norm_1 = nnx.BatchNorm(features, momentum=0.9, rngs=rngs)
        self.conv_2 = nnx.Conv(features, features, (3, 3), use_bias=False, rngs=rngs)
        self.norm_2 = nnx.BatchNorm(features, momentum=0.9, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = nnx.relu(self.norm_1(self.conv_1(x)))
        return nnx.relu(x + self.norm_2(self.conv_2(y)))


class NnxResNet(nnx.Module):
    """A stem, residual blocks in a list, and a head."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.stem = nnx.Conv(3, 8, (3, 3), rngs=rngs)
        self.blocks = nnx.List([NnxResidualBlock(8, rngs) for _ in range(3)])
        self.head = nnx.Linear(8, 10, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((1, 2)))


def nnx_resnet() -> Task:
    """The NNX ResNet; the statistics of `nnx.BatchNorm` come back as aux."""

    def loss_of(model: Any, batch: Any) -> jax.Array:
        return _classification(model(batch["images"]), batch)

    return stateful_nnx_task(lambda: NnxResNet(nnx.Rngs(0)), loss_of, _labelled_images(8))


class UNet(nn.Module):
    """A U-Net; its skip connections are values alive across many segments."""

    widths: tuple[int, ...] = (8, 16, 32)

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        x, skips = nn.Conv(self.widths[0], (3, 3), name="stem")(images), []
        for i, width in enumerate(self.widths):
            x = nn.silu(nn.GroupNorm(4, name=f"down_norm_{i}")(nn.Conv(width, (3, 3), name=f"down_{i}")(x)))
            skips.append(x)
            x = nn.avg_pool(x, (2, 2), (2, 2))
        x = nn.silu(nn.Conv(self.widths[-1], (3, 3), name="middle")(x))
        for i, width in reversed(list(enumerate(self.widths))):
            x = nn.ConvTranspose(width, (2, 2), (2, 2), name=f"up_{i}")(x)
            x = nn.silu(nn.Conv(width, (3, 3), name=f"merge_{i}")(jnp.concatenate([x, skips.pop()], -1)))
        return nn.Conv(images.shape[-1], (1, 1), name="head")(x)


def linen_unet() -> Task:
    """The U-Net as a denoiser."""
    model, images = UNet(), jax.random.normal(jax.random.key(1), (2, 16, 16, 3))

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        noise = jax.random.normal(batch["key"], batch["images"].shape)
        noisy: Any = model.apply({"params": params}, batch["images"] + noise)
        return ((noisy - noise) ** 2).mean()

    params = initialise(model)(jax.random.key(0), images)["params"]
    return Task(loss_fn, params, {"images": images, "key": jax.random.key(2)})
