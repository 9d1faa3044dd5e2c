"""RoBERTa: BERT's encoder and masked-token head, without the next-sentence head (Liu et al. 2019).

Its rows have one type, and its first position is 2: the published model counts positions from its padding token.
"""

from examples.bert.model import Config, make_init, make_loss

__all__ = ["SIZES", "Config", "make_init", "make_loss"]


def configure(num_layers, num_heads, channels, max_length=512, vocab_size=50265):
    return Config(
        num_layers=num_layers,
        num_heads=num_heads,
        channels=channels,
        max_length=max_length,
        vocab_size=vocab_size,
        num_types=1,
        first_position=2,
        predicts_next=False,
        pad=1,
        epsilon=1e-5,
    )


SIZES = {
    "tiny": configure(4, 4, 128, max_length=256, vocab_size=2048),
    "base": configure(12, 12, 768),
    "large": configure(24, 16, 1024),
}
