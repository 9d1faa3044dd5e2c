"""Reads pretrained weights from safetensors files: opens tensors lazily and arranges them in a model's tree.

    files --open_safetensors--> tensors by name --arrange--> the model's tree --step.init--> masters, block by block

No whole tensor exists outside the file and the masters, so reading a model needs little more host memory than training
it.
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
from jaxferry.partition.groups import leaf_paths

INDEX_FILE = "model.safetensors.index.json"

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


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file; `np.asarray` reads it whole, `blocks` in pieces.

    Attributes:
      file: the file.
      name: the tensor's name in the file.
      shape: its shape, after the transpose if `is_transposed`.
      dtype: its dtype.
      is_transposed: whether it is transposed when read.
    """

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    is_transposed: bool = False

    @property
    def T(self) -> StoredTensor:
        """The transposed matrix; nothing is read.

        Raises:
          InputError: if it is not a matrix.
        """
        if len(self.shape) != 2:
            raise InputError(f"tensor {self.name!r} of shape {self.shape} is not a matrix and cannot be transposed")
        return dataclasses.replace(self, shape=self.shape[::-1], is_transposed=not self.is_transposed)

    def blocks(self, max_bytes: int) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
        """Reads the tensor in pieces; yields the start index and the array of each.

        All pieces have the same number of stored rows; the last may have fewer.

        Args:
          max_bytes: maximum size of a piece; a single row is never cut.
        """
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
    sources = [_as_source(source_of(path)) for path in paths]
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


_FLOATING = frozenset(_DTYPES[name] for name in ("F64", "F32", "F16", "BF16"))


def _as_source(source: Source | str | None) -> Source | None:
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
    """Opens a safetensors file with the package `safetensors`.

    Raises:
      InputError: if the file or the package is missing, or the file is damaged.
    """
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


def _listed(names: list[str], most: int = 20) -> str:
    others = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + others
