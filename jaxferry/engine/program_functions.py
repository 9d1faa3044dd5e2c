"""The functions of programs: where each reads parameters, writes its gradient, and which copies it waits for.

derivative --reads from the key's source--> --writes to the key's target--> --waits for its load--> traced program
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxferry.engine.placement import Placement
from jaxferry.engine.program_keys import ProgramKey, ProgramKind, Source, Target
from jaxferry.engine.transport.queued import queue_stores
from jaxferry.native import targets, twins
from jaxferry.partition import (
    Derivative,
    ForwardPartition,
    Gradient,
    Layer,
    Partition,
    RowGradient,
    Segment,
    host_stores,
    read_in_place,
    store_in_place,
)

Function = Callable[..., Any]


def trace_program(
    partition: Partition, derivatives: Mapping[int, Derivative], placement: Placement, key: ProgramKey, native: bool
) -> Any:
    """Traces one program without compiling it; it can be lowered for any platform (`jax.stages.Traced`)."""
    return ProgramTracer(partition, derivatives, placement, native).trace(key)


def is_finite(values: Sequence[jax.Array]) -> jax.Array:
    """Whether every element of every array is finite."""
    checks = [jnp.all(jnp.isfinite(value)) for value in values]
    return jnp.stack(checks).all() if checks else jnp.bool_(True)


def squared_norm(gradients: Sequence[Gradient]) -> jax.Array | None:
    """Returns the sum of squares in fp32; None if any gradient consists of rows, since rows may repeat."""
    total = jnp.float32(0)
    for gradient in gradients:
        if isinstance(gradient, RowGradient):
            return None
        total += jnp.sum(jnp.square(gradient.astype(jnp.float32)))
    return total


def joined(layer: Layer, gradients: Sequence[Gradient]) -> list[Gradient]:
    """The gradients of a layer as programs return them: small ones are joined, unless some are rows of lookups."""
    arrays = [gradient for gradient in gradients if not isinstance(gradient, RowGradient)]
    return list(gradients) if len(arrays) < len(gradients) else list(layer.join_small(arrays))


def has_rows(gradients: Sequence[Gradient]) -> bool:
    """Whether some gradients are rows of lookups."""
    return any(isinstance(gradient, RowGradient) for gradient in gradients)


class ProgramTracer:
    """Traces the functions of a partition's programs.

    Args:
      partition: the segments.
      derivatives: by program number; empty for evaluations.
      placement: where arguments and results live.
      native: whether programs read and write host memory by native operations.
      is_scaled: whether the loss is scaled before its backward.
    """

    def __init__(
        self,
        partition: ForwardPartition,
        derivatives: Mapping[int, Derivative],
        placement: Placement,
        native: bool = False,
        is_scaled: bool = False,
    ) -> None:
        self._partition, self._derivatives, self._placement = partition, derivatives, placement
        self._native, self._is_scaled = native, is_scaled

    def content(self, key: ProgramKey) -> Hashable | None:
        """Everything that a program depends on; None if that cannot be compared between partitions."""
        segment, place = self._segment(key), None
        if segment.content is None or not isinstance(segment.remat, Hashable):
            return None
        if key.kind is ProgramKind.LOSS:
            assert isinstance(self._partition, Partition)
            place = self._partition.segments[-1].outputs.index(self._partition.loss)
        memories = (self._placement.device, self._placement.pinned)
        fused_bytes = None if key.writes is Target.DEVICE else host_stores.FUSED_BYTES
        joins = (key.arrives, key.stores)
        uses = (key.kind, key.reads, key.writes, joins, self._native, self._is_scaled, place, fused_bytes)
        layer, rows = self._partition.layers[segment.group], self._partition.graph.batch_size
        layouts = (layer.is_whole, layer.layout, layer.trained.layout)
        return (segment.content, segment.remat, layouts, uses, memories, rows)

    def exchanged_bytes(self, key: ProgramKey) -> int:
        """Device memory of the exchange that may run before a program; see `Placement.exchanges`."""
        if key.reads is not Source.HOST:
            return 0
        return self._placement.exchanged_bytes(self._partition.layers[self._segment(key).group])

    def _segment(self, key: ProgramKey) -> Segment:
        if key.kind is ProgramKind.EVALUATION:
            return next(s for s in self._partition.segments if s.program == key.program)
        return self._derivatives[key.program].segment

    def trace(self, key: ProgramKey) -> Any:
        """Traces the program of a key for its arguments' shapes; see `Programs.__getitem__` for these."""
        segment = self._segment(key)
        if key.kind is ProgramKind.EVALUATION:
            layer = self._partition.layers[segment.group]
            function, arguments = self._sourced(key, layer, segment.forward, self._arguments(segment))
            return self._traced(function, *arguments)
        derivative = self._derivatives[key.program]
        if key.kind is ProgramKind.FORWARD:
            function, arguments = _forward_of(derivative), self._arguments(segment)
        elif key.kind is ProgramKind.LOSS:
            scale = [_struct(jax.ShapeDtypeStruct((), jnp.float32), self._placement.device)]
            function, arguments = self._loss(derivative), self._arguments(segment) + scale * self._is_scaled
        else:
            function = derivative.backward
            weights, *others = derivative.backward_arguments(self._partition.graph)
            arguments = [self._whole(weights), *map(self._placed, others)]
        layer = self._partition.layers[segment.group]
        function, arguments = self._sourced(key, layer, function, arguments)
        if key.kind is ProgramKind.FORWARD:
            return self._arriving(key, layer, function, arguments)
        return self._targeted(key, layer, function, arguments)

    def _sourced(
        self, key: ProgramKey, layer: Layer, function: Function, arguments: list[Any]
    ) -> tuple[Function, list[Any]]:
        """Makes a function read the parameters from the key's source."""
        weights, *others = arguments
        if key.reads is Source.HOST:
            vectors = self._placement.readable(layer)
            there = self._placement.ownership.shared(layer)
            return read_in_place(function, there, arguments, self._native), [vectors, *others]
        if key.kind is not ProgramKind.BACKWARD or self._derivatives[key.program].reads_weights:
            return function, arguments

        def unread(given: Any, *others: Any) -> Any:
            return function([jnp.zeros(w.shape, w.dtype) for w in weights], *others)

        return unread, [[], *others]

    def _targeted(self, key: ProgramKey, layer: Layer, function: Function, arguments: list[Any]) -> Any:
        """Traces a function `-> gradients, rest` that writes its gradients to the key's target.

        A backward donates its residuals and cotangents, since nothing else reads them.
        """
        device, pinned = self._placement.device, self._placement.pinned
        if key.writes is Target.DEVICE:
            own = self._placement.ownership.shared(layer.trained)

            def returned(*given: Any) -> Any:
                gradients, rest = function(*given)
                made = joined(own, gradients)
                return made, rest, squared_norm(gradients if own is layer.trained else made)

            used = (4, 5) if key.kind is ProgramKind.BACKWARD else ()
            if key.stores:
                return self._storing(key, layer, returned, arguments, used)
            where = self._with_gradients(layer, returned, arguments)
            return self._arriving(key, layer, returned, arguments, used, where)
        if self._placement.num_devices > 1:
            return self._storing_shares(key, layer, function, arguments)
        accumulate = key.writes is Target.HOST_SUM
        store = store_in_place(function, layer.trained, arguments, accumulate=accumulate, native=self._native)

        def stored(destinations: Any, *given: Any) -> Any:
            vectors, gradients, rest = store(destinations, *given)
            return vectors, rest, None if gradients is None else squared_norm(gradients)

        destinations = [_struct(v, pinned) for v in layer.trained.vectors]
        donated = (0, 5, 6) if key.kind is ProgramKind.BACKWARD else (0,)
        return self._arriving(key, layer, stored, [destinations, *arguments], donated, (pinned, device, device))

    def _storing_shares(self, key: ProgramKey, layer: Layer, function: Function, arguments: list[Any]) -> Any:
        """Traces a function whose gradients are summed over the devices, each of which writes its share to the host."""
        own = self._placement.ownership.shared(layer.trained)
        shares, pinned = self._placement.shares_of(layer), self._placement.pinned_of(layer)

        def stored(destinations: Any, *given: Any) -> Any:
            gradients, rest = function(*given)
            made = [jax.lax.with_sharding_constraint(vector, shares) for vector in own.pack(gradients)]
            norm = squared_norm(made)
            if key.writes is Target.HOST_SUM:
                made = [twins.to_device(known) + vector for known, vector in zip(destinations, made, strict=True)]
            return list(map(twins.to_host, made)), rest, norm

        destinations = [_struct(v, pinned) for v in own.vectors]
        _, rest, _ = jax.eval_shape(stored, destinations, *arguments)
        where = (pinned, self._shared(rest), self._placement.device)
        donated = (0, 5, 6) if key.kind is ProgramKind.BACKWARD else (0,)
        return self._arriving(key, layer, stored, [destinations, *arguments], donated, where)

    def _storing(
        self, key: ProgramKey, layer: Layer, function: Function, arguments: list[Any], donate: tuple[int, ...]
    ) -> Any:
        """Traces a function `-> joined gradients, rest, norm` that also queues the gradients' copies to the host.

        The copies read the gradients after the program has ended. So the gradients are results of an operation that
        works in place: XLA gives those the memory of the program's results, and copies them nowhere else.
        """
        device, pinned = self._placement.device, self._placement.pinned

        def returned(destinations: Any, *given: Any) -> Any:
            made, rest, norm = function(*given)
            sources = targets.ferry_wait(made)
            return (queue_stores(layer.trained, sources, destinations), sources), rest, norm

        destinations = [_struct(v, pinned) for v in layer.trained.vectors]
        donated = (0, *(number + 1 for number in donate))
        where = ((pinned, device), device, device)
        return self._arriving(key, layer, returned, [destinations, *arguments], donated, where)

    def _arriving(
        self,
        key: ProgramKey,
        layer: Layer,
        function: Function,
        arguments: list[Any],
        donate: tuple[int, ...] = (),
        shardings: Any = None,
    ) -> Any:
        """Traces a function that waits for the load of its parameters first, if the key says so.

        The parameters are the first results: JAX gives donated memory to the first results of the same shape.
        """
        if not key.arrives:
            return self._traced(function, *arguments, donate=donate, shardings=shardings)
        place = 0 if key.writes is Target.DEVICE and not key.stores else 1

        def arriving(*given: Any) -> Any:
            *own, _ = given
            own[place] = targets.ferry_wait(own[place])
            return own[place], function(*own)

        arriving.__name__ = function.__name__
        device = self._placement.device
        vectors = tuple(_struct(v, self._placement.pinned) for v in layer.vectors)
        where = (device, device if shardings is None else shardings)
        # The vectors are an argument so that their memory is not reused before the load has ended.
        options: dict[str, Any] = {"donate_argnums": (place, *donate), "out_shardings": where, "keep_unused": True}
        return jax.jit(arriving, **options).trace(*arguments, vectors)

    def _loss(self, derivative: Derivative) -> Function:
        assert isinstance(self._partition, Partition)
        place = self._partition.segments[-1].outputs.index(self._partition.loss)

        def loss(weights: Any, inputs: Any, nondiff_inputs: Any, *scale: jax.Array) -> Any:
            outputs, nondiff_outputs, saved = derivative.forward(weights, inputs, nondiff_inputs)
            seeds = [jnp.zeros_like(output) for output in outputs]
            seeds[place] = scale[0].astype(seeds[place].dtype) if scale else jnp.ones_like(seeds[place])
            gradients, cotangents = derivative.backward(
                weights,
                [inputs[i] for i in derivative.inputs_read],
                [nondiff_inputs[i] for i in derivative.nondiff_inputs_read],
                [outputs[i] for i in derivative.outputs_read],
                saved,
                seeds,
            )
            return gradients, (outputs, nondiff_outputs, is_finite(outputs), cotangents)

        return loss

    def _arguments(self, segment: Segment) -> list[Any]:
        read = (segment.weights, segment.inputs, segment.nondiff_inputs)
        weights, *others = [[self._partition.graph.avals[value] for value in values] for values in read]
        return [self._whole(weights), *map(self._placed, others)]

    def _whole(self, avals: Sequence[Any]) -> list[Any]:
        """Structs of arrays that each device has all of: parameters."""
        return [_struct(aval, self._placement.device, aval.weak_type) for aval in avals]

    def _placed(self, avals: Sequence[Any]) -> list[Any]:
        """Structs of values, which devices may share."""
        return [_struct(aval, self._placement.of(self._partition.graph, aval), aval.weak_type) for aval in avals]

    def _with_gradients(self, layer: Layer, function: Function, arguments: Sequence[Any]) -> Any:
        """The shardings of results: devices share gradients and values; each has all of gradients with rows."""
        if self._placement.num_devices == 1:
            return self._placement.device
        gradients, rest, norm = jax.eval_shape(function, *arguments)
        where = self._placement.device if has_rows(gradients) else self._placement.shares_of(layer)
        return (
            jax.tree.map(lambda _: where, gradients),
            self._shared(rest),
            None if norm is None else self._placement.device,
        )

    def _shared(self, results: Any) -> Any:
        """The shardings of values."""
        return jax.tree.map(lambda aval: self._placement.of(self._partition.graph, aval), results)

    def _traced(self, function: Function, *args: Any, donate: tuple[int, ...] = (), shardings: Any = None) -> Any:
        if shardings is None:
            is_alone = self._placement.num_devices == 1
            shardings = self._placement.device if is_alone else self._shared(jax.eval_shape(function, *args))
        return jax.jit(function, donate_argnums=donate, out_shardings=shardings).trace(*args)


def _forward_of(derivative: Derivative) -> Function:
    """The forward of a program, which also tells whether its outputs are finite."""

    def forward(weights: Any, inputs: Any, nondiff_inputs: Any) -> Any:
        outputs, nondiff_outputs, saved = derivative.forward(weights, inputs, nondiff_inputs)
        return outputs, nondiff_outputs, saved, is_finite(outputs)

    return forward


def _struct(aval: Any, where: Any, weak_type: bool = False) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=where, weak_type=weak_type)
