"""Layers stacked along an axis of their parameters, one `scan` over all of them."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
from flax import nnx

from models import Block, NnxBlock, Task, initialise, initialise_nnx, next_token_loss, split_nnx


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
    model, batch = ScannedNet(), jax.random.randint(jax.random.key(1), (2, 9), 0, 64)

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        logits: Any = model.apply({"params": params}, batch[:, :-1])
        return next_token_loss(logits, batch)

    return Task(loss_fn, initialise(model)(jax.random.key(0), batch[:, :-1])["params"], batch)


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
    graph, params = split_nnx(initialise_nnx(lambda: NnxScanned(64, 16, 3, nnx.Rngs(0))), nnx.Param)

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        return next_token_loss(nnx.merge(graph, params)(batch[:, :-1]), batch)

    return Task(loss_fn, params, jax.random.randint(jax.random.key(1), (2, 9), 0, 64))
