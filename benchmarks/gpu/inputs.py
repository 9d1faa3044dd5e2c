"""Parameters and tokens that all contenders start from, whatever they are written in. Needs NumPy only."""

import numpy as np

NUM_DRAWN = 1_000_003
"""How many random numbers are drawn. Larger arrays repeat them: drawing a billion takes longer than the steps."""


def draw():
    """Returns the numbers that all weights repeat."""
    return np.random.default_rng(0).standard_normal(NUM_DRAWN, dtype=np.float32) * np.float32(0.02)


def leaf(drawn, name, shape):
    """Returns a parameter of the Flax GPT-2, float32; `name` is the last part of its path."""
    if name in ("scale", "bias"):
        return np.full(shape, name == "scale", np.float32)
    return np.resize(drawn, shape)


def tokens(rows, length, vocab_size):
    """Returns random tokens, int32 [rows, length + 1]."""
    return np.random.default_rng(1).integers(0, vocab_size, (rows, length + 1), dtype=np.int32)
