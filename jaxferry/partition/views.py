"""Arrays that hold the elements of another one in another order: what transposes and reshapes make of a weight.

A view's dimensions are made of pieces of the dimensions of what is stored, so that it can be told whether a product
with the view is a product with a plain matrix in storage order.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence

import jax
from jax import lax

from jaxferry.partition.graph import Equation

Piece = tuple[tuple[int, ...], int]
"""Part of a stored dimension: its place in storage order (compared as tuples), and its length."""


@dataclasses.dataclass(frozen=True)
class View:
    """The pieces that each dimension consists of, slowest first; dimensions of length 1 have none."""

    dims: tuple[tuple[Piece, ...], ...]

    @classmethod
    def of(cls, shape: Sequence[int]) -> View:
        """The view of a stored array as it is."""
        return cls(tuple((((i,), n),) if n != 1 else () for i, n in enumerate(shape)))

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """All pieces in the order of the view."""
        return tuple(piece for dim in self.dims for piece in dim)

    def transpose(self, permutation: Sequence[int]) -> View:
        """The view with its dimensions permuted."""
        return View(tuple(self.dims[i] for i in permutation))

    def reshape(self, shape: Sequence[int]) -> View | None:
        """The view in another shape; None where a dimension would be cut across its pieces."""
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
    """The view that an equation makes of one; None if it does more than reorder."""
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
    """A broadcast that only adds dimensions of length 1."""
    dims: list[tuple[Piece, ...]] = [()] * len(shape)
    for dim, place in zip(view.dims, places, strict=True):
        dims[place] = dim
    lengths = [math.prod(size for _, size in dim) for dim in dims]
    return View(tuple(dims)) if lengths == list(shape) else None


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A view as a stored matrix, of which the dimensions summed over are the rows or the columns.

    Attributes:
      summed: pieces of the dimensions summed over, in storage order.
      free: those of the others.
      transpose: whether `free` come first in storage.
    """

    summed: tuple[Piece, ...]
    free: tuple[Piece, ...]
    transpose: bool


def as_matrix(view: View, summed: Collection[int]) -> Matrix | None:
    """The matrix that a view is for a product that sums over some of its dimensions; None if it is none."""
    stored = sorted(view.pieces)
    chosen = {piece for i in summed for piece in view.dims[i]}
    count = len(chosen)
    if chosen == set(stored[:count]):
        return Matrix(tuple(stored[:count]), tuple(stored[count:]), False)
    if chosen == set(stored[len(stored) - count :]):
        return Matrix(tuple(stored[len(stored) - count :]), tuple(stored[: len(stored) - count]), True)
    return None


def size_of(pieces: Sequence[Piece]) -> int:
    """Number of elements that the pieces span."""
    return math.prod(size for _, size in pieces)


def reorder(array: jax.Array, kept: Sequence[int], pieces: Sequence[Piece], order: Sequence[Piece]) -> jax.Array:
    """An array `[*kept, *pieces]` with the pieces in another order, flattened to one last dimension."""
    array = array.reshape((*kept, *(size for _, size in pieces)))
    moved = [len(kept) + pieces.index(piece) for piece in order]
    return array.transpose((*range(len(kept)), *moved)).reshape((*kept, size_of(order)))


def dot_dims(equation: Equation, ndims: tuple[int, int]) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]] | None:
    """Summed and free dimensions of both operands of a `dot_general`; None if it has batch dimensions."""
    summed, batch = equation.params["dimension_numbers"]
    if batch[0]:
        return None
    free = [tuple(d for d in range(n) if d not in dims) for n, dims in zip(ndims, summed, strict=True)]
    return [tuple(dims) for dims in summed], free


def has_default_precision(dot: Equation) -> bool:
    """Whether a product is asked for no more than its dtype's usual precision, which is all that operations have.

    A precision may stand in the model's code or come from `jax_default_matmul_precision`.
    """
    precision = dot.params["precision"]
    asked = precision if isinstance(precision, tuple) else (precision,)
    return all(part is None or part == lax.Precision.DEFAULT for part in asked)
