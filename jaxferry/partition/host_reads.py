"""Rewrites programs to read a layer's parameters in host memory: Direct Host Access (MemFerry, section III).

Views: arrays that hold a stored weight's elements in another order, as after transposes and reshapes.

A view's dimensions consist of pieces of the stored dimensions. These show whether a product with the view is a product
with a plain matrix in storage order.

Equations that read parameters become operations on the layer's flat vectors: lookups become `dha_gather`, products
become `dha_matmul`, and all others read a device copy made by `dha_read`. Transposes, reshapes and casts of a parameter
on the way to an operation are folded into it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxferry.native import GatherShape, ProductShape, operations, twins
from jaxferry.partition.graph import Equation, Graph, evaluate, trace
from jaxferry.partition.layout import Layer, Leaf

Piece = tuple[tuple[int, ...], int]
"""A piece of a stored dimension: its position in storage order (compared as tuples) and its length."""


@dataclasses.dataclass(frozen=True)
class View:
    """The pieces of each dimension, slowest first; dimensions of length 1 have none."""

    dims: tuple[tuple[Piece, ...], ...]

    @classmethod
    def of(cls, shape: Sequence[int]) -> View:
        """Returns the view of a stored array in its own order."""
        return cls(tuple((((i,), n),) if n != 1 else () for i, n in enumerate(shape)))

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """All pieces in view order."""
        return tuple(piece for dim in self.dims for piece in dim)

    def transpose(self, permutation: Sequence[int]) -> View:
        """Returns the view with its dimensions permuted."""
        return View(tuple(self.dims[i] for i in permutation))

    def reshape(self, shape: Sequence[int]) -> View | None:
        """Returns the view in another shape; None if the shape splits a piece unevenly."""
        left = list(self.pieces)
        dims = []
        for length in shape:
            taken: list[Piece] = []
            while length != 1:
                if not left or 0 in (length, left[0][1]):
                    return None
                place, size = left.pop(0)
                if length % size == 0:
                    taken.append((place, size))
                    length //= size
                elif size % length == 0:
                    taken.append(((*place, 0), length))
                    left.insert(0, ((*place, 1), size // length))
                    length = 1
                else:
                    return None
            dims.append(tuple(taken))
        return View(tuple(dims))


def apply(equation: Equation, view: View) -> View | None:
    """Applies an equation to a view; None if the equation does more than reorder."""
    name, params = equation.primitive.name, equation.params
    if name in ("convert_element_type", "copy"):
        return view
    if name == "transpose":
        return view.transpose(params["permutation"])
    if name == "reshape":
        return None if params.get("dimensions") else view.reshape(params["new_sizes"])
    if name in ("squeeze", "reduce_sum"):
        dropped = {d % len(view.dims) for d in params.get("dimensions", params.get("axes"))}
        if any(view.dims[d] for d in dropped):
            return None
        return View(tuple(dim for i, dim in enumerate(view.dims) if i not in dropped))
    if name == "expand_dims":
        rank = len(view.dims) + len(params["dimensions"])
        added = {d % rank for d in params["dimensions"]}
        kept = iter(view.dims)
        return View(tuple(() if i in added else next(kept) for i in range(rank)))
    if name == "broadcast_in_dim":
        return _broadcast(view, params["shape"], params["broadcast_dimensions"])
    return None


def _broadcast(view: View, shape: Sequence[int], places: Sequence[int]) -> View | None:
    """Applies a broadcast that only adds dimensions of length 1; None for any other."""
    dims: list[tuple[Piece, ...]] = [()] * len(shape)
    for dim, place in zip(view.dims, places, strict=True):
        dims[place] = dim
    lengths = [math.prod(size for _, size in dim) for dim in dims]
    return View(tuple(dims)) if lengths == list(shape) else None


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A view as a stored matrix whose rows or columns are the contracted dimensions.

    Attributes:
      summed: pieces of the contracted dimensions, in storage order.
      free: pieces of the other dimensions, in storage order.
      transpose: whether `free` comes first in storage.
    """

    summed: tuple[Piece, ...]
    free: tuple[Piece, ...]
    transpose: bool


