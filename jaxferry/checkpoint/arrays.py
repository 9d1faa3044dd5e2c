"""The arrays of a save, written by Orbax, in chunks that follow each other in C order.

A leaf that the state stores in parts (layers of a scan) is written in parts, without a copy, and read whole. Orbax
knows arrays by number: "params.3" is the fourth parameter, "params.3.0" its first part. Many arrays share one file.
Several processes each write the elements that they own, `arrays-K/`: Orbax lets only the first process write arrays
that are not JAX's global ones.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import errno
import json
import logging
import math
import pathlib
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import tensorstore

from jaxferry.checkpoint.about import Checkpoint, Digest, Leaf, Piece
from jaxferry.errors import CheckpointError
from jaxferry.optimizer import LazyArray, OnDiskArray, SplitMaster, Stored, stored_whole
from jaxferry.processes import Messages, is_key

FOLDER = "arrays"  # the folder of the first process, relative to the save
CHUNK_BYTES = 4 * 2**20  # the most bytes of a new chunk; each is encoded by one thread
_FILE_BYTES = 32 * 2**20
"""The most bytes that are encoded in memory at a time, and lie in a file; by default all arrays are, and 2 GiB."""


def _in_numpy(part: str, name: str, leaf: Any) -> Stored:
    """Returns an array of a checkpoint without a copy."""
    if isinstance(leaf, Stored):
        return dataclasses.replace(leaf, pieces={where: _readable(array) for where, array in leaf.pieces.items()})
    return stored_whole(_readable(jax.random.key_data(leaf) if is_key(leaf) else leaf))


def _readable(array: Any) -> Any:
    """An array of NumPy's, or one that is read chunk by chunk."""
    return array if isinstance(array, LazyArray) else np.asarray(array)


def write_arrays(checkpoint: Checkpoint, save: pathlib.Path, messages: Messages | None = None) -> Checkpoint:
    """Writes the arrays of a save, and lets the other processes write theirs; returns the content with a `Leaf` each.

    Raises `CheckpointError` if another process has failed.
    """
    content = checkpoint.map_arrays(_in_numpy)
    _write(content, save, 0)
    pieces = [_pieces(content)]
    if messages is not None:
        for process in range(1, messages.num_processes):
            messages.receive("wrote", process)
            pieces.append(_read_pieces(save, process))

    def written(part: str, name: str, leaf: Stored) -> Leaf:
        made = Leaf(name, tuple(leaf.shape), str(leaf.dtype), leaf.axis)
        if leaf.span is None:
            return dataclasses.replace(made, digest=_digest(leaf))
        return dataclasses.replace(made, pieces=tuple(each[part][name] for each in pieces))

    return content.map_arrays(written)


def write_own(checkpoint: Checkpoint, save: pathlib.Path, process: int) -> None:
    """Writes the elements that a process other than the first owns, and tells what they are in a file."""
    content = checkpoint.map_arrays(_in_numpy)
    _write(content, save, process)
    (save / f"pieces-{process}").write_text(json.dumps(_pieces(content)), encoding="utf-8")


def _pieces(content: Checkpoint) -> dict[str, dict[str, Piece]]:
    """Returns what this process stores of leaves of which it owns some elements."""
    return {
        part: {
            name: Piece(leaf.span.start, leaf.span.stop, _digest(leaf))
            for name, leaf in own.items()
            if leaf.span is not None
        }
        for part, own in content.arrays.items()
    }


def _read_pieces(save: pathlib.Path, process: int) -> dict[str, dict[str, Piece]]:
    file = save / f"pieces-{process}"
    try:
        stored = json.loads(file.read_text(encoding="utf-8"))
        file.unlink()
    except (OSError, ValueError) as error:  # JSON that has not arrived as a whole
        raise CheckpointError(
            f"process {process} has written to {save}, but process 0 does not see it: save to a folder that all "
            f"processes share ({reason(error)})"
        ) from error
    return {part: {name: Piece(*piece) for name, piece in own.items()} for part, own in stored.items()}


