"""Counts the costs of a partition's segments."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxferry.costs.costs import Costs, HostRead, host_reads, jaxpr_costs, touched_bytes
from jaxferry.costs.estimate import LayerCosts, Recomputation
from jaxferry.costs.layer_records import backward_variant, forward_variant
from jaxferry.costs.temporaries import temporary_bytes
from jaxferry.partition import AUTO, Derivative, Partition, Segment, differentiate
from jaxferry.partition.derivative import once_for_graph
from jaxferry.partition.graph import Graph


def partition_costs(partition: Partition, remat: Any = None, temporaries: bool = False) -> tuple[LayerCosts, ...]:
    """Counts forward and backward of each segment's uses; segments that share programs are counted once.

    The work of a segment that reads several groups is split among them by the bytes that its forward reads of each,
    which for products is how their operations are split. What it keeps, and its temporaries, count with the first.

    Also counts full recomputation where a plan may choose it (`AUTO`) and it would keep fewer bytes. The last segment
    is exempt: its forward and backward are one program and keep nothing in between.

    Args:
      partition: the model.
      remat: what all segments keep between forward and backward, as in `jaxferry.partition.differentiate`; None for
        each segment's own choice.
      temporaries: whether to estimate `temporary_bytes` as well. The last segment then keeps nothing for its backward,
        which is part of the same program.
    """
    counted: dict[tuple[int, str], _ProgramCosts] = {}

    def program_costs(segment: Segment, remat: Any, kind: str) -> _ProgramCosts:
        if (segment.program, kind) not in counted:
            counted[segment.program, kind] = once_for_graph(_ProgramCosts, partition.graph, segment, remat)
        return counted[segment.program, kind]

    graph, held = partition.graph, set[int]()
    result = []
    for number, segment in enumerate(partition.segments):
        program = program_costs(segment, remat, "own")
        # A value that several backwards read is kept once and counted with the first segment that keeps it.
        before, own = set(held), program.kept_values(segment)
        held |= own
        kept_bytes = graph.device_bytes(*program.derivative.saved) + graph.held_bytes(*own - before)
        is_last = number == len(partition.segments) - 1
        costs = program.of(partition, segment, kept_bytes)
        if temporaries:
            of_program = program.temporary_bytes(is_last)
            costs = dataclasses.replace(
                costs, activation_bytes=0 if is_last else kept_bytes, temporary_bytes=_by_variant(of_program)
            )
        if (segment.remat if remat is None else remat) == AUTO and not is_last:
            again = program_costs(segment, "full", "again")
            # Later segments may recompute too; they then need this segment's outputs, which it keeps for them.
            shared = {v for later in partition.segments[number + 1 :] for v in later.inputs}
            kept = again.kept_values(segment) | (own & shared)
            again_bytes = graph.device_bytes(*again.derivative.saved) + graph.held_bytes(*kept - before)
            if again_bytes < kept_bytes:
                costs = dataclasses.replace(costs, recomputation=program.recomputation(again, again_bytes))
                if temporaries:
                    more = _by_variant(again.temporary_bytes(is_last), recomputes=True)
                    costs = dataclasses.replace(costs, temporary_bytes={**costs.temporary_bytes, **more})
        result += program.split(costs, partition, segment, partition.uses_of[number])
    return tuple(result)


class _ProgramCosts:
    """The costs of a segment's forward and backward programs."""

    def __init__(self, graph: Graph, segment: Segment, remat: Any):
        self.derivative = derivative = differentiate(graph, segment, remat)
        self._temporary_bytes: tuple[int, int] | None = None
        forward, backward = _forward_jaxpr(graph, derivative), _backward_jaxpr(graph, derivative)
        self._graph, self._jaxprs = graph, (forward, backward)
        weights = segment.by_group(range(len(segment.weights)))
        self.forward: Costs = jaxpr_costs(forward)
        self.backward: Costs = jaxpr_costs(backward)
        self.reads_forward = [host_reads(forward, own) for own in weights]
        self.reads_backward = [host_reads(backward, own) for own in weights]
        self.touched_forward = [touched_bytes(own) for own in self.reads_forward]
        self.touched_backward = [touched_bytes(own) for own in self.reads_backward]

    def temporary_bytes(self, is_last: bool) -> tuple[int, int]:
        """Returns the temporaries of forward and backward; those of the last segment's one program for both."""
        if self._temporary_bytes is None:
            forward, backward = self._jaxprs
            whole = [_loss_jaxpr(self._graph, self.derivative)] * 2 if is_last else [forward, backward]
            self._temporary_bytes = temporary_bytes(whole[0]), temporary_bytes(whole[1])
        return self._temporary_bytes

    def kept_values(self, segment: Segment) -> set[int]:
        """Returns the segment's inputs and outputs that its backward reads."""
        read = {segment.inputs[index] for index in self.derivative.inputs_read}
        return read | {segment.outputs[index] for index in self.derivative.outputs_read}

    def of(self, partition: Partition, segment: Segment, activation_bytes: int) -> LayerCosts:
        layer = partition.layers[segment.groups[0]]
        leaves = [leaf for group in segment.groups for leaf in partition.layers[group].leaves]
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
            dha_bytes_forward=sum(self.touched_forward),
            dha_bytes_backward=sum(self.touched_backward),
            forward_kernels=self.forward.kernels,
            backward_kernels=self.backward.kernels,
            itemsize=max(np.dtype(leaf.dtype).itemsize for leaf in leaves),
            is_whole=layer.is_whole,
        )

    def split(self, whole: LayerCosts, partition: Partition, segment: Segment, uses: Sequence[int]) -> list[LayerCosts]:
        """Splits the costs of the segment among its uses."""
        total = sum(self.touched_forward)
        shares = [size / total if total else 1 / len(uses) for size in self.touched_forward]
        work = [f"{way}_{what}" for way in ("forward", "backward") for what in ("flops", "bytes", "kernels")]
        made = []
        for place, (use, share) in enumerate(zip((partition.uses[number] for number in uses), shares, strict=True)):
            layer, is_first = partition.layers[use.group], place == 0
            costs = dataclasses.replace(
                whole,
                name=use.name,
                parameters=layer.name,
                block=layer.block,
                num_parameters=layer.trained.num_parameters,
                param_bytes=layer.num_bytes,
                grad_bytes=layer.trained.num_bytes,
                dha_bytes_forward=self.touched_forward[place],
                dha_bytes_backward=self.touched_backward[place],
                dha_products_forward=_products(self.reads_forward[place]),
                dha_products_backward=_products(self.reads_backward[place]),
                is_whole=layer.is_whole,
                shares_program=not is_first,
                **({key: getattr(whole, key) * share for key in work} if len(uses) > 1 else {}),
            )
            if not is_first:
                costs = dataclasses.replace(costs, activation_bytes=0, recomputation=None, temporary_bytes={})
            made.append(costs)
        return made

    def recomputation(self, again: _ProgramCosts, activation_bytes: int) -> Recomputation:
        """Returns the additional costs of running the forward again, as in the programs `again`."""
        return Recomputation(
            activation_bytes=activation_bytes,
            flops=again.backward.flops - self.backward.flops,
            bytes=again.backward.bytes - self.backward.bytes,
            kernels=again.backward.kernels - self.backward.kernels,
        )


