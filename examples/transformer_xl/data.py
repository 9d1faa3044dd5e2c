"""Text to batches for Transformer-XL: each row of a batch goes on where the same row of the batch before ended."""

import dataclasses

import numpy as np

from examples.common import text
from jaxferry.errors import InputError


def load(path, vocab_size):
    """The text under `path`, or Python's own library for None, as tokens below `vocab_size` of GPT-2's kind."""
    return text.load(path, vocab_size, text.train_byte_bpe, "gpt2")


@dataclasses.dataclass(frozen=True)
class Streams:
    """Cuts the text into `batch_size` streams, one a row, and these into segments of `length` tokens, one a step.

    The seed says where in the text the first stream starts; behind the text's end comes its beginning.

    Raises:
      InputError: if the text is too short for one segment of each stream.
    """

    tokens: np.ndarray
    batch_size: int
    length: int
    seed: int

    def __post_init__(self):
        if self.num_segments == 0:
            raise InputError(
                f"--batch times --seq must be below the {len(self.tokens)} tokens of the text's part, "
                f"got {self.batch_size} times {self.length}"
            )

    @property
    def num_segments(self):
        """Of each stream, before it starts again."""
        return (len(self.tokens) // self.batch_size - 1) // self.length

    def __call__(self, step):
        """The batch of a step: `tokens`, int32 [batch_size, length + 1]; `is_start`, whether the streams start."""
        segment = step % self.num_segments
        first = np.random.default_rng(self.seed).integers(len(self.tokens)) + segment * self.length
        rows = np.arange(self.batch_size)[:, None] * (len(self.tokens) // self.batch_size)
        places = (first + rows + np.arange(self.length + 1)) % len(self.tokens)
        return {"tokens": self.tokens[places].astype(np.int32), "is_start": np.bool_(segment == 0)}
