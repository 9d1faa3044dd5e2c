"""Rewrites programs to write a layer's gradient to host memory themselves (GO; MemFerry, section V).

A gradient that is a product, `x.T @ dy` up to casts, transposes and reshapes, is computed panel by panel on its way to
the host and never exists whole on the device. Other gradients are stored once computed. One that a loop has summed in
fp32 is stored from this sum, which is rounded in its own memory: in 16 bits it would be on the device beside the sum.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxferry.native import as_stored, operations, twins
from jaxferry.partition import host_reads
from jaxferry.partition.graph import Atom, Equation, Graph, evaluate, live_equations, trace
from jaxferry.partition.host_reads import Piece, View
from jaxferry.partition.layout import Layer, Leaf

FUSED_BYTES = 2**20
"""XLA computes smaller gradients, which are then stored: computing them by panels would gain nothing."""

_ROUNDED_PANELS = 16
"""A sum is rounded in so many panels: of one panel at a time there is a second copy."""


def store_in_place(
    function: Callable[..., Any],
    layer: Layer,
    arguments: Sequence[Any],
    *,
    accumulate: bool,
    native: bool,
    fused_bytes: int | None = None,
) -> Callable[..., tuple[list[jax.Array], list[jax.Array] | None, Any]]:
    """Returns a function that stores gradients instead of returning them.

    Args:
      function: `(*arguments) -> (gradients, rest)`; `gradients` are arrays, one for each of the layer's parameters.
      layer: the layout of the gradients in the layer's vectors.
      arguments: shape structs of the function's arguments.
      accumulate: whether gradients are added to the contents of the vectors.
      native: whether to use the native library's operations. Without them the vectors are packed on the device.
      fused_bytes: the minimum size of a gradient that is computed panel by panel; default `FUSED_BYTES`.

    Returns:
      `(destinations, *arguments) -> (vectors, gradients, rest)`. `destinations` are the layer's vectors in host memory,
      which the caller donates; `vectors` are the updated ones. `gradients` are the gradients on the device, or None if
      some never exist there.
    """
    graph = trace(lambda given: function(*given), list(arguments), (), {})
    gradients, rest = jax.tree.unflatten(graph.out_tree, graph.outputs)
    least_bytes, products = FUSED_BYTES if fused_bytes is None else fused_bytes, dict[int, _Product]()
    made_by = {value: equation for equation in graph.equations for value in equation.outputs}
    for i, leaf in enumerate(layer.leaves if native else ()):
        if (product := _find_product(graph, made_by, gradients[i], leaf, least_bytes)) is not None:
            products[i] = product
    sums = [_find_sum(graph, made_by, each, least_bytes) if native else None for each in gradients]
    dense = [each if sums[i] is None else sums[i] for i, each in enumerate(gradients) if i not in products]
    needed = [*jax.tree.leaves(rest), *dense, *(atom for p in products.values() for atom in (p.x, p.dy))]
    equations = live_equations(graph.equations, needed)
    made_at = {value: i for i, equation in enumerate(graph.equations) for value in equation.outputs}
    order = sorted(range(len(gradients)), key=lambda i: made_at.get(gradients[i], -1))

    def run(destinations: Sequence[jax.Array], *given: Any) -> Any:
        values = dict(graph.constants)
        values |= zip(graph.parameters, jax.tree.leaves(list(given)), strict=True)
        evaluate(equations, values)

        def value(atom: Any) -> Any:
            return values[atom] if isinstance(atom, int) else atom.val

        def gradient(i: int) -> Any:
            total, made = sums[i], gradients[i]
            return as_stored(value(made)) if total is None else _rounded(values[total], graph.avals[made].dtype)

        on_device = {i: gradient(i) for i in range(len(gradients)) if i not in products}
        kept = list(on_device.values())
        others = jax.tree.map(value, rest)
        if not native:
            return _packed(layer, kept, destinations if accumulate else None), kept, others
        vectors = list(destinations)
        for i in order:
            leaf = layer.leaves[i]
            if i in products:
                stored = products[i].store(vectors[leaf.vector], value, leaf, accumulate)
            else:
                stored = operations.gradient_store(
                    vectors[leaf.vector], on_device[i], offset=leaf.offset, accumulate=accumulate, native=True
                )
            vectors[leaf.vector] = stored
        return vectors, None if products else kept, others

    return run


def _find_sum(graph: Graph, made_by: Mapping[int, Equation], gradient: Any, least_bytes: int) -> int | None:
    """Returns the fp32 sum of a loop of which a large gradient is the rounded value; None if it is anything else."""
    cast = made_by.get(gradient) if isinstance(gradient, int) else None
    if cast is None or cast.primitive.name != "convert_element_type" or graph.num_bytes(gradient) < least_bytes:
        return None
    [total] = cast.reads
    made = made_by.get(total) if graph.avals[total].ndim else None
    parts = made.reads if made is not None and made.primitive.name == "add" else (total,)  # of a last, smaller tile
    loops = ("scan", "while", "optimization_barrier")  # which orders that last tile behind the loop
    is_sum = any(made_by[part].primitive.name in loops for part in parts if part in made_by)
    return total if is_sum and graph.avals[total].dtype == np.float32 else None


def _rounded(total: jax.Array, dtype: Any) -> jax.Array:
    """Returns an fp32 array rounded to the values of a dtype, panel by panel in its own memory."""
    axis = int(np.argmax(total.shape))
    length = total.shape[axis]
    size = -(-length // _ROUNDED_PANELS)

    def step(i: jax.Array, array: jax.Array) -> jax.Array:
        start = jnp.minimum(i * size, length - size)  # what is rounded twice stays the same
        panel = as_stored(jax.lax.dynamic_slice_in_dim(array, start, size, axis).astype(dtype))
        return jax.lax.dynamic_update_slice_in_dim(array, panel.astype(array.dtype), start, axis)

    return jax.lax.fori_loop(0, -(-length // size), step, total)


def _packed(layer: Layer, gradients: Sequence[jax.Array], onto: Sequence[jax.Array] | None) -> list[jax.Array]:
    """Packs gradients on the device and returns them, or their sums with `onto`, as host vectors."""
    packed = layer.pack(gradients)
    if onto is not None:
        packed = tuple(twins.to_device(known) + vector for known, vector in zip(onto, packed, strict=True))
    return [twins.to_host(vector) for vector in packed]


@dataclasses.dataclass(frozen=True)
class _Product:
    """A gradient that is a product of `x` and `dy`, contracted over all common dimensions.

    Attributes:
      x, dy: the operands; the pieces of x come first in the parameter.
      summed: the contracted dimensions of each operand, in the same order.
      free: the other dimensions of each operand.
      pieces: the pieces of each operand's free dimensions.
      order: the same pieces in the parameter's order.
      dtype: the dtype that XLA would round the product to.
    """

    x: Atom
    dy: Atom
    summed: tuple[tuple[int, ...], tuple[int, ...]]
    free: tuple[tuple[int, ...], tuple[int, ...]]
    pieces: tuple[tuple[Piece, ...], tuple[Piece, ...]]
    order: tuple[tuple[Piece, ...], tuple[Piece, ...]]
    dtype: np.dtype

    def store(self, vector: jax.Array, value: Callable[[Any], Any], leaf: Leaf, accumulate: bool) -> jax.Array:
        """Writes the product at the parameter's offset and returns the updated vector."""
        x, dy = (self._rows(value(atom), side) for side, atom in enumerate((self.x, self.dy)))
        return operations.dha_matmul_gradient(
            vector, x, dy, offset=leaf.offset, accumulate=accumulate, round_to=self.dtype, native=True
        )

    def _rows(self, array: jax.Array, side: int) -> jax.Array:
        """Returns an operand as a matrix whose rows are the contracted dimensions."""
        kept = [array.shape[d] for d in self.summed[side]]
        moved = array.transpose((*self.summed[side], *self.free[side]))
        flat = host_reads.reorder(moved, kept, self.pieces[side], self.order[side])
        return flat.reshape((-1, flat.shape[-1]))


