"""Text to batches for Transformer-XL: each row continues where the same row of the previous batch ended."""

import dataclasses

import numpy as np

from examples.common import text
from jaxferry.errors import InputError


def load(path, vocab_size):
    """Reads the text under `path` (None: Python's standard library) as byte-level BPE tokens below `vocab_size`."""
    return text.load(path, vocab_size, text.train_byte_bpe, "gpt2")


@dataclasses.dataclass(frozen=True)
class Streams:
    """Cuts the text into `batch_size` streams, one per row, and these into segments of `length` tokens, one per step.

    The seed chooses where in the text the first stream starts; the text wraps around at its end.

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
        """The number of segments in each stream before it starts again."""
        return (len(self.tokens) // self.batch_size - 1) // self.length

    def __call__(self, step):
        """Returns the batch of a step: `tokens`, int32 [batch_size, length + 1]; `is_start`: the streams start here."""
        segment = step % self.num_segments
        first = np.random.default_rng(self.seed).integers(len(self.tokens)) + segment * self.length
        rows = np.arange(self.batch_size)[:, None] * (len(self.tokens) // self.batch_size)
        places = (first + rows + np.arange(self.length + 1)) % len(self.tokens)
        return {"tokens": self.tokens[places].astype(np.int32), "is_start": np.bool_(segment == 0)}
