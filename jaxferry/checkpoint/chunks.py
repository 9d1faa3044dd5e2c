"""How arrays of a checkpoint are cut into chunks, each encoded by itself in a file, and read in pieces of some chunks.

New checkpoints have chunks of elements that follow each other in C order. Older ones have chunks of other shapes, such
as a whole array.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

CHUNK_BYTES = 4 * 2**20
"""The most bytes of a new chunk. So many are written at a time as have room in memory, each encoded by a thread."""

PIECE_BYTES = 16 * 2**20
"""The bytes that are read at a time, where a chunk does not force more; they are in memory encoded as well."""


def chunk_shape(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Returns the shape of an array's chunks: equal ones, each of elements that follow each other in C order.

    Args:
      shape: shape of the array, which has elements.
      itemsize: bytes of an element.
    """
    left, chunk = max(1, CHUNK_BYTES // itemsize), []
    for length in reversed(shape):
        # Files hold the last chunk of an axis in full as well.
        own = -(-length // -(-length // left))
        chunk.append(own)
        left = left // own if own == length else 1
    return tuple(reversed(chunk))


def indices(shape: Sequence[int], chunk: Sequence[int], num_elements: int = 1) -> Iterator[tuple[slice, ...]]:
    """Yields indices that together are all of an array, in C order, cut where chunks are.

    Args:
      shape: shape of the array.
      chunk: shape of its chunks.
      num_elements: how many elements an index shall cover, unless the chunks force more.
    """
    if not shape:
        yield ()
        return
    row, own = math.prod(shape[1:]), chunk[0]
    if own == 1 and row > num_elements:
        for first in range(shape[0]):
            for rest in indices(shape[1:], chunk[1:], num_elements):
                yield (slice(first, first + 1), *rest)
        return
    rows = own * max(1, num_elements // max(1, row * own))
    for first in range(0, shape[0], rows):
        yield (slice(first, min(first + rows, shape[0])), *(slice(0, length) for length in shape[1:]))
