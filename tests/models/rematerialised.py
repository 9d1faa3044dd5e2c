"""Blocks whose activations are computed again in the backward: `nn.remat`, `nnx.remat`, `jax.checkpoint`."""

from __future__ import annotations

import flax.linen as nn
import jax
from flax import nnx

from models import Block, NnxNet, Task, gpt, nnx_task, random_tokens


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
    return nnx_task(lambda: CheckpointedNet(64, 16, 3, nnx.Rngs(0)), random_tokens())


def whole_model_checkpoint() -> Task:
    """The whole loss function in one `jax.checkpoint`: one equation that reads every layer."""
    task = gpt(depth=3)
    return Task(jax.checkpoint(task.loss_fn), task.params, task.batch)
