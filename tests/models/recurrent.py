"""Recurrent nets: the scan over time is one equation, which reads one layer's parameters."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
from flax import nnx

from models import Task, language_model, random_tokens, stateful_nnx_task, token_loss


class LstmNet(nn.Module):
    """Two LSTMs, the first in both directions, between a table and a head."""

    vocab: int = 64
    width: int = 16

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x: Any = nn.Embed(self.vocab, self.width, name="embed")(tokens)
        for i in range(2):
            x = x + nn.RNN(nn.OptimizedLSTMCell(self.width), name=f"lstm_{i}")(x)
        backward: Any = nn.RNN(nn.GRUCell(self.width), reverse=True, keep_order=True, name="gru")(x)
        return nn.Dense(self.vocab, name="head")(x + backward)


def linen_lstm() -> Task:
    """LSTM and GRU by `nn.RNN`."""
    return language_model(LstmNet())


class NnxRecurrent(nnx.Module):
    """Two LSTMs in a list; the head reads the last state."""

    def __init__(self, vocab: int, width: int, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(vocab, width, rngs=rngs)
        cells = [nnx.OptimizedLSTMCell(width, width, rngs=rngs) for _ in range(2)]
        self.layers = nnx.List([nnx.RNN(cell, rngs=rngs) for cell in cells])
        self.head = nnx.Linear(width, vocab, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def nnx_lstm() -> Task:
    """LSTMs by `nnx.RNN`; the RNG streams for its initial states are state beside the parameters."""
    return stateful_nnx_task(lambda: NnxRecurrent(64, 16, nnx.Rngs(0)), token_loss, {"tokens": random_tokens()})
