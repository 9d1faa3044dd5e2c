"""How an operation sees a piece of a host array: where it starts, and the matrix that it is."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class GatherShape:
    """A table within a host array: `rows` x `columns` elements from element `offset` on, row by row."""

    rows: int
    columns: int
    offset: int = 0


@dataclasses.dataclass(frozen=True)
class ProductShape:
    """A weight within a host array: `[k, n]`, or `[n, k]` if `transpose`, from element `offset` on, row by row.

    Attributes:
      k: length of the dimension that is summed over.
      n: length of the other one.
      transpose: whether the rows of the stored matrix have length k.
      offset: its first element.
    """

    k: int
    n: int
    transpose: bool = False
    offset: int = 0

    @property
    def weight_shape(self) -> tuple[int, int]:
        """The stored matrix."""
        return (self.n, self.k) if self.transpose else (self.k, self.n)
