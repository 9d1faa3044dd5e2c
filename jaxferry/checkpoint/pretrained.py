"""Reads and writes weights in safetensors files.

    files --open_safetensors--> tensors by name --arrange--> the model's tree --step.init--> masters, block by block
      ^---------------------------save_safetensors----------------------------- state.lazy_params

Tensors are read in pieces, straight into the masters, so reading a model needs little more host memory than training.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxferry.errors import InputError
from jaxferry.partition import leaf_paths
from jaxferry.processes import is_key

INDEX_FILE = "model.safetensors.index.json"
MAX_FILE_BYTES = 5_000_000_000  # maximum bytes of the tensors in one file that `save_safetensors` writes, by default

_DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(jnp.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_FLOATING = frozenset(_DTYPES[name] for name in ("F64", "F32", "F16", "BF16"))
_PIECE_BYTES = 32 * 2**20
_MOST_NAMED = 20


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file; `np.asarray` reads it whole, `blocks` in pieces, transposed if it says so."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    is_transposed: bool = False

    @property
    def T(self) -> StoredTensor:
        """The transposed matrix; nothing is read. Raises InputError if it is not a matrix."""
        if len(self.shape) != 2:
            raise InputError(f"tensor {self.name!r} of shape {self.shape} is not a matrix and cannot be transposed")
        return dataclasses.replace(self, shape=self.shape[::-1], is_transposed=not self.is_transposed)

    def blocks(self, max_bytes: int) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
        """Reads the tensor in pieces of at most `max_bytes`, or of one row; yields each one's start and array."""
        stored = self.shape[::-1] if self.is_transposed else self.shape
        if not stored:
            yield (), np.asarray(self)
            return
        row_bytes = max(1, self.dtype.itemsize * int(np.prod(stored[1:])))
        rows = max(1, max_bytes // row_bytes)
        for row in range(0, stored[0], rows):
            # Mapped parts of a file count as the process's memory until it is closed.
            with open_file(self.file) as file:
                piece = file.get_slice(self.name)[row : min(row + rows, stored[0])]
            start = (row, *(0,) * (len(stored) - 1))
            yield (start[::-1], piece.T) if self.is_transposed else (start, piece)

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Reads some rows, which are columns in the file if the tensor is transposed."""
        with open_file(self.file) as file:
            stored = file.get_slice(self.name)
            found: np.ndarray = stored[:, start:stop].T if self.is_transposed else stored[start:stop]
        return found

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        with open_file(self.file) as file:
            array: np.ndarray = file.get_tensor(self.name)
        array = array.T if self.is_transposed else array
        return array if dtype is None else array.astype(dtype)


@dataclasses.dataclass(frozen=True)
class Source:
    """The stored tensor of a parameter.

    Attributes:
      name: the tensor's name.
      is_transposed: whether the tensor is the parameter's transpose, as in PyTorch's `Linear`.
    """

    name: str
    is_transposed: bool = False


def open_safetensors(path: str | os.PathLike[str]) -> dict[str, StoredTensor]:
    """Returns the tensors of a checkpoint by name; reads only the files' headers.

    Args:
      path: a `.safetensors` file, an index of several (`model.safetensors.index.json`), or a folder with one of these.

    Raises:
      InputError: if the checkpoint, one of its files or the package `safetensors` is missing, or a file is damaged.
    """
    path = Path(path)
    if path.is_dir():
        path = _checkpoint_in(path)
    if path.suffix != ".json":
        return _tensors_of(path)
    try:
        placed = json.loads(path.read_text())["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} is not an index of safetensors files: {error!r}") from error
    found: dict[str, StoredTensor] = {}
    for file in dict.fromkeys(placed.values()):
        found |= {name: tensor for name, tensor in _tensors_of(path.parent / file).items() if placed.get(name) == file}
    missing = [name for name in placed if name not in found]
    if missing:
        raise InputError(f"{path} lists tensors that its files do not contain: {_listed(missing)}")
    return found


def arrange(
    tensors: Mapping[str, Any],
    params: Any,
    source_of: Callable[[tuple[str, ...]], Source | str | None],
    ignored: Iterable[str] = (),
) -> Any:
    """Returns a model's tree of parameters with stored tensors as leaves, for `step.init`; nothing is read.

    Args:
      tensors: tensors by name, from `open_safetensors`.
      params: the model's tree of parameters; shapes are enough.
      source_of: maps a parameter's path, such as `("h_0", "qkv", "kernel")`, to the name of its tensor or a `Source`;
        None keeps the leaf of `params`.
      ignored: regular expressions that match the whole names of tensors that are not parameters.

    Raises:
      InputError: if tensors are missing, unused, of another shape than their parameter, or not floating point; the
        message names them all.
    """
    leaves, tree = jax.tree.flatten(params)
    paths = leaf_paths(params)
    sources = [_source(source_of, path) for path in paths]
    wanted = {source.name for source in sources if source is not None}
    skip = [re.compile(pattern) for pattern in ignored]
    missing = sorted(wanted - tensors.keys())
    unexpected = [name for name in tensors if name not in wanted and not any(p.fullmatch(name) for p in skip)]
    arranged, wrong = [], []
    for leaf, path, source in zip(leaves, paths, sources, strict=True):
        tensor = leaf if source is None else tensors.get(source.name)
        if source is not None and tensor is not None:
            tensor = tensor.T if source.is_transposed and len(tensor.shape) == 2 else tensor
            if tuple(tensor.shape) != tuple(leaf.shape):
                wrong.append(f"{source.name} is {list(tensor.shape)}, {'/'.join(path)} {list(leaf.shape)}")
            elif tensor.dtype not in _FLOATING:
                wrong.append(f"{source.name} is of {tensor.dtype}")
        arranged.append(tensor)
    problems = [
        f"{what}: {_listed(names)}"
        for what, names in (("missing", missing), ("unexpected", unexpected), ("mismatched", wrong))
        if names
    ]
    if problems:
        raise InputError(f"the tensors do not fit the model; {'; '.join(problems)}")
    return jax.tree.unflatten(tree, arranged)


def save_safetensors(
    folder: str | os.PathLike[str],
    params: Any,
    source_of: Callable[[tuple[str, ...]], Source | str | None],
    dtype: Any = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> list[Path]:
    """Writes parameters in Hugging Face's format, under the names that `arrange` reads; returns the tensors' files.

    One file is `model.safetensors`; several are numbered and have an index. Tensors are written in pieces, so little
    host memory is needed beside `params`; with `state.lazy_params`, no copy of all parameters exists.

    Args:
      folder: where to write; created if it is missing.
      params: the model's tree of parameters, such as `state.lazy_params`.
      source_of: as in `arrange`; parameters of which it returns None are left out.
      dtype: floating-point tensors are cast to this dtype, such as `jnp.bfloat16`; None keeps theirs.
      max_file_bytes: maximum bytes of the tensors in a file; a single tensor is never cut.

    Raises:
      InputError: if the folder holds safetensors files, two parameters have one name, a parameter to transpose is not a
        matrix, or a dtype has no name in the format.
    """
    folder = Path(folder)
    others = sorted(file.name for pattern in ("*.safetensors", INDEX_FILE) for file in folder.glob(pattern))
    if others:
        raise InputError(f"{folder} holds {_listed(others)}: give an empty folder")
    parts = _parts(_named_leaves(params, source_of, dtype), max_file_bytes)
    names = [f"model-{n:05}-of-{len(parts):05}.safetensors" for n in range(1, len(parts) + 1)]
    files = [folder / name for name in (names if len(parts) > 1 else ["model.safetensors"])]
    folder.mkdir(parents=True, exist_ok=True)
    for file, part in zip(files, parts, strict=True):
        _write(file, part)
    if len(parts) > 1:
        placed = {leaf.name: file.name for file, part in zip(files, parts, strict=True) for leaf in part}
        total = sum(leaf.num_bytes for part in parts for leaf in part)
        index = {"metadata": {"total_size": total}, "weight_map": placed}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
    return files


@dataclasses.dataclass(frozen=True)
class _NamedLeaf:
    """A parameter to write: its tensor's name, its array and dtype, and whether the tensor is its transpose."""

    name: str
    leaf: Any
    dtype: np.dtype
    is_transposed: bool

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.leaf.shape, dtype=np.int64)) * self.dtype.itemsize

    def pieces(self) -> Iterator[np.ndarray]:
        """Yields the tensor's elements in C order, in small pieces."""
        shape = tuple(self.leaf.shape)
        if not shape:
            yield np.asarray(self.leaf).astype(self.dtype)
            return
        num = shape[-1] if self.is_transposed else shape[0]
        rows = max(1, _PIECE_BYTES // max(1, self.num_bytes // max(1, num)))
        for first in range(0, num, rows):
            some = slice(first, first + rows)
            piece = np.asarray(self.leaf[:, some]).T if self.is_transposed else np.asarray(self.leaf[some])
            yield np.ascontiguousarray(piece, self.dtype)


def _named_leaves(
    params: Any, source_of: Callable[[tuple[str, ...]], Source | str | None], dtype: Any
) -> list[_NamedLeaf]:
    found: dict[str, _NamedLeaf] = {}
    for path, leaf in zip(leaf_paths(params), jax.tree.leaves(params), strict=True):
        source = _source(source_of, path)
        if source is None:
            continue
        where = "/".join(path)
        if is_key(leaf):
            raise InputError(f"{where} holds PRNG keys, which cannot be written: let source_of return None for it")
        is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
        own = np.dtype(leaf.dtype if dtype is None or not is_float else dtype)
        if source.name in found:
            raise InputError(f"{where} and another parameter have the same tensor, {source.name}")
        if source.is_transposed and len(leaf.shape) != 2:
            raise InputError(f"{where} of shape {tuple(leaf.shape)} is not a matrix and cannot be transposed")
        if own not in _DTYPES.values():
            raise InputError(f"{where} is of {own}, which cannot be written; give dtype=, such as jnp.float32")
        found[source.name] = _NamedLeaf(source.name, leaf, own, source.is_transposed)
    return list(found.values())


def _write(file: Path, leaves: Iterable[_NamedLeaf]) -> None:
    """Writes a file in the format's layout: the size of a header, the header as JSON, the tensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    # Larger elements first, so that all are aligned.
    ordered = sorted(leaves, key=lambda leaf: -leaf.dtype.itemsize)
    for leaf in ordered:
        span = [offset, offset + leaf.num_bytes]
        shape = list(leaf.leaf.shape)[:: -1 if leaf.is_transposed else 1]
        header[leaf.name] = {"dtype": _NAMES[leaf.dtype], "shape": shape, "data_offsets": span}
        offset += leaf.num_bytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for leaf in ordered:
            for piece in leaf.pieces():
                # Dtypes such as bfloat16 have no buffer; bytes have.
                stream.write(piece.reshape(-1).view(np.uint8).data)


def _parts(leaves: Iterable[_NamedLeaf], max_bytes: int) -> list[list[_NamedLeaf]]:
    """Splits tensors, in order, into files."""
    parts: list[list[_NamedLeaf]] = [[]]
    for leaf in leaves:
        if parts[-1] and sum(other.num_bytes for other in parts[-1]) + leaf.num_bytes > max_bytes:
            parts.append([])
        parts[-1].append(leaf)
    return parts


def _source(source_of: Callable[[tuple[str, ...]], Source | str | None], path: tuple[str, ...]) -> Source | None:
    source = source_of(path)
    if not isinstance(source, Source | str | None):
        raise InputError(f"source_of must return a Source, a tensor's name or None, got {source!r} for {path}")
    return Source(source) if isinstance(source, str) else source


def _checkpoint_in(folder: Path) -> Path:
    index, files = folder / INDEX_FILE, sorted(folder.glob("*.safetensors"))
    if index.exists():
        return index
    if len(files) != 1:
        raise InputError(
            f"{folder} holds {'no' if not files else 'several'} .safetensors files and no {INDEX_FILE}: give a file"
        )
    return files[0]


def _tensors_of(file: Path) -> dict[str, StoredTensor]:
    tensors = {}
    with open_file(file) as opened:
        for name in opened.keys():  # noqa: SIM118 - not a dictionary
            stored = opened.get_slice(name)
            dtype = _DTYPES.get(stored.get_dtype())
            if dtype is None:
                raise InputError(f"tensor {name!r} in {file} has the unsupported dtype {stored.get_dtype()}")
            tensors[name] = StoredTensor(file, name, tuple(stored.get_shape()), dtype)
    return tensors


@contextlib.contextmanager
def open_file(path: Path) -> Iterator[Any]:
    """Opens a safetensors file; raises `InputError` if it is missing or damaged, or the package is missing."""
    try:
        import safetensors
    except ImportError as error:
        raise InputError(
            "reading .safetensors files needs the package safetensors: pip install 'jaxferry[safetensors]'"
        ) from error
    try:
        opened = safetensors.safe_open(path, framework="np")
    except (OSError, safetensors.SafetensorError) as error:
        raise InputError(f"{path} cannot be read as a safetensors file: {error}") from error
    with opened as file:
        yield file


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_MOST_NAMED]) + (f" and {len(names) - _MOST_NAMED} more" if names[_MOST_NAMED:] else "")
