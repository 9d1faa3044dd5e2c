"""A model under JaxFerry beside the same model in a plain jitted Optax loop."""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxferry
from jaxferry.partition import Partition
from models import Task, plain_steps

NUM_STEPS = 10
LEARNING_RATE = 1e-3


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The results of ten steps of AdamW.

    Attributes:
      partition: the segments.
      losses: of JaxFerry's steps.
      plain_losses: of the plain loop's.
      device_param_bytes_peak: the most bytes of parameters that were on the device at a time.
      param_bytes: those of the whole model in the dtype in which the device sees it.
      messages: JaxFerry's warnings.
    """

    partition: Partition
    losses: tuple[float, ...]
    plain_losses: tuple[float, ...]
    device_param_bytes_peak: int
    param_bytes: int
    messages: tuple[str, ...]

    @property
    def max_relative_difference(self) -> float:
        """The largest difference between both losses of a step, relative to the plain one."""
        ours, theirs = np.asarray(self.losses), np.asarray(self.plain_losses)
        return float(np.max(np.abs(ours - theirs) / np.abs(theirs)))


def compare(task: Task, **options: Any) -> Comparison:
    """Trains the task both ways; JaxFerry under the policy with the least memory, which loads every layer twice.

    Args:
      task: the task.
      options: further arguments of `train_step`.
    """
    optimizer = optax.adamw(LEARNING_RATE)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step = jaxferry.train_step(task.loss_fn, optimizer, policy="l2l", **options)
        state = step.init(task.params)
        partition = step.prepare(task.batch).partition
        batch, losses, peak = task.batch, [], 0
        for _ in range(NUM_STEPS):
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))
            peak = max(peak, metrics["device_param_bytes_peak"])
            batch = task.advance(batch, metrics.get("aux")) if task.advance else batch
    return Comparison(
        partition=partition,
        losses=tuple(losses),
        plain_losses=tuple(plain_losses(task, optimizer)),
        device_param_bytes_peak=peak,
        param_bytes=sum(layer.num_bytes for layer in partition.layers),
        messages=tuple(str(w.message) for w in caught if issubclass(w.category, UserWarning)),
    )


def plain_losses(task: Task, optimizer: optax.GradientTransformation) -> Iterator[float]:
    """The losses of plain Optax, with float32 masters where parameters have 16 bits, as JaxFerry keeps them."""
    masters = jax.tree.map(lambda p: p.astype(jnp.promote_types(p.dtype, jnp.float32)), task.params)
    return (loss for *_, loss in itertools.islice(plain_steps(task, optimizer, masters), NUM_STEPS))
