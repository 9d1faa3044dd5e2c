"""From a partition to what each of its segments costs."""

from typing import Any

import jax
import numpy as np

from jaxferry.partition import Derivative, Partition, Segment, differentiate
from jaxferry.partition.graph import Graph
from jaxferry.profiling.costs import Costs, jaxpr_costs, touched_bytes
from jaxferry.profiling.estimate import LayerCosts


def partition_costs(partition: Partition, remat: str = "none") -> tuple[LayerCosts, ...]:
    """Counts forward and backward of each segment; segments that share their programs are counted once.

    Args:
      partition: the model.
      remat: what is kept between forward and backward, one of `jaxferry.partition.REMAT`.
    """
    counted: dict[int, _ProgramCosts] = {}
    held: set[int] = set()
    result = []
    for segment in partition.segments:
        if segment.program not in counted:
            counted[segment.program] = _ProgramCosts(partition.graph, segment, remat)
        program = counted[segment.program]
        # What several backwards read is kept once, from the first forward on that needs it kept.
        kept = program.kept_values(segment) - held
        held |= kept
        kept_bytes = program.derivative.saved_bytes + sum(map(partition.graph.num_bytes, kept))
        result.append(program.of(partition, segment, kept_bytes))
    return tuple(result)


class _ProgramCosts:
    """The costs of one pair of programs."""

    def __init__(self, graph: Graph, segment: Segment, remat: str):
        self.derivative = derivative = differentiate(graph, segment, remat)
        forward, backward = _forward_jaxpr(graph, derivative), _backward_jaxpr(graph, derivative)
        weights = range(len(segment.weights))
        self.forward: Costs = jaxpr_costs(forward)
        self.backward: Costs = jaxpr_costs(backward)
        self.touched_forward = touched_bytes(forward, weights)
        self.touched_backward = touched_bytes(backward, weights)

    def kept_values(self, segment: Segment) -> set[int]:
        """The segment's own inputs and outputs that its backward reads."""
        read = {segment.inputs[index] for index in self.derivative.inputs_read}
        return read | {segment.outputs[index] for index in self.derivative.outputs_read}

    def of(self, partition: Partition, segment: Segment, activation_bytes: int) -> LayerCosts:
        layer = partition.layers[segment.layer]
        return LayerCosts(
            name=segment.name,
            parameters=layer.name,
            num_parameters=layer.trained.num_parameters,
            param_bytes=layer.num_bytes,
            grad_bytes=layer.trained.num_bytes,
            activation_bytes=activation_bytes,
            forward_flops=self.forward.flops,
            forward_bytes=self.forward.bytes,
            backward_flops=self.backward.flops,
            backward_bytes=self.backward.bytes,
            dha_bytes_forward=self.touched_forward,
            dha_bytes_backward=self.touched_backward,
            forward_kernels=self.forward.kernels,
            backward_kernels=self.backward.kernels,
            itemsize=max(np.dtype(leaf.dtype).itemsize for leaf in layer.leaves),
        )


def _forward_jaxpr(graph: Graph, derivative: Derivative) -> Any:
    segment = derivative.segment
    shapes = [_shapes(graph, values) for values in (segment.weights, segment.inputs, segment.passive)]
    return jax.make_jaxpr(derivative.forward)(*shapes)


def _backward_jaxpr(graph: Graph, derivative: Derivative) -> Any:
    return jax.make_jaxpr(derivative.backward)(*derivative.backward_arguments(graph))


def _shapes(graph: Graph, values: Any) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(graph.avals[value].shape, graph.avals[value].dtype) for value in values]