def _products(reads: Sequence[HostRead]) -> tuple[HostRead, ...]:
    return tuple(read for read in reads if read.flops)


def _forward_jaxpr(graph: Graph, derivative: Derivative) -> Any:
    segment = derivative.segment
    shapes = [_shapes(graph, values) for values in (segment.weights, segment.inputs, segment.nondiff_inputs)]
    return jax.make_jaxpr(derivative.forward)(*shapes)


def _backward_jaxpr(graph: Graph, derivative: Derivative) -> Any:
    return jax.make_jaxpr(derivative.backward)(*derivative.backward_arguments(graph))


def _loss_jaxpr(graph: Graph, derivative: Derivative) -> Any:
    """The program of the last segment: its forward and, for cotangents of 1, its backward."""

    def run(weights: Any, inputs: Any, nondiff_inputs: Any) -> Any:
        outputs, nondiff_outputs, saved = derivative.forward(weights, inputs, nondiff_inputs)
        read = (
            [inputs[i] for i in derivative.inputs_read],
            [nondiff_inputs[i] for i in derivative.nondiff_inputs_read],
            [outputs[i] for i in derivative.outputs_read],
        )
        cotangents = [jnp.ones_like(output) for output in outputs]
        return derivative.backward(weights, *read, saved, cotangents), outputs, nondiff_outputs

    segment = derivative.segment
    shapes = [_shapes(graph, values) for values in (segment.weights, segment.inputs, segment.nondiff_inputs)]
    return jax.make_jaxpr(run)(*shapes)


def _by_variant(num_bytes: tuple[int, int], recomputes: bool = False) -> dict[str, int]:
    """The temporaries of forward and backward as those of all their variants, which differ little in them."""
    forward_bytes, backward_bytes = num_bytes
    forwards = {forward_variant(by_dha, recomputes): forward_bytes for by_dha in (False, True)}
    flags = itertools.product((False, True), repeat=2)
    return forwards | {backward_variant(dha, host, recomputes): backward_bytes for dha, host in flags}


def _shapes(graph: Graph, values: Any) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(graph.avals[value].shape, graph.avals[value].dtype) for value in values]
