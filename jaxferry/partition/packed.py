"""Stacked parameters, whose parts it numbers and names, and frozen ones of fewer than 8 bits an element.

A model that scans over its layers has one leaf for all of them, for example `layers/attn/kernel` of shape [12, ...].
It is stored as `layers/0/attn/kernel`, `layers/1/attn/kernel`, ...: siblings, as in a model without a scan.

Frozen parameters of fewer than 8 bits an element, which the engine stores and moves as bytes.

    int4[k, n] --packed--> uint8[k, n / 2] --loaded, read in place, saved ... within a program--> int4[k, n]

XLA packs such elements in its buffers. NumPy, XLA's FFI and JAX's own counts of bytes take a byte for each, and array
addresses know no half bytes. So no vector has such a dtype: each program that reads a parameter unpacks it, which is a
view of the bytes. Elements are packed along the last axis, the first one in the lowest bits, as XLA packs them. Where
the length of that axis leaves a byte part empty, each element takes a byte, as int8; the two are told apart by dtype.

Frozen PRNG keys likewise: no vector holds keys, so their bits are stored, and programs wrap them.

    key<fry>[k] --> uint32[k, 2] --loaded, saved ... within a program--> key<fry>[k]
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxferry.errors import InputError
from jaxferry.partition.graph import Builder, Graph, bits_of
from jaxferry.partition.groups import ITERATION, Path, common_modules
from jaxferry.partition.layout import Layer, Part
from jaxferry.processes import is_key


@dataclasses.dataclass(frozen=True)
class Stored:
    """A parameter in its stored form.

    Attributes:
      source: the leaf of the model's flattened tree that it belongs to.
      part: the part of that leaf; None for the whole leaf.
      path: its path.
      keys: its path as `group_leaves` takes it: the modules of an iteration lie below the iteration's number.
    """

    source: int
    part: Part | None
    path: str
    keys: Path


@dataclasses.dataclass(frozen=True)
class Stack:
    """How a stacked leaf is cut.

    Attributes:
      length: number of parts.
      axis: the stacking axis.
      family: a number that leaves share if the same scans read them.
    """

    length: int
    axis: int
    family: int


def stored_leaves(paths: Sequence[Path], stacks: Mapping[int, Stack]) -> list[Stored]:
    """Returns the stored parameters in order: each leaf, or its parts in its place."""
    prefixes = _prefixes(paths, stacks)
    stored: list[Stored] = []
    for leaf, path in enumerate(paths):
        stack = stacks.get(leaf)
        if stack is None:
            stored.append(Stored(leaf, None, "/".join(path), path))
            continue
        depth, prefix = prefixes[stack.family]
        for number in range(stack.length):
            above, below = (*prefix, str(number)), path[depth:]
            part = Part(number, stack.length, stack.axis)
            # `group_leaves` opens numbered modules only if they contain modules, so each iteration gets one.
            stored.append(Stored(leaf, part, "/".join((*above, *below)), (*above, ITERATION, *below)))
    return stored


def stored_in(layers: Sequence[Layer]) -> list[Stored]:
    """Returns the stored parameters of existing layers, in order."""
    leaves = sorted((leaf for layer in layers for leaf in layer.leaves), key=lambda leaf: leaf.index)
    return [Stored(leaf.source, leaf.part, leaf.path, tuple(leaf.path.split("/"))) for leaf in leaves]


def _prefixes(paths: Sequence[Path], stacks: Mapping[int, Stack]) -> dict[int, tuple[int, Path]]:
    """Returns for each family the number of keys that its paths share, and the path that precedes the numbers."""
    families: dict[int, list[int]] = {}
    for leaf, stack in stacks.items():
        families.setdefault(stack.family, []).append(leaf)
    prefixes: dict[int, tuple[int, Path]] = {}
    taken: set[Path] = set()
    for family, leaves in families.items():
        depth = common_modules([paths[leaf] for leaf in leaves])
        common = paths[leaves[0]][:depth]
        names = [common] if common else []
        names += [(*common, "scan"), *((*common, f"scan_{count}") for count in range(2, len(families) + 2))]
        prefix = next(name for name in names if name not in taken)
        taken.add(prefix)
        prefixes[family] = depth, prefix
    return prefixes


_UNSIGNED = {2: jnp.uint2, 4: jnp.uint4, 8: jnp.uint8}
"""By the bits of an element."""

BYTES = (np.dtype(np.uint8), np.dtype(np.int8), np.dtype(np.uint32))
"""The dtypes in which coded parameters are stored."""

_PIECE_BYTES = 2**22

_UNWRITABLE = ("float8_e4m3",)
"""Dtypes that TensorStore, which writes checkpoints, does not know."""


def _is_key(dtype: Any) -> bool:
    return bool(jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key))


@functools.cache
def key_kinds() -> dict[str, tuple[Any, str]]:
    """By the name of their dtype, the dtype of JAX's own PRNG keys and their implementation."""
    kinds = ("threefry2x32", "rbg", "unsafe_rbg")
    made = [(jax.eval_shape(functools.partial(jax.random.key, 0, impl=kind)).dtype, kind) for kind in kinds]
    return {str(dtype): (dtype, kind) for dtype, kind in made}


