"""What a checkpoint holds, and `about`, the JSON file of a save: what its arrays are, and their digests.

    {"format": "jaxferry.checkpoint/2", "step": 3,
     "params": [{"path": "['a']['w']", "shape": [4, 4], "dtype": "float32", "digest": "99aa06d3014798d8..."}, ...],
     "dtypes": ["float32", ...], "dictionary_paths": [["a", "w"], ...],
     "optimizer": [...], "loss_scale": null, "optimizer_keys": {}, "extra": [...],
     "metric": 0.25, "saved_at_s": 1800000000.0, "digest": "..."}

A leaf with an `axis` is stored in parts along this axis. Several processes write format 3, in which a leaf may have
`pieces`: for each process its first element, the one after its last, and their digest (of each part, if the leaf is
stored in parts). The last `digest` covers all other fields, as JSON with sorted keys and without spaces. Format 1 has
no digests, no `extra`, no `metric` and no `saved_at_s`. `extra_keys` is there, as `optimizer_keys` is, if some of
`extra` are keys of random numbers.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxferry.errors import CheckpointError, InputError
from jaxferry.partition import dtype_named, key_kinds, shape_from_stored
from jaxferry.records import check_keys, check_seconds, check_text, read_json, required
from jaxferry.units import MAX_BYTES

FORMAT = "jaxferry.checkpoint/2"
IN_PIECES = "jaxferry.checkpoint/3"
WITHOUT_DIGESTS = "jaxferry.checkpoint/1"
FILE = "about/metadata"  # the file, relative to the save; the name is that of Orbax's `JsonSave`, which can read it
_OF_FIRST = ("format", "step", "params", "dtypes", "dictionary_paths", "optimizer", "loss_scale", "optimizer_keys")
_OF_SECOND = (*_OF_FIRST, "extra", "metric", "saved_at_s", "digest")
_MAX_DIMENSIONS = 32
_MAX_COUNT = 2**63 - 1
_MAX_PARTS = 2**20


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """The content of a checkpoint.

    Attributes:
      step: number of steps taken.
      params: master parameters as they are stored (`partition.packed`), by path (as `jax.tree_util.keystr` writes it),
        in the order of the flattened tree. A parameter that is stored in parts is a `Stored`; `load` returns every
        parameter whole.
      dtypes: the dtypes of the model's own parameters, in the same order.
      dictionary_paths: for a tree of plain dictionaries the keys of each parameter, else None.
      optimizer: leaves of the optimizer's state by path.
      loss_scale: value and number of finite updates of a dynamic loss scale; None without one.
      extra: the user's own arrays, by name.
      metric: the lower, the better the state; None if it is unknown.
    """

    step: int
    params: Mapping[str, Any]
    dtypes: Sequence[str]
    dictionary_paths: Sequence[Sequence[str]] | None
    optimizer: Mapping[str, Any]
    loss_scale: Sequence[float] | None = None
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    metric: float | None = None

    @property
    def arrays(self) -> dict[str, Mapping[str, Any]]:
        """The fields whose values are arrays, by name."""
        return {"params": self.params, "optimizer": self.optimizer, "extra": self.extra}

    def map_arrays(self, change: Callable[[str, str, Any], Any]) -> Checkpoint:
        """Returns the checkpoint with `change(field, name, array)` in place of each array."""
        return dataclasses.replace(
            self,
            **{  # type: ignore[arg-type]
                field: {name: change(field, name, array) for name, array in own.items()}
                for field, own in self.arrays.items()
            },
        )

    def dictionary(self) -> Any:
        """Returns the parameters' shapes and dtypes in nested dictionaries; `CheckpointError` for other trees."""
        if self.dictionary_paths is None:
            raise CheckpointError(
                "the parameters of this checkpoint are not a tree of dictionaries: pass restore(path, params=...) a "
                "tree of the same structure (shapes are enough, as from jax.eval_shape)"
            )
        return _nested(
            self.dictionary_paths,
            [
                jax.ShapeDtypeStruct(shape_from_stored(array, dtype), dtype)
                for array, dtype in zip(self.params.values(), map(dtype_named, self.dtypes), strict=True)
            ],
        )