def _digest(leaf: Stored) -> str:
    """Returns the digest of an array's elements, or of its parts one after the other."""
    digest = Digest()
    for array in leaf.arrays:
        if isinstance(array, np.ndarray):
            digest.add(array)
            continue
        for index in indices(array.shape, chunk_shape(array.shape, array.dtype.itemsize)):
            digest.add(array[index])
    return digest.text()


def folder_of(process: int) -> str:
    """Returns the folder of what a process has stored, relative to the save."""
    return f"{FOLDER}-{process}" if process else FOLDER


def names_of(number: int, length: int | None) -> list[str]:
    """Returns the names of a leaf's arrays."""
    return [str(number)] if length is None else [f"{number}.{part}" for part in range(length)]


def reason(error: BaseException) -> str:
    """Returns an error's message as one short line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


@contextlib.contextmanager
def storage_errors() -> Iterator[None]:
    """Raises what TensorStore and Orbax raise for the file system as OSError; errors of our own functions pass."""
    try:
        yield
    except (ValueError, RuntimeError) as error:
        inner = list(traceback.walk_tb(error.__traceback__))[2:]  # behind this function and the block
        if any((frame.f_globals.get("__name__") or "").startswith("jaxferry.") for frame, _ in inner):
            raise
        raise OSError(errno.EIO, reason(error)) from error


@contextlib.contextmanager
def _raised_alone() -> Iterator[None]:
    """Keeps Orbax from logging, with its traceback, each error of its threads that it raises as well."""

    def passes(record: logging.LogRecord) -> bool:
        return record.levelno < logging.ERROR or "orbax" not in record.pathname

    logger = logging.getLogger("absl")
    logger.addFilter(passes)
    try:
        yield
    finally:
        logger.removeFilter(passes)


def _write(content: Checkpoint, save: pathlib.Path, process: int) -> None:
    folder = save / folder_of(process)
    arrays = {part: _numbered(list(own.values()), is_first=not process) for part, own in content.arrays.items()}
    if jax.process_count() > 1:
        _write_alone(arrays, folder)
        return
    # Here, since nothing but checkpoints needs the package.
    import orbax.checkpoint as ocp

    failures = list[BaseException]()
    handler = ocp.PyTreeCheckpointHandler(type_handler_registry=_by_chunks(failures))
    try:
        with _raised_alone(), ocp.Checkpointer(handler) as checkpointer, storage_errors():
            checkpointer.save(folder, args=ocp.args.PyTreeSave(arrays, ocdbt_target_data_file_size=_FILE_BYTES))
    finally:
        if failures:
            raise failures[0]


class _Array(np.ndarray):
    """An array that Orbax does not copy."""

    def __deepcopy__(self, memo: Any) -> _Array:
        return self


def _numbered(leaves: Sequence[Stored], is_first: bool) -> dict[str, np.ndarray]:
    """Returns the arrays to write, by name; only the first process writes leaves that all processes have whole."""
    arrays: dict[str, np.ndarray] = {}
    for number, leaf in enumerate(leaves):
        if is_first or leaf.span is not None:
            length = None if leaf.axis is None else leaf.shape[leaf.axis]
            arrays |= zip(names_of(number, length), leaf.arrays, strict=True)
    # Orbax accepts no arrays without elements.
    kept = {name: array for name, array in arrays.items() if array.size}
    return {name: array.view(_Array) if isinstance(array, np.ndarray) else array for name, array in kept.items()}


def _write_alone(arrays: Mapping[str, Mapping[str, Any]], folder: pathlib.Path) -> None:
    """Writes arrays in Orbax's format."""
    writes, context = _Writes(), tensorstore.Context()
    store = {"driver": "ocdbt", "base": f"file://{folder}/", "target_data_file_size": _FILE_BYTES}
    for part, own in arrays.items():
        for name, array in own.items():
            spec = {"driver": "zarr", "kvstore": {**store, "path": f"{part}.{name}/"}}
            layout = tensorstore.ChunkLayout(chunk_shape=chunk_shape(array.shape, array.dtype.itemsize))
            dtype = tensorstore.dtype(array.dtype)
            opened = tensorstore.open(
                spec, create=True, context=context, chunk_layout=layout, dtype=dtype, shape=array.shape
            )
            with storage_errors():
                made = opened.result()
            writes.start(made, array)
    writes.finish()