def dtype_named(name: str) -> Any:
    """The dtype of a parameter by its name, also that of PRNG keys."""
    return key_kinds()[name][0] if name in key_kinds() else jnp.dtype(name)


def is_coded(dtype: Any) -> bool:
    """Whether frozen parameters of a dtype are stored as bytes: keys, fewer than 8 bits an element, unwritable ones."""
    return _is_key(dtype) or bits_of(dtype) < 8 or np.dtype(dtype).name in _UNWRITABLE


def check_storable(dtype: Any, what: str) -> None:
    """Checks that parameters of a dtype can be stored.

    Raises:
      InputError: if it is no dtype of JAX, one with which XLA does not compute, or PRNG keys that JAX does not know.
    """
    if str(dtype) in key_kinds():
        return
    if jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        raise InputError(
            f"{what} has dtype {dtype}, PRNG keys of an implementation that is not JAX's own: pass them outside "
            "params, for instance in the batch"
        )
    if np.dtype(dtype).kind not in "biufcV" or np.dtype(dtype).hasobject:
        raise InputError(f"{what} has dtype {dtype}, which JAX has no arrays of: pass numbers")
    if bits_of(dtype) < 8 and bits_of(dtype) not in _UNSIGNED:
        raise InputError(
            f"{what} has dtype {dtype}, of {bits_of(dtype)} bits, with which XLA does not compute: cast it to a dtype "
            "of 2, 4 or 8 bits"
        )