def dictionary_paths(params: Any) -> list[list[str]] | None:
    """Returns the keys of each leaf if the tree consists of dictionaries with string keys, else None."""
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]]
    keys = [[getattr(entry, "key", None) for entry in path] for path in paths]
    if not all(path and isinstance(path[-1], str) for path in keys):
        return None
    tree: Any = jax.tree.structure(params)
    is_plain = tree == jax.tree.structure(_nested(keys, [0] * len(keys)))
    return [[str(key) for key in path] for path in keys] if is_plain else None


def _nested(paths: Sequence[Sequence[Any]], leaves: Sequence[Any]) -> Any:
    tree: dict[Any, Any] = {}
    for path, leaf in zip(paths, leaves, strict=True):
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = leaf
    return tree


def is_numeric(dtype: Any) -> bool:
    """Returns whether arrays of a dtype can be saved: numbers and booleans."""
    return any(jax.numpy.issubdtype(dtype, kind) for kind in (jax.numpy.number, jax.numpy.bool_))


class Piece(NamedTuple):
    """The elements `start` to `stop` that one process has stored of a leaf, or of each of its parts."""

    start: int
    stop: int
    digest: str


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A leaf of the parameters, of the optimizer's state or of the user's arrays.

    Attributes:
      path: its path in its tree.
      axis: the axis along which it is stored in parts; None for a leaf stored whole.
      digest: digest of its elements; None in format 1, and of leaves in pieces.
      pieces: what each process has stored; empty if the first process has stored all.
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
        return document | ({"pieces": self.pieces} if self.pieces else {"digest": self.digest})


@dataclasses.dataclass(frozen=True)
class About:
    """The content of the file."""

    content: Checkpoint
    optimizer_keys: Mapping[str, str]
    saved_at_s: float = 0.0
    format: str = FORMAT
    extra_keys: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def num_processes(self) -> int:
        """The number of processes that have stored arrays."""
        leaves = [leaf for own in self.content.arrays.values() for leaf in own.values()]
        return max((len(leaf.pieces) for leaf in leaves), default=1) or 1

    def write(self, save: pathlib.Path) -> None:
        """Writes the file of a save; raises OSError if that fails."""
        fields = {field.name: getattr(self.content, field.name) for field in dataclasses.fields(self.content)}
        fields |= {part: [leaf.to_json() for leaf in own.values()] for part, own in self.content.arrays.items()}
        fields |= {"optimizer_keys": self.optimizer_keys, "saved_at_s": self.saved_at_s, "format": self.format}
        fields |= {"extra_keys": self.extra_keys} if self.extra_keys else {}
        file = save / FILE
        file.parent.mkdir()
        file.write_text(json.dumps(fields | {"digest": _digest(fields)}, allow_nan=False), encoding="utf-8")


class Digest:
    """XXH3 with 128 bits of arrays one after the other; it detects damage, not forgery."""

    def __init__(self, content: bytes = b"") -> None:
        try:
            import xxhash  # here, so that training without checkpoints runs where it is missing
        except ImportError as error:
            raise CheckpointError("checkpoints need the package xxhash: pip install xxhash") from error
        self._hashed = xxhash.xxh3_128(content)

    def add(self, array: Any) -> None:
        """Adds an array's elements in C order."""
        # Dtypes such as bfloat16 have no buffer; bytes have.
        self._hashed.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)

    def text(self) -> str:
        """Returns the digest in hexadecimal."""
        return str(self._hashed.hexdigest())


def _digest(document: Mapping[str, Any]) -> str:
    return Digest(json.dumps(document, sort_keys=True, separators=(",", ":")).encode()).text()