class _Writes:
    """Writes to arrays of TensorStore, chunk by chunk: few chunks are in memory encoded at a time."""

    def __init__(self) -> None:
        self._chunks: collections.deque[tuple[Any, int]] = collections.deque()
        self._num_bytes = 0

    def start(self, opened: Any, array: np.ndarray) -> list[Any]:
        """Writes an array, which must not change meanwhile; returns TensorStore's writes, not all of them ended."""
        started = []
        for index in indices(array.shape, chunk_shape(array.shape, array.dtype.itemsize)):
            chunk = array[index]
            while self._chunks and self._num_bytes + chunk.nbytes > _FILE_BYTES:
                self._end_one()
            # Without a copy of the chunk.
            write = opened[index].write(chunk, can_reference_source_data_indefinitely=True)
            started.append(write)
            self._chunks.append((write, chunk.nbytes))
            self._num_bytes += chunk.nbytes
        return started

    def finish(self) -> None:
        while self._chunks:
            self._end_one()

    def _end_one(self) -> None:
        write, num_bytes = self._chunks.popleft()
        self._num_bytes -= num_bytes
        with storage_errors():
            write.result()


def _by_chunks(failures: list[BaseException]) -> Any:
    """Returns handlers of arrays for Orbax, whose own handler of NumPy's encodes all of them at a time.

    They add an error to `failures` instead of raising it, and then write nothing more: an error in Orbax's event loop
    leaves writes of other arrays without a loop, whose complaints Python prints.
    """
    from orbax.checkpoint import type_handlers as handlers

    base: Any = handlers.NumpyHandler
    writes = _Writes()

    class ChunksHandler(base):
        async def _open_and_write(self, value: np.ndarray, tspec: dict[str, Any], ts_context: Any) -> None:
            if not failures:
                try:
                    await self._write(value, tspec, ts_context)
                except Exception as error:  # noqa: BLE001 - raised once Orbax has ended
                    failures.append(error)

        async def _write(self, value: np.ndarray, tspec: dict[str, Any], ts_context: Any) -> None:
            stored = tspec.get("base", tspec)  # in the spec of a cast
            stored["metadata"]["chunks"] = chunk_shape(value.shape, value.dtype.itemsize)
            opened = tensorstore.open(tensorstore.Spec(tspec), create=True, open=True, context=ts_context)
            # Other arrays begin meanwhile: arrays that are written together take one commit.
            with storage_errors():
                made = await opened
            for write in writes.start(made, value):
                with storage_errors():
                    await write

    known: list[tuple[Any, Any]] = [(jax.Array, handlers.ArrayHandler())]
    known += [(kind, ChunksHandler()) for kind in (np.ndarray, SplitMaster, OnDiskArray)]
    return handlers.create_type_handler_registry(*known)


def chunk_shape(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Returns the shape of an array's chunks: equal ones, each of elements that follow each other in C order."""
    left, chunk = max(1, CHUNK_BYTES // itemsize), []
    for length in reversed(shape):
        # Files hold the last chunk of an axis in full as well.
        own = -(-length // -(-length // left))
        chunk.append(own)
        left = left // own if own == length else 1
    return tuple(reversed(chunk))


def indices(shape: Sequence[int], chunk: Sequence[int], num_elements: int = 1) -> Iterator[tuple[slice, ...]]:
    """Yields indices that together cover an array, in C order, cut at the bounds of chunks of any shape.

    An index covers `num_elements`, unless the chunks force more.
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
