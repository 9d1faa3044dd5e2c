"""Vision transformers by size, for the commands of JaxFerry: `jaxferry fit vit:large`."""

from examples.common.workloads import images
from examples.vit import model

SIZES = model.SIZES


def make(size, batch_size=64):
    """Returns (loss_fn, init_fn, batch_of)."""
    config = SIZES[size]
    return model.make_loss(config), model.make_init(config), images(config, batch_size)
