"""The arrays of a checkpoint, written by Orbax.

A leaf that the state stores in parts (layers of a scan) is written in parts, without a copy, and read whole. Orbax
knows arrays by number: "params.3" is the fourth parameter, "params.3.0" its first part. Many arrays share one file.
"""

from __future__ import annotations

import collections
import inspect
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import tensorstore

from jaxferry.checkpoint.about import Leaf
from jaxferry.checkpoint.chunks import chunk_shape, indices
from jaxferry.checkpoint.digests import digest
from jaxferry.optimizer.pieces import Owned, Stacked

FOLDER = "arrays"
"""The folder of the first process, relative to the checkpoint."""

_FILE_BYTES = 32 * 2**20
"""As many bytes are encoded in memory at a time, and lie in a file; by default all arrays are, and 2 GiB."""

Leaves = Mapping[str, Any]
"""Arrays by path; `Stacked` where they are in parts."""


def describe(leaves: Leaves) -> list[Leaf]:
    """Returns what `about` says of arrays; computes their digests."""
    return [
        Leaf(
            name,
            tuple(leaf.shape),
            str(leaf.dtype),
            leaf.axis if isinstance(leaf, Stacked | Owned) else None,
            None if isinstance(leaf, Owned) else digest(leaf),
        )
        for name, leaf in leaves.items()
    ]


def folder_of(process: int) -> str:
    """The folder of what a process has stored, relative to the checkpoint."""
    return f"{FOLDER}-{process}" if process else FOLDER


def write_arrays(parts: Mapping[str, Leaves], checkpoint: pathlib.Path, process: int = 0) -> None:
    """Writes the arrays of a checkpoint.

    Args:
      parts: the leaves of `params`, `optimizer` and `extra`.
      checkpoint: its folder.
      process: the number of the process; only the first writes leaves that all have whole.
    """
    ocp = _orbax()
    arrays = {part: _filled(_numbered(list(leaves.values()), is_first=not process)) for part, leaves in parts.items()}
    if jax.process_count() > 1:
        _write_own(arrays, checkpoint / folder_of(process))
        return
    saved = ocp.args.PyTreeSave(arrays, ocdbt_target_data_file_size=_FILE_BYTES)
    handler = ocp.PyTreeCheckpointHandler(type_handler_registry=_by_pieces(), **_alone())
    with ocp.Checkpointer(handler, **_alone()) as checkpointer:
        checkpointer.save(checkpoint / folder_of(process), args=saved)


def _write_own(arrays: Mapping[str, Mapping[str, Any]], folder: pathlib.Path) -> None:
    """Writes arrays as Orbax does, which lets no process but the first write arrays that others have not."""
    writes, context = _Writes(), tensorstore.Context()
    store = {"driver": "ocdbt", "base": f"file://{folder}/", "target_data_file_size": _FILE_BYTES}
    for part, own in arrays.items():
        for name, array in own.items():
            spec = {"driver": "zarr", "kvstore": {**store, "path": f"{part}.{name}/"}}
            layout = tensorstore.ChunkLayout(chunk_shape=chunk_shape(array.shape, array.dtype.itemsize))
            kind = {"dtype": tensorstore.dtype(array.dtype), "shape": array.shape}
            opened = tensorstore.open(spec, create=True, context=context, chunk_layout=layout, **kind)
            writes.start(opened.result(), np.asarray(array))
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
        """Waits until all chunks are written."""
        while self._chunks:
            self._end_one()

    def _end_one(self) -> None:
        write, num_bytes = self._chunks.popleft()
        self._num_bytes -= num_bytes
        write.result()


def _orbax() -> Any:
    """The package, which nothing but checkpoints needs."""
    import orbax.checkpoint

    return orbax.checkpoint


def _alone() -> dict[str, Any]:
    """Options of Orbax by which this process waits for no other one."""
    own = jax.process_index()
    options = _orbax().options.MultiprocessingOptions
    return {"multiprocessing_options": options(primary_host=own, active_processes={own})}


def _by_pieces() -> Any:
    """Returns Orbax's handlers of arrays; its own of NumPy's encodes all of them at a time, of a copy by default."""
    handlers = _orbax().type_handlers
    base: Any = handlers.NumpyHandler
    writes = _Writes()

    class PiecesHandler(base):
        async def _open_and_write(self, value: np.ndarray, tspec: dict[str, Any], ts_context: Any) -> None:
            stored = tspec.get("base", tspec)  # in the spec of a cast
            stored["metadata"]["chunks"] = chunk_shape(value.shape, value.dtype.itemsize)
            opened = tensorstore.open(tensorstore.Spec(tspec), create=True, open=True, context=ts_context)
            # Other arrays begin meanwhile: those that are written together take one commit.
            for write in writes.start(await opened, value):
                await write

    has_choice = "deepcopy_host_arrays" in inspect.signature(base).parameters
    return handlers.create_type_handler_registry(
        (jax.Array, handlers.ArrayHandler()),
        (np.ndarray, PiecesHandler(**({"deepcopy_host_arrays": False} if has_choice else {}))),
    )


def _numbered(leaves: Sequence[Any], is_first: bool) -> dict[str, Any]:
    """Returns the arrays to write, by the number of the leaf, and of the part for a leaf in parts."""
    arrays: dict[str, Any] = {}
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, Owned):
            names = [str(i)] if leaf.axis is None else [f"{i}.{k}" for k in range(leaf.shape[leaf.axis])]
            arrays |= dict(zip(names, map(np.asarray, leaf.arrays), strict=True))
        elif not is_first:
            continue
        elif isinstance(leaf, Stacked):
            arrays |= {f"{i}.{k}": np.asarray(part) for k, part in enumerate(leaf.parts)}
        else:
            arrays[str(i)] = leaf
    return arrays


def names_of(number: int, leaf: Leaf) -> list[str]:
    """The names of a leaf's arrays."""
    return [str(number)] if leaf.axis is None else [f"{number}.{k}" for k in range(leaf.shape[leaf.axis])]


def _filled(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the arrays that have elements; Orbax accepts no others."""
    return {name: array for name, array in arrays.items() if array.size}


def open_one(folder: pathlib.Path, name: str, context: Any = None) -> Any:
    """Opens one array of a folder; those of one context share what they know of the files."""
    base = {"driver": "file", "path": f"{folder}/"}
    spec = {"driver": "zarr", "kvstore": {"driver": "ocdbt", "base": base, "path": f"{name}/"}}
    return tensorstore.open(spec, open=True, context=context).result()


def files_of(folder: pathlib.Path, names: Sequence[str]) -> str:
    """Returns the files, relative to the checkpoint, that hold arrays; the folder's name if it cannot be told."""
    prefixes = tuple(f"{name}/".encode() for name in names)
    try:
        store = tensorstore.KvStore.open({"driver": "file", "path": f"{folder}/"}).result()
        root = tensorstore.ocdbt.dump(store).result()["versions"][-1]["root"]["location"]
        files = {_file_of(place) for key, place in _places(store, root) if key.startswith(prefixes)}
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


def _file_of(place: str) -> str:
    """Returns the file of a place, which reads "value:FOLDER:FILE:OFFSET:LENGTH"."""
    _, base, file, _, _ = place.split(":")
    return base + file
