"""The functions of programs: where each reads parameters, writes its gradient, and which copies it waits for.

derivative --reads from the key's source--> --writes to the key's target--> --waits for its load--> traced program
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxferry.native import as_stored, targets, twins
from jaxferry.partition import (
    Derivative,
    ForwardPartition,
    Gradient,
    Layer,
    Partition,
    RowGradient,
    Segment,
    forward_of,
    host_stores,
    read_in_place,
    store_in_place,
)
from jaxferry.step import ProgramKey, ProgramKind, Source, Target
from jaxferry.transport import Placement, check_passes, queue_stores

Function = Callable[..., Any]


def trace_program(
    partition: Partition, derivatives: Mapping[int, Derivative], placement: Placement, key: ProgramKey, native: bool
) -> Any:
    """Traces one program without compiling it; it can be lowered for any platform (`jax.stages.Traced`)."""
    return ProgramTracer(partition, derivatives, placement, native).trace(key)


def is_finite(values: Sequence[jax.Array]) -> jax.Array:
    """Returns whether every element of every array is finite as it is stored."""
    checks = [jnp.all(jnp.isfinite(value)) for value in as_stored(values)]
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
    """Traces the functions of a partition's programs; `derivatives` is empty for evaluations."""

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
        segment, number = self._segment(key), None
        if segment.content is None or not isinstance(segment.remat, Hashable):
            return None
        if key.kind is ProgramKind.LOSS:
            assert isinstance(self._partition, Partition)
            number = self._partition.segments[-1].outputs.index(self._partition.loss)
        memories = (self._placement.device, self._placement.pinned)
        fused_bytes = host_stores.FUSED_BYTES if key.writes_host else None
        joins = (key.arrives, key.stores)
        uses = (key.kind, key.reads, key.writes, joins, self._native, self._is_scaled, number, fused_bytes)
        layers, rows = self._layers(segment), self._partition.graph.batch_size
        layouts = tuple((layer.is_whole, layer.layout, layer.trained.layout) for layer in layers)
        return (segment.content, segment.remat, segment.tiling, layouts, uses, memories, rows)

    def exchanged_bytes(self, key: ProgramKey) -> int:
        """Device memory of the exchange that may run before a program; see `Placement.exchanges`."""
        read = zip(self._layers(self._segment(key)), key.reads, strict=True)
        return sum(self._placement.exchanged_bytes(layer) for layer, source in read if source is Source.HOST)

    def _layers(self, segment: Segment) -> list[Layer]:
        return [self._partition.layers[group] for group in segment.groups]

    def _segment(self, key: ProgramKey) -> Segment:
        if key.kind is ProgramKind.EVALUATION:
            return next(s for s in self._partition.segments if s.program == key.program)
        return self._derivatives[key.program].segment

    def batch(self) -> list[Any]:
        """The shapes of the batch's leaves, with their places."""
        return self._placed([self._partition.graph.avals[value] for value in self._partition.graph.batch])

    def trace(self, key: ProgramKey) -> Any:
        """Traces the program of a key for its arguments' shapes; see `Programs.__getitem__` for these."""
        with targets.for_products_of(self._placement.platform):
            return self._trace(key)

    def _trace(self, key: ProgramKey) -> Any:
        segment = self._segment(key)
        if key.kind is ProgramKind.EVALUATION:
            forward = forward_of(self._partition.graph, segment)
            function, arguments = self._sourced(key, segment, forward, self._arguments(segment))
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
        function, arguments = self._sourced(key, segment, function, arguments)
        if key.kind is ProgramKind.FORWARD:
            return self._arriving(key, segment, function, arguments)
        if segment.tiling is not None and self._placement.num_devices > 1:
            function = self._exchanging_once(function)
        return self._targeted(key, segment, function, arguments)

    def _exchanging_once(self, function: Function) -> Function:
        """Makes a function `-> gradients, rest` exchange its gradients after its loop over tiles, not in each tile."""
        graph, placement = self._partition.graph, self._placement

        def placed(array: jax.Array, is_row: bool) -> jax.Array:
            has_own = is_row and array.shape[:1] == (graph.batch_size,)
            return jax.lax.with_sharding_constraint(array, placement.of(graph, array) if has_own else placement.device)

        def once(*args: Any) -> Any:
            gradients, rest = function(*args)
            pairs = [(gradient, isinstance(gradient, RowGradient)) for gradient in gradients]
            return [jax.tree.map(lambda x, own=own: placed(x, own), gradient) for gradient, own in pairs], rest

        return once

    def _sourced(
        self, key: ProgramKey, segment: Segment, function: Function, arguments: list[Any]
    ) -> tuple[Function, list[Any]]:
        """Makes a function of all weights read those of each group from the key's source: `(by group, *others)`."""
        weights, *others = arguments
        by_group, layers = segment.by_group(weights), self._layers(segment)
        is_read = [True] * len(layers)
        if key.kind is ProgramKind.BACKWARD:
            is_read = list(self._derivatives[key.program].reads_groups)

        def of_groups(weights: Any, *others: Any) -> Any:
            found = [
                arrays if read else [jnp.zeros(w.shape, w.dtype) for w in own]
                for arrays, read, own in zip(weights, is_read, by_group, strict=True)
            ]
            return function(segment.from_groups(found), *others)

        of_groups.__name__ = function.__name__

        function_of, weights = of_groups, [own if read else [] for own, read in zip(by_group, is_read, strict=True)]
        for number, source in enumerate(key.reads):
            if source is Source.HOST and is_read[number]:
                function_of, weights = self._in_place(number, layers[number], function_of, weights, others)
        return function_of, [weights, *others]

    def _in_place(
        self, number: int, layer: Layer, function: Function, weights: list[Any], others: list[Any]
    ) -> tuple[Function, list[Any]]:
        """Makes a function of `(by group, *others)` read one group in host memory; returns its new first argument."""

        def of_one(own: Any, rest: Any, *others: Any) -> Any:
            return function([*rest[:number], own, *rest[number:]], *others)

        rest = [*weights[:number], *weights[number + 1 :]]
        there = self._placement.ownership.shared(layer)
        read = read_in_place(of_one, there, [weights[number], rest, *others], self._native)

        def reading(weights: Any, *others: Any) -> Any:
            return read(weights[number], [*weights[:number], *weights[number + 1 :]], *others)

        reading.__name__ = function.__name__
        return reading, [*weights[:number], self._placement.readable(layer), *weights[number + 1 :]]

    def _targeted(self, key: ProgramKey, segment: Segment, function: Function, arguments: list[Any]) -> Any:
        """Traces a function `-> gradients, rest` that writes gradients to the key's target."""
        device, pinned, layers = self._placement.device, self._placement.pinned, self._layers(segment)
        donated: tuple[int, ...] = (4, 5) if key.kind is ProgramKind.BACKWARD else ()
        if key.stores:
            return self._storing(key, segment, self._returning(segment, function), arguments, donated)
        if not key.writes_host:
            returning = self._returning(segment, function)
            where = self._with_gradients(layers, returning, arguments)
            return self._arriving(key, segment, returning, arguments, donated, where)
        if self._placement.num_devices > 1:
            return self._storing_shares(key, segment, function, arguments)
        run, left = _by_group(segment, function), list(arguments)
        places = [number for number, target in enumerate(key.writes) if target is not Target.DEVICE]
        for number in places:
            run, left = self._stored(number, layers[number], key.writes[number], run, left)

        def stored(destinations: Any, *args: Any) -> Any:
            parts, rest = run(*reversed(destinations), *args)
            made = [
                self._joined(layer, part) if target is Target.DEVICE else part
                for layer, part, target in zip(layers, parts, key.writes, strict=True)
            ]
            return [gradients for gradients, _ in made], rest, [norm for _, norm in made]

        destinations = [[_struct(v, pinned) for v in layers[number].trained.vectors] for number in places]
        where = [device if target is Target.DEVICE else pinned for target in key.writes]
        donated = (0, *(number + 1 for number in donated))
        return self._arriving(key, segment, stored, [destinations, *arguments], donated, (where, device, device))

    def _returning(self, segment: Segment, function: Function) -> Function:
        """Makes a function `-> gradients, rest` return joined gradients, rest and norms, by group."""
        by_group, layers = _by_group(segment, function), self._layers(segment)

        def returned(*args: Any) -> Any:
            parts, rest = by_group(*args)
            made = [self._joined(layer, part) for layer, part in zip(layers, parts, strict=True)]
            return [gradients for gradients, _ in made], rest, [norm for _, norm in made]

        return returned

    def _joined(self, layer: Layer, gradients: Sequence[Gradient]) -> tuple[list[Gradient], jax.Array | None]:
        """The gradients of a group as programs return them, and their squared norm."""
        made = as_stored(joined(self._placement.ownership.shared(layer.trained), gradients))
        return made, squared_norm(made)

    def _stored(
        self, number: int, layer: Layer, target: Target, function: Function, arguments: list[Any]
    ) -> tuple[Function, list[Any]]:
        """Makes a function `-> by group, rest` write the gradients of one group to host memory.

        Its part of the result is then the vectors and the norm, and the vectors to write are a further first argument.
        """

        def of_one(*args: Any) -> Any:
            parts, rest = function(*args)
            return parts[number], ([*parts[:number], *parts[number + 1 :]], rest)

        accumulate = target is Target.HOST_SUM
        store = store_in_place(of_one, layer.trained, arguments, accumulate=accumulate, native=self._native)

        def storing(destinations: Any, *args: Any) -> Any:
            vectors, gradients, (others, rest) = store(destinations, *args)
            part = vectors, None if gradients is None else squared_norm(gradients)
            return [*others[:number], part, *others[number:]], rest

        return storing, [[_struct(v, self._placement.pinned) for v in layer.trained.vectors], *arguments]

    def _storing_shares(self, key: ProgramKey, segment: Segment, function: Function, arguments: list[Any]) -> Any:
        """Traces a function whose gradients are summed over the devices, each of which writes its share to the host."""
        layers, by_group = self._layers(segment), _by_group(segment, function)
        written = [number for number, target in enumerate(key.writes) if target is not Target.DEVICE]

        def share(number: int, gradients: Any, destinations: Any) -> Any:
            layer = layers[number]
            own, shares = self._placement.ownership.shared(layer.trained), self._placement.shares_of(layer)
            made = [jax.lax.with_sharding_constraint(vector, shares) for vector in own.pack(gradients)]
            made = as_stored(made)
            norm = squared_norm(made)
            if key.writes[number] is Target.HOST_SUM:
                made = [twins.to_device(known) + vector for known, vector in zip(destinations, made, strict=True)]
            return list(map(twins.to_host, made)), norm

        def stored(destinations: Any, *args: Any) -> Any:
            parts, rest = by_group(*args)
            into = dict(zip(written, destinations, strict=True))
            made = [
                share(number, part, into[number]) if number in into else self._joined(layers[number], part)
                for number, part in enumerate(parts)
            ]
            return [gradients for gradients, _ in made], rest, [norm for _, norm in made]

        def pinned(number: int) -> Any:
            return self._placement.pinned_of(layers[number])

        owned = {number: self._placement.ownership.shared(layers[number].trained) for number in written}
        destinations = [[_struct(v, pinned(number)) for v in owned[number].vectors] for number in written]
        gradients, rest, _ = jax.eval_shape(stored, destinations, *arguments)
        where = [
            pinned(number) if number in owned else self._where_gradients_are(layers[number], own)
            for number, own in enumerate(gradients)
        ]
        donated = (0, 5, 6) if key.kind is ProgramKind.BACKWARD else (0,)
        shardings = (where, self._shared(rest), self._placement.device)
        return self._arriving(key, segment, stored, [destinations, *arguments], donated, shardings)

    def _where_gradients_are(self, layer: Layer, gradients: Sequence[Any]) -> Any:
        return self._placement.device if has_rows(gradients) else self._placement.shares_of(layer)

    def _storing(
        self, key: ProgramKey, segment: Segment, function: Function, arguments: list[Any], donate: tuple[int, ...]
    ) -> Any:
        """Traces a function `-> joined gradients, rest, norms` that also queues the gradients' copies to the host.

        The copies read the gradients after the program has ended. So the gradients are results of an operation that
        works in place: XLA gives those the memory of the program's results, and copies them nowhere else.
        """
        device, pinned, [layer] = self._placement.device, self._placement.pinned, self._layers(segment)

        def returned(destinations: Any, *args: Any) -> Any:
            [made], rest, norms = function(*args)
            sources = targets.ferry_wait(made)
            return [(queue_stores(layer.trained, sources, destinations[0]), sources)], rest, norms

        destinations = [[_struct(v, pinned) for v in layer.trained.vectors]]
        donated = (0, *(number + 1 for number in donate))
        where = ([(pinned, device)], device, device)
        return self._arriving(key, segment, returned, [destinations, *arguments], donated, where)

    def _arriving(
        self,
        key: ProgramKey,
        segment: Segment,
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
        number, [layer] = int(key.writes_host or key.stores), self._layers(segment)

        def arriving(*args: Any) -> Any:
            *own, _ = args
            own[number] = [targets.ferry_wait(own[number][0])]
            return own[number][0], function(*own)

        arriving.__name__ = function.__name__
        device = self._placement.device
        vectors = tuple(_struct(v, self._placement.pinned) for v in layer.vectors)
        where = (device, device if shardings is None else shardings)
        # The vectors are an argument so that their memory is not reused before the load has ended.
        options: dict[str, Any] = {"donate_argnums": (number, *donate), "out_shardings": where, "keep_unused": True}
        return jax.jit(arriving, **options).trace(*arguments, vectors)

    def _loss(self, derivative: Derivative) -> Function:
        assert isinstance(self._partition, Partition)
        number = self._partition.segments[-1].outputs.index(self._partition.loss)

        def seeds(outputs: Any, *scale: jax.Array) -> Any:
            made = [jnp.zeros_like(output) for output in outputs]
            made[number] = as_stored(scale[0].astype(made[number].dtype)) if scale else jnp.ones_like(made[number])
            return made

        def loss(*given: Any) -> Any:
            gradients, (outputs, nondiff_outputs, cotangents) = derivative.both(seeds, *given)
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
        """Structs of values, which devices may share; raises `InputError` if JAX passes no such dtype to programs."""
        for aval in avals:
            check_passes(aval, self._placement)
        return [_struct(aval, self._placement.of(self._partition.graph, aval), aval.weak_type) for aval in avals]

    def _with_gradients(self, layers: Sequence[Layer], function: Function, arguments: Sequence[Any]) -> Any:
        """The shardings of results: devices share gradients and values; each has all of gradients with rows."""
        if self._placement.num_devices == 1:
            return self._placement.device
        by_group, rest, norms = jax.eval_shape(function, *arguments)
        where = [self._where_gradients_are(layer, own) for layer, own in zip(layers, by_group, strict=True)]
        shardings = [jax.tree.map(lambda _, at=at: at, parts) for at, parts in zip(where, by_group, strict=True)]
        return shardings, self._shared(rest), jax.tree.map(lambda _: self._placement.device, norms)

    def _shared(self, results: Any) -> Any:
        return jax.tree.map(lambda aval: self._placement.of(self._partition.graph, aval), results)

    def _traced(self, function: Function, *args: Any, donate: tuple[int, ...] = (), shardings: Any = None) -> Any:
        if shardings is None:
            is_alone = self._placement.num_devices == 1
            shardings = self._placement.device if is_alone else self._shared(jax.eval_shape(function, *args))
        return jax.jit(function, donate_argnums=donate, out_shardings=shardings).trace(*args)


def _by_group(segment: Segment, function: Function) -> Function:
    """Makes a function `-> gradients, rest` return the gradients of each group of its segment apart."""

    def by_group(*args: Any) -> Any:
        gradients, rest = function(*args)
        return segment.trained_by_group(gradients), rest

    return by_group


def _forward_of(derivative: Derivative) -> Function:
    """The forward of a program, which also tells whether its outputs are finite."""

    def forward(weights: Any, inputs: Any, nondiff_inputs: Any) -> Any:
        outputs, nondiff_outputs, saved = derivative.forward(weights, inputs, nondiff_inputs)
        return outputs, nondiff_outputs, saved, is_finite(outputs)

    return forward


def _struct(aval: Any, where: Any, weak_type: bool = False) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=where, weak_type=weak_type)
