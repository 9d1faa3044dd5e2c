"""The compiled programs of a partition: forward and backward for each distinct segment.

The last segment's forward and backward follow each other, so they are one program, `loss`, between whose halves nothing
has to be stored. Handing a backward the buffers of a layer that is dropped after it, for its gradients, was tried: XLA
copies the weights out of the way first, which costs the memory and more time than it saves.
"""

from __future__ import annotations

import enum
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp

from jaxferry.engine.placement import Placement
from jaxferry.partition import Derivative, Gradient, Partition, RowGradient, Segment, differentiate
from jaxferry.partition.graph import evaluate

Compiled = Callable[..., Any]


class Kind(enum.Enum):
    """What a program computes."""

    FORWARD = "forward"
    LOSS = "loss"
    BACKWARD = "backward"


Key = tuple[Kind, int]
"""What is computed, for which program number."""


class Programs:
    """What the executor runs: every program of a training step, compiled side by side where the machine has the cores.

    Args:
      partition: the segments.
      derivatives: for each program number, what its backward reads and what is kept for it.
      placement: where arguments and results live.

    Attributes:
      derivatives: as given.
      prelude: `batch leaves -> prelude values`, or None.
      temporary_bytes: the most device memory that a program needs beside its arguments and results.
    """

    def __init__(self, partition: Partition, derivatives: dict[int, Derivative], placement: Placement) -> None:
        self.derivatives = derivatives
        self.prelude = make_prelude(partition, placement)
        maker = _Maker(partition, derivatives, placement)
        last = partition.segments[-1].program
        earlier = sorted({segment.program for segment in partition.segments[:-1]})
        keys = [(Kind.LOSS, last), *((kind, program) for kind in (Kind.FORWARD, Kind.BACKWARD) for program in earlier)]
        lowered = [maker.lower(key) for key in keys]
        with ThreadPoolExecutor() as pool:
            compiled = list(pool.map(lambda program: program.compile(), lowered))
        self._compiled: dict[Key, Compiled] = dict(zip(keys, compiled, strict=True))
        stats = [program.memory_analysis() for program in compiled]
        self.temporary_bytes = max((s.temp_size_in_bytes for s in stats if s is not None), default=0)

    def forward(self, program: int) -> Compiled:
        """`(weights, inputs, passive) -> (outputs, extras, saved, is_finite)`."""
        return self._compiled[Kind.FORWARD, program]

    def backward(self, program: int) -> Compiled:
        """`(weights, inputs, passive, outputs, saved, cotangents) -> (gradients, input cotangents, squared norm)`.

        `weights` is an empty list where the backward does not read them.
        """
        return self._compiled[Kind.BACKWARD, program]

    def loss(self, program: int) -> Compiled:
        """`(weights, inputs, passive) -> (outputs, extras, is_finite, gradients, input cotangents, squared norm)`."""
        return self._compiled[Kind.LOSS, program]

    @property
    def num_executables(self) -> int:
        """How many programs XLA compiled for a step."""
        return len(self._compiled) + (self.prelude is not None)


def derivatives_of(partition: Partition, remat: str) -> dict[int, Derivative]:
    """The derivative of each distinct segment."""
    first: dict[int, Segment] = {}
    for segment in partition.segments:
        first.setdefault(segment.program, segment)
    return {program: differentiate(partition.graph, segment, remat) for program, segment in first.items()}


def compile_evaluation(partition: Partition, placement: Placement) -> dict[int, Compiled]:
    """Forward programs alone: program number -> `(weights, inputs, passive) -> (outputs, extras)`."""
    make = _Maker(partition, {}, placement)
    return {s.program: make.evaluation(s) for s in {s.program: s for s in partition.segments}.values()}


def make_prelude(partition: Partition, placement: Placement) -> Compiled | None:
    """The jitted prelude, or None if there is nothing to run."""
    if not partition.prelude_outputs:
        return None
    graph = partition.graph

    def prelude(leaves: Sequence[Any]) -> list[Any]:
        values = {**dict(zip(graph.batch, leaves, strict=True)), **graph.constants}
        evaluate(partition.prelude, values)
        return [values[value] for value in partition.prelude_outputs]

    return jax.jit(prelude, out_shardings=placement.device)


