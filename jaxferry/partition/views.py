"""Views: arrays that hold a stored weight's elements in another order, as after transposes and reshapes.

A view's dimensions consist of pieces of the stored dimensions. These show whether a product with the view is a product
with a plain matrix in storage order.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence

import jax
from jax import lax

from jaxferry.partition.graph import Equation

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
