"""Models that draw random numbers: dropout and streams of their own, keys in the batch or in the model's state."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from models import Task, gpt, initialise, random_tokens, stateful_nnx_task, token_loss


class Noisy(nn.Module):
    """Residual blocks with dropout, whole branches dropped, and Gaussian noise: a stream each."""

    width: int = 16
    depth: int = 3

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for i in range(self.depth):
            h = nn.Dropout(0.2, deterministic=False)(nn.relu(nn.Dense(4 * self.width, name=f"up_{i}")(x)))
            h = nn.Dense(self.width, name=f"down_{i}")(h)
            keep = jax.random.bernoulli(self.make_rng("branches"), 0.8, (x.shape[0], 1))
            x = x + jnp.where(keep, h, 0) + 0.01 * jax.random.normal(self.make_rng("noise"), x.shape)
        return nn.Dense(4, name="head")(x)


def linen_streams() -> Task:
    """Three RNG streams, whose keys travel in the batch."""
    model, x = Noisy(), jax.random.normal(jax.random.key(1), (8, 16))

    def rngs_of(key: jax.Array) -> dict[str, jax.Array]:
        return dict(zip(("dropout", "branches", "noise"), jax.random.split(key, 3), strict=True))

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        y: Any = model.apply({"params": params}, batch["x"], rngs=rngs_of(batch["key"]))
        return ((y - batch["x"][:, :4]) ** 2).mean()

    params = initialise(model)({"params": jax.random.key(0), **rngs_of(jax.random.key(2))}, x)["params"]
    return Task(loss_fn, params, {"x": x, "key": jax.random.key(3)}, next_key)


def next_key(batch: Any, aux: Any) -> Any:
    """The batch with another key."""
    return {**batch, "key": jax.random.split(batch["key"])[0]}


def gpt_dropout() -> Task:
    """The linen GPT-2 with dropout in attention, after embeddings and on each branch."""
    task = gpt(depth=3, dropout=0.1)

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        return task.loss_fn(params, batch["tokens"], rng=batch["key"])

    return Task(loss_fn, task.params, {"tokens": task.batch, "key": jax.random.key(3)}, next_key)


class DropoutNet(nnx.Module):
    """Residual blocks with dropout; the counts of its RNG streams are part of its state."""

    def __init__(self, vocab: int, width: int, depth: int, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(vocab, width, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(width, width, rngs=rngs) for _ in range(depth)])
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.head = nnx.Linear(width, vocab, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + self.dropout(nnx.gelu(layer(x)))
        return self.head(x)


def nnx_dropout() -> Task:
    """An NNX model that draws from its own `nnx.Rngs`; their counts come back as aux."""
    return stateful_nnx_task(
        lambda: DropoutNet(64, 16, 3, nnx.Rngs(0, dropout=1)), token_loss, {"tokens": random_tokens()}
    )
