"""`about`, the JSON file of a checkpoint: what its arrays are, and their digests.

    {"format": "jaxferry.checkpoint/2", "step": 3,
     "params": [{"path": "['a']['w']", "shape": [4, 4], "dtype": "float32", "digest": "99aa06d3014798d8..."}, ...],
     "dtypes": ["float32", ...], "dictionary_paths": [["a", "w"], ...],
     "optimizer": [...], "loss_scale": null, "optimizer_keys": {}, "extra": [...],
     "metric": 0.25, "saved_at_s": 1800000000.0, "digest": "..."}

A leaf with an `axis` is stored in parts along it. In format 3, which several processes write, a leaf may have `pieces`:
for each process the first element that it has stored, the one after the last, and their digest; of each part, if it is
stored in parts. The last `digest` is that of all other fields, as JSON with sorted
keys and without spaces. Format 1 has no digests, no `extra`, no `metric` and no `saved_at_s`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jaxferry.checkpoint.digests import digest_of_bytes
from jaxferry.errors import InputError
from jaxferry.records import check_keys, check_seconds, check_text, read_json, required
from jaxferry.units import MAX_BYTES

FORMAT = "jaxferry.checkpoint/2"
IN_PIECES = "jaxferry.checkpoint/3"
WITHOUT_DIGESTS = "jaxferry.checkpoint/1"
FILE = "about/metadata"
"""The file, relative to the checkpoint; the name is that of Orbax's `JsonSave`, which can read it."""

_OF_FIRST = (
    "format",
    "step",
    "params",
    "dtypes",
    "dictionary_paths",
    "optimizer",
    "loss_scale",
    "optimizer_keys",
)
_OF_SECOND = (*_OF_FIRST, "extra", "metric", "saved_at_s", "digest")
_OF_LEAF = ("path", "shape", "dtype", "axis")
_MAX_DIMENSIONS = 32
_MAX_COUNT = 2**63 - 1
_MAX_PARTS = 2**20