def _find_product(
    graph: Graph, made_by: Mapping[int, Equation], gradient: Any, leaf: Leaf, fused_bytes: int
) -> _Product | None:
    """Returns the product that computes a gradient, if the gradient is large and has no other reader."""
    if not isinstance(gradient, int) or leaf.size * leaf.dtype.itemsize < fused_bytes:
        return None
    readers: dict[int, int] = {}
    for atom in (*(v for equation in graph.equations for v in equation.reads), *graph.outputs):
        if isinstance(atom, int):
            readers[atom] = readers.get(atom, 0) + 1
    chain: list[Equation] = []
    value = gradient
    while value in made_by and readers[value] == 1 and made_by[value].primitive.name != "dot_general":
        equation = made_by[value]
        if len(equation.inputs) != 1 or not isinstance(equation.inputs[0], int):
            return None
        chain.append(equation)
        value = equation.inputs[0]
    dot = made_by.get(value)
    if dot is None or readers[value] != 1 or dot.primitive.name != "dot_general":
        return None
    if not host_reads.has_default_precision(dot):
        return None
    dtypes = [np.dtype(graph.avals[v].dtype) for v in (value, *(e.outputs[0] for e in reversed(chain)))]
    if len(set(dtypes)) > 2 or not all(dtype in operations.DTYPES for dtype in dtypes):
        return None
    view: View | None = View.of(graph.avals[value].shape)
    for equation in reversed(chain):
        view = None if view is None else host_reads.apply(equation, view)
    return None if view is None else _arrange(graph, dot, view, dtypes[0])


def _arrange(graph: Graph, dot: Equation, view: View, dtype: np.dtype) -> _Product | None:
    """Returns the product in the parameter's order; None if that order mixes the operands' dimensions."""
    first, second = dot.inputs
    if not isinstance(first, int) or not isinstance(second, int):
        return None
    dims = host_reads.dot_dims(dot, (graph.avals[first].ndim, graph.avals[second].ndim))
    if dims is None:
        return None
    summed, free = dims
    ordered = view.pieces
    of_first = [piece for piece in ordered if piece[0][0] < len(free[0])]
    sides = [0, 1] if list(ordered[: len(of_first)]) == of_first else [1, 0]
    atoms, orders = (first, second), (of_first, [piece for piece in ordered if piece[0][0] >= len(free[0])])
    if [piece for side in sides for piece in orders[side]] != list(ordered):
        return None
    return _Product(
        atoms[sides[0]],
        atoms[sides[1]],
        (summed[sides[0]], summed[sides[1]]),
        (free[sides[0]], free[sides[1]]),
        (tuple(sorted(orders[sides[0]])), tuple(sorted(orders[sides[1]]))),
        (tuple(orders[sides[0]]), tuple(orders[sides[1]])),
        dtype,
    )
