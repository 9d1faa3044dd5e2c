"""Products that read and make arrays in the order that these have, without transposes beside them.

Within one program XLA folds a transpose into the product beside it. A loop over tiles parts the two: a transposed
weight would be a second copy of it, and a gradient that is transposed after its sum a second accumulator.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jaxferry.partition.graph import Atom, Equation, Graph, live_equations


def without_transposes(graph: Graph) -> Graph:
    """The program with transposes of operands and results of products folded into the products where they can be."""
    equations = list(graph.equations)
    while True:
        made_by: dict[Atom, Equation] = {value: equation for equation in equations for value in equation.outputs}
        readers: dict[Atom, list[Equation]] = {}
        for equation in equations:
            for value in equation.reads:
                readers.setdefault(value, []).append(equation)
        changed: dict[Equation, list[Equation]] = {}
        for dot in (equation for equation in equations if equation.primitive.name == "dot_general"):
            if (folded := _reading_untransposed(graph, dot, made_by)) is not None:
                changed[dot] = [folded]
                continue
            found = readers.get(dot.outputs[0], [])
            is_only = len(found) == 1 and dot.outputs[0] not in graph.outputs
            if is_only and (swapped := _swapped(graph, dot, found[0])) is not None:
                changed[dot], changed[found[0]] = [], [swapped]
        if not changed:
            return dataclasses.replace(graph, equations=live_equations(equations, graph.outputs))
        equations = [new for old in equations for new in changed.get(old, [old])]


def _reading_untransposed(graph: Graph, dot: Equation, made_by: Mapping[Atom, Equation]) -> Equation | None:
    """The product of what is transposed for it, if it keeps the order of the other dimensions; None if nothing is."""
    for side, atom in enumerate(dot.inputs):
        source = made_by.get(atom) if isinstance(atom, int) else None
        if source is None or source.primitive.name != "transpose":
            continue
        order = source.params["permutation"]
        summed, batch = ([list(axes) for axes in pair] for pair in dot.params["dimension_numbers"])
        free = [order[axis] for axis in range(len(order)) if axis not in (*summed[side], *batch[side])]
        if free == sorted(free):
            for pair in (summed, batch):
                pair[side] = [order[axis] for axis in pair[side]]
            inputs = [*dot.inputs]
            inputs[side] = source.inputs[0]
            return _replaced(dot, (summed, batch), tuple(inputs))
    return None


def _swapped(graph: Graph, dot: Equation, reader: Equation) -> Equation | None:
    """The product with its operands swapped, if that is all that its reader, a transpose, does; else None."""
    summed, batch = dot.params["dimension_numbers"]
    first, second = (graph.aval_of(atom).ndim - len(axes) for atom, axes in zip(dot.inputs, summed, strict=True))
    order = (*range(first, first + second), *range(first))
    if reader.primitive.name != "transpose" or batch[0] or tuple(reader.params["permutation"]) != order:
        return None
    return dataclasses.replace(_replaced(dot, (summed[::-1], batch), dot.inputs[::-1], True), outputs=reader.outputs)


def _replaced(dot: Equation, numbers: object, inputs: tuple[Atom, ...], is_swapped: bool = False) -> Equation:
    summed, batch = (tuple(tuple(axes) for axes in pair) for pair in numbers)  # type: ignore[attr-defined]
    precision = dot.params["precision"]
    precision = precision[::-1] if is_swapped and isinstance(precision, tuple) else precision
    params = {**dot.params, "dimension_numbers": (summed, batch), "precision": precision}
    return dataclasses.replace(dot, params=params, inputs=inputs)
