"""Llama by size, for the commands of JaxFerry: `jaxferry fit llama:8b`."""

from examples.common.workloads import next_tokens
from examples.llama import model

SHORT = {"1b": "3.2-1b", "3b": "3.2-3b", "7b": "2-7b", "8b": "3-8b", "13b": "2-13b"}
SIZES = model.SIZES | {short: model.SIZES[size] for short, size in SHORT.items()}
LENGTH = 2048


def make(size, batch_size=8, length=None):
    """Returns (loss_fn, init_fn, batch_of); `length` is a row's tokens, by default 2,048 or the model's positions."""
    config = SIZES[size]
    length = length or min(LENGTH, config.max_length)
    return model.make_loss(config), model.make_init(config), next_tokens(config, batch_size, length)
