"""Digests of leaves: XXH3 with 128 bits, which a single pass over the memory computes.

They find damage, not forgery: whoever can write a checkpoint can write digests that fit.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxferry.engine.host.pieces import Stacked
from jaxferry.errors import CheckpointError


def digest(leaf: Any) -> str:
    """Returns the digest of an array's elements in C order, or of its parts one after the other, in hexadecimal."""
    hashed = _xxh3(b"")
    for part in leaf.parts if isinstance(leaf, Stacked) else (leaf,):
        # Dtypes such as bfloat16 have no buffer; bytes have.
        hashed.update(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data)
    found: str = hashed.hexdigest()
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
