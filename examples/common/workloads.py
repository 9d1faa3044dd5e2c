"""Random batches for the commands of JaxFerry, which know the examples' models by name and size: `gpt2:6.7b`.

Each example's `workload.py` has `SIZES` and `make(size, batch_size)`, which returns `(loss_fn, init_fn, batch_of)`.
"""

import jax
import jax.numpy as jnp


def random_tokens(number, batch_size, length, vocab_size):
    """Returns int32 [batch_size, length] for the step of this number."""
    return jax.random.randint(jax.random.key(number), (batch_size, length), 0, vocab_size)


def next_tokens(config, batch_size, length):
    """Returns the batches of a language model: int32 `tokens` [batch_size, length + 1]."""

    def batch_of(number):
        return {"tokens": random_tokens(number, batch_size, length + 1, config.vocab_size)}

    return batch_of


def images(config, batch_size):
    """Returns the batches of a classifier: float32 `images` [batch_size, height, width, colours], int32 `labels`."""

    def batch_of(number):
        keys = jax.random.split(jax.random.key(number))
        shape = (batch_size, config.image_size, config.image_size, config.num_colours)
        labels = jax.random.randint(keys[1], (batch_size,), 0, config.num_classes)
        return {"images": jax.random.normal(keys[0], shape, jnp.float32), "labels": labels}

    return batch_of
