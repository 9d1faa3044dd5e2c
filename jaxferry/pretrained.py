"""Pretrained weights: safetensors files as arrays that are read when they are needed, and a model's tree of them.

    files --open_safetensors--> tensors by name --arrange--> the model's tree --step.init--> masters, block by block

A tensor is nowhere whole but in the file and in the masters, so that a model needs little more host memory to be read
than to be trained.
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
    """A tensor in a safetensors file; `np.asarray` reads it whole, `blocks` piece by piece.

    Attributes:
      file: the file.
      name: the tensor's name there.
      shape: its shape; that of the transpose if it is transposed.
      dtype: its dtype.
      is_transposed: whether rows and columns are exchanged when it is read.
    """

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    is_transposed: bool = False

    @property
    def T(self) -> StoredTensor:
        """The matrix with rows and columns exchanged; nothing is read.

        Raises:
          InputError: if it is no matrix.
        """
        if len(self.shape) != 2:
            raise InputError(f"tensor {self.name!r} of shape {self.shape} is no matrix that can be transposed")
        return dataclasses.replace(self, shape=self.shape[::-1], is_transposed=not self.is_transposed)

    def blocks(self, max_bytes: int) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
        """Reads the tensor in pieces that fill it: where each begins, and the array.

        The pieces have as many rows of the file each, the last one perhaps fewer.

        Args:
          max_bytes: what a piece may have at most; a single row is not cut.
        """
        stored = self.shape[::-1] if self.is_transposed else self.shape
        if not stored:
            yield (), np.asarray(self)
            return
        row_bytes = max(1, self.dtype.itemsize * int(np.prod(stored[1:])))
        rows = max(1, max_bytes // row_bytes)
        for row in range(0, stored[0], rows):
            # What has been mapped of a file counts as the process's memory until it is closed.
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
    """Where a parameter comes from.

    Attributes:
      name: the tensor's name.
      is_transposed: whether the tensor is the parameter's transpose, as PyTorch's `Linear` keeps its weight.
    """

    name: str
    is_transposed: bool = False


def open_safetensors(path: str | os.PathLike[str]) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint by name; nothing but the files' headers is read.

    Args:
      path: a `.safetensors` file, an index of several (`model.safetensors.index.json`), or a folder with one of them.

    Raises:
      InputError: if there is no such checkpoint, a file is missing or damaged, or the package `safetensors` is.
    """
    path = Path(path)
    if path.is_dir():
        path = _checkpoint_in(path)
    if path.suffix != ".json":
        return _tensors_of(path)
    try:
        placed = json.loads(path.read_text())["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} is no index of safetensors files: {error!r}") from error
    found: dict[str, StoredTensor] = {}
    for file in dict.fromkeys(placed.values()):
        found |= {name: tensor for name, tensor in _tensors_of(path.parent / file).items() if placed.get(name) == file}
    missing = [name for name in placed if name not in found]
    if missing:
        raise InputError(f"{path} names tensors that its files do not have: {_listed(missing)}")
    return found


def arrange(
    tensors: Mapping[str, Any],
    params: Any,
    source_of: Callable[[tuple[str, ...]], Source | str | None],
    ignored: Iterable[str] = (),
) -> Any:
    """The tree of a model's parameters with stored tensors for leaves, to be given to `step.init`; nothing is read.

    Args:
      tensors: by name, as `open_safetensors` gives them.
      params: the model's tree of parameters; shapes are enough.
      source_of: the name of the tensor that a parameter comes from, or a `Source`, by the parameter's path, such as
        `("h_0", "qkv", "kernel")`; None leaves the leaf of `params`.
      ignored: regular expressions of whole names: of tensors that are not parameters.

    Raises:
      InputError: if tensors are missing, or left over, or of another shape than their parameter, or not floating point;
        it names them all.
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
        for what, names in (("missing", missing), ("unexpected", unexpected), ("not as the model's", wrong))
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
            f"{folder} holds {'no' if not files else 'several'} .safetensors files and no {INDEX_FILE}: name a file"
        )
    return files[0]


def _tensors_of(file: Path) -> dict[str, StoredTensor]:
    tensors = {}
    with open_file(file) as opened:
        for name in opened.keys():  # noqa: SIM118 - it is no dictionary
            stored = opened.get_slice(name)
            dtype = _DTYPES.get(stored.get_dtype())
            if dtype is None:
                raise InputError(f"tensor {name!r} in {file} is of {stored.get_dtype()}, which is not supported")
            tensors[name] = StoredTensor(file, name, tuple(stored.get_shape()), dtype)
    return tensors


@contextlib.contextmanager
def open_file(path: Path) -> Iterator[Any]:
    """A safetensors file, opened with the package of that name.

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