def as_matrix(view: View, summed: Collection[int]) -> Matrix | None:
    """Returns the view as a matrix for a product that contracts some of its dimensions; None if it is not one."""
    stored = sorted(view.pieces)
    chosen = {piece for i in summed for piece in view.dims[i]}
    count = len(chosen)
    if chosen == set(stored[:count]):
        return Matrix(tuple(stored[:count]), tuple(stored[count:]), False)
    if chosen == set(stored[len(stored) - count :]):
        return Matrix(tuple(stored[len(stored) - count :]), tuple(stored[: len(stored) - count]), True)
    return None


def size_of(pieces: Sequence[Piece]) -> int:
    """Returns the number of elements that the pieces span."""
    return math.prod(size for _, size in pieces)


def reorder(array: jax.Array, kept: Sequence[int], pieces: Sequence[Piece], order: Sequence[Piece]) -> jax.Array:
    """Reorders the pieces of an array `[*kept, *pieces]` and flattens them into one last dimension."""
    array = array.reshape((*kept, *(size for _, size in pieces)))
    moved = [len(kept) + pieces.index(piece) for piece in order]
    return array.transpose((*range(len(kept)), *moved)).reshape((*kept, size_of(order)))


def dot_dims(equation: Equation, ndims: tuple[int, int]) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]] | None:
    """Returns the contracted and free dimensions of both operands of a `dot_general`; None with batch dimensions."""
    summed, batch = equation.params["dimension_numbers"]
    if batch[0]:
        return None
    free = [tuple(d for d in range(n) if d not in dims) for n, dims in zip(ndims, summed, strict=True)]
    return [tuple(dims) for dims in summed], free


def has_default_precision(dot: Equation) -> bool:
    """Whether a product has its dtype's default precision, the only one that native operations support.

    Another precision may come from the model's code or from `jax_default_matmul_precision`.
    """
    precision = dot.params["precision"]
    asked = precision if isinstance(precision, tuple) else (precision,)
    return all(part is None or part == lax.Precision.DEFAULT for part in asked)


Vectors = Sequence[jax.Array]

_CLIPPED = (lax.GatherScatterMode.CLIP, lax.GatherScatterMode.PROMISE_IN_BOUNDS)
"""Modes in which XLA's gather reads the nearest row for an index out of range."""


@dataclasses.dataclass(frozen=True)
class _Reference:
    """A value that is a reordered and possibly cast parameter.

    Attributes:
      leaf: index of the parameter in its layer.
      view: the reordering.
      dtype: the dtype after the cast.
    """

    leaf: int
    view: View
    dtype: np.dtype


Operation = Callable[[Vectors, dict[int, Any]], jax.Array]
"""Computes an equation's result from the layer's vectors and the values computed so far."""


def read_in_place(
    function: Callable[..., Any], layer: Layer, arguments: Sequence[Any], native: bool
) -> Callable[..., Any]:
    """Returns the same function with the layer's vectors in host memory in place of its parameters.

    Without native operations, the program copies the whole layer to the device first.

    Args:
      function: `function(weights, *others)`; `weights` are the layer's parameters on the device.
      layer: the layout of the parameters in the vectors.
      arguments: shape structs of the function's arguments.
      native: whether to use the native library's operations.

    Returns:
      A function of `(vectors, *others)` with the same results.
    """
    if not native:
        return lambda vectors, *others: function(layer.unpack([twins.to_device(v).ravel() for v in vectors]), *others)
    graph = trace(function, arguments[0], tuple(arguments[1:]), {})
    rewrite = _Rewrite(graph, layer)
    dense = sorted(rewrite.dense_leaves)

    def run(vectors: Vectors, *others: Any) -> Any:
        values = {**graph.constants, **dict(zip(graph.batch, jax.tree.leaves(others), strict=True))}
        read = _read([layer.leaves[i] for i in dense], vectors)
        values |= {graph.parameters[i]: array for i, array in zip(dense, read, strict=True)}
        for equation in graph.equations:
            operation = rewrite.operations.get(id(equation))
            if operation is not None:
                values[equation.outputs[0]] = operation(vectors, values)
            elif id(equation) not in rewrite.folded:
                evaluate([equation], values)
        results = [values[atom] if isinstance(atom, int) else atom.val for atom in graph.outputs]
        return jax.tree.unflatten(graph.out_tree, results)

    return run


