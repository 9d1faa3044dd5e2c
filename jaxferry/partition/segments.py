"""The segments of a function: what each reads, what crosses to later ones, which of them are the same program."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import jax

from jaxferry.partition.cuts import Merge
from jaxferry.partition.dataflow import Dataflow
from jaxferry.partition.graph import Atom, Equation, Graph, evaluate, is_inexact
from jaxferry.partition.layout import Layer


@dataclasses.dataclass(frozen=True, eq=False)
class Segment:
    """A stretch of the program, compiled as one forward and one backward program.

    Values are numbers of the graph. `forward` takes them in the order `weights`, `inputs`, `passive`.

    Attributes:
      name: the layer's name, with a `#2`, `#3`, ... where an earlier segment uses the same layer.
      layer: index of the layer whose parameters it reads.
      equations: the equations, views included.
      weights: the layer's parameter leaves.
      inputs: values from earlier segments through which a derivative flows.
      passive: all other values that it reads: batch, constants, prelude, and values without derivative.
      outputs: values for later segments (or the loss) through which a derivative flows.
      extras: further values that later segments or the caller read.
      trained: which of `weights` have a gradient, as indices.
      alive_bytes: bytes of the values alive at its end.
      program: segments with the same number share their compiled programs.
      remat: what it keeps between forward and backward: one of `REMAT`, `AUTO`, or a policy (`remat.py`).
    """

    name: str
    layer: int
    equations: tuple[Equation, ...]
    weights: tuple[int, ...]
    inputs: tuple[int, ...]
    passive: tuple[int, ...]
    outputs: tuple[int, ...]
    extras: tuple[int, ...]
    trained: tuple[int, ...]
    alive_bytes: int
    program: int = -1
    remat: Any = "none"

    @property
    def runs_back(self) -> bool:
        """Whether it has a backward: not if nothing trained lies in it or before it."""
        return bool(self.trained or self.inputs)

    def forward(
        self, weights: Sequence[Any], inputs: Sequence[Any], passive: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Runs the segment on arrays or tracers; returns the values of `outputs` and of `extras`."""
        numbers = (*self.weights, *self.inputs, *self.passive)
        values = dict(zip(numbers, (*weights, *inputs, *passive), strict=True))
        evaluate(self.equations, values)
        return [values[value] for value in self.outputs], [values[value] for value in self.extras]


@dataclasses.dataclass(frozen=True, eq=False)
class ForwardPartition:
    """A function of parameters as an ordered list of segments over layers.

    Attributes:
      layers: the layers, in order of first use; layers that no segment reads come last.
      segments: the segments, in order.
      graph: the traced function, to which all numbers refer.
      prelude: equations that run once a step before the first segment.
      prelude_outputs: values that the prelude makes for segments or the caller.
      notes: what could not be cut though it looks as if it should be, and why.
      merges: which layers could not be, or were not worth being, apart, and why.
    """

    layers: tuple[Layer, ...]
    segments: tuple[Segment, ...]
    graph: Graph
    prelude: tuple[Equation, ...]
    prelude_outputs: tuple[int, ...]
    notes: tuple[str, ...]
    merges: tuple[Merge, ...]

    @property
    def coarse_merges(self) -> tuple[Merge, ...]:
        """Merges that had to be, of more than half of all parameters: no plan needs less of them on the device."""
        total = sum(layer.num_bytes for layer in self.layers)
        names = [(set(layer.name.split("+")), layer.num_bytes) for layer in self.layers]
        return tuple(
            merge
            for merge in self.merges
            if merge.is_forced and any(set(merge.layers) <= layers and 2 * size > total for layers, size in names)
        )

    @property
    def num_programs(self) -> int:
        """Number of different segments."""
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
      loss: the value of the loss.
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
    layer_of_group: Mapping[int, int],
) -> list[Segment]:
    """Turns stretches of `flow.main` into segments.

    Args:
      graph: the traced loss function.
      flow: its equations.
      derived: values that depend on trained parameters.
      stretches: of `flow.main`.
      layers: the layers.
      layer_of_group: maps a stretch's group to its layer.
    """
    made_by = {v: i for i, s in enumerate(stretches) for e in flow.main[s.start : s.stop] for v in e.outputs}
    bodies = [_with_views(flow, flow.main[s.start : s.stop]) for s in stretches]
    wanted: set[int] = {value for value in graph.outputs if isinstance(value, int)}
    outputs: list[tuple[int, ...]] = []
    for body in reversed(bodies):
        made = [value for equation in body for value in equation.outputs]
        outputs.append(tuple(value for value in made if value in wanted))
        wanted.update(value for equation in body for value in equation.reads)
    segments, uses = [], dict.fromkeys(range(len(layers)), 0)
    for stretch, body, leaving in zip(stretches, bodies, reversed(outputs), strict=True):
        layer = layer_of_group[stretch.group]
        uses[layer] += 1
        suffix = f"#{uses[layer]}" if uses[layer] > 1 else ""
        weights = tuple(graph.parameters[leaf.index] for leaf in layers[layer].leaves)
        read = _read_from_outside(body, weights)
        inputs = tuple(v for v in read if v in made_by and _has_derivative(graph, derived, v))
        leaving = tuple(v for v in leaving if v in made_by)
        segments.append(
            Segment(
                name=layers[layer].name + suffix,
                layer=layer,
                equations=body,
                weights=weights,
                inputs=inputs,
                passive=tuple(v for v in read if v not in inputs),
                outputs=tuple(v for v in leaving if _has_derivative(graph, derived, v)),
                extras=tuple(v for v in leaving if not _has_derivative(graph, derived, v)),
                trained=tuple(i for i, leaf in enumerate(layers[layer].leaves) if leaf.is_trained),
                alive_bytes=stretch.alive_bytes,
            )
        )
    return segments


def depending_on(graph: Graph, values: Iterable[int]) -> frozenset[int]:
    """These values, and all that are made from them."""
    found = set(values)
    for equation in graph.equations:
        if not found.isdisjoint(equation.reads):
            found.update(equation.outputs)
    return frozenset(found)


def _has_derivative(graph: Graph, derived: Collection[int], value: int) -> bool:
    return value in derived and is_inexact(graph.avals[value])


def _with_views(flow: Dataflow, equations: Iterable[Equation]) -> tuple[Equation, ...]:
    """The equations, each view before its first use."""
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
    """Values that the equations read but do not make, without `weights`, in order of first use."""
    known = set(weights)
    read: dict[int, None] = {}
    for equation in equations:
        read |= {value: None for value in equation.reads if value not in known}
        known.update(equation.outputs)
    return tuple(read)


def prelude_with_views(flow: Dataflow) -> tuple[Equation, ...]:
    """The prelude's equations with the constants' views that they need."""
    return _with_views(flow, flow.prelude)
