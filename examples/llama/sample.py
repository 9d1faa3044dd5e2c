"""Samples text token by token with a cache of keys and values, layer by layer as in training."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from examples.common.sampling import draw
from examples.llama.model import make_caches, make_graph
from jaxferry.processes import distributed


def generate(step, state, config, prompt, num_tokens, temperature=0.8, seed=0, cache_dtype=jnp.float32):
    """Continues `prompt`, a list of tokens, by `num_tokens`, or up to the model's last position.

    Temperature 0 always takes the most likely token. The parameters stay in host memory, as in a training step, and the
    step's memory budget applies, including the caches.
    """
    length = min(len(prompt) + num_tokens, config.max_length)
    decode, key = make_decode(config), jax.random.key(seed)
    caches = make_caches(config, 1, length, cache_dtype)
    tokens, caches = distributed.alike((jnp.array([prompt]), caches))
    position, written = 0, []
    while len(prompt) + len(written) < length:
        key, this = jax.random.split(key)
        token, caches = step.apply(state, decode, tokens, caches, position, temperature, this)
        position += tokens.shape[1]
        tokens = token[:, None]
        written.append(int(distributed.whole(token)[0]))
    return written


@functools.cache
def make_decode(config):
    """Returns a function that draws the token after the given ones; the cache holds the earlier ones."""
    graph = make_graph(config)

    def decode(params, tokens, caches, position, temperature, key):
        logits, caches = nnx.merge(graph, params)(tokens, caches, position)
        return draw(logits[:, -1], temperature, key), caches

    return decode
