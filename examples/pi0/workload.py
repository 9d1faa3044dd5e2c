"""Models of pi0's structure by size, for the commands of JaxFerry: `jaxferry fit pi0:base`."""

import jax

from examples.pi0 import model, train

SIZES = model.SIZES


def make(size, batch_size=32):
    """Returns (loss_fn, init_fn, batch_of)."""
    config = SIZES[size]
    create = model.make_create(config)

    def batch_of(number):
        key = jax.random.key(number)
        observation, actions = model.make_batch(config, batch_size, key)
        return {"observation": observation, "actions": actions, "key": key}

    return train.make_loss(create), train.make_init(create), batch_of