def _read(leaves: Sequence[Leaf], vectors: Vectors) -> list[jax.Array]:
    """Returns device copies of parameters; one operation per vector."""
    found: dict[int, jax.Array] = {}
    for number, vector in enumerate(vectors):
        chosen = [leaf for leaf in leaves if leaf.vector == number]
        if chosen:
            shapes, offsets = [leaf.shape for leaf in chosen], [leaf.offset for leaf in chosen]
            arrays = operations.dha_read(vector, shapes, offsets, native=True)
            found |= {leaf.index: array for leaf, array in zip(chosen, arrays, strict=True)}
    return [found[leaf.index] for leaf in leaves]


class _Rewrite:
    """Decides how each equation is rewritten.

    Attributes:
      operations: id of an equation -> the operation that replaces it.
      folded: ids of equations that are folded into an operation.
      dense_leaves: parameters that are read through a device copy.
    """

    def __init__(self, graph: Graph, layer: Layer) -> None:
        self._graph, self._layer = graph, layer
        self.dense_leaves: set[int] = set()
        while True:
            # Once one equation needs a device copy of a parameter, all others use it too.
            known = set(self.dense_leaves)
            self.operations: dict[int, Operation] = {}
            self.folded: set[int] = set()
            self._find()
            if self.dense_leaves == known:
                break

    def _find(self) -> None:
        references = {
            value: _Reference(i, View.of(leaf.shape), leaf.dtype)
            for i, (value, leaf) in enumerate(zip(self._graph.parameters, self._layer.leaves, strict=True))
            if i not in self.dense_leaves
        }
        whole = {atom for atom in self._graph.outputs if isinstance(atom, int)}
        for equation in self._graph.equations:
            if references.keys().isdisjoint(equation.reads):
                continue
            followed = self._follow(equation, references)
            if followed is not None:
                references[equation.outputs[0]] = followed
                self.folded.add(id(equation))
                continue
            operation = self._operation(equation, references)
            if operation is None:
                whole.update(equation.reads)
            else:
                self.operations[id(equation)] = operation
        self.dense_leaves |= {references[value].leaf for value in whole if value in references}

    def _follow(self, equation: Equation, references: Mapping[int, _Reference]) -> _Reference | None:
        """Returns the reference that an equation makes of another; None if it does more than reorder or cast once."""
        atom = equation.inputs[0]
        if len(equation.inputs) != 1 or not isinstance(atom, int):
            return None
        reference = references[atom]
        view = apply(equation, reference.view)
        if view is None:
            return None
        dtype = np.dtype(self._graph.avals[equation.outputs[0]].dtype)
        is_cast_twice = dtype != reference.dtype != self._layer.leaves[reference.leaf].dtype
        if is_cast_twice or dtype not in operations.DTYPES:
            return None
        return _Reference(reference.leaf, view, dtype)

    def _operation(self, equation: Equation, references: Mapping[int, _Reference]) -> Operation | None:
        if equation.primitive.name == "dot_general":
            return self._product(equation, references)
        if equation.primitive.name == "gather":
            return self._lookup(equation, references)
        return None

    def _lookup(self, equation: Equation, references: Mapping[int, _Reference]) -> Operation | None:
        """Rewrites a gather of whole rows from a table in storage order."""
        table, indices = equation.inputs
        reference = references.get(table) if isinstance(table, int) else None
        if not isinstance(table, int) or reference is None or indices in references:
            return None
        leaf, params = self._layer.leaves[reference.leaf], equation.params
        aval, out = self._graph.avals[table], self._graph.avals[equation.outputs[0]]
        if aval.ndim != 2 or list(reference.view.pieces) != sorted(reference.view.pieces):
            return None
        rows, columns = aval.shape
        numbers = params["dimension_numbers"]
        is_of_rows = (
            tuple(params["slice_sizes"]) == (1, columns)
            and numbers.collapsed_slice_dims == (0,)
            and numbers.start_index_map == (0,)
            and not numbers.operand_batching_dims
            and tuple(numbers.offset_dims) == (out.ndim - 1,)
            and (params["fill_value"] is None or np.isnan(params["fill_value"]))
            and params["mode"] in (*_CLIPPED, lax.GatherScatterMode.FILL_OR_DROP)
        )
        if not is_of_rows:
            return None
        shape = GatherShape(rows, columns, leaf.offset)
        clips = params["mode"] in _CLIPPED

        def lookup(vectors: Vectors, values: dict[int, Any]) -> jax.Array:
            places = (values[indices] if isinstance(indices, int) else jnp.asarray(indices.val))[..., 0]
            # The indices' dtype may be too small for the last row.
            last = min(rows - 1, jnp.iinfo(places.dtype).max)
            places = jnp.clip(places, 0, last) if clips else places
            found = operations.dha_gather(vectors[leaf.vector], places, shape=shape, native=True)
            return found.astype(reference.dtype)

        return lookup

    def _product(self, equation: Equation, references: Mapping[int, _Reference]) -> Operation | None:
        """Rewrites a product of a reference with another value, summed over the rows or columns of a stored matrix."""
        if not has_default_precision(equation):
            return None
        atoms = equation.inputs
        avals: list[Any] = list(map(self._graph.aval_of, atoms))
        found = [references.get(atom) if isinstance(atom, int) else None for atom in atoms]
        dims = dot_dims(equation, (avals[0].ndim, avals[1].ndim))
        side = 0 if found[0] is not None else 1
        reference, other = found[side], atoms[1 - side]
        is_mixed = avals[0].dtype != avals[1].dtype
        if reference is None or found[1 - side] is not None or dims is None or is_mixed:
            return None
        summed, free = dims
        matrix = as_matrix(reference.view, summed[side])
        if matrix is None:
            return None
        operand = _Operand(reference, matrix, summed[side], free[side], summed[1 - side], free[1 - side])
        leaf, out = self._layer.leaves[reference.leaf], self._graph.avals[equation.outputs[0]]
        shape = ProductShape(size_of(matrix.summed), size_of(matrix.free), matrix.transpose, leaf.offset)

        def product(vectors: Vectors, values: dict[int, Any]) -> jax.Array:
            x = operand.arrange(values[other] if isinstance(other, int) else jnp.asarray(other.val))
            y = operations.dha_matmul(
                x.astype(reference.dtype), vectors[leaf.vector], shape=shape, out_dtype=out.dtype, native=True
            )
            return operand.restore(y, is_first=side == 0).astype(out.dtype)

        return product


