"""Cuts the equations into segments: between the readers of two layers, where the fewest bytes are alive.

The equations that read parameters, in order, give the sequence of layers. The cut between two layers may fall anywhere
between the last reader of one and the first reader of the next; it falls where the fewest bytes are alive. In a
transformer that is the residual stream. If one layer is applied several times in a row (ALBERT), its readers repeat
periodically, and each application is a segment.

Some cuts cost far more than the others: a cut between a tied head and its bias would carry all logits. Unless both
layers have more parameter bytes than such a cut carries, the two layers are merged.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Sequence

from jaxferry.partition.dataflow import Dataflow
from jaxferry.partition.graph import Graph
from jaxferry.units import format_apart

_EXPENSIVE_RATIO = 8
"""A cut is expensive if it carries more than this multiple of the median cut's bytes."""

_INDIVISIBLE = {
    "cond": "a branch is chosen only while the program runs",
    "custom_jvp_call": "a custom_jvp rule spans them",
    "custom_vjp_call": "a custom_vjp rule spans them",
    "remat2": "one jax.checkpoint spans them; wrap each layer in its own instead",
    "checkpoint": "one jax.checkpoint spans them; wrap each layer in its own instead",
    "scan": "a scan reads them in every iteration",
    "while": "a loop reads them in every iteration",
}


@dataclasses.dataclass(frozen=True)
class Merge:
    """Layers that were merged into one, and why.

    Attributes:
      layers: their names.
      reason: why they were merged.
      is_forced: whether no cut was possible; otherwise a cut was possible but too expensive.
    """

    layers: tuple[str, ...]
    reason: str
    is_forced: bool

    @property
    def message(self) -> str:
        """The names and the reason on one line."""
        first, *_, last = self.layers
        names = " and ".join(self.layers) if len(self.layers) <= 3 else f"{len(self.layers)} layers, {first} to {last},"
        return f"{names} are one layer: {self.reason}"


@dataclasses.dataclass(frozen=True)
class Stretch:
    """Equations of one segment: `flow.main[start:stop]`, reading the parameters of `group`.

    Attributes:
      alive_bytes: bytes of the values that are defined before `stop` and used after it.
    """

    group: int
    start: int
    stop: int
    alive_bytes: int


@dataclasses.dataclass(frozen=True)
class _Run:
    """Consecutive readers of one group, for one application of the layer."""

    group: int
    first: int
    last: int


def merge_shared_readers(flow: Dataflow, group_of_leaf: Sequence[int]) -> tuple[list[int], list[tuple[set[int], str]]]:
    """Joins groups that one equation reads together.

    Returns:
      The new group of each leaf, and the joins as pairs of original groups and reason.
    """
    groups, joins = list(group_of_leaf), []
    for equation in flow.main:
        together = {groups[leaf] for leaf in flow.leaves_read(equation)}
        if len(together) > 1:
            name = equation.primitive.name
            reason = f"one {name} reads their parameters"
            reason += f" ({_INDIVISIBLE[name]})" if name in _INDIVISIBLE else ""
            joins.append(({g for g, new in zip(group_of_leaf, groups, strict=True) if new in together}, reason))
            groups = [min(together) if group in together else group for group in groups]
    return groups, joins


def find_cuts(graph: Graph, flow: Dataflow, group_of_leaf: Sequence[int], is_early: bool = False) -> list[Stretch]:
    """Cuts `flow.main` into one stretch for each application of a group.

    Among positions with equally few live bytes, a cut falls at the last one, or at the first with `is_early`. Every
    equation of `flow.main` must read leaves of at most one group. The result is empty if no equation reads a leaf.
    """
    runs = _runs(graph, flow, group_of_leaf)
    alive = _alive_bytes(graph, flow)
    stops = [
        min(range(run.last + 1, following.first + 1), key=lambda place: (alive[place], place if is_early else -place))
        for run, following in itertools.pairwise(runs)
    ]
    stops += [len(flow.main)] if runs else []
    starts = [0, *stops]
    return [Stretch(run.group, start, stop, alive[stop]) for run, start, stop in zip(runs, starts, stops, strict=False)]


def expensive_cut(stretches: Sequence[Stretch], group_bytes: Sequence[int]) -> tuple[set[int], str] | None:
    """Returns the two groups at the most expensive cut that does not pay off, and why; None if all cuts pay off."""
    cuts = list(itertools.pairwise(stretches))
    if not cuts:
        return None
    usual = statistics.median_low([left.alive_bytes for left, _ in cuts])
    expensive = [
        (left.alive_bytes, left.group, right.group)
        for left, right in cuts
        if left.group != right.group
        and left.alive_bytes > _EXPENSIVE_RATIO * usual
        and left.alive_bytes > min(group_bytes[left.group], group_bytes[right.group])
    ]
    if not expensive:
        return None
    alive_bytes, left, right = max(expensive)
    carried, smaller = format_apart(alive_bytes, min(group_bytes[left], group_bytes[right]))
    reason = f"a cut between them would carry {carried}, more than the {smaller} of parameters that it could offload"
    return {left, right}, reason


def _runs(graph: Graph, flow: Dataflow, group_of_leaf: Sequence[int]) -> list[_Run]:
    readers: list[tuple[int, list[int]]] = []
    for place, equation in enumerate(flow.main):
        for group in {group_of_leaf[leaf] for leaf in flow.leaves_read(equation)}:
            if not readers or readers[-1][0] != group:
                readers.append((group, []))
            readers[-1][1].append(place)
    return [_Run(group, part[0], part[-1]) for group, places in readers for part in _applications(graph, flow, places)]


def _applications(graph: Graph, flow: Dataflow, places: list[int]) -> list[list[int]]:
    """Splits the readers of one run by application of the layer.

    A layer with one parameter is not split: lookups in the same table belong together.
    """
    readers = [flow.main[place] for place in places]
    if len(frozenset().union(*map(flow.leaves_read, readers))) == 1:
        return [places]
    kinds = [
        (e.primitive.name, flow.leaves_read(e), [(graph.avals[v].shape, graph.avals[v].dtype) for v in e.outputs])
        for e in readers
    ]
    num = len(kinds)
    period = next(p for p in range(1, num + 1) if num % p == 0 and kinds[p:] == kinds[: num - p])
    return [places[start : start + period] for start in range(0, num, period)]


def _alive_bytes(graph: Graph, flow: Dataflow) -> list[int]:
    """Returns the bytes alive before each equation: defined earlier in `main`, and used at or after it or returned."""
    made = {value: place for place, equation in enumerate(flow.main) for value in equation.outputs}
    last_use = {value: place for place, equation in enumerate(flow.main) for value in equation.reads if value in made}
    end = len(flow.main)
    last_use |= {value: end for value in graph.outputs if isinstance(value, int) and value in made}
    change = [0] * (end + 2)
    for value, use in last_use.items():
        change[made[value] + 1] += graph.num_bytes(value)
        change[use + 1] -= graph.num_bytes(value)
    alive = [0] * (end + 1)
    total = 0
    for place in range(end + 1):
        total += change[place]
        alive[place] = total
    return alive
