"""A model as a user of the command line writes it: copied into the test's folder as a module."""

import jax
import jax.numpy as jnp

NUM_LAYERS, WIDTH = 4, 32


def init(key):
    keys = jax.random.split(key, NUM_LAYERS)
    return {f"layer_{i}": {"kernel": jax.random.normal(k, (WIDTH, WIDTH)) / WIDTH**0.5} for i, k in enumerate(keys)}


def loss_fn(params, batch):
    x = batch["x"]
    for i in range(NUM_LAYERS):
        x = jnp.tanh(x @ params[f"layer_{i}"]["kernel"])
    return jnp.mean((x - batch["y"]) ** 2)


def batch(number):
    x, y = jax.random.normal(jax.random.key(number), (2, 8, WIDTH))
    return {"x": x, "y": jnp.tanh(y)}


def arrays():
    return loss_fn, init(jax.random.key(0)), batch(0)


def functions():
    return loss_fn, init, batch


def weighed():
    """Each batch weighs more than the one before."""

    def loss(params, batch):
        return loss_fn(params, batch), {"num": batch["num"]}

    return loss, init, lambda number: {**batch(number), "num": jnp.float32(1 + number)}


def long_batch():
    """Six layers, whose activations outweigh their parameters."""

    def loss(params, batch):
        x = batch["x"]
        for kernel in params.values():
            x = jnp.tanh(x @ kernel)
        return jnp.mean((x - batch["y"]) ** 2)

    kernels = jax.random.normal(jax.random.key(0), (6, WIDTH, WIDTH)) / WIDTH**0.5
    params = {f"layer_{i}": kernel for i, kernel in enumerate(kernels)}
    return loss, params, {name: jnp.repeat(value, 64, axis=0) for name, value in batch(0).items()}


def shapes():
    return loss_fn, jax.eval_shape(init, jax.random.key(0)), batch(0)


def modules():
    """Shapes of blocks with two matrices each."""
    kernel = {"kernel": jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)}

    def loss(params, batch):
        x = batch["x"]
        for block in params.values():
            x = x + jnp.tanh(x @ block["up"]["kernel"]) @ block["down"]["kernel"]
        return jnp.mean((x - batch["y"]) ** 2)

    return loss, {f"h_{i}": {"up": kernel, "down": kernel} for i in range(3)}, batch(0)


def shaped_batch():
    return loss_fn, init, jax.eval_shape(lambda: batch(0))


def diverging():
    return (lambda params, batch: loss_fn(params, batch) / 0.0), init, batch


def broken():
    def loss(params, batch):
        raise ValueError("no such thing")

    return loss, init, batch
