"""Masked tokens (Devlin et al. 2019, section 3.1): 15 % are predicted, of which 80 % are hidden and 10 % replaced."""

import numpy as np

MASKED_SHARE = 0.15
HIDDEN_SHARE, REPLACED_SHARE = 0.8, 0.1


def count_masked(length):
    """Returns P, the maximum number of masked tokens in a row of `length` tokens."""
    return max(1, round(MASKED_SHARE * length))


def mask_tokens(rng, tokens, num_special, mask, vocab_size):
    """Chooses tokens to predict and hides them.

    Args:
      rng: a NumPy generator.
      tokens: int32 [B, T].
      num_special: tokens below this number are never chosen and never replace others.
      mask: the mask token.
      vocab_size: replacements are below it.

    Returns:
      A dictionary: `tokens` [B, T] with the chosen ones hidden, replaced or unchanged; `positions` and `labels`, int32
      [B, P], in any order; `weights`, float32 [B, P]: 0 after a row's last chosen token.
    """
    B, T = tokens.shape
    P = count_masked(T)
    is_ordinary = tokens >= num_special
    # Chooses the P ordinary tokens of a row with the lowest random numbers; special tokens sort last.
    positions = np.argsort(np.where(is_ordinary, rng.random((B, T)), 2.0), axis=1)[:, :P]
    counts = np.minimum(is_ordinary.sum(1), np.maximum(1, np.rint(MASKED_SHARE * is_ordinary.sum(1))))
    weights = np.arange(P) < counts[:, None]
    labels = np.take_along_axis(tokens, positions, axis=1)
    lots = rng.random((B, P))
    others = rng.integers(num_special, vocab_size, size=(B, P))
    shown = np.where(lots < HIDDEN_SHARE, mask, np.where(lots < HIDDEN_SHARE + REPLACED_SHARE, others, labels))
    hidden = tokens.copy()
    np.put_along_axis(hidden, positions, np.where(weights, shown, labels), axis=1)
    return {
        "tokens": hidden,
        "positions": positions.astype(np.int32),
        "labels": labels,
        "weights": weights.astype(np.float32),
    }
