"""Matrices stored within host arrays, as operations see them: their offset and shape."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class GatherShape:
    """A table within a host array: `[rows, columns]`, row-major, starting at element `offset`."""

    rows: int
    columns: int
    offset: int = 0


@dataclasses.dataclass(frozen=True)
class ProductShape:
    """A weight within a host array: `[k, n]`, or `[n, k]` if `transpose`, row-major, starting at element `offset`.

    Attributes:
      k: length of the contracted dimension.
      n: length of the other dimension.
      transpose: whether the rows of the stored matrix have length k.
      offset: its first element.
    """

    k: int
    n: int
    transpose: bool = False
    offset: int = 0

    @property
    def weight_shape(self) -> tuple[int, int]:
        """The stored matrix's shape."""
        return (self.n, self.k) if self.transpose else (self.k, self.n)
