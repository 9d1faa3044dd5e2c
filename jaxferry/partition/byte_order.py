"""Refuses arrays in another machine's byte order, which JAX cannot hold."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxferry.errors import InputError


def check_byte_order(leaf: Any, name: str) -> None:
    """Raises InputError if a leaf is a NumPy array whose bytes are swapped.

    Args:
      leaf: any leaf of the user's.
      name: what it is, for the error.
    """
    dtype = getattr(leaf, "dtype", None)
    if isinstance(dtype, np.dtype) and not dtype.isnative:
        raise InputError(
            f"{name} has byte-swapped elements ({dtype.str}): pass array.astype(array.dtype.newbyteorder('='))"
        )
