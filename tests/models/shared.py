"""Parameters used more than once: one block n times (ALBERT), a universal transformer, modules tied in NNX."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from models import Block, NnxBlock, Task, language_model, nnx_task, random_tokens


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


def linen_albert() -> Task:
    """One block, used four times."""
    return language_model(Albert(), 128, 17)


def linen_universal_transformer() -> Task:
    """One block with adaptive computation."""
    return language_model(UniversalTransformer(), 128, 17)


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
    return nnx_task(lambda: TiedNet(64, 16, nnx.Rngs(0)), random_tokens())
