"""Text to batches for RoBERTa: byte-level BPE, rows of full sentences, masked anew whenever they are drawn.

A row is <s> sentences </s> and padding. A sentence is a line. A row holds as many whole sentences as fit, possibly from
several texts, which </s> separates.
"""

import dataclasses
import functools

import numpy as np
from tokenizers import Tokenizer

from examples.bert import masking
from examples.common import text
from examples.common.batches import check_length
from jaxferry.errors import InputError

SPECIAL_TOKENS = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
START, PAD, END, UNK, MASK = range(len(SPECIAL_TOKENS))
LINE_BREAK = "Ċ"  # as a byte-level BPE writes it


def load(path, vocab_size):
    """Reads the text under `path` (None: Python's standard library) as byte-level BPE tokens below `vocab_size`."""
    return text.load(path, vocab_size, train_tokenizer, "roberta", separator=SPECIAL_TOKENS[END])


def train_tokenizer(texts, vocab_size):
    return text.train_byte_bpe(texts, vocab_size, SPECIAL_TOKENS)


@dataclasses.dataclass(frozen=True)
class FullSentences:
    """Draws rows of whole sentences, `length` tokens including the special ones.

    Raises:
      InputError: if the text is shorter than one row, or a row is too short for a token.
    """

    tokens: np.ndarray
    batch_size: int
    length: int
    seed: int
    tokenizer: Tokenizer

    def __post_init__(self):
        if self.length < 3:
            raise InputError(f"--seq must be at least 3, so that a row has room for a token, got {self.length}")
        check_length(self.tokens, self.length)

    def __call__(self, step):
        """Returns the batch of a step: that of `mask_tokens` plus `types`, int32 [B, T], all 0."""
        rng = np.random.default_rng((self.seed, step))
        tokens = self.draw(rng)
        vocab_size = self.tokenizer.get_vocab_size()
        masked = masking.mask_tokens(rng, tokens, len(SPECIAL_TOKENS), MASK, vocab_size)
        return {**masked, "types": np.zeros_like(tokens)}

    def draw(self, rng):
        """Draws unmasked rows of sentences: int32 [B, T]."""
        room = self.length - 2
        first = self.bounds[: np.searchsorted(self.bounds, len(self.tokens) - room, side="right")]
        starts = rng.choice(first, size=self.batch_size)
        ends = self.bounds[np.searchsorted(self.bounds, starts + room, side="right") - 1]
        # A sentence longer than a row is cut.
        counts = np.where(ends > starts, ends - starts, room)[:, None]
        at = np.arange(room)
        rows = np.full((self.batch_size, self.length), PAD, np.int32)
        rows[:, 0] = START
        rows[:, 1:-1] = np.where(at < counts, self.tokens[starts[:, None] + at], PAD)
        np.put_along_axis(rows, counts + 1, END, axis=1)
        return rows

    @functools.cached_property
    def bounds(self):
        """The starts of sentences (after each line break and each text's end), and the end of the text."""
        vocabulary = self.tokenizer.get_vocab()
        enders = [number for token, number in vocabulary.items() if LINE_BREAK in token] + [END]
        behind = np.flatnonzero(np.isin(self.tokens, enders)) + 1
        return np.unique(np.concatenate([[0], behind, [len(self.tokens)]]))
