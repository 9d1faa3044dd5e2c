"""Builds the forward and backward programs of a segment and chooses what to save between them.

    forward(weights, inputs, nondiff_inputs)                              -> outputs, nondiff_outputs, saved
    backward(weights, inputs, nondiff_inputs, outputs, saved, cotangents) -> gradients, input cotangents

A backward needs residuals. The engine holds many of them anyway: the weights, which it drops after the forward and
reloads for the backward, and the segment's inputs and outputs. These are passed to the backward as arguments, not saved
twice. The backward recomputes copies made from weights alone (a cast, a transpose), so nothing of a weight stays on the
device in between.

Of the other residuals a policy as in `jax.checkpoint_policies` selects those to save, or the results of large products
and of kernels are saved, or they are as few bytes as possible: recomputing element-wise operations, casts and reshapes
costs less than the memory traffic of saving their results, and a minimum cut of the graph finds the saved set with the
fewest bytes; among equal sets, the one nearest to the residuals, which recomputes least. Source: functorch's
`min_cut_rematerialization_partition` (PyTorch), with parameters and batch free of cost.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import jax
import numpy as np
import scipy.sparse
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from jaxferry.errors import InputError
from jaxferry.modes import Remat
from jaxferry.partition.graph import Atom, Equation, Graph, aval_bytes, evaluate, live_equations, trace
from jaxferry.partition.rows import ELEMENTWISE, keep_rows
from jaxferry.partition.scans import jaxprs_in
from jaxferry.partition.segments import Segment

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


def is_cheap(equation: Equation) -> bool:
    """Whether recomputing an equation costs less than saving its result."""
    return equation.primitive.name in _CHEAP and not equation.has_effects


def values_to_keep(
    graph: Graph,
    residuals: Iterable[int],
    free: Collection[int],
    can_repeat: Callable[[Equation], bool] = is_cheap,
) -> set[int]:
    """Returns the values to save so that cheap equations, or others that can repeat, recompute every residual."""
    wanted = [value for value in dict.fromkeys(residuals) if value not in free]
    if not wanted:
        return set()
    made_by = {v: e for e in graph.equations for v in e.outputs}
    nodes, stack = dict.fromkeys(wanted), list(wanted)
    edges: list[tuple[int, int]] = []
    while stack:
        value = stack.pop()
        equation = made_by.get(value)
        for operand in equation.reads if equation is not None and can_repeat(equation) else ():
            if operand not in free:
                edges.append((operand, value))
                if operand not in nodes:
                    nodes[operand] = None
                    stack.append(operand)
    fixed = [v for v in nodes if v not in made_by or not can_repeat(made_by[v])]
    return _minimum_cut(graph, list(nodes), edges, fixed, wanted)


def _values_kept(
    keeps: Callable[[Equation], bool], graph: Graph, residuals: Iterable[int], free: Collection[int]
) -> set[int]:
    """The results of equations to keep among those that the residuals depend on, as `jax.checkpoint` saves them."""
    made_by = {v: e for e in graph.equations for v in e.outputs}
    kept: set[int] = set()
    seen, stack = set(free), list(residuals)
    while stack:
        value = stack.pop()
        if value in seen:
            continue
        seen.add(value)
        equation = made_by.get(value)
        if equation is None or equation.has_effects or keeps(equation):
            kept.add(value)
        else:
            stack += equation.reads
    return kept


def _may_keep(policy: Callable[..., Any], graph: Graph, equation: Equation) -> bool:
    avals = list(map(graph.aval_of, equation.inputs))
    answer = policy(equation.primitive, *avals, **equation.params)
    if not isinstance(answer, bool | np.bool_):
        raise InputError(
            "remat: a policy must return True (keep) or False (recompute) for each operation, got "
            f"{answer!r} for {equation.primitive.name}"
        )
    return bool(answer)


MOST_DEPTH, _SHARE_OF_DEPTH = 1024, 0.25
"""Products are large if each result is a sum of so many terms, or of that share of the mean in the segment.

