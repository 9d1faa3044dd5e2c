"""Parameters used more than once: one block n times (ALBERT), a universal transformer, modules tied in NNX."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from models import Block, NnxBlock, Task, initialise, initialise_nnx, next_token_loss, split_nnx


class Albert(nn.Module):
    """A narrow table, a projection, and one block used n times."""

    vocab: int = 128
    width: int = 32
    depth: int = 4

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        table = nn.Embed(self.vocab, 8, name="table")
        x = nn.Dense(self.width, name="projection")(table(tokens))
        block = Block(4, name="block")
        for _ in range(self.depth):
            x = block(x)
        return table.attend(nn.Dense(8, name="head")(x))


class UniversalTransformer(nn.Module):
    """One block used n times with a learnt embedding of the step, each position halting at its own step."""

    vocab: int = 128
    width: int = 32
    depth: int = 4

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        table = nn.Embed(self.vocab, self.width, name="table")
        steps = nn.Embed(self.depth, self.width, name="steps")
        halt = nn.Dense(1, name="halt")
        block = Block(4, name="block")
        x = table(tokens)
        result, running = jnp.zeros_like(x), jnp.ones((*tokens.shape, 1))
        for i in range(self.depth):
            x = block(x + steps(jnp.asarray(i)))
            stop = nn.sigmoid(halt(x)) if i + 1 < self.depth else jnp.ones_like(running)
            result, running = result + running * stop * x, running * (1 - stop)
        return table.attend(result)


def _language_model(model: nn.Module) -> Task:
    batch = jax.random.randint(jax.random.key(1), (2, 17), 0, 128)

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        logits: Any = model.apply({"params": params}, batch[:, :-1])
        return next_token_loss(logits, batch)

    return Task(loss_fn, initialise(model)(jax.random.key(0), batch[:, :-1])["params"], batch)


def linen_albert() -> Task:
    """One block, used four times."""
    return _language_model(Albert())


def linen_universal_transformer() -> Task:
    """One block with adaptive computation."""
    return _language_model(UniversalTransformer())


class TiedNet(nnx.Module):
    """Blocks whose second half repeats the first, and a head tied to the table."""

    def __init__(self, vocab: int, width: int, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(vocab, width, rngs=rngs)
        blocks = [NnxBlock(width, rngs) for _ in range(2)]
        self.blocks = nnx.List([*blocks, *blocks])

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(x)


def nnx_tied() -> Task:
    """The NNX model with tied blocks; NNX itself stores each parameter once."""
    graph, params = split_nnx(initialise_nnx(lambda: TiedNet(64, 16, nnx.Rngs(0))), nnx.Param)

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        return next_token_loss(nnx.merge(graph, params)(batch[:, :-1]), batch)

    return Task(loss_fn, params, jax.random.randint(jax.random.key(1), (2, 9), 0, 64))
