"""The derivatives of segments one after another, without the engine, beside those of the whole loss."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxferry.partition import RowGradient, differentiate, evaluate, partition, scans
from tolerances import LOSS_RTOL


def equations_of(jaxpr):
    """The equations of a program and of those within it."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in scans.jaxprs_in(eqn):
            yield from equations_of(inner)


def parts_of(task, *args, **kwargs):
    """The segments of a task's loss."""
    return partition(task.loss_fn, task.params, (task.batch, *args), kwargs)


def stored(parts, params):
    """The parameters as they are stored, in the order of the graph's."""
    leaves, found = jax.tree.leaves(params), {}
    for leaf in (leaf for layer in parts.layers for leaf in layer.leaves):
        whole, part = leaves[leaf.source], leaf.part
        found[leaf.index] = whole if part is None else jnp.take(whole, part.number, part.axis)
        assert found[leaf.index].shape == leaf.shape
    return [found[index] for index in range(len(found))]


def chained_gradients(parts, params, batch_leaves):
    """Loss and gradients by running the segments' derivatives one after another, without the engine."""
    graph = parts.graph
    values = {**graph.constants, **dict(zip(graph.batch, batch_leaves, strict=True))}
    values |= zip(graph.parameters, stored(parts, params), strict=True)
    evaluate(parts.prelude, values)
    kept = {}
    derivatives = {s.program: differentiate(graph, s) for s in parts.segments}
    for number, s in enumerate(parts.segments):
        arguments = [[values[v] for v in numbers] for numbers in (s.weights, s.inputs, s.nondiff_inputs)]
        outputs, nondiff_outputs, kept[number] = derivatives[s.program].forward(*arguments)
        values |= zip((*s.outputs, *s.nondiff_outputs), (*outputs, *nondiff_outputs), strict=True)
    cotangents = {parts.loss: jnp.ones_like(values[parts.loss])}
    gradients = {v: jnp.zeros_like(values[v]) for v in graph.parameters}
    for number, s in reversed(list(enumerate(parts.segments))):
        d = derivatives[s.program]
        own, into = d.backward(
            [values[v] for v in s.weights],
            [values[s.inputs[i]] for i in d.inputs_read],
            [values[s.nondiff_inputs[i]] for i in d.nondiff_inputs_read],
            [values[s.outputs[i]] for i in d.outputs_read],
            kept[number],
            [cotangents.get(v, jnp.zeros_like(values[v])) for v in s.outputs],
        )
        for v, gradient in zip(s.weights, own, strict=True):
            gradients[v] += gradient.dense() if isinstance(gradient, RowGradient) else gradient
        for v, cotangent in zip(s.inputs, into, strict=True):
            cotangents[v] = cotangents[v] + cotangent if v in cotangents else cotangent
    return values[parts.loss], [gradients[v] for v in graph.parameters]


def assert_same_derivative(loss_fn, params, *args):
    """Segments one after another have the loss and the gradients of the whole; returns the partition."""
    parts = partition(loss_fn, params, args)
    # Compiled as a whole: one by one, XLA would compile each operation by itself.
    loss, gradients = jax.jit(lambda p, batch: chained_gradients(parts, p, batch))(params, jax.tree.leaves(args))
    expected, theirs = jax.jit(jax.value_and_grad(lambda p: jax.tree.leaves(loss_fn(p, *args))[0]))(params)
    np.testing.assert_allclose(loss, expected, rtol=LOSS_RTOL)
    for ours, their in zip(gradients, stored(parts, theirs), strict=True):
        np.testing.assert_allclose(ours, their, rtol=LOSS_RTOL, atol=1e-6)
    return parts
