"""RoBERTa by size, for the commands of JaxFerry: `jaxferry fit roberta:large`."""

from examples.bert.workload import make_masked
from examples.roberta import model

SIZES = model.SIZES


def make(size, batch_size=32, length=None):
    """Returns (loss_fn, init_fn, batch_of); `length` is a row's tokens, by default the positions of the model."""
    return make_masked(SIZES[size], batch_size, length)