A result of 16 bits then takes as long to compute as to write and to read. The mean is by operations; narrow models have
no product of so many terms."""

_KERNELS = frozenset({"ffi_call", "pallas_call", "custom_partitioning"})


def _products(eqn: Any, avals: Callable[[Any], Any], inner: int = 1) -> list[tuple[float, float]]:
    """The terms of each result, and the operations, of the products of an equation and of programs nested in it."""
    name, params = eqn.primitive.name, eqn.params
    atoms = (eqn.inputs, eqn.outputs) if isinstance(eqn, Equation) else (eqn.invars, eqn.outvars)
    operands, results = (list(map(avals, each)) for each in atoms)
    if name in _KERNELS or name.startswith("dot_product_attention"):
        return [(math.inf, 0.0)]
    if name in ("dot_general", "ragged_dot_general"):
        numbers = params["dimension_numbers"] if name == "dot_general" else params["ragged_dot_dimension_numbers"]
        axes = (numbers if name == "dot_general" else numbers.dot_dimension_numbers)[0][0]
        depth = math.prod(operands[0].shape[axis] for axis in axes)
    elif name == "conv_general_dilated":
        depth = math.prod(operands[1].shape) // max(operands[1].shape[params["dimension_numbers"].rhs_spec[0]], 1)
    else:
        times = inner * params.get("length", 1)
        nested = itertools.chain.from_iterable(each.eqns for each in jaxprs_in(eqn))
        return [found for each in nested for found in _products(each, lambda atom: atom.aval, times)]
    return [(float(depth), float(depth * inner * math.prod(results[0].shape)))]


def _keeps_products(graph: Graph) -> Callable[[Equation], bool]:
    """Whether the results of an equation are those of large products, or of kernels, whose work is not known."""
    found = [each for equation in graph.equations for each in _products(equation, graph.aval_of)]
    total = sum(work for _, work in found)
    mean = sum(depth * work for depth, work in found if work) / total if total else 0.0
    least = min(MOST_DEPTH, _SHARE_OF_DEPTH * mean)
    return lambda equation: any(depth >= least for depth, _ in _products(equation, graph.aval_of))


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


REMAT = tuple(remat.value for remat in Remat)
"""What a segment recomputes in its backward: `none` nothing expensive, `products` all but large products, `full` its
whole forward from its inputs."""

AUTO = "auto"
"""`none` unless a plan chooses another one."""


@dataclasses.dataclass(frozen=True, eq=False)
class Derivative:
    """Forward and backward of one segment as functions for `jax.jit`.

    Attributes:
      segment: the segment; all segments with the same program number may share these functions.
      saved: shape and dtype of each saved residual.
      weights_read: indices of the weights that the backward reads.
      row_gradients: shape and dtype of the arrays of all gradients if some are `RowGradient`s, else empty.
      inputs_read, nondiff_inputs_read, outputs_read: indices of the values that the backward reads.
      forward: returns the values of `segment.outputs` and `segment.nondiff_outputs`, and the residuals.
      backward: returns gradients of the trained weights (arrays, or `RowGradient`s of lookups) and the inputs'
        cotangents. It takes of `inputs`, `nondiff_inputs` and `outputs` only the values that it reads. Weights that are
        not read may be shape structs.
    """

    segment: Segment
    saved: tuple[Any, ...]
    weights_read: tuple[int, ...]
    inputs_read: tuple[int, ...]
    nondiff_inputs_read: tuple[int, ...]
    outputs_read: tuple[int, ...]
    forward: Callable[..., Any]
    backward: Callable[..., Any]
    row_gradients: tuple[Any, ...] = ()

    def both(self, seeds: Callable[..., Any], weights: Any, inputs: Any, nondiff_inputs: Any, *scale: Any) -> Any:
        """Runs the forward and, for the cotangents `seeds(outputs, *scale)`, the backward.

        Returns:
          The gradients, and the outputs, the non-differentiable outputs and the inputs' cotangents.
        """
        outputs, nondiff_outputs, saved = self.forward(weights, inputs, nondiff_inputs)
        read = (
            [inputs[i] for i in self.inputs_read],
            [nondiff_inputs[i] for i in self.nondiff_inputs_read],
            [outputs[i] for i in self.outputs_read],
        )
        gradients, cotangents = self.backward(weights, *read, saved, seeds(outputs, *scale))
        return gradients, (outputs, nondiff_outputs, cotangents)

    @functools.cached_property
    def reads_groups(self) -> tuple[bool, ...]:
        """For each group of the segment, whether the backward reads any weights of it."""
        groups = self.segment.by_group(range(len(self.segment.weights)))
        return tuple(not set(self.weights_read).isdisjoint(group) for group in groups)

    @property
    def has_rows(self) -> bool:
        """Whether some gradients are `RowGradient`s."""
        return bool(self.row_gradients)

    @property
    def row_gradient_bytes(self) -> int:
        """Bytes of all gradients if some are `RowGradient`s, else 0."""
        return sum(map(aval_bytes, self.row_gradients))

    @property
    def saved_bytes(self) -> int:
        """Bytes of the saved residuals."""
        return sum(aval_bytes(aval) for aval in self.saved)

    def is_worth_it(self, other: Derivative) -> bool:
        """Whether it saves fewer bytes than another derivative of the segment, by an eighth at least."""
        return 8 * self.saved_bytes <= 7 * other.saved_bytes and self.saved_bytes < other.saved_bytes

    def backward_arguments(self, graph: Graph) -> tuple[list[Any], ...]:
        """Returns shape structs of the arguments of `backward`; `graph` is the segment's graph."""
        segment = self.segment
        return (
            shapes_of(graph, segment.weights),
            shapes_of(graph, [segment.inputs[i] for i in self.inputs_read]),
            shapes_of(graph, [segment.nondiff_inputs[i] for i in self.nondiff_inputs_read]),
            shapes_of(graph, [segment.outputs[i] for i in self.outputs_read]),
            list(self.saved),
            shapes_of(graph, segment.outputs),
        )


