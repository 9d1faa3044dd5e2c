"""Text from a model: each next token drawn from the logits of everything before it, on the host's processor."""

import functools

import jax
import jax.numpy as jnp

from model import GPT2


def generate(config, params, prompt, num_tokens, temperature=0.8, seed=0):
    """Continues `prompt`, a list of tokens, by `num_tokens`, or by fewer where the model's positions end.

    Temperature 0 always takes the likeliest token. The parameters are read on the CPU, where the master copies are.
    """
    length = min(len(prompt) + num_tokens, config.max_length)
    cpu = jax.local_devices(backend="cpu")[0]
    params = jax.device_put(params, cpu)
    with jax.default_device(cpu):
        key = jax.random.key(seed)
        tokens = jnp.zeros(length, jnp.int32).at[: len(prompt)].set(jnp.array(prompt))
        for position in range(len(prompt), length):
            tokens = extend(config, params, tokens, position, temperature, key)
        return tokens[len(prompt) :].tolist()


@functools.partial(jax.jit, static_argnums=0)
def extend(config, params, tokens, position, temperature, key):
    """Sets the token at a position; what stands after it is not seen by a causal model."""
    logits = GPT2(config).apply({"params": params}, tokens[None])[0, position - 1].astype(jnp.float32)
    drawn = jax.random.categorical(jax.random.fold_in(key, position), logits / jnp.maximum(temperature, 1e-6))
    return tokens.at[position].set(jnp.where(temperature > 0, drawn, logits.argmax()))
