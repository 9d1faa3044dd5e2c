"""Copies and sums in host memory, in place, on all threads of the native library.

NumPy does the same without the library, in other dtypes, and where arrays are not contiguous.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import numpy as np

from jaxferry.native import targets
from jaxferry.native.loading import NativeLibrary, library, status
from jaxferry.native.targets import DTYPE_NUMBERS

_LARGE_BYTES = 2**20
"""The first write to fresh memory costs more than a copy, and threads share it; for fewer bytes it does not matter."""


def empty(shape: tuple[int, ...], dtype: Any, where: Any) -> jax.Array | None:
    """An unwritten array of XLA's, of whole bytes on one CPU device; None if the library cannot make it."""
    is_large = math.prod(shape) * np.dtype(dtype).itemsize >= _LARGE_BYTES
    return _empty(shape, np.dtype(dtype), where)() if is_large and status("cpu").is_available else None


@functools.lru_cache(maxsize=1024)
def _empty(shape: tuple[int, ...], dtype: np.dtype, where: Any) -> Any:
    made = jax.ShapeDtypeStruct(shape, jax.dtypes.canonicalize_dtype(dtype))
    return jax.jit(lambda: targets.empty(made), out_shardings=where)


def copy(target: np.ndarray, source: np.ndarray) -> None:
    """Copies an array into another one of the same shape, cast to its dtype."""
    if target.shape != source.shape:
        raise ValueError(f"an array of shape {list(source.shape)} does not fit {list(target.shape)}")
    is_plain = target.flags.c_contiguous and source.flags.c_contiguous and target.nbytes >= _LARGE_BYTES
    if is_plain and target.dtype == source.dtype and target.nbytes % 4 == 0:
        target, source = (array.reshape(-1).view(np.uint8).view(np.float32) for array in (target, source))
    if is_plain and (native := _native(target, source)) is not None:
        native.add(target, source, adds=False)
    else:
        target[...] = source


def clear(target: np.ndarray) -> None:
    """Fills an array with zeros."""
    if target.flags.c_contiguous and status("cpu").is_available:
        library("cpu").clear(target)
    else:
        target[...] = 0


def add(target: np.ndarray, source: np.ndarray, adds: bool = True) -> None:
    """Adds an array to a contiguous one in place, in fp32 at least, and rounds once; without `adds`, replaces it.

    Both are contiguous and of as many elements; the source has the same dtype or fewer bits.
    """
    if target.size != source.size:
        raise ValueError(f"{source.size} elements do not fit {target.size}")
    if (native := _native(target, source)) is not None:
        native.add(target, source, adds)
    elif adds:
        target += source.astype(target.dtype)
    else:
        target[...] = source


def add_rows(target: np.ndarray, rows: np.ndarray, indices: np.ndarray, start: int = 0) -> None:
    """Adds rows to a table, one after another, in fp32 at least; each row of the table is rounded once.

    `target` has consecutive elements of the table from `start` on, flat and contiguous. `rows` are `[number,
    columns]`, `indices` `[number]` integers: the rows of the table. What is not in `target` is ignored.
    """
    number, columns = rows.shape
    if indices.shape != (number,):
        raise ValueError(f"{number} rows and indices of shape {list(indices.shape)}")
    if not columns:
        return
    stop = start + target.size
    is_in = (indices >= 0) & (indices < -(-stop // columns))
    places = np.full(number, -1, np.int32)
    places[is_in] = indices[is_in]
    if (native := _native(target, rows)) is not None:
        native.add_rows(target, np.ascontiguousarray(rows), places, start)
        return
    wide = np.promote_types(target.dtype, np.float32)
    for place in np.unique(places[is_in]).tolist():
        first = place * columns
        begin, end = max(first, start), min(first + columns, stop)
        if begin < end:
            total = target[begin - start : end - start].astype(wide)
            for row in rows[places == place]:
                total += row[begin - first : end - first].astype(wide)
            target[begin - start : end - start] = total.astype(target.dtype)


def _native(*arrays: np.ndarray) -> NativeLibrary | None:
    """The CPU's library, if there is one that knows these arrays' dtypes."""
    known = all(array.dtype in DTYPE_NUMBERS for array in arrays) and status("cpu").is_available
    return library("cpu") if known else None
