"""Applies the argument `tiles`: which segments run in how many tiles along the rows of the batch, or along its tokens.

    tiles = "off" | "auto" | number | {name: number}

Programs are tiled after differentiation: the forward, the backward, or the loss with its gradients. A segment whose
programs do not all tile runs whole. Segments of one program with different tiles become different programs.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import numbers
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jaxferry.errors import InputError
from jaxferry.partition import derivatives
from jaxferry.partition.derivatives import AUTO, REMAT, Derivative, once_for_graph, shapes_of
from jaxferry.partition.graph import Graph, evaluate, trace
from jaxferry.partition.segments import BATCH, TOKENS, ForwardPartition, Segment, Tiling
from jaxferry.partition.tile_analysis import Analysis
from jaxferry.partition.tile_execution import InTiles
from jaxferry.partition.tile_rules import CannotTile, Rows
from jaxferry.processes import is_raw_key

OFF = "off"
"""Every segment runs whole."""

_NOTHING = "there is one row"
_FORWARD = "forward"

Parts = TypeVar("Parts", bound=ForwardPartition)


def check_tiles(tiles: Any) -> Any:
    """Checks `tiles` as far as possible without a model; returns a number, a mapping from names to numbers, or `AUTO`.

    Raises:
      InputError: if it is neither `"off"`, nor `"auto"`, nor a number, nor a mapping to numbers.
    """
    if isinstance(tiles, Mapping):
        return {name: _checked(number, f"tiles[{name!r}]") for name, number in tiles.items()}
    return AUTO if isinstance(tiles, str) and tiles == AUTO else _checked(tiles, "tiles")


def _checked(number: Any, where: str) -> int:
    if isinstance(number, str) and number == OFF:
        return 1
    if not isinstance(number, numbers.Integral) or isinstance(number, bool) or number < 1:
        others = ', or numbers by segment, or "auto"' if where == "tiles" else ""
        raise InputError(f'{where} must be "off" or a number of tiles, 1 or more{others}, got {number!r}')
    return int(number)


def with_tiles(partition: Parts, tiles: Any, choices: Sequence[Any] | None = None) -> Parts:
    """Returns a freshly built partition whose segments run in tiles.

    Args:
      partition: the segments.
      tiles: a number for all segments, numbers of all segments in order, or numbers by name: of a segment, or of a
        block for all of its segments. What cannot be tiled stays whole, but for what is named.
      choices: what each segment keeps for its backward, as of `remat_of`; None for a partition that only evaluates, in
        which names may be unknown.

    Raises:
      InputError: if a mapping names an unknown segment, or one that cannot be tiled.
    """
    numbers = _numbers(partition, tiles, is_strict=choices is not None)
    if max(numbers, default=1) == 1:
        return partition
    size = 1 + max(segment.program for segment in partition.segments)
    rows, num_rows = rows_of_values(partition)
    stops: dict[Any, str] = {}
    segments = []
    for place, (segment, number) in enumerate(zip(partition.segments, numbers, strict=True)):
        remat, is_loss = choices and choices[place], choices is not None and place == len(partition.segments) - 1
        program, reason = segment.program + size * (number - 1), ""
        for tiling in _tilings(partition.graph, segment, number, rows, num_rows) if number > 1 else ():
            tiled = dataclasses.replace(segment, tiling=tiling, program=program)
            key = tiling, program, id(remat) if callable(remat) else remat, is_loss
            if key not in stops:
                stops[key] = _stop(partition.graph, tiled, remat, is_loss)
            reason = reason or stops[key]
            if not stops[key]:
                segments.append(tiled)
                break
        else:
            if reason and reason != _NOTHING and isinstance(tiles, Mapping) and choices is not None:
                raise InputError(f"tiles: {segment.name!r} cannot run in tiles: {reason}")
            segments.append(dataclasses.replace(segment, not_tiled=reason) if reason else segment)
    return dataclasses.replace(partition, segments=tuple(segments))


def _tilings(
    graph: Graph, segment: Segment, number: int, rows: Mapping[int, Rows | None], num_rows: int
) -> list[Tiling]:
    """The ways to share a segment out, the best first: along the batch if that has rows enough, else along tokens."""
    inputs, others = (tuple(rows.get(value) for value in own) for own in (segment.inputs, segment.nondiff_inputs))
    found = [Tiling(number, BATCH, num_rows, inputs, others)]
    lengths, tokens = collections.Counter[int](), list[int]()
    for value, at in zip(segment.inputs, inputs, strict=True):
        shape = graph.avals[value].shape
        tokens.append(shape[1] if at is not None and at.axis == 0 and at.minor == 1 and len(shape) > 2 else 0)
        lengths[tokens[-1]] += math.prod(shape)
    if any(tokens):
        length = max((own for own in lengths if own), key=lambda own: lengths[own])
        along = tuple(Rows(1) if own == length else None for own in tokens)
        found.append(Tiling(number, TOKENS, length, along, (None,) * len(others)))
    return found if number <= num_rows else found[::-1]


def _numbers(partition: ForwardPartition, tiles: Any, is_strict: bool) -> list[int]:
    """The number of tiles of each segment."""
    names = [segment.name for segment in partition.segments]
    if not isinstance(tiles, Mapping):
        return [tiles] * len(names) if isinstance(tiles, int) else list(tiles)
    layers = [partition.layers[segment.groups[0]] for segment in partition.segments]
    blocks = [layer.block or layer.name for layer in layers]
    unknown = [name for name in tiles if name not in names and name not in blocks]
    if unknown and is_strict:
        raise InputError(f"tiles names {unknown[0]!r}, which is not a segment; use one of {', '.join(names)}")
    return [tiles.get(name, tiles.get(block, 1)) for name, block in zip(names, blocks, strict=True)]


def _stop(graph: Graph, segment: Segment, remat: Any, is_loss: bool) -> str:
    """What keeps the programs of a segment from being tiled; empty if nothing does."""
    assert segment.tiling is not None
    if segment.tiling.num_rows < 2:
        return _NOTHING
    try:
        _programs(graph, segment)._forward  # noqa: B018 - made here, or it raises
        for kind in () if remat is None else REMAT if remat == AUTO else (remat,):
            _programs(graph, segment, kind).check(is_loss)
    except CannotTile as stop:
        return str(stop)
    return ""


_ROWS: weakref.WeakKeyDictionary[ForwardPartition, tuple[dict[int, Rows | None], int]] = weakref.WeakKeyDictionary()


def rows_of_values(partition: ForwardPartition) -> tuple[dict[int, Rows | None], int]:
    """Where the values between segments have the rows of the batch, and the number of rows, of each device's share.

    Found once for a partition, which is tried in many numbers of tiles.
    """
    if partition not in _ROWS:
        _ROWS[partition] = _rows_of_values(partition)
    return _ROWS[partition]


def _rows_of_values(partition: ForwardPartition) -> tuple[dict[int, Rows | None], int]:
    graph, devices = partition.graph, partition.graph.num_devices if partition.graph.batch_size else 1
    num_rows, parameters = graph.num_rows // devices, {graph.avals[value].shape for value in graph.parameters}
    rows: dict[int, Rows | None] = {}
    for value in graph.batch:
        shape, dtype = graph.avals[value].shape, graph.avals[value].dtype
        # Running statistics are vectors. A batch that has a matrix's shape by chance has rows.
        is_state = len(shape) == 1 and jnp.issubdtype(dtype, jnp.floating) and shape in parameters
        if shape[:1] == (graph.num_rows,) and not is_state and not is_raw_key(shape, dtype):
            rows[value] = Rows(0, devices)
    if num_rows < 2:  # each axis of size 1 might be that of the rows
        between = (value for segment in partition.segments for value in segment.inputs)
        return rows | {v: Rows(0) for v in between if graph.avals[v].shape[:1] == (graph.num_rows,)}, num_rows

    def prelude(weights: Any, given: Any) -> Any:
        values = {**dict(zip(graph.batch, given, strict=True)), **graph.constants}
        evaluate(partition.prelude, values)
        return [values[value] for value in partition.prelude_outputs]

    rows |= _propagated(graph, prelude, (), graph.batch, partition.prelude_outputs, rows, num_rows)
    known: dict[Any, list[Rows | None]] = {}
    for segment in partition.segments:
        inputs, outputs = (*segment.inputs, *segment.nondiff_inputs), (*segment.outputs, *segment.nondiff_outputs)
        key, count = (segment.program, *(rows.get(value) for value in inputs)), len(segment.inputs)
        if key not in known:  # equal blocks are traced once

            def forward(weights: Any, given: Any, own: Segment = segment, count: int = count) -> Any:
                return own.forward(weights, given[:count], given[count:])

            made = _propagated(graph, forward, segment.weights, inputs, outputs, rows, num_rows)
            known[key] = list(made.values())
        rows |= zip(outputs, known[key], strict=True)
    return rows, num_rows


def _propagated(
    graph: Graph,
    function: Callable[..., Any],
    weights: Sequence[int],
    inputs: Sequence[int],
    outputs: Sequence[int],
    rows: Mapping[int, Rows | None],
    num_rows: int,
) -> dict[int, Rows | None]:
    """Where the results of a function have their rows; what cannot be tiled has none."""
    traced = trace(function, shapes_of(graph, weights), (shapes_of(graph, inputs),), {}, is_derived=True)
    given = {number: rows.get(value) for number, value in zip(traced.batch, inputs, strict=True)}
    analysis = Analysis(traced, given, num_rows, stops=[])
    return {value: analysis.rows_of(atom) for value, atom in zip(outputs, traced.outputs, strict=True)}


class _Tiled:
    """The programs of a segment in any number of tiles, made when they are needed first.

    Args:
      graph: the segment's graph.
      segment: the segment.
      source: its derivative, or its forward alone.
    """

    def __init__(self, graph: Graph, segment: Segment, source: Derivative | Callable[..., Any]) -> None:
        assert segment.tiling is not None
        self._graph, self._segment, self._tiling, self._source = graph, segment, segment.tiling, source

    def check(self, is_loss: bool) -> None:
        """Raises CannotTile if a program of the step cannot be tiled."""
        assert isinstance(self._source, Derivative)
        self._forward  # noqa: B018 - made here, or it raises
        if is_loss:
            self._loss_alone  # noqa: B018 - likewise
        elif self._segment.runs_back:
            self._backward  # noqa: B018

    def forward_in(self, num_tiles: int) -> Callable[..., Any]:
        def forward(*given: Any) -> Any:
            return self._forward.run(num_tiles)(*given)

        return forward

    def backward_in(self, num_tiles: int) -> Callable[..., Any]:
        def backward(*given: Any) -> Any:
            sizes = [len(jax.tree.leaves(part)) for part in given]
            donated = range(sum(sizes[:4]), sum(sizes))
            return self._backward.run(num_tiles, donated)(*given)

        return backward

    def both(self, num_tiles: int, seeds: Callable[..., Any], *given: Any) -> Any:
        loss = self._loss_alone if seeds is ones else self._loss(seeds, given[3:])
        return loss.run(num_tiles)(*given)

    def _in_tiles(self, function: Callable[..., Any], arguments: Sequence[Any], rows: Sequence[Rows | None]) -> InTiles:
        stores = self._tiling.along == TOKENS
        return InTiles(function, arguments, rows, self._tiling.num_rows, self._graph.num_devices, stores)

    @property
    def _arguments(self) -> list[Any]:
        segment = self._segment
        return [shapes_of(self._graph, own) for own in (segment.weights, segment.inputs, segment.nondiff_inputs)]

    @property
    def _rows(self) -> list[Rows | None]:
        return [None] * len(self._segment.weights) + [*self._tiling.inputs, *self._tiling.nondiff_inputs]

    @functools.cached_property
    def _forward(self) -> InTiles:
        if not any(self._rows):
            raise CannotTile("none of its inputs has the rows of the batch")
        function = self._source.forward if isinstance(self._source, Derivative) else self._source
        return self._in_tiles(function, self._arguments, self._rows)

    def _loss(self, seeds: Callable[..., Any], scale: Sequence[Any] = ()) -> InTiles:
        assert isinstance(self._source, Derivative)
        both, more = functools.partial(self._source.both, seeds), [jax.typeof(each) for each in scale]
        shapes = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in more]
        rows = [*self._rows, *[None] * len(shapes)]
        return self._in_tiles(both, [*self._arguments, *shapes], rows)

    @functools.cached_property
    def _loss_alone(self) -> InTiles:
        return self._loss(ones)

    @functools.cached_property
    def _backward(self) -> InTiles:
        derivative, tiling, made = self._source, self._tiling, self._forward.results
        assert isinstance(derivative, Derivative)
        num_outputs, num_saved = len(self._segment.outputs), len(derivative.saved)
        outputs = made[:num_outputs]
        rows: list[Rows | None] = [None] * len(self._segment.weights)
        rows += [tiling.inputs[i] for i in derivative.inputs_read]
        rows += [tiling.nondiff_inputs[i] for i in derivative.nondiff_inputs_read]
        rows += [outputs[i] for i in derivative.outputs_read]
        rows += [*made[len(made) - num_saved :], *outputs]
        return self._in_tiles(derivative.backward, derivative.backward_arguments(self._graph), rows)


def _programs(graph: Graph, segment: Segment, remat: Any = _FORWARD) -> _Tiled:
    """The programs of a segment, made once for all numbers of tiles; `_FORWARD` for that without derivatives alone."""
    assert segment.tiling is not None
    shared = dataclasses.replace(segment, tiling=dataclasses.replace(segment.tiling, num_tiles=1))
    return once_for_graph(_make_programs, graph, shared, remat)


def _make_programs(graph: Graph, segment: Segment, remat: Any) -> _Tiled:
    whole = dataclasses.replace(segment, tiling=None)
    return _Tiled(
        graph, segment, segment.forward if remat == _FORWARD else derivatives.differentiate(graph, whole, remat)
    )


def differentiate(graph: Graph, segment: Segment, remat: Any = None) -> Derivative:
    """As `derivatives.differentiate`; the programs of a segment in tiles run so."""
    whole = derivatives.differentiate(graph, dataclasses.replace(segment, tiling=None), remat)
    if segment.tiling is None:
        return whole
    tiled, number = _programs(graph, segment, remat), segment.tiling.num_tiles
    known = {field.name: getattr(whole, field.name) for field in dataclasses.fields(whole)}
    known |= {"segment": segment, "forward": tiled.forward_in(number)}
    if segment.runs_back:
        known["backward"] = tiled.backward_in(number)
    return TiledDerivative(**known, tiled=tiled)


def ones(outputs: Any) -> Any:
    """The cotangents of a loss alone."""
    return jax.tree.map(jnp.ones_like, outputs)


@dataclasses.dataclass(frozen=True, eq=False)
class TiledDerivative(Derivative):
    """A derivative whose programs run in tiles."""

    tiled: _Tiled | None = None

    def both(self, *args: Any, **kwargs: Any) -> Any:
        """As of `Derivative`, in one program."""
        assert self.tiled is not None
        assert self.segment.tiling is not None
        return self.tiled.both(self.segment.tiling.num_tiles, *args, **kwargs)


def forward_of(graph: Graph, segment: Segment) -> Callable[..., Any]:
    """The forward of a segment without derivatives, in tiles if it has a tiling."""
    if segment.tiling is None:
        return segment.forward
    return _programs(graph, segment).forward_in(segment.tiling.num_tiles)
