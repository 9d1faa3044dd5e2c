"""Mixtures of experts: all experts weighted, and the best k of each token by gather and scatter."""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from models import BlockNet, Task, first_columns, initialise, next_token_loss, nnx_task


class DenseExperts(nn.Module):
    """Every expert on every token, weighted by the router; each expert is a module of its own."""

    num_experts: int = 3

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        weights = nn.softmax(nn.Dense(self.num_experts, name="router")(x))
        outputs = [
            nn.Dense(x.shape[-1], name=f"expert_{i}_down")(nn.gelu(nn.Dense(32, name=f"expert_{i}_up")(x)))
            for i in range(self.num_experts)
        ]
        return (jnp.stack(outputs, -1) * weights[..., None, :]).sum(-1)


class RoutedExperts(nn.Module):
    """The best `top` experts of each token with a capacity each: tokens are gathered by expert and scattered back.

    Source: Switch Transformers (Fedus and others, 2021), whose load-balancing loss is sown too.
    """

    num_experts: int = 4
    top: int = 2
    capacity: int = 12

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        shape, width = x.shape, x.shape[-1]
        x = x.reshape(-1, width)
        up = self.param("up", nn.initializers.lecun_normal(batch_axis=0), (self.num_experts, width, 32))
        down = self.param("down", nn.initializers.lecun_normal(batch_axis=0), (self.num_experts, 32, width))
        probabilities = nn.softmax(nn.Dense(self.num_experts, name="router")(x))
        weights, experts = jax.lax.top_k(probabilities, self.top)
        chosen = jax.nn.one_hot(experts, self.num_experts)
        self.sow("losses", "balance", self.num_experts * (chosen.mean((0, 1)) * probabilities.mean(0)).sum())
        # The place of each choice in its expert's queue; what does not fit is dropped.
        flat = chosen.reshape(-1, self.num_experts)
        place = ((jnp.cumsum(flat, 0) - flat) * flat).sum(-1).astype(int)
        queue = jnp.where(place < self.capacity, experts.reshape(-1) * self.capacity + place, -1)
        tokens = jnp.repeat(jnp.arange(x.shape[0]), self.top)
        slots = jnp.zeros((self.num_experts * self.capacity, width), x.dtype)
        slots = slots.at[queue].add(jnp.where(queue[:, None] >= 0, x[tokens], 0))
        h = slots.reshape(self.num_experts, self.capacity, width)
        h = jnp.einsum("ecf,efw->ecw", nn.gelu(jnp.einsum("ecw,ewf->ecf", h, up)), down)
        back = jnp.where(queue[:, None] >= 0, h.reshape(-1, width)[queue], 0) * weights.reshape(-1, 1)
        return jnp.zeros_like(x).at[tokens].add(back).reshape(shape)


class ExpertBlock(nn.Module):
    """Token mixing and experts."""

    experts: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        mixed = nn.Dense(x.shape[1], name="mix")(nn.LayerNorm(name="norm_1")(x).swapaxes(1, 2)).swapaxes(1, 2)
        x = x + mixed
        return x + self.experts(name="experts")(nn.LayerNorm(name="norm_2")(x))


def _expert_net(experts: Any) -> Task:
    model = BlockNet(functools.partial(ExpertBlock, experts), depth=2, norm=nn.LayerNorm)
    batch = jax.random.randint(jax.random.key(1), (2, 9), 0, 64)

    def loss_fn(params: Any, batch: Any) -> tuple[jax.Array, Any]:
        logits, sown = model.apply({"params": params}, batch[:, :-1], mutable=["losses"])
        balance = sum(jax.tree.leaves(sown), start=jnp.zeros(()))
        loss = next_token_loss(logits, batch)
        return loss + 0.01 * balance, {"loss": loss, "balance": balance}

    return Task(loss_fn, initialise(model)(jax.random.key(0), batch[:, :-1])["params"], batch)


def linen_dense_experts() -> Task:
    """All experts on all tokens."""
    return _expert_net(DenseExperts)


def linen_routed_experts() -> Task:
    """Two of four experts a token, with the balance of their load as a second loss."""
    return _expert_net(RoutedExperts)


class NnxExpert(nnx.Module):
    """An MLP."""

    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(width, 2 * width, rngs=rngs)
        self.down = nnx.Linear(2 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.silu(self.up(x)))


class NnxSwitch(nnx.Module):
    """One expert an example, by `jax.lax.switch`: an equation that reads all experts."""

    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.router = nnx.Linear(width, 3, rngs=rngs)
        self.experts = nnx.List([NnxExpert(width, rngs) for _ in range(3)])
        self.head = nnx.Linear(width, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        scores = nnx.softmax(self.router(x).mean(0))
        branches = [lambda x, expert=expert: expert(x) for expert in self.experts]
        return self.head(x + scores.max() * jax.lax.switch(scores.argmax(), branches, x))


def nnx_switch() -> Task:
    """Experts chosen by control flow."""
    return nnx_task(lambda: NnxSwitch(16, nnx.Rngs(0)), jax.random.normal(jax.random.key(1), (8, 16)), first_columns)
