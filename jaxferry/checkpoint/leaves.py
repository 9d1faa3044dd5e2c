"""The leaves of a checkpoint as they are stored: read piece by piece, straight into the memory of the state.

So a process that has room to train has room to resume, and of several processes each reads only its own elements.
"""

from __future__ import annotations

import dataclasses
import errno
import math
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
import tensorstore

from jaxferry.checkpoint.about import About, Checkpoint, Digest, Leaf, Piece
from jaxferry.checkpoint.arrays import folder_of, indices, names_of, reason, storage_errors
from jaxferry.errors import CheckpointError, is_internal
from jaxferry.partition import Span

PIECE_BYTES = 16 * 2**20
"""The bytes that are read at a time, where a chunk does not force more; they are in memory encoded as well."""

_PLACED = 1 << 18  # elements whose places are computed at a time


@dataclasses.dataclass(frozen=True)
class StoredLeaf:
    """An array of a checkpoint, not read yet."""

    about: Leaf
    part: str
    number: int
    folder: pathlib.Path
    path: str
    context: Any = dataclasses.field(repr=False, compare=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole."""
        return self.about.shape

    @property
    def dtype(self) -> np.dtype:
        """The stored dtype."""
        return np.dtype(jax.numpy.dtype(self.about.dtype))

    def read(self) -> np.ndarray:
        """Returns the whole array; raises errors as `read_into` does."""
        made = np.empty(self.shape, self.dtype)
        self.read_into(made)
        return made

    def read_into(self, made: np.ndarray, span: Span | None = None) -> None:
        """Reads the array, or a span of its elements, into `made`, in any dtype, and compares the digest.

        Raises `CheckpointError` with the leaf and the file if the array is missing or damaged.
        """
        # Elements of parts along another axis do not follow each other in the whole.
        is_apart = span is not None and self.about.axis not in (None, 0)
        try:
            for first, found in self._pieces(None if is_apart else span):
                if span is None:
                    self._put(made, first, found)
                elif is_apart:
                    self._put_apart(made, span, first, found)
                else:
                    span.put(made, first, found)
        except (CheckpointError, OSError, MemoryError) as error:
            raise cannot_read(self.path, error) from error

    @property
    def _shape_of_one(self) -> tuple[int, ...]:
        """Shape of the array, or of each of its parts."""
        return tuple(length for axis, length in enumerate(self.shape) if axis != self.about.axis)

    def _put(self, made: np.ndarray, first: int, found: np.ndarray) -> None:
        """Writes elements that follow each other in the array, or in one of its parts, to the whole."""
        one = math.prod(self._shape_of_one)
        if self.about.axis is not None:
            made = np.moveaxis(made, self.about.axis, 0)[first // one, ...]  # a view, also of a scalar
            first %= one
        if found.ndim and made.ndim and found.shape[1:] == made.shape[1:]:
            row = first // max(1, math.prod(made.shape[1:]))
            made[row : row + len(found)] = found
        else:
            flat = made.reshape(-1) if made.flags.c_contiguous else made.flat
            flat[first : first + found.size] = found.reshape(-1)

    def _put_apart(self, made: np.ndarray, span: Span, first: int, found: np.ndarray) -> None:
        """Writes elements that follow each other in a part along some axis to the wanted elements of the whole."""
        assert self.about.axis is not None
        length, inner = self.shape[self.about.axis], math.prod(self.shape[self.about.axis + 1 :])
        part, first = divmod(first, math.prod(self._shape_of_one))
        flat = found.reshape(-1)
        for start in range(0, flat.size, _PLACED):
            some = flat[start : start + _PLACED]
            before, after = np.divmod(np.arange(first + start, first + start + some.size), inner)
            places = (before * length + part) * inner + after - span.start
            is_wanted = (places >= 0) & (places < span.size)
            made[places[is_wanted]] = some[is_wanted]

    def _pieces(self, span: Span | None) -> Iterator[tuple[int, np.ndarray]]:
        """Yields elements that follow each other, and the first one's place; part by part, if there are parts."""
        length = None if self.about.axis is None else self.shape[self.about.axis]
        names = [f"{self.part}.{name}" for name in names_of(self.number, length)]
        one = math.prod(self._shape_of_one)
        for process, piece in enumerate(self.about.pieces or (Piece(0, one, self.about.digest or ""),)):
            is_wanted = span is None or (piece.start < span.stop and span.start < piece.stop)
            if len(names) > 1 or is_wanted:
                yield from self._stored(self.folder / folder_of(process), names, piece, one)

    def _stored(
        self, folder: pathlib.Path, names: list[str], piece: Piece, one: int
    ) -> Iterator[tuple[int, np.ndarray]]:
        """Yields what a process has stored of a leaf; compares its digest at the end."""
        what, digest = f"{self.part} {self.about.path}", Digest()
        shape = (piece.stop - piece.start,) if self.about.pieces else self._shape_of_one
        for number, name in enumerate(names):
            first = number * one + piece.start
            # Arrays without elements are not stored.
            for found in self._read(folder, name, shape, what) if math.prod(shape) else ():
                digest.add(found)
                yield first, found
                first += found.size
        if piece.digest and digest.text() != piece.digest:
            raise CheckpointError(f"{what} in {_files_of(folder, names)} is damaged: its digest is another")

    def _read(self, folder: pathlib.Path, name: str, shape: tuple[int, ...], what: str) -> Iterator[np.ndarray]:
        try:
            stored = open_one(folder, name, self.context)
            found, declared = (tuple(stored.shape), stored.dtype.numpy_dtype), (shape, self.dtype)
            if found != declared:
                raise OSError(errno.EIO, f"it is declared as {declared}, not {found}")
            chunk, num_elements = stored.chunk_layout.read_chunk.shape, PIECE_BYTES // self.dtype.itemsize
            for index in indices(shape, chunk, num_elements):
                with storage_errors():
                    read = stored[index].read().result()
                yield np.asarray(read)
        except Exception as error:
            if is_internal(error):
                raise
            raise CheckpointError(f"{what} in {_files_of(folder, [name])}: {reason(error)}") from error


class StoredKey:
    """Keys of random numbers in a checkpoint, not read yet; `CheckpointError` if the kind does not fit the bits."""

    def __init__(self, data: StoredLeaf, kind: str) -> None:
        self._data, self._kind = data, kind
        bits = jax.ShapeDtypeStruct(data.shape, data.dtype)
        try:
            keys: Any = jax.eval_shape(lambda data: jax.random.wrap_key_data(data, impl=kind), bits)
        except (ValueError, TypeError) as error:
            raise cannot_read(data.path, error) from error
        self.dtype, self.shape = keys.dtype, tuple(keys.shape)

    def read(self) -> jax.Array:
        """Returns the keys; raises errors as `StoredLeaf.read_into` does."""
        keys = jax.random.wrap_key_data(jax.numpy.asarray(self._data.read()), impl=self._kind)
        return keys.reshape(self.shape)


def stored_content(about: About, folder: pathlib.Path, path: str | os.PathLike[str]) -> Checkpoint:
    """Returns the checkpoint with a `StoredLeaf`, or a `StoredKey`, in place of each array."""
    context = tensorstore.Context()
    numbers = {field: {name: number for number, name in enumerate(own)} for field, own in about.content.arrays.items()}

    def stored(field: str, name: str, leaf: Leaf) -> StoredLeaf | StoredKey:
        data = StoredLeaf(leaf, field, numbers[field][name], folder, os.fspath(path), context)
        kind = {"optimizer": about.optimizer_keys, "extra": about.extra_keys}.get(field, {}).get(name)
        return data if kind is None else StoredKey(data, kind)

    return about.content.map_arrays(stored)


def cannot_read(path: str | os.PathLike[str], error: Exception) -> CheckpointError:
    """Returns the error for a checkpoint that cannot be read."""
    what = str(error) if isinstance(error, CheckpointError | ValueError) else reason(error)
    return CheckpointError(f"{os.fspath(path)} cannot be read: {what}; restore another checkpoint")


def open_one(folder: pathlib.Path, name: str, context: Any = None) -> Any:
    """Opens one array of a folder; arrays of one context share what they know of the files."""
    base = {"driver": "file", "path": f"{folder}/"}
    spec = {"driver": "zarr", "kvstore": {"driver": "ocdbt", "base": base, "path": f"{name}/"}}
    with storage_errors():
        return tensorstore.open(spec, open=True, context=context).result()


def _files_of(folder: pathlib.Path, names: Sequence[str]) -> str:
    """Returns the files, relative to the save, that hold arrays; the folder's name if they cannot be found."""
    prefixes = tuple(f"{name}/".encode() for name in names)
    try:
        store = tensorstore.KvStore.open({"driver": "file", "path": f"{folder}/"}).result()
        root = tensorstore.ocdbt.dump(store).result()["versions"][-1]["root"]["location"]
        # A place reads "value:FOLDER:FILE:OFFSET:LENGTH".
        places = [place.split(":") for key, place in _places(store, root) if key.startswith(prefixes)]
        files = {base + file for _, base, file, _, _ in places}
    except Exception:  # noqa: BLE001 - the file that tells is damaged too
        files = set()
    return " and ".join(f"{folder.name}/{file}" for file in sorted(files)) or f"{folder.name}/"


def _places(store: Any, node: str) -> Iterator[tuple[bytes, str]]:
    """Yields the keys below a node of Orbax's database, and where their values lie."""
    for entry in tensorstore.ocdbt.dump(store, node).result()["entries"]:
        if "location" in entry:
            yield from _places(store, entry["location"])
        else:
            yield entry["key"], entry.get("indirect_value", node)