@dataclasses.dataclass(frozen=True)
class _Operand:
    """Reshapes the other operand of a product to the rows of a matrix, and the result back.

    Attributes:
      reference: the weight.
      matrix: the weight as a stored matrix.
      summed, free: the weight's summed and free dimensions.
      other_summed, other_free: those of the other operand.
    """

    reference: _Reference
    matrix: Matrix
    summed: tuple[int, ...]
    free: tuple[int, ...]
    other_summed: tuple[int, ...]
    other_free: tuple[int, ...]

    def arrange(self, x: jax.Array) -> jax.Array:
        """Returns the other operand as `[*other_free, k]`, with k in storage order."""
        kept = [x.shape[d] for d in self.other_free]
        pieces = [piece for d in self.summed for piece in self.reference.view.dims[d]]
        return reorder(x.transpose((*self.other_free, *self.other_summed)), kept, pieces, self.matrix.summed)

    def restore(self, y: jax.Array, is_first: bool) -> jax.Array:
        """Turns `[*other_free, n]`, with n in storage order, into the product's result."""
        kept = y.shape[:-1]
        dims = [self.reference.view.dims[d] for d in self.free]
        y = reorder(y, kept, self.matrix.free, [piece for dim in dims for piece in dim])
        y = y.reshape((*kept, *(math.prod(size for _, size in dim) for dim in dims)))
        if not is_first:
            return y
        return y.transpose((*range(len(kept), y.ndim), *range(len(kept))))
