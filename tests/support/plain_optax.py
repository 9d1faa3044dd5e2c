"""An example's training beside its twin: an ordinary jitted Optax loop over the very same loss function."""

import itertools

import numpy as np

import jaxferry
from models import Task, plain_loop
from tolerances import LOSS_RTOL


def task_of(loss_fn, params, batches, carried):
    """A model whose batches have numbers; what it returns by the names in `carried` goes into the next batch."""
    carried, numbers = carried or {}, itertools.count(1)

    def advance(batch, aux):
        return {**batches(next(numbers)), **{name: aux[name] for name in carried}}

    return Task(loss_fn, params, {**batches(0), **carried}, advance)


def plain_losses(loss_fn, optimizer, params, batches, num_steps, carried=None):
    """The losses of `num_steps` steps."""
    return plain_loop(task_of(loss_fn, params, batches, carried), optimizer, num_steps)[1]


def offloaded_losses(loss_fn, optimizer, params, batches, num_steps, carried=None, **options):
    """The same by JaxFerry, with options of `jaxferry.train_step`."""
    task, losses = task_of(loss_fn, params, batches, carried), []
    step, batch = jaxferry.train_step(loss_fn, optimizer, **options), task.batch
    state = step.init(params)
    while True:
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
        if len(losses) == num_steps:
            return losses
        batch = task.advance(batch, metrics.get("aux"))


def assert_same_losses(loss_fn, optimizer, params, batches, num_steps=10, carried=None, **options):
    """JaxFerry's losses are those of the plain loop, and no step is like another."""
    expected = plain_losses(loss_fn, optimizer, params, batches, num_steps, carried)
    losses = offloaded_losses(loss_fn, optimizer, params, batches, num_steps, carried, **options)
    np.testing.assert_allclose(losses, expected, rtol=LOSS_RTOL)
    assert len(set(losses)) == num_steps
