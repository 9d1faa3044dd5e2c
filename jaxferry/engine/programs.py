"""The compiled programs of a partition: forward and backward for each distinct segment, or its evaluation.

The shadow model determines which programs exist: where each reads parameters and writes gradients. The last segment's
forward and backward follow each other, so they are one program, `loss`, which stores nothing in between. Donating a
dropped layer's buffers to its backward, for the gradients, does not pay: XLA first copies the weights elsewhere, which
costs the same memory and more time than it saves.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxferry.engine.all_processes import check_same
from jaxferry.engine.placement import Placement
from jaxferry.engine.program_keys import ProgramKey, ProgramKind, Source, Target
from jaxferry.engine.shared_programs import compile_shared
from jaxferry.engine.transport.queued import queue_stores
from jaxferry.native import targets
from jaxferry.partition import (
    Derivative,
    ForwardPartition,
    Gradient,
    Layer,
    Partition,
    RowGradient,
    Segment,
    differentiate,
    host_stores,
    read_in_place,
    store_in_place,
)
from jaxferry.partition.graph import evaluate

Compiled = Callable[..., Any]
Function = Callable[..., Any]


class Programs:
    """The programs that the executor runs, compiled in parallel if the machine has the cores.

    Args:
      partition: the segments.
      derivatives: for each program number, the values that its backward reads and keeps; empty for evaluations.
      placement: where arguments and results live.
      native: whether programs read and write host memory by native operations.
      is_scaled: whether the loss is scaled before its backward, by an additional argument of the loss program.
      held: where the programs of `keep` are held for later steps, by content.

    Attributes:
      derivatives, is_scaled: as given.
      prelude: `batch leaves -> prelude values`, or None.
      temporary_bytes: device memory that each program needs beside its arguments and results.
    """

    def __init__(
        self,
        partition: ForwardPartition,
        derivatives: dict[int, Derivative],
        placement: Placement,
        native: bool = False,
        is_scaled: bool = False,
        held: dict[Hashable, Compiled] | None = None,
    ) -> None:
        self._held = {} if held is None else held
        self.is_scaled, self._has_others = is_scaled, placement.num_processes > 1
        self.derivatives = derivatives
        self.prelude = make_prelude(partition, placement)
        self.temporary_bytes: dict[ProgramKey, int] = {}
        self._maker = _Maker(partition, derivatives, placement, native, is_scaled)
        self._compiled: dict[ProgramKey, Any] = {}
        self._lowered: dict[ProgramKey, Any] = {}

    def lowered(self, key: ProgramKey) -> Any:
        """Returns the program of a key before XLA compiles it (`jax.stages.Lowered`)."""
        if key not in self._lowered:
            self._lowered[key] = lower_traced(self.traced(key))
        return self._lowered[key]

    def traced(self, key: ProgramKey) -> Any:
        """Returns the program of a key before it is lowered for a platform (`jax.stages.Traced`)."""
        return self._maker.trace(key)

    def keep(self, keys: Iterable[ProgramKey]) -> None:
        """Drops all programs except these, and holds these for later steps."""
        kept = set(keys)
        self._lowered = {}
        self._compiled = {key: program for key, program in self._compiled.items() if key in kept}
        contents = {key: self._maker.content(key) for key in self._compiled}
        self._held |= {content: self._compiled[key] for key, content in contents.items() if content is not None}

    def require(self, keys: Iterable[ProgramKey]) -> None:
        """Compiles the programs that are not compiled yet."""
        missing = {key: self._maker.content(key) for key in keys if key not in self._compiled}
        if missing and self._has_others:
            check_same("their programs", "".join(self.lowered(key).as_text() for key in missing))
        made = compile_shared(missing, self.lowered)
        self._compiled |= made
        for key, program in made.items():
            stats = program.memory_analysis()
            self.temporary_bytes[key] = 0 if stats is None else stats.temp_size_in_bytes

    def temporary_bytes_of(self, keys: Iterable[ProgramKey]) -> Mapping[ProgramKey, int]:
        """Compiles these programs and returns `temporary_bytes`."""
        self.require(keys)
        return self.temporary_bytes

    def __getitem__(self, key: ProgramKey) -> Compiled:
        """Returns the compiled program.

        `weights` are the group's parameters, or its vectors in host memory if the key reads those:

            evaluation (weights, inputs, nondiff_inputs) -> outputs, nondiff_outputs
            forward   (weights, inputs, nondiff_inputs) -> outputs, nondiff_outputs, saved, is_finite
            loss      ([destinations,] weights, inputs, nondiff_inputs [, scale])
                      -> gradients, (outputs, nondiff_outputs, is_finite, input cotangents), squared norm
            backward  ([destinations,] weights, inputs, nondiff_inputs, outputs, saved, cotangents)
                      -> gradients, input cotangents, squared norm

        Small gradients are joined (`Layer.join_small`), unless some gradients are rows of lookups. A program that
        writes host memory takes the vectors to write as `destinations` and returns them instead of gradients. `weights`
        is an empty list for a backward that reads none. The norm is None unless all gradients were whole on the device.

        A program that stores takes `destinations` too, and returns them with the gradients that it copies there, as a
        pair in place of gradients. One that arrives has a last argument, the vectors that the load of its weights
        reads. It is donated the weights, and returns these and everything else.
        """
        program: Compiled = self._compiled[key]
        return program

    def gradients_of(self, key: ProgramKey) -> Any:
        """The shapes of the gradients that a compiled program returns."""
        made = self._compiled[key].out_info
        return made[1][0] if key.arrives else made[0]

    @property
    def num_executables(self) -> int:
        """The number of programs that XLA compiled for a step."""
        return len(self._compiled) + (self.prelude is not None)


def derivatives_of(
    partition: Partition, remat: Any = None, known: Mapping[int, Derivative] | None = None
) -> dict[int, Derivative]:
    """Differentiates each distinct segment that is not `known`; `remat` as in `differentiate`, the same for all."""
    first: dict[int, Segment] = {}
    for segment in partition.segments:
        if known is None or segment.program not in known:
            first.setdefault(segment.program, segment)
    return {program: differentiate(partition.graph, segment, remat) for program, segment in first.items()}


def trace_program(
    partition: Partition, derivatives: Mapping[int, Derivative], placement: Placement, key: ProgramKey, native: bool
) -> Any:
    """Traces one program without compiling it; it can be lowered for any platform (`jax.stages.Traced`)."""
    return _Maker(partition, derivatives, placement, native).trace(key)


def lower_traced(traced: Any, platform: str | None = None) -> Any:
    """Lowers a traced program for a platform (`"cuda"`), by default that of its arguments."""
    with warnings.catch_warnings():
        # XLA chooses which donated buffers fit a result; the others are freed after the call.
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        return traced.lower() if platform is None else traced.lower(lowering_platforms=(platform,))


def make_prelude(partition: ForwardPartition, placement: Placement) -> Compiled | None:
    """Returns the jitted prelude, or None if there is nothing to run."""
    if not partition.prelude_outputs:
        return None
    graph = partition.graph

    def prelude(leaves: Sequence[Any]) -> list[Any]:
        values = {**dict(zip(graph.batch, leaves, strict=True)), **graph.constants}
        evaluate(partition.prelude, values)
        return [values[value] for value in partition.prelude_outputs]

    shardings: Any = placement.device
    if placement.num_devices > 1:
        shardings = [placement.of(graph, graph.avals[value]) for value in partition.prelude_outputs]
    return jax.jit(prelude, out_shardings=shardings)


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


class _Maker:
    """Traces the functions of a partition's programs."""

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

    def _segment(self, key: ProgramKey) -> Segment:
        if key.kind is ProgramKind.EVALUATION:
            return next(s for s in self._partition.segments if s.program == key.program)
        return self._derivatives[key.program].segment

    def trace(self, key: ProgramKey) -> Any:
        segment = self._segment(key)
        if key.kind is ProgramKind.EVALUATION:
            layer = self._partition.layers[segment.group]
            function, arguments = self._sourced(key, layer, segment.forward, self._arguments(segment))
            return self._traced(function, *arguments)
        derivative = self._derivatives[key.program]
        if key.kind is ProgramKind.FORWARD:
            function, arguments = self._forward(derivative), self._arguments(segment)
        elif key.kind is ProgramKind.LOSS:
            scale = [self._struct(jax.ShapeDtypeStruct((), jnp.float32), self._placement.device)]
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
            vectors = [self._struct(v, self._placement.pinned) for v in layer.vectors]
            return read_in_place(function, layer, arguments, self._native), [vectors, *others]
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
        accumulate = key.writes is Target.HOST_SUM
        store = store_in_place(function, layer.trained, arguments, accumulate=accumulate, native=self._native)

        def stored(destinations: Any, *given: Any) -> Any:
            vectors, gradients, rest = store(destinations, *given)
            return vectors, rest, None if gradients is None else squared_norm(gradients)

        destinations = [self._struct(v, pinned) for v in layer.trained.vectors]
        donated = (0, 5, 6) if key.kind is ProgramKind.BACKWARD else (0,)
        return self._arriving(key, layer, stored, [destinations, *arguments], donated, (pinned, device, device))

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

        destinations = [self._struct(v, pinned) for v in layer.trained.vectors]
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
        vectors = tuple(self._struct(v, self._placement.pinned) for v in layer.vectors)
        where = (device, device if shardings is None else shardings)
        # The vectors are an argument so that their memory is not reused before the load has ended.
        options: dict[str, Any] = {"donate_argnums": (place, *donate), "out_shardings": where, "keep_unused": True}
        return jax.jit(arriving, **options).trace(*arguments, vectors)

    def _forward(self, derivative: Derivative) -> Function:
        def forward(weights: Any, inputs: Any, nondiff_inputs: Any) -> Any:
            outputs, nondiff_outputs, saved = derivative.forward(weights, inputs, nondiff_inputs)
            return outputs, nondiff_outputs, saved, is_finite(outputs)

        return forward

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
        return [self._struct(aval, self._placement.device, aval.weak_type) for aval in avals]

    def _placed(self, avals: Sequence[Any]) -> list[Any]:
        """Structs of values, which devices may share."""
        return [self._struct(aval, self._placement.of(self._partition.graph, aval), aval.weak_type) for aval in avals]

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

    def _struct(self, aval: Any, where: Any, weak_type: bool = False) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=where, weak_type=weak_type)

    def _traced(self, function: Function, *args: Any, donate: tuple[int, ...] = (), shardings: Any = None) -> Any:
        if shardings is None:
            is_alone = self._placement.num_devices == 1
            shardings = self._placement.device if is_alone else self._shared(jax.eval_shape(function, *args))
        return jax.jit(function, donate_argnums=donate, out_shardings=shardings).trace(*args)