def stored_struct(aval: Any) -> jax.ShapeDtypeStruct:
    """The shape and dtype in which a frozen parameter is stored: its own, unless they are coded (`is_coded`)."""
    if _is_key(aval.dtype):
        return jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(aval.shape, aval.dtype))
    shape, dtype = tuple(aval.shape), np.dtype(aval.dtype)
    if not is_coded(dtype):
        return jax.ShapeDtypeStruct(shape, dtype)
    num = 8 // bits_of(dtype)
    if not shape or shape[-1] % num:
        return jax.ShapeDtypeStruct(shape, np.int8)
    return jax.ShapeDtypeStruct((*shape[:-1], shape[-1] // num), np.uint8)


def is_stored_as_bytes(own: Any, master: Any) -> bool:
    """Whether a parameter is stored as bytes: one of a coded dtype that is not trained."""
    return is_coded(own.dtype) and np.dtype(master.dtype) in BYTES


def to_bytes(array: Any, made: np.ndarray | None = None) -> np.ndarray:
    """Returns an array as it is stored if frozen: itself, or, if it is coded, its bytes, in `made` if that is given."""
    if is_key(array):
        bits = np.asarray(jax.random.key_data(array))
        if made is not None:
            made[...] = bits
        return bits
    array = np.asarray(array)
    if not is_coded(array.dtype):
        return array
    stored = stored_struct(array)
    made = np.empty(stored.shape, stored.dtype) if made is None else made
    if array.ndim < 2:
        made[...] = _bytes_of(array, stored.dtype)
        return made
    # Some rows at a time, since the codes of a row take memory.
    rows = max(1, _PIECE_BYTES // max(1, math.prod(array.shape[1:])))
    for first in range(0, len(array), rows):
        made[first : first + rows] = _bytes_of(array[first : first + rows], stored.dtype)
    return made


def _bytes_of(array: np.ndarray, stored: np.dtype) -> np.ndarray:
    bits = bits_of(array.dtype)
    codes = array.view(np.uint8) & np.uint8((1 << bits) - 1)
    if stored == np.int8:
        return codes.view(np.int8) if _is_float(array.dtype) else array.astype(np.int8)
    num = 8 // bits
    made = codes[..., ::num]
    for place in range(1, num):
        made = made | codes[..., place::num] << np.uint8(place * bits)
    return made


def from_bytes(array: np.ndarray, dtype: Any) -> Any:
    """The inverse of `to_bytes`, for a parameter of this dtype; a copy if that is coded. Keys are on JAX's CPU."""
    if _is_key(dtype):
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            return jax.random.wrap_key_data(jnp.asarray(array), impl=key_kinds()[str(dtype)][1])
    dtype = np.dtype(dtype)
    if not is_coded(dtype) or array.dtype == dtype:
        return array
    if array.dtype == np.int8 and not _is_float(dtype):
        return array.astype(dtype)
    if array.dtype == np.int8 or bits_of(dtype) == 8:
        return array.view(dtype).copy()
    elements = _elements_of_bytes(dtype)
    made = np.empty((array.size, elements.shape[1]), dtype)
    flat = array.reshape(-1)
    # Some bytes at a time, since NumPy takes eight for each index.
    for first in range(0, flat.size, _PIECE_BYTES // 8):
        made[first : first + _PIECE_BYTES // 8] = elements[flat[first : first + _PIECE_BYTES // 8]]
    return made.reshape(shape_from_stored(array, dtype))


@functools.cache
def _elements_of_bytes(dtype: np.dtype) -> np.ndarray:
    """The elements in each byte."""
    bits = bits_of(dtype)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    codes = (np.arange(256, dtype=np.uint8)[:, None] >> shifts) & np.uint8((1 << bits) - 1)
    if _is_float(dtype):
        return codes.view(dtype)
    if dtype.name.startswith("int"):
        # A signed code's highest bit counts negative.
        sign = 1 << (bits - 1)
        return ((codes ^ np.uint8(sign)).astype(np.int8) - np.int8(sign)).astype(dtype)
    return codes.astype(dtype)


def shape_from_stored(stored: Any, dtype: Any) -> tuple[int, ...]:
    """The shape of a parameter of this dtype that is stored so."""
    shape = tuple(stored.shape)
    if _is_key(dtype):
        return shape[:-1]
    if not is_coded(dtype) or np.dtype(stored.dtype) != np.uint8:
        return shape
    return (*shape[:-1], shape[-1] * (8 // bits_of(dtype)))


def reading_stored(graph: Graph, stored: Sequence[Stored], frozen: Collection[int]) -> Graph:
    """The graph with frozen parameters as they are stored; views of them are what it read before.

    Raises:
      InputError: if elements are packed along the axis that a scan over layers cuts.
    """
    coded = [leaf for leaf in frozen if is_coded(graph.avals[graph.parameters[leaf]].dtype)]
    if not coded:
        return graph
    builder, parameters = Builder.onto(graph), list(graph.parameters)
    for leaf in sorted(coded):
        value, part = parameters[leaf], stored[leaf].part
        aval = graph.avals[value]
        if part is not None and part.axis == len(aval.shape) and not _is_key(aval.dtype):
            raise InputError(
                f"parameter {stored[leaf].path!r} of dtype {aval.dtype} is scanned over its last axis, along which its "
                "elements are packed: stack its layers along another axis, or pass it as int8"
            )
        made = jax.make_jaxpr(lambda x, like=aval: _unpacked(x, like))(stored_struct(aval))
        parameters[leaf] = builder.value(made.in_avals[0])
        builder.inline(made, [parameters[leaf]])
        # What read the parameter reads the view.
        builder.equations[-1] = dataclasses.replace(builder.equations[-1], outputs=(value,))
    equations = (*builder.equations, *graph.equations)
    return dataclasses.replace(graph, equations=equations, avals=builder.avals, parameters=tuple(parameters))


def _unpacked(array: jax.Array, like: Any) -> jax.Array:
    if _is_key(like.dtype):
        return jax.random.wrap_key_data(array, impl=key_kinds()[str(like.dtype)][1])
    dtype, bits = like.dtype, bits_of(like.dtype)
    if array.dtype == np.int8:
        if not _is_float(dtype):
            return array.astype(dtype)
        return jax.lax.bitcast_convert_type(array.astype(_UNSIGNED[bits]), dtype)
    # Without a barrier, XLA's choice of Triton kernels (jaxlib 0.10.2, 0.11.2) looks through the view of int4 and ends
    # the process: "Check failed: dst_dim_it != dst_dim_end". The barrier costs nothing: the view is one of memory.
    return jax.lax.optimization_barrier(jax.lax.bitcast_convert_type(array, dtype).reshape(like.shape))


def _is_float(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.floating))
