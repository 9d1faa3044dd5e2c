"""What the models share beside Flax's own layers."""

import jax
import jax.numpy as jnp


def dropout(x, rate, key):
    """Drops a share of x and scales up the rest; gives back the key for the next one. Does nothing without a key.

    The key travels with the residual stream, so that no block holds a number of its own: all are the same program.
    """
    if key is None or rate == 0:
        return x, key
    key, this = jax.random.split(key)
    return jnp.where(jax.random.bernoulli(this, 1 - rate, x.shape), x / (1 - rate), 0), key
