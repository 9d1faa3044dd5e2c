"""Batches addressed by step number: `batches(step)` depends only on the seed and the step.

A class of batches is a frozen dataclass with `__call__(step)`, which returns a dictionary of NumPy arrays. Shapes are
equal for all steps, so that a step is compiled once.
"""

import dataclasses
import functools

import grain
import numpy as np

from jaxferry.errors import InputError


@dataclasses.dataclass(frozen=True)
class Batches:
    """Draws rows of `length` tokens plus the next one, for a causal language model.

    Grain shuffles all positions of the text where a row can start, anew for each epoch, and finds those of any step
    without going through the steps before.

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
        return {"tokens": take_rows(self.tokens, self.starts[step], self.length + 1)}

    @functools.cached_property
    def starts(self):
        """The first positions of each step's rows: [batch_size] by step."""
        return shuffled(len(self.tokens) - self.length, self.batch_size, self.seed)


def shuffled(size, batch_size, seed):
    """Returns batches of the numbers below `size` by step: shuffled by the seed, anew for each epoch, without end."""
    return grain.MapDataset.range(size).shuffle(seed=seed).repeat().batch(batch_size)


def check_length(tokens, length):
    if len(tokens) <= length:
        raise InputError(f"--seq must be below the {len(tokens)} tokens of the text's part, got {length}")


def draw_rows(rng, tokens, num_rows, length):
    """Draws rows of consecutive tokens from random positions: int32 [num_rows, length]."""
    return take_rows(tokens, rng.integers(len(tokens) - length + 1, size=num_rows), length)


def take_rows(tokens, starts, length):
    """Returns rows of consecutive tokens: int32 [num_rows, length]."""
    return tokens[starts[:, None] + np.arange(length)].astype(np.int32)