def differentiate(graph: Graph, segment: Segment, remat: Any = None) -> Derivative:
    """Builds the forward and the backward of `segment`.

    Args:
      graph: the segment's graph.
      segment: the segment.
      remat: what to save between the two: one of `REMAT`, `AUTO`, or a policy as in `jax.checkpoint_policies`; None
        uses the segment's own choice. All but policies are differentiated once for each graph.

    Raises:
      InputError: if the policy returns anything but True (keep) or False (recompute).
    """
    return dataclasses.replace(once_for_graph(_differentiate, graph, segment, remat), segment=segment)


def once_for_graph(make: Callable[[Graph, Segment, Any], Any], graph: Graph, segment: Segment, remat: Any) -> Any:
    """What a function makes of a segment, once for each graph and content unless the segment recomputes by a policy."""
    remat = segment.remat if remat is None else remat
    if not isinstance(remat, str):
        return make(graph, segment, remat)
    key = make, segment.signature, "none" if remat == AUTO else remat
    if key not in graph.kept:
        graph.kept[key] = make(graph, segment, remat)
    return graph.kept[key]


def _differentiate(graph: Graph, segment: Segment, remat: Any) -> Derivative:
    if remat == Remat.FULL or not segment.runs_back:
        made = _recomputing_forward(segment)
    else:
        made = _saving_residuals(segment, _linearise(graph, segment), Remat.NONE if remat == AUTO else remat)
    if not segment.runs_back:
        return made
    kept = keep_rows(made.backward, made.backward_arguments(graph), len(segment.trained))
    if kept is None:
        return made
    sparse, row_gradients = kept
    return dataclasses.replace(made, backward=sparse, row_gradients=row_gradients)


