"""Samples text: draws each next token from the logits of all previous ones, layer by layer as in training."""

import functools

import jax
import jax.numpy as jnp

from examples.common.sampling import draw
from jaxferry.processes import distributed
from model import GPT2


def generate(step, state, config, prompt, num_tokens, temperature=0.8, seed=0):
    """Continues `prompt`, a list of tokens, by `num_tokens`, or up to the model's last position.

    Temperature 0 always takes the most likely token. The parameters stay in host memory, as in a training step, and the
    step's memory budget applies.
    """
    length = min(len(prompt) + num_tokens, config.max_length)
    extend, key = make_extend(config), jax.random.key(seed)
    tokens = jnp.zeros(length, jnp.int32).at[: len(prompt)].set(jnp.array(prompt))
    tokens = distributed.alike(tokens)
    for position in range(len(prompt), length):
        tokens = step.apply(state, extend, tokens, position, temperature, key)
    return distributed.whole(tokens)[len(prompt) :].tolist()


@functools.cache
def make_extend(config):
    """Returns a function that sets the token at a position; a causal model ignores later ones."""
    model = GPT2(config)

    def extend(params, tokens, position, temperature, key):
        logits = model.apply({"params": params}, tokens[None])[0, position - 1]
        return tokens.at[position].set(draw(logits, temperature, jax.random.fold_in(key, position)))

    return extend
