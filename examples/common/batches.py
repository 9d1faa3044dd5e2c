"""Batches addressed by step number: `batches(step)` depends only on the seed and the step.

A class of batches is a frozen dataclass with `__call__(step)`, which returns a dictionary of NumPy arrays. Shapes are
equal for all steps, so that a step is compiled once.
"""

import dataclasses

import numpy as np

from jaxferry.errors import InputError


@dataclasses.dataclass(frozen=True)
class Batches:
    """Draws rows of `length` tokens plus the next one, for a causal language model.

    Raises:
      InputError: if the text is shorter than one row.
    """

    tokens: np.ndarray
    batch_size: int
    length: int
    seed: int

    def __post_init__(self):
        check_length(self.tokens, self.length)

    def __call__(self, step):
        """Returns the batch of a step: `tokens`, int32 [batch_size, length + 1]."""
        rng = np.random.default_rng((self.seed, step))
        return {"tokens": draw_rows(rng, self.tokens, self.batch_size, self.length + 1)}


def check_length(tokens, length):
    if len(tokens) <= length:
        raise InputError(f"--seq must be below the {len(tokens)} tokens of the text's part, got {length}")


def draw_rows(rng, tokens, num_rows, length):
    """Draws rows of consecutive tokens from random positions: int32 [num_rows, length]."""
    starts = rng.integers(len(tokens) - length + 1, size=num_rows)
    return tokens[starts[:, None] + np.arange(length)].astype(np.int32)
