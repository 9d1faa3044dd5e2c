"""Models whose layers are stacked and scanned over: what users write with nn.scan, nnx.scan and jax.lax.scan."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from models import Task, next_token_loss

VOCAB, WIDTH, DEPTH = 32, 8, 4


class Block(nn.Module):
    """A residual MLP block as nn.scan wants it: carry in, carry and output out."""

    dropout: float = 0.0
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> tuple[jax.Array, None]:
        h = nn.LayerNorm(dtype=self.dtype, name="norm")(x)
        h = jnp.tanh(nn.Dense(2 * WIDTH, dtype=self.dtype, name="fc")(h))
        h = nn.Dropout(self.dropout)(h, deterministic=not train)
        return x + nn.Dense(WIDTH, dtype=self.dtype, name="proj")(h), None


class Net(nn.Module):
    """Embedding, scanned blocks, head."""

    depth: int = DEPTH
    dropout: float = 0.0
    remat: bool = False
    dtype: Any = None
    axis: int = 0

    @nn.compact
    def __call__(self, tokens: jax.Array, train: bool = False) -> jax.Array:
        x = nn.Embed(VOCAB, WIDTH, name="embed")(tokens)
        block = nn.remat(Block, prevent_cse=False, static_argnums=(2,)) if self.remat else Block
        layers = nn.scan(
            block,
            variable_axes={"params": self.axis},
            split_rngs={"params": True, "dropout": True},
            in_axes=nn.broadcast,
            length=self.depth,
        )
        x, _ = layers(self.dropout, self.dtype, name="layers")(x, train)
        return nn.Dense(VOCAB, name="head")(x)


def tokens() -> jax.Array:
    """A batch of random tokens."""
    return jax.random.randint(jax.random.key(1), (2, 6), 0, VOCAB)


def linen(**config: Any) -> Task:
    """The linen model; a keyword `rng` of the loss function switches dropout on."""
    model = Net(**config)

    def loss_fn(params: Any, batch: Any, rng: Any = None) -> jax.Array:
        rngs = None if rng is None else {"dropout": rng}
        logits: Any = model.apply({"params": params}, batch[:, :-1], rng is not None, rngs=rngs)
        return next_token_loss(logits, batch)

    return Task(loss_fn, model.init(jax.random.key(0), tokens()[:, :-1])["params"], tokens())


class NnxBlock(nnx.Module):
    """A residual MLP block with dropout."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.fc = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.proj = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.proj(jnp.tanh(self.fc(self.norm(x))))


class NnxNet(nnx.Module):
    """Embedding, blocks made by vmap and scanned over, head."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        make = nnx.split_rngs(splits=DEPTH)(nnx.vmap(NnxBlock, in_axes=(0,), out_axes=0))
        self.embed, self.blocks = nnx.Embed(VOCAB, WIDTH, rngs=rngs), make(rngs)
        self.head = nnx.Linear(WIDTH, VOCAB, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def forward(x: jax.Array, block: NnxBlock) -> jax.Array:
            return block(x)

        return self.head(forward(self.embed(tokens), self.blocks))


def nnx_net() -> Task:
    """The NNX model, split into graph definition and parameters."""
    graph, params = nnx.split(NnxNet(nnx.Rngs(0)), nnx.Param)

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        return next_token_loss(nnx.merge(graph, params)(batch[:, :-1]), batch)

    return Task(loss_fn, params, tokens())


def plain(depth: int = DEPTH, reverse: bool = False) -> Task:
    """Without Flax: jax.lax.scan over a dictionary of stacked arrays, cast on the way, and a penalty on all."""

    def loss_fn(params: Any, x: jax.Array) -> jax.Array:
        def block(x: jax.Array, own: Any) -> tuple[jax.Array, jax.Array]:
            x = x + jnp.tanh(x @ own["w"] + own["b"])
            return x, jnp.mean(x)

        blocks = jax.tree.map(lambda a: a.astype(jnp.float32) * 1.0, params["blocks"])
        x, means = jax.lax.scan(block, x @ params["first"]["w"], blocks, reverse=reverse)
        penalty = sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params))
        return jnp.mean(x**2) + 0.1 * means[0] + 1e-3 * penalty

    keys = jax.random.split(jax.random.key(0), 4)
    blocks = {
        "w": jax.random.normal(keys[0], (depth, WIDTH, WIDTH)) / 4,
        "b": jax.random.normal(keys[1], (depth, WIDTH)),
    }
    params = {"blocks": blocks, "first": {"w": jax.random.normal(keys[2], (WIDTH, WIDTH))}}
    return Task(loss_fn, params, jax.random.normal(keys[3], (2, WIDTH)))
