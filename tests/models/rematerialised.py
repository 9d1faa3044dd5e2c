"""Blocks whose activations are computed again in the backward: `nn.remat`, `nnx.remat`, `jax.checkpoint`."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
from flax import nnx

from models import Block, NnxNet, Task, gpt, initialise_nnx, next_token_loss, split_nnx


def linen_remat() -> Task:
    """The GPT-2 with each block under `nn.remat`, which keeps only products."""
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    return gpt(depth=3, block=nn.remat(Block, static_argnums=(2,), policy=policy))


class CheckpointedNet(NnxNet):
    """The NNX model with each block under `nnx.remat`."""

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for block in self.blocks:
            x = nnx.remat(lambda block, x: block(x))(block, x)
        return self.head(x)


def nnx_remat() -> Task:
    """Blocks under `nnx.remat`."""
    graph, params = split_nnx(initialise_nnx(lambda: CheckpointedNet(64, 16, 3, nnx.Rngs(0))), nnx.Param)

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        return next_token_loss(nnx.merge(graph, params)(batch[:, :-1]), batch)

    return Task(loss_fn, params, jax.random.randint(jax.random.key(1), (2, 9), 0, 64))


def whole_model_checkpoint() -> Task:
    """The whole loss function in one `jax.checkpoint`: one equation that reads every layer."""
    task = gpt(depth=3)
    return Task(jax.checkpoint(task.loss_fn), task.params, task.batch)
