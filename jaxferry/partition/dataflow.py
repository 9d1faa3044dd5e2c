"""Finds what each value depends on, and moves equations to the segments that need them.

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
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from jaxferry.partition.graph import Equation, Graph

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
        if batch.isdisjoint(equation.outputs) and len(groups[id(equation)]) == 1:
            (group,) = groups[id(equation)]
            target = meets.get((group, True), meets[group, False])
            made = max((position[value] for value in equation.reads if value in position), default=0.0)
            place[id(equation)] = min(place[id(equation)], max(target, made))
        position |= dict.fromkeys(equation.outputs, place[id(equation)])
    depends = {id(e): not flow.active.isdisjoint(e.outputs) for e in flow.main}
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
