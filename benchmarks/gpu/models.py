"""The models that contenders in JAX train, GPT-2 and a Llama of the examples, with what plain JAX is told of them."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
from flax import nnx

import model as gpt2
from benchmarks.gpu import inputs
from examples.llama import model as llama

LLAMAS = {"llama-3b": (28, 24, 8, 3072, 8192, 4096, 32_000), "llama-tiny": (2, 4, 2, 64, 160, 64, 256)}
"""Layers, heads, heads of keys and values, channels, hidden channels, positions and tokens."""


@dataclasses.dataclass(frozen=True)
class Model:
    """What a contender trains.

    Attributes:
      loss_fn: maps parameters and a batch of tokens to the loss.
      plain_loss_fn: the same for plain JAX, which is told there what to recompute.
      shapes: the tree of the parameters.
      vocab_size: the number of tokens.
      remat: what JaxFerry is told to recompute.
      layers_by_channels: layers times channels of the attention.
      num_looked_up: the elements of tables of which rows are looked up, and that nothing is multiplied by.
    """

    loss_fn: Callable[..., Any]
    plain_loss_fn: Callable[..., Any]
    shapes: Any
    vocab_size: int
    remat: str
    layers_by_channels: int
    num_looked_up: int

    def make_params(self) -> Any:
        """Returns the parameters as NumPy arrays, so that they do not count in the device's peak."""
        drawn = inputs.draw()

        def leaf(path: Any, like: Any) -> Any:
            name = next(entry.key for entry in reversed(path) if isinstance(getattr(entry, "key", None), str))
            return inputs.leaf(drawn, name, like.shape)

        return jax.tree_util.tree_map_with_path(leaf, self.shapes)

    def flops(self, rows: int, length: int) -> float:
        """Returns the floating-point operations of a step, without what is computed again.

        Six for each token and parameter of a product, and of causal attention six for each token, position before it
        and channel (Kaplan et al., Scaling Laws for Neural Language Models, 2020, section 2.1).
        """
        num = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(self.shapes)) - self.num_looked_up
        return 6.0 * rows * length * (num + self.layers_by_channels * length)


def of_size(size: str, attention: str | None = None) -> Model:
    """Returns the model of a size of `settings.BATCHES`, with "xla" or "cudnn" as attention; None: the device's own."""
    if size in LLAMAS:
        return _llama(*LLAMAS[size], attention=attention)
    config = dataclasses.replace(gpt2.SIZES[size], attention=attention)
    shapes = jax.eval_shape(gpt2.make_init(config), jax.random.key(0))
    loss_fn, looked_up = gpt2.make_loss(config), config.max_length * config.channels
    return Model(loss_fn, loss_fn, shapes, config.vocab_size, "none", config.num_layers * config.channels, looked_up)


def _llama(
    layers: int,
    heads: int,
    kv_heads: int,
    channels: int,
    hidden: int,
    length: int,
    vocab_size: int,
    attention: str | None,
) -> Model:
    config = llama.Config(
        layers, heads, kv_heads, channels, hidden, max_length=length, vocab_size=vocab_size, attention=attention
    )

    class Recomputed(llama.Block):
        def __call__(self, x, cache, position):
            return nnx.remat(lambda block, x: llama.Block.__call__(block, x, cache, position))(self, x)

    with mock.patch.object(llama, "Block", Recomputed):
        plain = llama.make_loss(config)
    shapes = jax.eval_shape(llama.make_init(config), jax.random.key(0))
    return Model(llama.make_loss(config), plain, shapes, vocab_size, "full", layers * channels, vocab_size * channels)
