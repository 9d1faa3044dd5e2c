"""An example's training beside its twin: an ordinary jitted Optax loop over the very same loss function."""

import jax
import numpy as np
import optax

import jaxferry
from tolerances import LOSS_RTOL


def plain_losses(loss_fn, optimizer, params, batches, num_steps, carried=None):
    """The losses of `num_steps` steps; what the loss function returns by the names in `carried` goes into the next."""

    @jax.jit
    def step(params, state, batch):
        result, gradients = jax.value_and_grad(loss_fn, has_aux=has_aux)(params, batch)
        updates, state = optimizer.update(gradients, state, params)
        loss, aux = result if has_aux else (result, {})
        return optax.apply_updates(params, updates), state, loss, aux

    carried, losses = carried or {}, []
    has_aux = isinstance(jax.eval_shape(loss_fn, params, {**batches(0), **carried}), tuple)
    state = optimizer.init(params)
    for i in range(num_steps):
        params, state, loss, aux = step(params, state, {**batches(i), **carried})
        carried = {name: aux[name] for name in carried}
        losses.append(float(loss))
    return losses


def offloaded_losses(loss_fn, optimizer, params, batches, num_steps, carried=None, **options):
    """The same by JaxFerry, with options of `jaxferry.train_step`."""
    step = jaxferry.train_step(loss_fn, optimizer, **options)
    state, carried, losses = step.init(params), carried or {}, []
    for i in range(num_steps):
        state, metrics = step(state, {**batches(i), **carried})
        carried = {name: metrics["aux"][name] for name in carried}
        losses.append(float(metrics["loss"]))
    return losses


def assert_same_losses(loss_fn, optimizer, params, batches, num_steps=10, carried=None, **options):
    """JaxFerry's losses are those of the plain loop, and no step is like another."""
    expected = plain_losses(loss_fn, optimizer, params, batches, num_steps, carried)
    losses = offloaded_losses(loss_fn, optimizer, params, batches, num_steps, carried, **options)
    np.testing.assert_allclose(losses, expected, rtol=LOSS_RTOL)
    assert len(set(losses)) == num_steps
