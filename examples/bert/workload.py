"""BERT by size, for the commands of JaxFerry: `jaxferry fit bert:base`."""

import jax.numpy as jnp

from examples.bert import masking, model
from examples.common.workloads import random_tokens

SIZES = model.SIZES


def make(size, batch_size=32, length=None):
    """Returns (loss_fn, init_fn, batch_of); `length` is a row's tokens, by default the positions of the model."""
    return make_masked(SIZES[size], batch_size, length)


def make_masked(config, batch_size, length):
    """Likewise, for a configuration: of BERT, or of RoBERTa."""
    length = length or config.max_length
    num_masked = masking.count_masked(length)

    def batch_of(number):
        tokens = random_tokens(number, batch_size, length, config.vocab_size)
        return {
            "tokens": tokens,
            "types": jnp.zeros((batch_size, length), jnp.int32),
            "positions": jnp.broadcast_to(jnp.arange(num_masked), (batch_size, num_masked)),
            "labels": tokens[:, :num_masked],
            "weights": jnp.ones((batch_size, num_masked)),
            "follows": jnp.zeros(batch_size, jnp.int32),
        }

    return model.make_loss(config), model.make_init(config), batch_of
