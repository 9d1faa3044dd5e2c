"""Which values to keep between forward and backward, and which to compute again: the fewest bytes, by a minimum cut.

A derivative asks for residuals. Element-wise operations, casts and changes of shape cost next to nothing beside the
memory traffic that keeping their results would cause, so a residual may be computed again from operands that are kept,
or from weights and batch, which the backward is given anyway. Among all sets of kept values from which every residual
can be had so, a minimum cut of the graph finds one with the fewest bytes; where several have as few, the one nearest to
the residuals, so that least is computed twice.

Source: the same cut as functorch's `min_cut_rematerialization_partition` (PyTorch), with parameters and batch for free.

A policy as in `jax.checkpoint_policies` decides instead for each equation whether its results may be kept.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import numpy as np
import scipy.sparse
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from jaxferry.errors import InputError
from jaxferry.partition.elementwise import ELEMENTWISE
from jaxferry.partition.graph import Equation, Graph

_CHEAP = ELEMENTWISE | {
    "broadcast_in_dim",
    "concatenate",
    "expand_dims",
    "iota",
    "name",
    "pad",
    "reshape",
    "rev",
    "slice",
    "split",
    "squeeze",
    "transpose",
}
_UNITS = 2**28
_INFINITE = 2**30


def values_to_keep(graph: Graph, residuals: Iterable[int], free: Collection[int]) -> set[int]:
    """Values to keep so that every residual can be computed again by cheap equations.

    Args:
      graph: the traced function.
      residuals: the values asked for.
      free: values that are at hand in any case.
    """
    wanted = [value for value in dict.fromkeys(residuals) if value not in free]
    if not wanted:
        return set()
    made_by = {v: e for e in graph.equations for v in e.outputs}
    nodes, stack = dict.fromkeys(wanted), list(wanted)
    edges: list[tuple[int, int]] = []
    while stack:
        value = stack.pop()
        equation = made_by.get(value)
        for operand in equation.reads if equation is not None and is_cheap(equation) else ():
            if operand not in free:
                edges.append((operand, value))
                if operand not in nodes:
                    nodes[operand] = None
                    stack.append(operand)
    fixed = [v for v in nodes if v not in made_by or not is_cheap(made_by[v])]
    return _minimum_cut(graph, list(nodes), edges, fixed, wanted)


def values_kept_by(
    policy: Callable[..., Any], graph: Graph, residuals: Iterable[int], free: Collection[int]
) -> set[int]:
    """Values that a policy keeps, of those that the residuals are made from: as `jax.checkpoint` does with it.

    Args:
      policy: `policy(primitive, *avals, **params)` says whether results of such an equation may be kept.
      graph: the traced function.
      residuals: the values asked for.
      free: values that are at hand in any case.

    Raises:
      InputError: if the policy answers with anything but True and False.
    """
    made_by = {v: e for e in graph.equations for v in e.outputs}
    kept: set[int] = set()
    seen, stack = set(free), list(residuals)
    while stack:
        value = stack.pop()
        if value in seen:
            continue
        seen.add(value)
        equation = made_by.get(value)
        if equation is None or equation.has_effects or _may_keep(policy, graph, equation):
            kept.add(value)
        else:
            stack += equation.reads
    return kept


def _may_keep(policy: Callable[..., Any], graph: Graph, equation: Equation) -> bool:
    avals = [graph.avals[atom] if isinstance(atom, int) else atom.aval for atom in equation.inputs]
    answer = policy(equation.primitive, *avals, **equation.params)
    if not isinstance(answer, bool | np.bool_):
        raise InputError(
            "remat: a policy must say True (keep) or False (compute again) of each operation, got "
            f"{answer!r} for {equation.primitive.name}"
        )
    return bool(answer)


def is_cheap(equation: Equation) -> bool:
    """Whether an equation costs less to run again than its result costs to keep."""
    return equation.primitive.name in _CHEAP and not equation.has_effects


def _minimum_cut(
    graph: Graph, values: Sequence[int], edges: Sequence[tuple[int, int]], fixed: Sequence[int], wanted: Sequence[int]
) -> set[int]:
    """Each value is an arc of its size from node 2i to node 2i+1; source and sink are the last two nodes."""
    index = {value: i for i, value in enumerate(values)}
    source, sink = 2 * len(values), 2 * len(values) + 1
    sizes = np.array([graph.num_bytes(value) for value in values], dtype=np.float64)
    # Capacities are 32-bit integers in SciPy; a value of no size still must not be kept for nothing.
    capacities = np.maximum(1, np.ceil(sizes * min(1.0, _UNITS / max(1.0, sizes.sum())))).astype(np.int32)
    arcs = {(2 * i, 2 * i + 1): int(capacity) for i, capacity in enumerate(capacities)}
    arcs |= {(2 * index[a] + 1, 2 * index[b]): _INFINITE for a, b in edges}
    arcs |= {(source, 2 * index[v]): _INFINITE for v in fixed}
    arcs |= {(2 * index[v] + 1, sink): _INFINITE for v in wanted}
    rows, columns = zip(*arcs, strict=True)
    capacity = np.array(list(arcs.values()), np.int32)
    matrix = scipy.sparse.csr_array((capacity, (rows, columns)), (sink + 1, sink + 1))
    flow = maximum_flow(matrix, source, sink).flow
    left = scipy.sparse.csr_array(matrix - flow > 0)
    # Everything from which the sink can still be reached lies behind the cut that is nearest to the sink.
    behind = set(breadth_first_order(scipy.sparse.csr_array(left.T), sink, return_predecessors=False).tolist())
    return {value for value, i in index.items() if 2 * i not in behind and 2 * i + 1 in behind}
