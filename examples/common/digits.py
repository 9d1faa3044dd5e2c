"""Images to batches: the 1797 handwritten digits that scikit-learn ships, 8 by 8 pixels each.

They are shuffled once with a fixed seed; the last ones are for validation. Larger models receive enlarged images.
"""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits

from examples.common.batches import shuffled
from jaxferry.errors import InputError
from jaxferry.processes import distributed

VALIDATION_SHARE = 0.2
PIXELS = 8
NUM_CLASSES = 10


@dataclasses.dataclass(frozen=True)
class Digits:
    """Images, float32 [N, 8, 8] in [-1, 1], and their labels, int32 [N]."""

    images: np.ndarray
    labels: np.ndarray


def load():
    """Returns the digits for training and for validation."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images = (digits.images[order] / 8 - 1).astype(np.float32)
    labels = digits.target[order].astype(np.int32)
    split = len(labels) - int(len(labels) * VALIDATION_SHARE)
    return Digits(images[:split], labels[:split]), Digits(images[split:], labels[split:])


def enlarge(images, size, num_colours):
    """Enlarges images [N, 8, 8] to [N, size, size, num_colours]; pixels become squares, all channels are equal."""
    if size % PIXELS:
        raise InputError(f"an image's size must be a multiple of {PIXELS}, got {size}")
    scale = size // PIXELS
    large = images.repeat(scale, axis=1).repeat(scale, axis=2)
    return np.broadcast_to(large[..., None], (*large.shape, num_colours))


@dataclasses.dataclass(frozen=True)
class Batches:
    """Draws images and labels: `batches(step)` is the same for the same seed and step."""

    digits: Digits
    batch_size: int
    seed: int
    size: int = PIXELS
    num_colours: int = 1

    def __call__(self, step):
        """Returns the batch of a step: `images`, float32 [B, size, size, num_colours], and `labels`, int32 [B]."""
        chosen = self.chosen[step]
        images = enlarge(self.digits.images[chosen], self.size, self.num_colours)
        return {"images": np.ascontiguousarray(images), "labels": self.digits.labels[chosen]}

    @functools.cached_property
    def chosen(self):
        """The digits of each step, shuffled by Grain: [B] by step."""
        return shuffled(len(self.digits.labels), self.batch_size, self.seed)


def accuracy_of(step, state, predict, digits, config, batch_size, *args):
    """Returns the accuracy over all images; `predict(params, images, *args)` returns logits [B, classes].

    The parameters stay in host memory: the forward runs layer by layer, within the step's memory budget.
    """
    num_hits = 0
    for start in range(0, len(digits.labels), batch_size):
        images = enlarge(digits.images[start : start + batch_size], config.image_size, config.num_colours)
        logits = distributed.whole(step.apply(state, predict, distributed.alike(images), *args))
        num_hits += int((jnp.argmax(logits, -1) == digits.labels[start : start + batch_size]).sum())
    return num_hits / len(digits.labels)
