"""Text to batches for a causal language model, with GPT-2's tokenizer."""

from examples.common import text
from examples.common.batches import Batches
from examples.common.text import VALIDATION_SHARE, read_library, read_texts
from examples.common.text import train_byte_bpe as train_tokenizer

__all__ = ["VALIDATION_SHARE", "Batches", "load", "read_library", "read_texts", "train_tokenizer"]


def load(path, vocab_size, weights=None):
    """Reads the text under `path` (None: Python's standard library) as tokens below `vocab_size` of a byte-level BPE.

    Pretrained weights bring their own tokenizer; otherwise one is trained on the text.
    """
    if weights is not None:
        return text.load_pretrained(path, vocab_size, weights)
    return text.load(path, vocab_size, lambda texts, size: train_tokenizer(texts, size), "gpt2")
