"""Fine-tuning by low-rank adapters: the base is read, and not trained."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from models import BlockNet, Task, initialise_nnx, language_model, split_nnx


class LoraDense(nn.Module):
    """A frozen product and a trained one of low rank. Source: LoRA (Hu and others, 2021)."""

    features: int
    rank: int = 2

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        base = self.param("base", nn.initializers.lecun_normal(), (x.shape[-1], self.features))
        down = self.param("lora_a", nn.initializers.lecun_normal(), (x.shape[-1], self.rank))
        up = self.param("lora_b", nn.initializers.zeros, (self.rank, self.features))
        return x @ jax.lax.stop_gradient(base) + (x @ down) @ up


class LoraBlock(nn.Module):
    """A residual MLP of adapted products."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        h = nn.gelu(LoraDense(64, name="up")(nn.LayerNorm(name="norm")(x)))
        return x + LoraDense(x.shape[-1], name="down")(h)


def linen_lora() -> Task:
    """Adapters beside frozen weights in one tree, by `stop_gradient`."""
    return language_model(BlockNet(LoraBlock, head=LoraDense))


class NnxLoraNet(nnx.Module):
    """Linear layers under `nnx.LoRA`."""

    def __init__(self, width: int, depth: int, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.LoRALinear(width, width, lora_rank=2, rngs=rngs) for _ in range(depth)])
        self.head = nnx.LoRALinear(width, 4, lora_rank=2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = x + jnp.tanh(layer(x))
        return self.head(x)


def nnx_lora() -> Task:
    """`nnx.LoRALinear`: only its `LoRAParam`s are parameters, the base is an argument."""
    graph, params, base = split_nnx(initialise_nnx(lambda: NnxLoraNet(16, 3, nnx.Rngs(0))), nnx.LoRAParam, ...)

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        outputs = nnx.merge(graph, params, batch["base"])(batch["x"])
        return ((outputs - batch["x"][:, :4]) ** 2).mean()

    return Task(loss_fn, params, {"x": jax.random.normal(jax.random.key(1), (8, 16)), "base": base})
