"""Text to batches for BERT: WordPiece tokens, rows of two spans with some masked tokens.

A row is [CLS] A [SEP] B [SEP]. As in the paper, a span is any piece of text. In half of the rows B follows A in the
text; in the other half it comes from a random position.
"""

import dataclasses

import numpy as np
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from examples.bert import masking
from examples.common import text
from examples.common.batches import check_length, draw_rows
from jaxferry.errors import InputError

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
PAD, UNK, CLS, SEP, MASK = range(len(SPECIAL_TOKENS))


def load(path, vocab_size):
    """Reads the text under `path` (None: Python's standard library) as uncased WordPiece tokens below `vocab_size`."""
    return text.load(path, vocab_size, train_tokenizer, "bert")


def train_tokenizer(texts, vocab_size):
    tokenizer = Tokenizer(models.WordPiece(unk_token=SPECIAL_TOKENS[UNK]))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        limit_alphabet=min(1000, vocab_size // 8),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


@dataclasses.dataclass(frozen=True)
class Pairs:
    """Draws rows of two spans, `length` tokens including the special ones.

    Raises:
      InputError: if the text is shorter than one row, or a row is too short for two spans.
    """

    tokens: np.ndarray
    batch_size: int
    length: int
    seed: int
    tokenizer: Tokenizer

    def __post_init__(self):
        if self.length < 8:
            raise InputError(f"--seq must be at least 8, so that a row has room for two spans, got {self.length}")
        check_length(self.tokens, self.length)

    def __call__(self, step):
        """Returns a step's batch: that of `mask_tokens` plus `types`, int32 [B, T], and `follows`, int32 [B]."""
        rng = np.random.default_rng((self.seed, step))
        B, T = self.batch_size, self.length
        num_tokens = T - 3
        first, other = (draw_rows(rng, self.tokens, B, num_tokens) for _ in range(2))
        follows = rng.integers(2, size=B, dtype=np.int32)
        # A and B each have at least a quarter of the row.
        num_first = rng.integers(num_tokens // 4, num_tokens - num_tokens // 4 + 1, size=B)[:, None]
        tokens, types = join(first, np.where(follows[:, None] == 1, first, other), num_first)
        return {
            **masking.mask_tokens(rng, tokens, len(SPECIAL_TOKENS), MASK, self.tokenizer.get_vocab_size()),
            "types": types,
            "follows": follows,
        }


def join(first, second, num_first):
    """Returns rows [CLS] A [SEP] B [SEP] and their token types, 0 up to the first [SEP] and then 1.

    A is the first `num_first` tokens of a row of `first`, B the rest of the row of `second`. `first` and `second` are
    int32 [B, T - 3], `num_first` is [B, 1].
    """
    num_tokens = first.shape[1]
    at = np.arange(num_tokens + 3)
    source = np.clip(at - 1 - (at > num_first), 0, num_tokens - 1)
    texts = [np.take_along_axis(part, source, axis=1) for part in (first, second)]
    tokens = np.where(at <= num_first, *texts)
    tokens[:, 0] = CLS
    tokens[:, -1] = SEP
    np.put_along_axis(tokens, num_first + 1, SEP, axis=1)
    return tokens.astype(np.int32), np.broadcast_to(at > num_first + 1, tokens.shape).astype(np.int32)
