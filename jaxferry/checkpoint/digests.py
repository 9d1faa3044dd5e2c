"""Digests of leaves: XXH3 with 128 bits, which a single pass over the memory computes.

They find damage, not forgery: whoever can write a checkpoint can write digests that fit.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxferry.errors import CheckpointError
from jaxferry.optimizer.pieces import Owned, Stacked


def digest(leaf: Any) -> str:
    """Returns the digest of an array's elements in C order, or of its parts one after the other, in hexadecimal."""
    found = Digest()
    parts = leaf.parts if isinstance(leaf, Stacked) else leaf.arrays if isinstance(leaf, Owned) else (leaf,)
    for part in parts:
        found.add(part)
    return found.text()


class Digest:
    """The digest of arrays one after the other."""

    def __init__(self) -> None:
        self._hashed = _xxh3(b"")

    def add(self, array: Any) -> None:
        """Adds an array's elements in C order."""
        # Dtypes such as bfloat16 have no buffer; bytes have.
        self._hashed.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)

    def text(self) -> str:
        """Returns the digest in hexadecimal."""
        found: str = self._hashed.hexdigest()
        return found


def digest_of_bytes(content: bytes) -> str:
    """Returns the digest of bytes, in hexadecimal."""
    found: str = _xxh3(content).hexdigest()
    return found


def _xxh3(content: bytes) -> Any:
    try:
        import xxhash  # here, so that training without checkpoints runs where it is missing
    except ImportError as error:
        raise CheckpointError("checkpoints need the package xxhash: pip install xxhash") from error
    return xxhash.xxh3_128(content)
