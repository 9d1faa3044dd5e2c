"""Layers stacked along an axis of their parameters, one `scan` over all of them."""

from __future__ import annotations

import flax.linen as nn
import jax
from flax import nnx

from models import Block, NnxBlock, Task, language_model, nnx_task, random_tokens


class ScannedNet(nn.Module):
    """A GPT-2 whose blocks are one `nn.scan`."""

    vocab: int = 64
    width: int = 32
    depth: int = 3

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(self.vocab, self.width, name="embed")(tokens)
        blocks = nn.scan(
            lambda block, x, _: (block(x), None),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=self.depth,
        )
        x, _ = blocks(Block(4, name="blocks"), x, None)
        return nn.Dense(self.vocab, name="head")(nn.LayerNorm(name="norm")(x))


def linen_scan() -> Task:
    """Blocks under `nn.scan`."""
    return language_model(ScannedNet())


class NnxScanned(nnx.Module):
    """Blocks made by `nnx.vmap` and run by `nnx.scan`."""

    def __init__(self, vocab: int, width: int, depth: int, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(vocab, width, rngs=rngs)
        self.blocks = nnx.vmap(lambda rngs: NnxBlock(width, rngs))(rngs.fork(split=depth))
        self.head = nnx.Linear(width, vocab, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
            self.embed(tokens), self.blocks
        )
        return self.head(x)


def nnx_scan() -> Task:
    """Blocks under `nnx.scan`."""
    return nnx_task(lambda: NnxScanned(64, 16, 3, nnx.Rngs(0)), random_tokens())