def _pullback(segment: Segment, weights: Any, inputs: Any, nondiff_inputs: Any) -> tuple[list[Any], Any, list[Any]]:
    def run(trained: Any, inputs: Any) -> tuple[list[Any], list[Any]]:
        given = dict(zip(segment.trained, trained, strict=True))
        return segment.forward([given.get(i, weight) for i, weight in enumerate(weights)], inputs, nondiff_inputs)

    return jax.vjp(run, [weights[i] for i in segment.trained], inputs, has_aux=True)


def _recomputing_forward(segment: Segment) -> Derivative:
    def forward(weights: Any, inputs: Any, nondiff_inputs: Any) -> Any:
        return (*segment.forward(weights, inputs, nondiff_inputs), [])

    if not segment.runs_back:
        return Derivative(segment, (), (), (), (), (), forward, lambda *given: ([], []))

    def backward(weights: Any, inputs: Any, nondiff_inputs: Any, outputs: Any, saved: Any, cotangents: Any) -> Any:
        # Without the barrier, XLA could merge the recomputation into the forward of a program that holds both.
        inputs = jax.lax.optimization_barrier(inputs)
        return _pullback(segment, weights, inputs, nondiff_inputs)[1](cotangents)

    inputs_read, nondiff_inputs_read = tuple(range(len(segment.inputs))), tuple(range(len(segment.nondiff_inputs)))
    weights_read = tuple(range(len(segment.weights)))
    return Derivative(segment, (), weights_read, inputs_read, nondiff_inputs_read, (), forward, backward)


@dataclasses.dataclass(frozen=True, eq=False)
class _Linearised:
    """The graph of `_pullback` and the atoms of its results."""

    graph: Graph
    outputs: tuple[Atom, ...]
    nondiff_outputs: tuple[Atom, ...]
    residuals: tuple[Atom, ...]
    tree: Any


def shapes_of(graph: Graph, values: Sequence[int]) -> list[jax.ShapeDtypeStruct]:
    """The shape structs of values."""
    avals = [graph.avals[value] for value in values]
    return [jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type) for aval in avals]


def joint_graph(graph: Graph, segment: Segment) -> Graph:
    """Returns the forward and backward of a segment in one graph, with custom derivative rules as plain equations."""

    def run(weights: Any, inputs: Any, nondiff_inputs: Any, cotangents: Any) -> Any:
        outputs, pullback, nondiff_outputs = _pullback(segment, weights, inputs, nondiff_inputs)
        return outputs, nondiff_outputs, pullback(cotangents)

    weights, *others = (
        shapes_of(graph, v) for v in (segment.weights, segment.inputs, segment.nondiff_inputs, segment.outputs)
    )
    return trace(run, weights, tuple(others), {})


def _linearise(graph: Graph, segment: Segment) -> _Linearised:
    """Traces the forward of a segment with its residuals."""
    trees = []

    def run(weights: Any, inputs: Any, nondiff_inputs: Any) -> Any:
        outputs, pullback, nondiff_outputs = _pullback(segment, weights, inputs, nondiff_inputs)
        residuals, tree = jax.tree.flatten(pullback)
        trees.append(tree)
        return outputs, nondiff_outputs, residuals

    weights, inputs, nondiff_inputs = (
        shapes_of(graph, v) for v in (segment.weights, segment.inputs, segment.nondiff_inputs)
    )
    linear = trace(run, weights, (inputs, nondiff_inputs), {})
    num_outputs, num_extras = len(segment.outputs), len(segment.nondiff_outputs)
    outputs, rest = linear.outputs[:num_outputs], linear.outputs[num_outputs:]
    return _Linearised(linear, outputs, rest[:num_extras], rest[num_extras:], trees[-1])


