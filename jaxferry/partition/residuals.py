"""Chooses which values to save for the backward and which to recompute: the fewest saved bytes, by a minimum cut.

A backward needs residuals. Recomputing element-wise operations, casts and reshapes costs less than the memory traffic
of saving their results. So a residual may be recomputed from saved values, or from weights and batch, which the
backward receives anyway. A minimum cut of the graph finds the saved set with the fewest bytes; among equal sets, the
one nearest to the residuals, which recomputes least.

Source: functorch's `min_cut_rematerialization_partition` (PyTorch), with parameters and batch free of cost.

Alternatively, a policy as in `jax.checkpoint_policies` decides for each equation whether its results are saved.
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
    """Returns the values to save so that cheap equations can recompute every residual.

    Args:
      graph: the traced function.
      residuals: the values that the backward needs.
      free: values that the backward has anyway.
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
    """Returns the values that a policy saves among those that the residuals depend on, as `jax.checkpoint` does.

    Args:
      policy: `policy(primitive, *avals, **params)` returns whether results of such an equation may be saved.
      graph: the traced function.
      residuals: the values that the backward needs.
      free: values that the backward has anyway.

    Raises:
      InputError: if the policy returns anything but True or False.
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
            "remat: a policy must return True (keep) or False (recompute) for each operation, got "
            f"{answer!r} for {equation.primitive.name}"
        )
    return bool(answer)


def is_cheap(equation: Equation) -> bool:
    """Whether recomputing an equation costs less than saving its result."""
    return equation.primitive.name in _CHEAP and not equation.has_effects


def _minimum_cut(
    graph: Graph, values: Sequence[int], edges: Sequence[tuple[int, int]], fixed: Sequence[int], wanted: Sequence[int]
) -> set[int]:
    """Returns a minimum cut. Value i is an arc from node 2i to node 2i+1; source and sink are the last two nodes."""
    index = {value: i for i, value in enumerate(values)}
    source, sink = 2 * len(values), 2 * len(values) + 1
    sizes = np.array([graph.num_bytes(value) for value in values], dtype=np.float64)
    # SciPy's capacities are 32-bit integers. At least 1, so that empty values are not saved needlessly.
    capacities = np.maximum(1, np.ceil(sizes * min(1.0, _UNITS / max(1.0, sizes.sum())))).astype(np.int32)
    arcs = {(2 * i, 2 * i + 1): int(capacity) for i, capacity in enumerate(capacities)}
    arcs |= {(2 * index[a] + 1, 2 * index[b]): _INFINITE for a, b in edges}
    arcs |= {(source, 2 * index[v]): _INFINITE for v in fixed}
    arcs |= {(2 * index[v] + 1, sink): _INFINITE for v in wanted}
    rows, columns = zip(*arcs, strict=True)
    capacity = np.array(list(arcs.values()), np.int32)
    matrix = scipy.sparse.csr_array((capacity, (rows, columns)), (sink + 1, sink + 1))
    flow = maximum_flow(matrix, source, sink).flow
    residual = scipy.sparse.csr_array(matrix - flow > 0)
    # The nodes that still reach the sink in the residual network lie behind the cut nearest to the sink.
    behind = set(breadth_first_order(scipy.sparse.csr_array(residual.T), sink, return_predecessors=False).tolist())
    return {value for value, i in index.items() if 2 * i not in behind and 2 * i + 1 in behind}
