"""GPT-2 by size, for the commands of JaxFerry: `jaxferry fit gpt2:6.7b`."""

import importlib

from examples.common.workloads import next_tokens

model = importlib.import_module("examples.gpt2.model")  # mypy knows the file as `model`, as train.py does

SIZES = model.SIZES


def make(size, batch_size=8, length=None):
    """Returns (loss_fn, init_fn, batch_of); `length` is a row's tokens, by default the positions of the model."""
    config = SIZES[size]
    length = length or config.max_length
    return model.make_loss(config), model.make_init(config), next_tokens(config, batch_size, length)
