"""What each value depends on, and where an equation may move without changing the result.

A trace lists equations in the order in which Python met them, which is not the order in which a layer needs them: a
loss often casts its whole tree of parameters first, slices labels at the top, or adds up a penalty over all weights
at the end. Three moves undo that:

  * a *view* (made from one layer's parameters or from nothing, and no smaller than what it reads: a cast, a transpose,
    a mask) is computed again in each segment that uses it, so no copy of a weight has to cross segments. Parameters
    that are repeated or looked up (learned queries for each example, a table of relative positions) are activations,
    not views: other layers may read them many times, and should not need their layer each time;
  * small values made from the batch alone (dropout keys, counts), or selected from a constant (a block's row of a mask
    over heads), go into a *prelude* that runs once a step, so that blocks which differ only in such constants are the
    same program;
  * an equation on the batch alone, or on parameters alone, waits until its first use; a summary of one layer's
    parameters (its share of a penalty) is made where the batch meets that layer.
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
    """The equations of a graph, sorted by what they may do.

    Attributes:
      main: those that stay in order; segments are slices of this list.
      views: value -> the equation that computes it again wherever it is used.
      prelude: those that run once, before everything.
      leaves: value -> indices of the parameter leaves that it is made from through views alone.
      active: values that depend on parameters, for which a derivative flows.
    """

    main: tuple[Equation, ...]
    views: Mapping[int, Equation]
    prelude: tuple[Equation, ...]
    leaves: Mapping[int, frozenset[int]]
    active: frozenset[int]

    def leaves_read(self, equation: Equation) -> frozenset[int]:
        """Indices of the parameter leaves that an equation of `main` reads, itself or through views."""
        return frozenset().union(*(self.leaves.get(value, frozenset()) for value in equation.reads))


def analyse(graph: Graph, group_of_leaf: Mapping[int, int]) -> Dataflow:
    """Sorts the equations of `graph`; `group_of_leaf` maps a leaf index to its layer."""
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
    """Values that depend on the batch, and values that depend on parameters."""
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
    """Moves equations on the batch alone or on parameters alone down to their first use.

    Of the latter, those on a single layer go to where the batch meets that layer first, if that is earlier.
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
    """Equations on parameters alone by which one layer continues what another has begun, as identities.

    The norm and the products that learned queries pass through, before they meet the batch, belong to their layer and
    stay there; a sum of the penalties of layers reads no parameter itself, and does not.
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
    """Where each equation stands once those that need not wait for both batch and parameters have moved down.

    Those in `fixed` (identities) stay where they are.
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