def read_format(save: pathlib.Path) -> str | None:
    """Returns the format of a save; None if it is not this package's. Raises `InputError` for an unreadable file."""
    if not os.path.lexists(save / FILE):
        return None
    found = read_json(save / FILE)
    known = found.get("format") if isinstance(found, Mapping) else None
    return known if known in (FORMAT, IN_PIECES, WITHOUT_DIGESTS) else None


def read_about(save: pathlib.Path) -> About:
    """Reads and checks the file of a save; raises `InputError` with the field if it is missing or damaged."""
    document = read_json(save / FILE)
    if not isinstance(document, Mapping):
        raise InputError(f"{FILE} must be a JSON object")
    found = required(document, "format", FILE)
    if found not in (FORMAT, IN_PIECES, WITHOUT_DIGESTS):
        known = f"{FORMAT!r}, {IN_PIECES!r} and {WITHOUT_DIGESTS!r}"
        raise InputError(f"it has format {found!r}, this package reads {known}")
    has_digests = found != WITHOUT_DIGESTS
    fields = _OF_SECOND if has_digests else _OF_FIRST
    check_keys(document, (*fields, "extra_keys") if has_digests else fields, FILE)
    for key in fields:
        required(document, key, FILE)
    if has_digests and document["digest"] != _digest({k: v for k, v in document.items() if k != "digest"}):
        raise InputError(f"{FILE} is damaged: its digest is another")
    return _from_json(document, has_digests)


def _from_json(document: Mapping[str, Any], has_digests: bool) -> About:
    params, optimizer = (_leaves(document[part], part, has_digests) for part in ("params", "optimizer"))
    dtypes, paths, keys = (document[key] for key in ("dtypes", "dictionary_paths", "optimizer_keys"))
    scale, metric = document["loss_scale"], document.get("metric")
    _check(_is_list(dtypes) and len(dtypes) == len(params), "dtypes", f"a list of {len(params)} names", dtypes)
    for dtype in dtypes:
        _check(_is_dtype(dtype) or dtype in key_kinds(), "dtypes", "names of dtypes of numbers or keys", dtype)
    _check(paths is None or _are_paths(paths, list(params)), "dictionary_paths", "lists of the keys of params", paths)
    extra = _leaves(document["extra"], "extra", has_digests) if has_digests else {}
    extra_keys = document.get("extra_keys", {})
    _check(_are_kinds(keys, optimizer), "optimizer_keys", "a mapping from paths of optimizer leaves to strings", keys)
    _check(_are_kinds(extra_keys, extra), "extra_keys", "a mapping from names of extra to strings", extra_keys)
    is_scale = scale is None or (_is_list(scale, 2) and _is_number(scale[0]) and scale[0] > 0 and _is_count(scale[1]))
    _check(is_scale, "loss_scale", "null, or a positive number and a count", scale)
    _check(metric is None or _is_number(metric), "metric", "a finite number or null", metric)
    _check(_is_count(document["step"]), "step", "a whole number, 0 to 2**63 - 1", document["step"])
    return About(
        content=Checkpoint(
            step=document["step"],
            params=params,
            dtypes=dtypes,
            dictionary_paths=paths,
            optimizer=optimizer,
            loss_scale=None if scale is None else [float(scale[0]), scale[1]],
            extra=extra,
            metric=None if metric is None else float(metric),
        ),
        optimizer_keys=keys,
        saved_at_s=check_seconds(document.get("saved_at_s", 0.0), "saved_at_s", FILE),
        format=document["format"],
        extra_keys=extra_keys,
    )


def _are_kinds(keys: Any, leaves: Mapping[str, Leaf]) -> bool:
    """Whether these are kinds of keys, by the names of some leaves."""
    return isinstance(keys, Mapping) and all(name in leaves and isinstance(k, str) for name, k in keys.items())


