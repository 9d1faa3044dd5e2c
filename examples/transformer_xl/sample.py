"""Samples text token by token on the CPU; the memory holds the earlier tokens."""

import functools

import jax
import jax.numpy as jnp

from examples.transformer_xl.model import TransformerXL, empty_memory


def generate(config, params, prompt, num_tokens, memory_length, temperature=0.8, seed=0):
    """Continues `prompt`, a list of tokens, by `num_tokens`; the model looks back `memory_length` tokens.

    Temperature 0 always takes the most likely token. The parameters are read on the CPU, where the masters are.
    """
    cpu = jax.local_devices(backend="cpu")[0]
    params = jax.device_put(params, cpu)
    with jax.default_device(cpu):
        memory = empty_memory(config, 1, memory_length, jnp.float32)
        key, tokens = jax.random.key(seed), list(prompt)
        for i in range(len(prompt) + num_tokens - 1):
            following, memory = advance(config, params, tokens[i], memory, temperature, jax.random.fold_in(key, i))
            if i + 1 >= len(prompt):
                tokens.append(int(following))
        return tokens[len(prompt) :]


@functools.partial(jax.jit, static_argnums=0)
def advance(config, params, token, memory, temperature, key):
    """Reads one token; returns the next one and the updated memory."""
    logits, memory = TransformerXL(config).apply({"params": params}, jnp.full((1, 1), token), memory)
    logits = logits[0, 0].astype(jnp.float32)
    drawn = jax.random.categorical(key, logits / jnp.maximum(temperature, 1e-6))
    return jnp.where(temperature > 0, drawn, logits.argmax()), memory
