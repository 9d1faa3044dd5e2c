"""Residual networks by size, for the commands of JaxFerry: `jaxferry fit resnet:50`."""

from examples.common.workloads import images
from examples.resnet import model

SIZES = model.SIZES


def make(size, batch_size=64):
    """Returns (loss_fn, init_fn, batch_of); every batch has the initial running averages."""
    config = SIZES[size]
    images_of, batch_stats = images(config, batch_size), model.make_batch_stats(config)

    def batch_of(number):
        return {**images_of(number), "batch_stats": batch_stats}

    return model.make_loss(config), model.make_init(config), batch_of
