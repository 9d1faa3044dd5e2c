"""Digests of leaves: XXH3 with 128 bits, which a single pass over the memory computes.

They find damage, not forgery: whoever can write a checkpoint can write digests that fit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import xxhash

from jaxferry.engine.host.pieces import Stacked


def digest(leaf: Any) -> str:
    """Returns the digest of an array's elements in C order, or of its parts one after the other, in hexadecimal."""
    hashed = xxhash.xxh3_128()
    for part in leaf.parts if isinstance(leaf, Stacked) else (leaf,):
        # Dtypes such as bfloat16 have no buffer; bytes have.
        hashed.update(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data)
    return hashed.hexdigest()


def digest_of_bytes(content: bytes) -> str:
    """Returns the digest of bytes, in hexadecimal."""
    return xxhash.xxh3_128(content).hexdigest()
