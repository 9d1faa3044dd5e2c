"""Makes segments of the cut equations, and shows them as a table."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import rich.console
import rich.markup
import rich.table

from jaxferry.partition.cuts import Dataflow, Merge
from jaxferry.partition.graph import Atom, Equation, Graph, evaluate, is_inexact
from jaxferry.partition.layout import Layer
from jaxferry.partition.tile_rules import Rows
from jaxferry.units import format_bytes


@dataclasses.dataclass(frozen=True)
class Use:
    """A segment's use of a parameter group: the unit of planning.

    Attributes:
      name: the layer's name, with `#2`, `#3`, ... appended for its second, third, ... use.
      segment: index of the segment.
      place: the group's place among the segment's groups.
      group: index of the group (a `Layer`).
      is_trained: whether it computes a gradient.
    """

    name: str
    segment: int
    place: int
    group: int
    is_trained: bool


BATCH, TOKENS = "batch", "tokens"


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How a segment's programs run in tiles.

    Attributes:
      num_tiles: at most so many, of at least a row.
      along: what its rows are: those of the batch, or of the axis behind it (`"tokens"`).
      num_rows: the number of rows; of a batch, those of each device's share of it.
      inputs, nondiff_inputs: where each of these values has its rows; None for what all tiles see whole.
    """

    num_tiles: int
    along: str
    num_rows: int
    inputs: tuple[Rows | None, ...]
    nondiff_inputs: tuple[Rows | None, ...]

    @property
    def actual_tiles(self) -> int:
        """The number of tiles, which all have the same number of rows but for the last one."""
        return -(-self.num_rows // -(-self.num_rows // self.num_tiles))


@dataclasses.dataclass(frozen=True, eq=False)
class Segment:
    """A stretch of the program, compiled as one forward and one backward program.

    Values are numbers in the graph. `forward` takes them in the order `weights`, `inputs`, `nondiff_inputs`.

    Attributes:
      name: the block's name, with `#2`, `#3`, ... appended for the block's second, third, ... segment.
      groups: indices of the parameter groups (`Layer`s) that it reads; most segments read one.
      equations: the equations, including views.
      weights: the groups' parameter leaves, in an order that does not depend on how fine the groups are.
      members: for each group, the indices of its leaves in `weights`.
      inputs: differentiable values from earlier segments.
      nondiff_inputs: all other values that it reads: batch, constants, prelude outputs, non-differentiable values.
      outputs: differentiable values that later segments read, or the loss.
      nondiff_outputs: non-differentiable values that later segments or the caller read.
      trained: indices of the `weights` that have a gradient.
      alive_bytes: bytes of the values alive at its end.
      program: the program number; segments with the same number share compiled programs.
      content: a digest of the program, equal for equal programs of any partitions; None if a part of it, such as a
        Python callback, can be compared only by identity.
      remat: what it keeps between forward and backward: one of `REMAT`, `AUTO`, or a policy (`remat.py`).
      tiling: how its programs run in tiles; None for programs of the whole batch (`tiles.py`).
      not_tiled: why it does not run in tiles though it was to; else empty.
    """

    name: str
    groups: tuple[int, ...]
    equations: tuple[Equation, ...]
    weights: tuple[int, ...]
    members: tuple[tuple[int, ...], ...]
    inputs: tuple[int, ...]
    nondiff_inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    nondiff_outputs: tuple[int, ...]
    trained: tuple[int, ...]
    alive_bytes: int
    program: int = -1
    content: str | None = None
    remat: Any = "none"
    tiling: Tiling | None = None
    not_tiled: str = ""

    @property
    def num_tiles(self) -> int:
        """The number of tiles that its programs run in."""
        return 1 if self.tiling is None else self.tiling.actual_tiles

    @property
    def signature(self) -> tuple[Any, ...]:
        """Equal for segments with the same equations and values of one graph."""
        values = (self.weights, self.inputs, self.nondiff_inputs, self.outputs, self.nondiff_outputs)
        return (self.equations, *values, self.members, self.trained, self.tiling)

    @property
    def group(self) -> int:
        """The group of a segment that reads one."""
        [group] = self.groups
        return group

    def by_group(self, of_weights: Sequence[Any]) -> list[list[Any]]:
        """Splits what there is of each of the `weights` by group."""
        return [[of_weights[i] for i in own] for own in self.members]

    def from_groups(self, by_group: Sequence[Sequence[Any]]) -> list[Any]:
        """Reverses `by_group`."""
        found = {
            i: each
            for own, parts in zip(self.members, by_group, strict=True)
            for i, each in zip(own, parts, strict=True)
        }
        return [found[i] for i in range(len(self.weights))]

    def trained_by_group(self, of_trained: Sequence[Any]) -> list[list[Any]]:
        """Splits what there is of each of the `trained` weights by group."""
        given = dict(zip(self.trained, of_trained, strict=True))
        return [[given[i] for i in each if i in given] for each in self.by_group(range(len(self.weights)))]

    @property
    def runs_back(self) -> bool:
        """Whether it has a backward: some parameter in it or before it is trained."""
        return bool(self.trained or self.inputs)

    def forward(
        self, weights: Sequence[Any], inputs: Sequence[Any], nondiff_inputs: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Runs the segment on arrays or tracers; returns the values of `outputs` and `nondiff_outputs`."""
        numbers = (*self.weights, *self.inputs, *self.nondiff_inputs)
        values = dict(zip(numbers, (*weights, *inputs, *nondiff_inputs), strict=True))
        evaluate(self.equations, values)
        return [values[value] for value in self.outputs], [values[value] for value in self.nondiff_outputs]


@dataclasses.dataclass(frozen=True, eq=False)
class ForwardPartition:
    """A function of parameters as an ordered list of segments over layers.

    Attributes:
      layers: the layers, in order of first use, then layers that no segment reads.
      segments: the segments, in order.
      graph: the traced function, which numbers all values.
      prelude: equations that run once per step, before the first segment.
      prelude_outputs: prelude values that segments or the caller read.
      notes: scanned parameters that could not be cut by layer, and why.
      merges: layers that were merged, and why.
    """

    layers: tuple[Layer, ...]
    segments: tuple[Segment, ...]
    graph: Graph
    prelude: tuple[Equation, ...]
    prelude_outputs: tuple[int, ...]
    notes: tuple[str, ...]
    merges: tuple[Merge, ...]

    @functools.cached_property
    def uses(self) -> tuple[Use, ...]:
        """The uses of groups, in the order of the segments: what a profile and a plan call layers."""
        made, count = [], collections.Counter[int]()
        for number, segment in enumerate(self.segments):
            trained = segment.trained_by_group(segment.trained)
            for place, group in enumerate(segment.groups):
                count[group] += 1
                suffix = f"#{count[group]}" if count[group] > 1 else ""
                made.append(Use(self.layers[group].name + suffix, number, place, group, bool(trained[place])))
        return tuple(made)

    @functools.cached_property
    def uses_of(self) -> tuple[tuple[int, ...], ...]:
        """For each segment, the indices of its uses."""
        ends = itertools.accumulate((len(segment.groups) for segment in self.segments), initial=0)
        return tuple(tuple(range(start, end)) for start, end in itertools.pairwise(ends))

    @functools.cached_property
    def num_uses(self) -> Mapping[int, int]:
        """By group, the number of its uses."""
        return collections.Counter(use.group for use in self.uses)

    @property
    def coarse_merges(self) -> tuple[Merge, ...]:
        """Forced merges of more than half of all parameter bytes; every plan needs these on the device at once."""
        total = sum(layer.num_bytes for layer in self.layers)
        names = [(set(layer.name.split("+")), layer.num_bytes) for layer in self.layers]
        return tuple(
            merge
            for merge in self.merges
            if merge.is_forced and any(set(merge.layers) <= layers and 2 * size > total for layers, size in names)
        )

    @property
    def num_programs(self) -> int:
        """Number of distinct programs."""
        return len({segment.program for segment in self.segments})

    @property
    def unread_leaves(self) -> tuple[str, ...]:
        """Paths of the trained parameters that the function never reads."""
        read = {value for s in self.segments for equation in s.equations for value in equation.reads}
        leaves = [leaf for layer in self.layers for leaf in layer.trained.leaves]
        return tuple(leaf.path for leaf in leaves if self.graph.parameters[leaf.index] not in read)


@dataclasses.dataclass(frozen=True, eq=False)
class Partition(ForwardPartition):
    """The partition of a loss function.

    Attributes:
      loss: the number of the loss.
      aux: the flattened auxiliary outputs.
      aux_tree: their tree, or None if the loss function returns a scalar alone.
    """

    loss: int
    aux: tuple[Atom, ...]
    aux_tree: jax.tree_util.PyTreeDef | None


def build_segments(
    graph: Graph,
    flow: Dataflow,
    derived: Collection[int],
    stretches: Sequence[Any],
    layers: Sequence[Layer],
    layers_of_group: Mapping[int, Sequence[int]],
) -> list[Segment]:
    """Turns stretches of `flow.main` into segments."""
    made_by = {v: i for i, s in enumerate(stretches) for e in flow.main[s.start : s.stop] for v in e.outputs}
    bodies = [with_views(flow, flow.main[s.start : s.stop]) for s in stretches]
    wanted: set[int] = {value for value in graph.outputs if isinstance(value, int)}
    outputs: list[tuple[int, ...]] = []
    for body in reversed(bodies):
        made = [value for equation in body for value in equation.outputs]
        outputs.append(tuple(value for value in made if value in wanted))
        wanted.update(value for equation in body for value in equation.reads)
    segments, count = [], collections.Counter[int]()
    for stretch, body, leaving in zip(stretches, bodies, reversed(outputs), strict=True):
        groups = _groups_read(graph, body, layers, layers_of_group[stretch.group])
        count[stretch.group] += 1
        suffix = f"#{count[stretch.group]}" if count[stretch.group] > 1 else ""
        leaves = [leaf for group in groups for leaf in layers[group].leaves]
        if len(groups) > 1:
            leaves.sort(key=lambda leaf: leaf.index)
        weights = tuple(graph.parameters[leaf.index] for leaf in leaves)
        place = {leaf.index: i for i, leaf in enumerate(leaves)}
        read = _read_from_outside(body, weights)
        inputs = tuple(v for v in read if v in made_by and _has_derivative(graph, derived, v))
        leaving = tuple(v for v in leaving if v in made_by)
        segments.append(
            Segment(
                name=(layers[groups[0]].block or layers[groups[0]].name) + suffix,
                groups=groups,
                equations=body,
                weights=weights,
                members=tuple(tuple(place[leaf.index] for leaf in layers[group].leaves) for group in groups),
                inputs=inputs,
                nondiff_inputs=tuple(v for v in read if v not in inputs),
                outputs=tuple(v for v in leaving if _has_derivative(graph, derived, v)),
                nondiff_outputs=tuple(v for v in leaving if not _has_derivative(graph, derived, v)),
                trained=tuple(i for i, leaf in enumerate(leaves) if leaf.is_trained),
                alive_bytes=stretch.alive_bytes,
            )
        )
    return segments


def _groups_read(
    graph: Graph, body: Sequence[Equation], layers: Sequence[Layer], groups: Sequence[int]
) -> tuple[int, ...]:
    """The groups among these that a segment reads, in the order in which it reads them first."""
    if len(groups) == 1:
        return tuple(groups)
    group_of = {graph.parameters[leaf.index]: group for group in groups for leaf in layers[group].leaves}
    return tuple(dict.fromkeys(group_of[value] for e in body for value in e.reads if value in group_of))


def depending_on(graph: Graph, values: Iterable[int]) -> frozenset[int]:
    """Returns these values and all values that depend on them."""
    found = set(values)
    for equation in graph.equations:
        if not found.isdisjoint(equation.reads):
            found.update(equation.outputs)
    return frozenset(found)


def _has_derivative(graph: Graph, derived: Collection[int], value: int) -> bool:
    return value in derived and is_inexact(graph.avals[value])


def with_views(flow: Dataflow, equations: Iterable[Equation]) -> tuple[Equation, ...]:
    """Returns the equations with each view inserted before its first use."""
    placed: set[int] = set()
    result: list[Equation] = []

    def place(value: int) -> None:
        view = flow.views.get(value)
        if view is not None and value not in placed:
            placed.update(view.outputs)
            for operand in view.reads:
                place(operand)
            result.append(view)

    for equation in equations:
        for operand in equation.reads:
            place(operand)
        result.append(equation)
    return tuple(result)


def _read_from_outside(equations: Iterable[Equation], weights: Iterable[int]) -> tuple[int, ...]:
    """Returns the values, except `weights`, that the equations read but do not define, in order of first use."""
    known = set(weights)
    read: dict[int, None] = {}
    for equation in equations:
        read |= {value: None for value in equation.reads if value not in known}
        known.update(equation.outputs)
    return tuple(read)


def table(partition: Partition) -> rich.table.Table:
    """Returns a table with one row per segment (name, parameters, layer bytes, bytes alive at its end, program)."""
    rows = rich.table.Table(
        title=f"{len(partition.segments)} segments, {len(partition.layers)} layers, {partition.num_programs} programs",
        caption=rich.markup.escape("\n".join(partition.notes)) or None,
        caption_justify="left",
    )
    rows.add_column("segment")
    for column in ("parameters", "bytes", "alive at its end", "program"):
        rows.add_column(column, justify="right")
    has_tiles = any(segment.tiling or segment.not_tiled for segment in partition.segments)
    if has_tiles:
        rows.add_column("tiles")
    for segment in partition.segments:
        layers = [partition.layers[group] for group in segment.groups]
        rows.add_row(
            segment.name,
            f"{sum(layer.num_parameters for layer in layers):,}",
            format_bytes(sum(layer.num_bytes for layer in layers)),
            format_bytes(segment.alive_bytes),
            str(segment.program),
            *([_tiles_text(segment)] if has_tiles else []),
        )
    return rows


def _tiles_text(segment: Segment) -> str:
    """The number of tiles, or why there is one."""
    if segment.tiling is None:
        return rich.markup.escape(f"1: {segment.not_tiled}") if segment.not_tiled else "1"
    return f"{segment.tiling.actual_tiles}{' along the tokens' if segment.tiling.along == TOKENS else ''}"


def print_table(partition: Partition, console: rich.console.Console | None = None) -> None:
    """Prints `table(partition)` and the reasons for merged layers to the console (default: standard output)."""
    console = console or rich.console.Console()
    console.print(table(partition))
    for merge in partition.merges:
        console.print(merge.message, markup=False, highlight=False)
