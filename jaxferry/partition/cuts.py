"""Cuts the equations into segments: between the readers of two layers, where the fewest bytes are alive.

Finds what each value depends on, and moves equations to the segments that need them.

A trace lists equations in Python's order of execution, not in the order in which layers need them: a loss often casts
all parameters first, slices labels at the top, or sums a penalty over all weights at the end. Three moves undo this:

  * Each segment recomputes the *views* that it uses. A view is made from one layer's parameters, or from constants
    alone, and is about as large as its operands or larger: a cast, a transpose, a mask. So no copy of a weight crosses
    segments. Repeated or looked-up parameters (learned queries per example, a table of relative positions) are
    activations, not views: other layers may read them many times and should not need this layer each time.
  * Small values made from the batch alone (dropout keys, counts), or selected from a constant (a block's row of a mask
    over heads), go into a *prelude* that runs once per step. Blocks that differ only in such constants are then the
    same program.
  * An equation that depends on the batch alone, or on parameters alone, moves down to its first use. A summary of one
    layer's parameters (its share of a penalty) is computed where the batch first meets that layer.

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
from collections.abc import Mapping, Sequence

from jaxferry.partition.graph import Equation, Graph
from jaxferry.units import format_apart

PRELUDE_BYTES = 4096
_REPEATING = ("broadcast_in_dim", "gather")
_SELECTING = ("slice", "dynamic_slice", "gather")


@dataclasses.dataclass(frozen=True)
class Dataflow:
    """The equations of a graph, classified by where they may run.

    Attributes:
      main: equations that run in this order; segments are slices of this list.
      views: value -> the equation that recomputes it wherever it is used.
      prelude: equations that run once per step, before all segments.
      leaves: value -> indices of the parameter leaves that it is made from through views alone.
      active: values that depend on parameters and may carry a derivative.
    """

    main: tuple[Equation, ...]
    views: Mapping[int, Equation]
    prelude: tuple[Equation, ...]
    leaves: Mapping[int, frozenset[int]]
    active: frozenset[int]

    def leaves_read(self, equation: Equation) -> frozenset[int]:
        """Returns the indices of the parameter leaves that an equation of `main` reads, directly or through views."""
        return frozenset().union(*(self.leaves.get(value, frozenset()) for value in equation.reads))


def analyse(graph: Graph, group_of_leaf: Mapping[int, int]) -> Dataflow:
    """Classifies the equations of `graph`; `group_of_leaf` maps a leaf index to its layer."""
    batch, active = dependences(graph)
    views, leaves = _views(graph, batch, group_of_leaf)
    viewed = set(views)
    rest = [e for e in graph.equations if e.has_effects or not viewed.issuperset(e.outputs)]
    prelude = _prelude(graph, rest, active, views)
    hoisted = {id(equation) for equation in prelude}
    main = [equation for equation in rest if id(equation) not in hoisted]
    flow = Dataflow(tuple(main), views, prelude, leaves, active)
    return dataclasses.replace(flow, main=_reorder(flow, batch, group_of_leaf))


def dependences(graph: Graph) -> tuple[set[int], frozenset[int]]:
    """Returns the values that depend on the batch, and the values that depend on parameters."""
    batch, active = set(graph.batch), set(graph.parameters)
    for equation in graph.equations:
        if equation.has_effects or not batch.isdisjoint(equation.reads):
            batch.update(equation.outputs)
        if not active.isdisjoint(equation.reads):
            active.update(equation.outputs)
    return batch, frozenset(active)


def _views(
    graph: Graph, batch: set[int], group_of_leaf: Mapping[int, int]
) -> tuple[dict[int, Equation], dict[int, frozenset[int]]]:
    views: dict[int, Equation] = {}
    leaves = {value: frozenset([index]) for index, value in enumerate(graph.parameters)}
    returned = {atom for atom in graph.outputs if isinstance(atom, int)}
    for equation in graph.equations:
        if not returned.isdisjoint(equation.outputs):
            continue
        sources = [value for value in equation.reads if value not in graph.constants]
        if not all(value in views or value in leaves for value in sources) or not batch.isdisjoint(equation.outputs):
            continue
        made_from = frozenset().union(*(leaves.get(value, frozenset()) for value in sources))
        size_in = sum(graph.num_bytes(value) for value in set(sources))
        size_out = sum(graph.num_bytes(value) for value in equation.outputs)
        if len({group_of_leaf[leaf] for leaf in made_from}) > 1 or (made_from and 2 * size_out < size_in):
            continue
        name = equation.primitive.name
        if made_from and size_out > size_in and name in _REPEATING:
            continue
        if not made_from and size_out <= PRELUDE_BYTES and name in _SELECTING:
            continue
        views |= dict.fromkeys(equation.outputs, equation)
        leaves |= dict.fromkeys(equation.outputs, made_from)
    return views, leaves


def _prelude(
    graph: Graph, equations: Sequence[Equation], active: frozenset[int], views: Mapping[int, Equation]
) -> tuple[Equation, ...]:
    ready = {*graph.batch, *graph.constants, *(value for value in views if value not in active)}
    prelude = []
    for equation in equations:
        small = all(graph.num_bytes(value) <= PRELUDE_BYTES for value in equation.outputs)
        if small and ready.issuperset(equation.reads) and not equation.has_effects:
            ready.update(equation.outputs)
            prelude.append(equation)
    return tuple(prelude)


def _reorder(flow: Dataflow, batch: set[int], group_of_leaf: Mapping[int, int]) -> tuple[Equation, ...]:
    """Moves equations that depend on the batch alone or on parameters alone down to their first use.

    An equation on one layer's parameters moves to where the batch first meets that layer, if that is earlier.
    """
    groups = {id(e): {group_of_leaf[leaf] for leaf in flow.leaves_read(e)} for e in flow.main}
    place = _places_of_first_use(flow, batch, _chained(flow, batch, groups))
    meets: dict[tuple[int, bool], float] = {}
    for equation in flow.main:
        for group in groups[id(equation)]:
            key = (group, not batch.isdisjoint(equation.outputs))
            meets[key] = min(place[id(equation)], meets.get(key, float("inf")))
    position: dict[int, float] = {}
    for equation in flow.main:
        if batch.isdisjoint(equation.outputs) and not equation.is_ordered and len(groups[id(equation)]) == 1:
            (group,) = groups[id(equation)]
            target = meets.get((group, True), meets[group, False])
            made = max((position[value] for value in equation.reads if value in position), default=0.0)
            place[id(equation)] = min(place[id(equation)], max(target, made))
        position |= dict.fromkeys(equation.outputs, place[id(equation)])
    # A callback may have no outputs, so its operands count: it follows the equations that make them.
    depends = {id(e): not flow.active.isdisjoint((*e.reads, *e.outputs)) for e in flow.main}
    return tuple(sorted(flow.main, key=lambda equation: (place[id(equation)], depends[id(equation)])))


def _chained(flow: Dataflow, batch: set[int], groups: Mapping[int, set[int]]) -> set[int]:
    """Returns the ids of equations on parameters alone that apply one layer to the result of another.

    Learned queries may pass through a norm and products before they meet the batch; these equations stay with their
    layer. A sum of the layers' penalties reads no parameter itself and is not among them.
    """
    made_from: dict[int, set[int]] = {}
    chained = set()
    for equation in flow.main:
        if batch.isdisjoint(equation.outputs) and not flow.active.isdisjoint(equation.outputs):
            before = set().union(*(made_from.get(value, set()) for value in equation.reads))
            if groups[id(equation)] and not before <= groups[id(equation)]:
                chained.add(id(equation))
            made_from |= dict.fromkeys(equation.outputs, before | groups[id(equation)])
    return chained


def _places_of_first_use(flow: Dataflow, batch: set[int], fixed: set[int]) -> dict[int, float]:
    """Returns the position of each equation after those that depend on the batch or on parameters alone moved down.

    Equations whose id is in `fixed` stay in place.
    """
    place = {id(equation): float(index) for index, equation in enumerate(flow.main)}
    first_use: dict[int, float] = {}
    for equation in reversed(flow.main):
        uses = [first_use[value] for value in equation.outputs if value in first_use]
        is_free = flow.active.isdisjoint(equation.outputs) or batch.isdisjoint(equation.outputs)
        if is_free and not equation.has_effects and uses and id(equation) not in fixed:
            place[id(equation)] = min(uses)
        for value in equation.reads:
            first_use[value] = min(place[id(equation)], first_use.get(value, place[id(equation)]))
    return place


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