def _leaves(value: Any, part: str, has_digests: bool) -> dict[str, Leaf]:
    _check(_is_list(value), part, "a list", value)
    leaves = [_leaf(one, f"{part}[{i}]", has_digests) for i, one in enumerate(value)]
    found = {leaf.path: leaf for leaf in leaves}
    _check(len(found) == len(leaves), part, "leaves of different paths", list(found))
    return found


def _leaf(value: Any, key: str, has_digests: bool) -> Leaf:
    where = f"{FILE}: {key}"
    _check(isinstance(value, Mapping), key, "a JSON object", value)
    has_pieces = has_digests and "pieces" in value
    last = ["pieces" if has_pieces else "digest"] if has_digests else []
    check_keys(value, ("path", "shape", "dtype", "axis", *last), where)
    path, shape, dtype, *more = (required(value, name, where) for name in ("path", "shape", "dtype", *last))
    axis = value.get("axis")
    # A tree that is one array has the empty path.
    if path != "":
        check_text(path, "path", where)
    _check(_is_dtype(dtype), f"{key}.dtype", "the name of a dtype of numbers", dtype)
    is_shape = _is_list(shape) and len(shape) <= _MAX_DIMENSIONS and all(map(_is_count, shape))
    num_bytes = jax.numpy.dtype(dtype).itemsize * math.prod(max(1, length) for length in shape) if is_shape else 0
    what = f"at most {_MAX_DIMENSIONS} whole numbers, and together at most 2**53 bytes"
    _check(is_shape and num_bytes <= MAX_BYTES, f"{key}.shape", what, shape)
    is_axis = "axis" not in value or (_is_count(axis) and axis < len(shape) and 1 <= shape[axis] <= _MAX_PARTS)
    _check(is_axis, f"{key}.axis", "a dimension with parts", axis)
    leaf = Leaf(path, tuple(shape), dtype, axis)
    if has_pieces:
        size = math.prod(length for i, length in enumerate(shape) if i != axis)
        return dataclasses.replace(leaf, pieces=_pieces(more[0], size, key))
    return dataclasses.replace(leaf, digest=check_text(more[0], "digest", where)) if has_digests else leaf


def _pieces(value: Any, size: int, key: str) -> tuple[Piece, ...]:
    """Returns pieces that together have each element once."""
    are_pieces = _is_list(value) and all(
        _is_list(each, 3) and _is_count(each[0]) and _is_count(each[1]) and isinstance(each[2], str) for each in value
    )
    ends = [0, *(each[1] for each in value)] if are_pieces else []
    is_whole = are_pieces and [each[0] for each in value] == ends[:-1] and ends == sorted(ends) and ends[-1] == size
    _check(is_whole, f"{key}.pieces", f"lists of start, stop and digest that have each of {size} elements once", value)
    return tuple(Piece(*each) for each in value)


def _are_paths(value: Any, names: Iterable[str]) -> bool:
    """Returns whether a value has the keys of these parameters of a tree of dictionaries."""
    if not _is_list(value) or not all(_is_list(path) and all(isinstance(key, str) for key in path) for path in value):
        return False
    leaves = {tuple(path) for path in value}
    is_within = any(path[:length] in leaves for path in leaves for length in range(len(path)))
    return ["".join(f"[{key!r}]" for key in path) for path in value] == names and not is_within


def _is_dtype(value: Any) -> bool:
    try:
        dtype = jax.numpy.dtype(value) if isinstance(value, str) else None
    except (TypeError, ValueError, SyntaxError):
        return False
    return dtype is not None and dtype.name == value and is_numeric(dtype)


def _is_list(value: Any, length: int | None = None) -> bool:
    return isinstance(value, list) and length in (None, len(value))


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_COUNT


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _check(is_right: bool, key: str, what: str, value: Any) -> None:
    if not is_right:
        text = repr(value)
        raise InputError(f"{FILE}: {key} must be {what}, got {text if len(text) <= 80 else text[:77] + '...'}")