def is_finite(values: Sequence[jax.Array]) -> jax.Array:
    """Whether every element of every array is finite."""
    checks = [jnp.all(jnp.isfinite(value)) for value in values]
    return jnp.stack(checks).all() if checks else jnp.bool_(True)


def squared_norm(gradients: Sequence[Gradient]) -> jax.Array | None:
    """Sum of squares in fp32; None if rows are among the gradients, since those may repeat."""
    total = jnp.float32(0)
    for gradient in gradients:
        if isinstance(gradient, RowGradient):
            return None
        total += jnp.sum(jnp.square(gradient.astype(jnp.float32)))
    return total


class _Maker:
    """Lowers the functions of a partition's programs."""

    def __init__(self, partition: Partition, derivatives: dict[int, Derivative], placement: Placement) -> None:
        self._partition, self._derivatives, self._placement = partition, derivatives, placement

    def lower(self, key: Key) -> Any:
        kind, program = key
        derivative = self._derivatives[program]
        if kind is Kind.FORWARD:
            return self._forward(derivative)
        return self._backward(derivative) if kind is Kind.BACKWARD else self._loss(derivative)

    def _forward(self, derivative: Derivative) -> Any:
        def forward(weights: Any, inputs: Any, passive: Any) -> Any:
            outputs, extras, saved = derivative.forward(weights, inputs, passive)
            return outputs, extras, saved, is_finite(outputs)

        return self._lower(forward, *self._arguments(derivative.segment))

    def _backward(self, derivative: Derivative) -> Any:
        segment = derivative.segment
        weights = self._of(segment.weights)

        def backward(given: Any, inputs: Any, passive: Any, outputs: Any, saved: Any, cotangents: Any) -> Any:
            unread = [jnp.zeros(w.shape, w.dtype) for w in weights]
            given = given if derivative.reads_weights else unread
            gradients, cotangents = derivative.backward(given, inputs, passive, outputs, saved, cotangents)
            return gradients, cotangents, squared_norm(gradients)

        arguments = [self._placed(avals) for avals in derivative.backward_arguments(self._partition.graph)]
        arguments[0] = weights if derivative.reads_weights else []
        return self._lower(backward, *arguments, donate=(4, 5))

    def _loss(self, derivative: Derivative) -> Any:
        place = self._partition.segments[-1].outputs.index(self._partition.loss)

        def loss(weights: Any, inputs: Any, passive: Any) -> Any:
            outputs, extras, saved = derivative.forward(weights, inputs, passive)
            seeds = [jnp.zeros_like(output) for output in outputs]
            seeds[place] = jnp.ones_like(outputs[place])
            gradients, cotangents = derivative.backward(
                weights,
                [inputs[i] for i in derivative.inputs_read],
                [passive[i] for i in derivative.passive_read],
                [outputs[i] for i in derivative.outputs_read],
                saved,
                seeds,
            )
            return outputs, extras, is_finite(outputs), gradients, cotangents, squared_norm(gradients)

        return self._lower(loss, *self._arguments(derivative.segment))

    def evaluation(self, segment: Segment) -> Any:
        return self._lower(segment.forward, *self._arguments(segment)).compile()

    def _arguments(self, segment: Segment) -> tuple[list[Any], list[Any], list[Any]]:
        return self._of(segment.weights), self._of(segment.inputs), self._of(segment.passive)

    def _of(self, values: Sequence[int]) -> list[Any]:
        return self._placed([self._partition.graph.avals[value] for value in values])

    def _placed(self, avals: Sequence[Any]) -> list[Any]:
        where = self._placement.device
        return [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=where, weak_type=a.weak_type) for a in avals]

    def _lower(self, function: Callable[..., Any], *args: Any, donate: tuple[int, ...] = ()) -> Any:
        with warnings.catch_warnings():
            # Which of the donated buffers fit a result is XLA's choice; the others are freed after the call.
            warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
            return jax.jit(function, donate_argnums=donate, out_shardings=self._placement.device).lower(*args)
