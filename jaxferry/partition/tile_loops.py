"""The rules of loops and branches: their bodies are analysed, and run on a tile."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.extend import core

from jaxferry.partition.graph import Graph, are_zeros, graph_of
from jaxferry.partition.scans import numbers_of_operands
from jaxferry.partition.tile_analysis import Analysis
from jaxferry.partition.tile_body import Body, Part
from jaxferry.partition.tile_rules import PARTIAL, CannotTile, Result, Rows, Site, Tile, rule


def _graph(closed: core.ClosedJaxpr) -> Graph:
    return graph_of(closed, 0, jax.tree.structure(list(closed.jaxpr.outvars)), is_derived=True)


def _shifted(at: Rows | None, by: int) -> Rows | None:
    return at if at is None or at == PARTIAL else at.at(at.axis + by)


def _joined(a: Rows | None, b: Rows | None) -> Rows | None:
    if a is None or b is None or a == b:
        return b if a is None else a
    raise CannotTile("a value has its rows along different axes from iteration to iteration")


class _Inner:
    """A body or branch, with the rows of its inputs and of its results."""

    def __init__(self, graph: Graph, analysis: Analysis, inputs: Sequence[Rows | None], results: Sequence[Rows | None]):
        wanted: list[Part] = []
        for atom, at in zip(graph.outputs, results, strict=True):
            is_sum = at == PARTIAL and analysis.rows_of(atom) != PARTIAL
            if is_sum and not are_zeros(atom, analysis.made_by):
                raise CannotTile("what it adds to a sum over the rows depends on no row")
            wanted.append((atom, None if is_sum else at))
        self._graph, self._inputs = graph, inputs
        self._body = Body(analysis, wanted, graph.constants, is_inner=True)

    def run(self, operands: Sequence[Any], start: Any, size: int) -> list[Any]:
        parts: Iterable[Part] = zip(self._graph.batch, self._inputs, strict=True)
        given = dict(zip(parts, operands, strict=True))
        return self._body.run(self._graph.constants, start, size, given)


@rule("scan")
def _scan(site: Site, rows: Sequence[Rows | None]) -> Tile:
    p, graph = site.params, _graph(site.params["jaxpr"])
    first, num_carry = numbers_of_operands(p)
    end = first + num_carry
    consts, carry, xs = list(rows[:first]), list(rows[first:end]), rows[end:]
    if any(x is not None and x.axis == 0 for x in xs):
        raise CannotTile("it scans along the rows")

    def analysed(is_trial: bool) -> tuple[Analysis, list[Rows | None], list[Rows | None]]:
        inside = [*consts, *carry, *(_shifted(x, -1) for x in xs)]
        of_inputs: Mapping[int, Rows | None] = dict(zip(graph.batch, inside, strict=True))
        found = Analysis(graph, of_inputs, site.num_rows, is_inner=True, is_trial=is_trial)
        return found, inside, [found.rows_of(atom) for atom in graph.outputs]

    while True:  # each time one more carry has rows, or is a sum
        _, _, made = analysed(is_trial=True)
        joined = [_joined(a, b) for a, b in zip(carry, made, strict=False)]
        if joined == carry:
            break
        carry = joined
    analysis, inside, made = analysed(is_trial=False)
    for at, given, zeros in zip(carry, rows[first:end], site.are_zeros[first:end], strict=True):
        if at == PARTIAL and given is None and not zeros:
            raise CannotTile("it adds to what was there before")
    inner = _Inner(graph, analysis, inside, [*carry, *made[len(carry) :]])
    reads = [given if at == PARTIAL else at for at, given in zip((*consts, *carry, *xs), rows, strict=True)]
    outs = [*carry, *(_shifted(at, 1) for at in made[len(carry) :])]
    results: list[Result] = ["add" if at == PARTIAL else at for at in outs]

    def run(operands: Sequence[Any], start: Any, size: int) -> list[Any]:
        def step(carry: list[Any], each: list[Any]) -> tuple[list[Any], list[Any]]:
            found = inner.run([*operands[:first], *carry, *each], start, size)
            return found[: len(carry)], found[len(carry) :]

        options = {name: p[name] for name in ("length", "reverse", "unroll")}
        last, stacked = jax.lax.scan(step, list(operands[first:end]), list(operands[end:]), **options)
        return [*last, *stacked]

    return Tile(results, reads, lambda size: p, run)


@rule("cond")
def _cond(site: Site, rows: Sequence[Rows | None]) -> Tile:
    if rows[0] is not None:
        raise CannotTile("a row chooses the branch")
    graphs, inside = [_graph(branch) for branch in site.params["branches"]], rows[1:]
    found = [
        Analysis(graph, dict(zip(graph.batch, inside, strict=True)), site.num_rows, is_inner=True) for graph in graphs
    ]
    outs: list[Rows | None] = [None] * len(site.results)
    for graph, analysis in zip(graphs, found, strict=True):
        outs = [_joined(at, analysis.rows_of(atom)) for at, atom in zip(outs, graph.outputs, strict=True)]
    inner = [_Inner(graph, analysis, inside, outs) for graph, analysis in zip(graphs, found, strict=True)]

    def run(operands: Sequence[Any], start: Any, size: int) -> list[Any]:
        branches = [lambda *given, own=own: own.run(given, start, size) for own in inner]
        return list(jax.lax.switch(operands[0], branches, *operands[1:]))

    return Tile(["add" if at == PARTIAL else at for at in outs], list(rows), lambda size: site.params, run)