def _saving_residuals(segment: Segment, lin: _Linearised, remat: Any) -> Derivative:
    graph, num_inputs = lin.graph, len(segment.inputs)
    from_weights = _made_from(graph, set(graph.parameters))
    nondiff_inputs = graph.batch[num_inputs:]
    given = {*graph.parameters, *nondiff_inputs, *graph.constants}
    residuals = [v for v in lin.residuals if isinstance(v, int)]
    free = given | from_weights
    if remat == Remat.NONE:
        kept = values_to_keep(graph, residuals, free)
    else:
        is_named = remat == Remat.PRODUCTS
        keeps = _keeps_products(graph) if is_named else functools.partial(_may_keep, remat, graph)
        kept = _values_kept(keeps, graph, residuals, free)
    recomputed = recomputation(graph, residuals, given | kept)
    if remat == Remat.NONE:
        assert all(is_cheap(equation) or from_weights.issuperset(equation.outputs) for equation in recomputed)
    needed = {*residuals, *(v for e in recomputed for v in e.reads)}
    # An output that is also an argument is read from that argument.
    supplied = {*graph.parameters, *graph.batch, *graph.constants}
    numbers: tuple[tuple[Atom, ...], ...] = (graph.batch[:num_inputs], nondiff_inputs, lin.outputs)
    read = [
        tuple(i for i, v in enumerate(values) if v in needed and not (values is lin.outputs and v in supplied))
        for values in numbers
    ]
    saved = tuple(v for v in kept if v not in supplied and v not in lin.outputs)

    def forward(weights: Any, inputs: Any, nondiff_inputs: Any) -> Any:
        values = dict(zip((*graph.parameters, *graph.batch), (*weights, *inputs, *nondiff_inputs), strict=True))
        values |= graph.constants
        evaluate(live_equations(graph.equations, (*lin.outputs, *lin.nondiff_outputs, *saved)), values)
        return [_collect(values, atoms) for atoms in (lin.outputs, lin.nondiff_outputs, saved)]

    def backward(weights: Any, inputs: Any, nondiff_inputs: Any, outputs: Any, residues: Any, cotangents: Any) -> Any:
        values: dict[Any, Any] = dict(graph.constants)
        values |= zip(graph.parameters, weights, strict=True)
        if remat != Remat.NONE:
            inputs = jax.lax.optimization_barrier(inputs)  # as in `_recomputing_forward`
        for atoms, places, arrays in zip(numbers, read, (inputs, nondiff_inputs, outputs), strict=True):
            values |= {atoms[i]: array for i, array in zip(places, arrays, strict=True)}
        values |= zip(saved, residues, strict=True)
        evaluate(recomputed, values)
        return jax.tree.unflatten(lin.tree, _collect(values, lin.residuals))(cotangents)

    kept_avals = tuple(jax.ShapeDtypeStruct(graph.avals[v].shape, graph.avals[v].dtype) for v in saved)
    weights_read = tuple(i for i, value in enumerate(graph.parameters) if value in needed)
    return Derivative(segment, kept_avals, weights_read, read[0], read[1], read[2], forward, backward)


def _collect(values: dict[int, Any], atoms: Sequence[Atom]) -> list[Any]:
    return [values[atom] if isinstance(atom, int) else atom.val for atom in atoms]


def recomputation(graph: Graph, residuals: Sequence[int], held: Collection[int]) -> tuple[Equation, ...]:
    """Returns the equations that compute the residuals from the values in `held`."""
    needed = {value for value in residuals if value not in held}
    chosen = []
    for equation in reversed(graph.equations):
        if needed.intersection(equation.outputs):
            chosen.append(equation)
            needed.update(value for value in equation.reads if value not in held)
    return tuple(reversed(chosen))


def _made_from(graph: Graph, sources: set[int]) -> set[int]:
    """Returns the values computed from `sources` and constants alone."""
    made: set[int] = set()
    for equation in graph.equations:
        if not equation.has_effects and all(v in sources or v in made or v in graph.constants for v in equation.reads):
            made.update(equation.outputs)
    return made
