"""The compiled programs of a partition: forward and backward for each distinct segment.

A program takes the flat vectors of its layer and cuts the parameters out of them. The last segment's forward and
backward follow each other, so they are one program, `loss`, between whose halves nothing has to be stored.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp

from jaxferry.engine.placement import Placement
from jaxferry.partition import Derivative, Layer, Partition, Segment, differentiate
from jaxferry.partition.graph import evaluate

Compiled = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Programs:
    """What the executor runs.

    Attributes:
      derivatives: for each program number, what its backward reads and what is kept for it.
      forward: program number -> `(vectors, inputs, passive) -> (outputs, extras, saved, is_finite)`.
      backward: program number -> `(vectors, inputs, passive, outputs, saved, cotangents) -> (gradient vectors, input
        cotangents, squared norm)`; vectors are left out (an empty tuple) where the backward does not read them.
      loss: `(vectors, inputs, passive) -> (outputs, extras, is_finite, gradient vectors, input cotangents, squared norm)`
        for the last segment.
      prelude: `batch leaves -> prelude values`, or None.
      temporary_bytes: the most device memory that any program needs beside its arguments and results.
    """

    derivatives: dict[int, Derivative]
    forward: dict[int, Compiled]
    backward: dict[int, Compiled]
    loss: Compiled
    prelude: Compiled | None
    temporary_bytes: int

    @property
    def num_executables(self) -> int:
        """How many programs XLA compiled."""
        return len(self.forward) + len(self.backward) + 1 + (self.prelude is not None)


def derivatives_of(partition: Partition, remat: str) -> dict[int, Derivative]:
    """The derivative of each distinct segment."""
    first: dict[int, Segment] = {}
    for segment in partition.segments:
        first.setdefault(segment.program, segment)
    return {program: differentiate(partition.graph, segment, remat) for program, segment in first.items()}


def compile_programs(partition: Partition, derivatives: dict[int, Derivative], placement: Placement) -> Programs:
    """Compiles every program of a training step, side by side where the machine has the cores."""
    make = _Maker(partition, derivatives, placement)
    last = partition.segments[-1].program
    earlier = {segment.program for segment in partition.segments[:-1]}
    lowered = {("loss", last): make.loss(last)}
    lowered |= {("forward", program): make.forward(program) for program in sorted(earlier)}
    lowered |= {("backward", program): make.backward(program) for program in sorted(earlier)}
    with ThreadPoolExecutor() as pool:
        compiled = dict(zip(lowered, pool.map(lambda program: program.compile(), lowered.values()), strict=True))
    stats = [program.memory_analysis() for program in compiled.values()]
    return Programs(
        derivatives=derivatives,
        forward={program: compiled["forward", program] for program in earlier},
        backward={program: compiled["backward", program] for program in earlier},
        loss=compiled["loss", last],
        prelude=make_prelude(partition, placement),
        temporary_bytes=max((s.temp_size_in_bytes for s in stats if s is not None), default=0),
    )


def compile_evaluation(partition: Partition, placement: Placement) -> dict[int, Compiled]:
    """Forward programs alone: program number -> `(vectors, inputs, passive) -> (outputs, extras)`."""
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


def squared_norm(vectors: Sequence[jax.Array]) -> jax.Array:
    """Sum of squares in fp32."""
    return sum((jnp.sum(jnp.square(v.astype(jnp.float32))) for v in vectors), start=jnp.float32(0))


class _Maker:
    """Lowers the functions of a partition's programs."""

    def __init__(self, partition: Partition, derivatives: dict[int, Derivative], placement: Placement) -> None:
        self._partition, self._derivatives, self._placement = partition, derivatives, placement
        self._layers: dict[int, Layer] = {s.program: partition.layers[s.layer] for s in partition.segments}

    def forward(self, program: int) -> Any:
        derivative, layer = self._derivatives[program], self._layers[program]

        def forward(vectors: Any, inputs: Any, passive: Any) -> Any:
            outputs, extras, saved = derivative.forward(layer.unpack(vectors), inputs, passive)
            return outputs, extras, saved, is_finite(outputs)

        segment = derivative.segment
        return self._lower(forward, layer.vectors, self._of(segment.inputs), self._of(segment.passive))

    def backward(self, program: int) -> Any:
        derivative, layer = self._derivatives[program], self._layers[program]

        def backward(vectors: Any, inputs: Any, passive: Any, outputs: Any, saved: Any, cotangents: Any) -> Any:
            weights = layer.unpack(vectors if derivative.reads_weights else [jnp.zeros(v.shape, v.dtype) for v in layer.vectors])
            gradients, cotangents = derivative.backward(weights, inputs, passive, outputs, saved, cotangents)
            packed = layer.pack(gradients)
            return packed, cotangents, squared_norm(packed)

        segment = derivative.segment
        return self._lower(
            backward,
            layer.vectors if derivative.reads_weights else (),
            [self._of(segment.inputs)[i] for i in derivative.inputs_read],
            [self._of(segment.passive)[i] for i in derivative.passive_read],
            [self._of(segment.outputs)[i] for i in derivative.outputs_read],
            [jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=self._placement.device) for aval in derivative.saved],
            self._of(segment.outputs),
            donate=(4, 5),
        )

    def loss(self, program: int) -> Any:
        derivative, layer = self._derivatives[program], self._layers[program]
        segment = self._partition.segments[-1]
        place = segment.outputs.index(self._partition.loss)

        def loss(vectors: Any, inputs: Any, passive: Any) -> Any:
            weights = layer.unpack(vectors)
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
            packed = layer.pack(gradients)
            return outputs, extras, is_finite(outputs), packed, cotangents, squared_norm(packed)

        return self._lower(loss, layer.vectors, self._of(segment.inputs), self._of(segment.passive))

    def evaluation(self, segment: Segment) -> Any:
        layer = self._layers[segment.program]

        def forward(vectors: Any, inputs: Any, passive: Any) -> Any:
            return segment.forward(layer.unpack(vectors), inputs, passive)

        return self._lower(forward, layer.vectors, self._of(segment.inputs), self._of(segment.passive)).compile()

    def _of(self, values: Sequence[int]) -> list[Any]:
        avals = [self._partition.graph.avals[value] for value in values]
        where = self._placement.device
        return [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=where, weak_type=a.weak_type) for a in avals]

    def _lower(self, function: Callable[..., Any], vectors: Sequence[Any], *args: Any, donate: tuple[int, ...] = ()) -> Any:
        where = self._placement.device
        held = tuple(jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=where) for v in vectors)
        with warnings.catch_warnings():
            # Which of the donated buffers fit a result is XLA's choice; the others are freed after the call.
            warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
            return jax.jit(function, donate_argnums=donate, out_shardings=where).lower(held, *args)
