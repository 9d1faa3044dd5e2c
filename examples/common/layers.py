"""Layers that the models share, in addition to Flax's own."""

import jax
import jax.numpy as jnp


def dropout(x, rate, key):
    """Applies dropout to x and returns it with the key for the next dropout. Without a key, x is unchanged.

    The key travels with the residual stream, so that blocks hold no constant of their own and are all the same program.
    """
    if key is None or rate == 0:
        return x, key
    key, this = jax.random.split(key)
    return jnp.where(jax.random.bernoulli(this, 1 - rate, x.shape), x / (1 - rate), 0), key
