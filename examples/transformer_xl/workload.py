"""Transformer-XL by size, for the commands of JaxFerry: `jaxferry fit transformer_xl:6.7b`."""

import jax.numpy as jnp

from examples.common.workloads import next_tokens
from examples.transformer_xl import model

SIZES = model.SIZES


def make(size, batch_size=8, length=512):
    """Returns (loss_fn, init_fn, batch_of); `length` is the tokens of a row, and of the memory, which stays empty."""
    config = SIZES[size]
    tokens_of = next_tokens(config, batch_size, length)

    def batch_of(number):
        memory = [jnp.zeros((batch_size, length, config.channels), jnp.bfloat16) for _ in range(config.num_layers)]
        return {**tokens_of(number), "memory": memory, "is_start": jnp.array(True)}

    return model.make_loss(config), model.make_init(config), batch_of