@dataclasses.dataclass(frozen=True)
class Piece:
    """The elements of a leaf that one process has stored, or those of each of its parts.

    Attributes:
      start, stop: the first one, and the one after the last.
      digest: their digest.
    """

    start: int
    stop: int
    digest: str


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A leaf of the parameters, of the optimizer's state or of the user's arrays.

    Attributes:
      path: its path in its tree.
      shape: shape of the whole.
      dtype: name of its dtype.
      axis: the axis along which it is stored in parts; None for a leaf stored whole.
      digest: digest of its elements; None in format 1, and of leaves in pieces.
      pieces: what each process has stored of it; none if the first has stored it whole.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    axis: int | None = None
    digest: str | None = None
    pieces: tuple[Piece, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Returns the leaf's JSON object."""
        document: dict[str, Any] = {"path": self.path, "shape": list(self.shape), "dtype": self.dtype}
        if self.axis is not None:
            document["axis"] = self.axis
        if self.pieces:
            return {**document, "pieces": [[piece.start, piece.stop, piece.digest] for piece in self.pieces]}
        return {**document, "digest": self.digest}


@dataclasses.dataclass(frozen=True)
class About:
    """The content of the file; the attributes are those of `Checkpoint`, with a `Leaf` for each array.

    Attributes:
      optimizer_keys: the implementations of those leaves of `optimizer` that are PRNG keys, by path.
      saved_at_s: when it was saved, in seconds since 1970; 0 in format 1.
      has_digests: whether each leaf has one.
      is_in_pieces: whether leaves may be in pieces.
    """

    step: int
    params: Sequence[Leaf]
    dtypes: Sequence[str]
    dictionary_paths: Sequence[Sequence[str]] | None
    optimizer: Sequence[Leaf]
    loss_scale: Sequence[float] | None
    optimizer_keys: Mapping[str, str]
    extra: Sequence[Leaf]
    metric: float | None = None
    saved_at_s: float = 0.0
    has_digests: bool = True
    is_in_pieces: bool = False

    @property
    def num_processes(self) -> int:
        """The number of processes that have written it, as far as leaves are in pieces."""
        return max((len(leaf.pieces) for leaf in (*self.params, *self.optimizer, *self.extra)), default=1) or 1

    def to_json(self) -> dict[str, Any]:
        """Returns the JSON document, with the digest of its fields."""
        document = {
            "format": IN_PIECES if self.is_in_pieces else FORMAT,
            "step": self.step,
            "params": [leaf.to_json() for leaf in self.params],
            "dtypes": list(self.dtypes),
            "dictionary_paths": self.dictionary_paths,
            "optimizer": [leaf.to_json() for leaf in self.optimizer],
            "loss_scale": self.loss_scale,
            "optimizer_keys": dict(self.optimizer_keys),
            "extra": [leaf.to_json() for leaf in self.extra],
            "metric": self.metric,
            "saved_at_s": self.saved_at_s,
        }
        return {**document, "digest": _digest(document)}


def is_numeric(dtype: Any) -> bool:
    """Whether arrays of this dtype can be saved: numbers and booleans."""
    return any(jax.numpy.issubdtype(dtype, kind) for kind in (jax.numpy.number, jax.numpy.bool_))


def write_about(about: About, checkpoint: pathlib.Path) -> None:
    """Writes the file of a checkpoint.

    Raises:
      OSError: if it cannot be written.
    """
    file = checkpoint / FILE
    file.parent.mkdir()
    file.write_text(json.dumps(about.to_json(), allow_nan=False), encoding="utf-8")


def read_format(checkpoint: pathlib.Path) -> str | None:
    """Returns the format of a checkpoint's folder; None if it is not one of this package's formats.

    Raises:
      InputError: if the folder has such a file, but it cannot be read.
    """
    file = checkpoint / FILE
    if not os.path.lexists(file):
        return None
    found = read_json(file)
    known = found.get("format") if isinstance(found, Mapping) else None
    return known if known in (FORMAT, IN_PIECES, WITHOUT_DIGESTS) else None


def read_about(checkpoint: pathlib.Path) -> About:
    """Reads and checks the file of a checkpoint.

    Raises:
      InputError: if it is missing or damaged; the message names the field.
    """
    document = read_json(checkpoint / FILE)
    if not isinstance(document, Mapping):
        raise InputError(f"{FILE} must be a JSON object")
    found = required(document, "format", FILE)
    if found not in (FORMAT, IN_PIECES, WITHOUT_DIGESTS):
        known = f"{FORMAT!r}, {IN_PIECES!r} and {WITHOUT_DIGESTS!r}"
        raise InputError(f"it has format {found!r}, this package reads {known}")
    has_digests = found != WITHOUT_DIGESTS
    fields = _OF_SECOND if has_digests else _OF_FIRST
    check_keys(document, fields, FILE)
    for key in fields:
        required(document, key, FILE)
    if has_digests and document["digest"] != _digest({k: v for k, v in document.items() if k != "digest"}):
        raise InputError(f"{FILE} is damaged: its digest is another")
    return _from_json(document, has_digests)


def _digest(document: Mapping[str, Any]) -> str:
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return digest_of_bytes(text.encode())


def _from_json(document: Mapping[str, Any], has_digests: bool) -> About:
    params = _leaves(document["params"], "params", has_digests)
    optimizer = _leaves(document["optimizer"], "optimizer", has_digests)
    keys = document["optimizer_keys"]
    names = {leaf.path for leaf in optimizer}
    if not isinstance(keys, Mapping) or not all(n in names and isinstance(k, str) for n, k in keys.items()):
        raise InputError(f"{FILE}: optimizer_keys must map paths of optimizer leaves to strings, got {_show(keys)}")
    return About(
        step=_count(document["step"], "step"),
        params=params,
        dtypes=_dtypes(document["dtypes"], len(params)),
        dictionary_paths=_dictionary_paths(document["dictionary_paths"], params),
        optimizer=optimizer,
        loss_scale=_loss_scale(document["loss_scale"]),
        optimizer_keys=keys,
        extra=_leaves(document["extra"], "extra", has_digests) if has_digests else (),
        metric=_metric(document.get("metric")),
        saved_at_s=check_seconds(document.get("saved_at_s", 0.0), "saved_at_s", FILE),
        has_digests=has_digests,
        is_in_pieces=document["format"] == IN_PIECES,
    )


def _leaves(value: Any, key: str, has_digests: bool) -> tuple[Leaf, ...]:
    leaves = tuple(_leaf(one, f"{key}[{i}]", has_digests) for i, one in enumerate(_list(value, key)))
    if len({leaf.path for leaf in leaves}) < len(leaves):
        raise InputError(f"{FILE}: a path occurs twice in {key}")
    return leaves


def _leaf(value: Any, key: str, has_digests: bool) -> Leaf:
    where = f"{FILE}: {key}"
    if not isinstance(value, Mapping):
        raise InputError(f"{where} must be a JSON object, got {_show(value)}")
    is_in_pieces = has_digests and "pieces" in value
    check_keys(value, (*_OF_LEAF, *(["pieces" if is_in_pieces else "digest"] if has_digests else [])), where)
    path, dtype, axis = required(value, "path", where), _dtype(required(value, "dtype", where), f"{key}.dtype"), None
    # A tree that is one array has the empty path.
    if path != "":
        check_text(path, "path", where)
    shape = tuple(_count(length, f"{key}.shape") for length in _list(required(value, "shape", where), f"{key}.shape"))
    num_bytes = math.prod(max(1, length) for length in shape) * jax.numpy.dtype(dtype).itemsize
    if len(shape) > _MAX_DIMENSIONS or num_bytes > MAX_BYTES:
        raise InputError(
            f"{where}: shape must have at most {_MAX_DIMENSIONS} dimensions and 2**53 bytes, got {_show(list(shape))}"
        )
    if "axis" in value:
        axis = _count(value["axis"], f"{key}.axis")
        if axis >= len(shape) or not 1 <= shape[axis] <= _MAX_PARTS:
            raise InputError(f"{where}: axis must be that of a dimension with parts, got {axis}")
    if is_in_pieces:
        size = math.prod(length for i, length in enumerate(shape) if i != axis)
        return Leaf(path, shape, dtype, axis, pieces=_pieces(value["pieces"], size, where))
    digest = required(value, "digest", where) if has_digests else None
    return Leaf(path, shape, dtype, axis, check_text(digest, "digest", where) if has_digests else None)


def _pieces(value: Any, size: int, where: str) -> tuple[Piece, ...]:
    """Pieces that together have each of this many elements once."""
    found = []
    for each in _list(value, "pieces"):
        if len(_list(each, "pieces")) != 3:
            raise InputError(f"{where}: a piece must be two elements and a digest, got {_show(each)}")
        start, stop = (_count(number, "pieces") for number in each[:2])
        found.append(Piece(start, stop, check_text(each[2], "digest", where)))
    ends = [0, *(piece.stop for piece in found)]
    if [piece.start for piece in found] != ends[:-1] or ends != sorted(ends) or ends[-1] != size:
        raise InputError(f"{where}: pieces must have each of {size} elements once, got {_show(value)}")
    return tuple(found)


def _dtypes(value: Any, num_params: int) -> list[str]:
    dtypes = [_dtype(name, f"dtypes[{i}]") for i, name in enumerate(_list(value, "dtypes"))]
    if len(dtypes) != num_params:
        raise InputError(f"{FILE}: dtypes must have one element for each of {num_params} params, got {len(dtypes)}")
    return dtypes


def _dtype(value: Any, key: str) -> str:
    try:
        dtype = jax.numpy.dtype(value) if isinstance(value, str) else None
    except TypeError:
        dtype = None
    if dtype is None or dtype.name != value or not is_numeric(dtype):
        raise InputError(f"{FILE}: {key} must be the name of a dtype of numbers, got {_show(value)}")
    return str(value)


def _dictionary_paths(value: Any, params: Sequence[Leaf]) -> list[list[str]] | None:
    if value is None:
        return None
    paths = _list(value, "dictionary_paths")
    written = ["".join(f"[{key!r}]" for key in _list(path, "dictionary_paths")) for path in paths]
    if written != [leaf.path for leaf in params] or not all(isinstance(key, str) for path in paths for key in path):
        raise InputError(f"{FILE}: dictionary_paths must be the paths of params as lists of keys, got {_show(value)}")
    leaves = {tuple(path) for path in paths}
    if any(path[:length] in leaves for path in leaves for length in range(len(path))):
        raise InputError(f"{FILE}: dictionary_paths has a leaf within a leaf")
    return paths


def _loss_scale(value: Any) -> list[float] | None:
    if value is None:
        return None
    scale = _list(value, "loss_scale")
    is_number = len(scale) == 2 and isinstance(scale[0], int | float) and not isinstance(scale[0], bool)
    if not is_number or not 0 < scale[0] < math.inf:
        raise InputError(f"{FILE}: loss_scale must be a positive number and a count, got {_show(value)}")
    return [float(scale[0]), _count(scale[1], "loss_scale[1]")]


def _metric(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and -math.inf < value < math.inf
    if value is not None and not is_number:
        raise InputError(f"{FILE}: metric must be a finite number or null, got {_show(value)}")
    return None if value is None else float(value)


def _count(value: Any, key: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MAX_COUNT:
        raise InputError(f"{FILE}: {key} must be a whole number, 0 to 2**63 - 1, got {_show(value)}")
    return value


def _list(value: Any, key: str) -> list[Any]:
    if not isinstance(value, list):
        raise InputError(f"{FILE}: {key} must be a list, got {_show(value)}")
    return value


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
