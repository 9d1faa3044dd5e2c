"""What a checkpoint holds, and how it is compared with a model and an optimizer."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax

from jaxferry.errors import CheckpointError, InputError
from jaxferry.partition import dtype_named, is_stored_as_bytes, shape_from_stored


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


def check_extra(extra: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Returns the user's arrays as NumPy arrays; raises `InputError` unless names map to arrays of numbers."""
    if not isinstance(extra, Mapping) or not all(isinstance(name, str) and name for name in extra):
        raise InputError(f"extra must be a mapping from names to arrays, got {type(extra).__name__}")
    arrays = {name: np.asarray(array) for name, array in extra.items()}
    for name, array in arrays.items():
        if not is_numeric(array.dtype):
            raise InputError(f"extra[{name!r}] must be an array of numbers, got dtype {array.dtype}")
    # Checkpoints name dtypes without a byte order.
    return {name: array.astype(array.dtype.newbyteorder("="), copy=False) for name, array in arrays.items()}


def check_matches(what: str, saved: Mapping[str, Any], expected: Mapping[str, Any], check_dtypes: bool = False) -> None:
    """Raises `CheckpointError` with the first difference in names, shapes or (optionally) dtypes of leaves."""
    differs = f"the checkpoint does not match the {what}: "
    for name in [*expected, *saved]:
        if name not in saved:
            raise CheckpointError(f"{differs}it has no {name}")
        if name not in expected:
            raise CheckpointError(f"{differs}only the checkpoint has {name}")
        shapes = tuple(saved[name].shape), tuple(expected[name].shape)
        if shapes[0] != shapes[1]:
            raise CheckpointError(
                f"{differs}{name} has shape {shapes[0]} in the checkpoint and {shapes[1]} in the {what}"
            )
        if check_dtypes and saved[name].dtype != expected[name].dtype:
            raise CheckpointError(
                f"{differs}{name} is {saved[name].dtype} in the checkpoint and {expected[name].dtype} in the {what}"
            )


def check_coded(
    saved: Mapping[str, Any], dtypes: Sequence[str], expected: Mapping[str, Any], masters: Sequence[Any]
) -> None:
    """Raises `CheckpointError` unless the same parameters are stored as bytes here, with the same dtypes."""
    there = {
        name: dtype
        for (name, stored), dtype in zip(saved.items(), dtypes, strict=True)
        if is_stored_as_bytes(jax.ShapeDtypeStruct((), dtype_named(dtype)), stored)
    }
    pairs = zip(expected.items(), masters, strict=True)
    here = {name: str(own.dtype) for (name, own), master in pairs if is_stored_as_bytes(own, master)}
    for name in [name for name in expected if name in saved and here.get(name) != there.get(name)]:
        found, wanted = there.get(name, saved[name].dtype), here.get(name, expected[name].dtype)
        raise CheckpointError(
            f"the checkpoint does not match the model: {name} is {found} in the checkpoint and {wanted} in the model"
        )


_FIELD = re.compile(r"^(.*)\.(\w+)$", re.DOTALL)
_MAX_NAMED = 3


def check_transformations(saved: Collection[str], expected: Collection[str], params: Collection[str]) -> None:
    """Raises `CheckpointError`, which names both, if a checkpoint's optimizer has other Optax transformations.

    Paths tell the transformations: "[0].mu['w']" means that the first transformation of a chain keeps a field `mu` for
    each parameter. Optax's state classes tell which transformation has these fields.
    """
    found = [_fields(names, params) for names in (saved, expected)]
    paths = sorted(path for path in {*found[0], *found[1]} if found[0].get(path) != found[1].get(path))
    if not paths:
        return
    described = []
    for fields in found:
        names = []
        for path in paths[:_MAX_NAMED]:
            if own := fields.get(path):
                known = " or ".join(_transformations().get(own, [])[:2]) or "a transformation"
                names.append(f"{known} ({', '.join(sorted(own))}) at {path or 'the top'}")
        described.append(", ".join(names) or f"nothing at {', '.join(paths[:_MAX_NAMED])}")
    raise CheckpointError(
        f"the checkpoint does not match the optimizer: it was saved with {described[0]}, and this optimizer has "
        f"{described[1]}: pass the optimizer that it was saved with"
    )


def _fields(names: Collection[str], params: Collection[str]) -> dict[str, frozenset[str]]:
    ends, found = sorted(params, key=len, reverse=True), dict[str, set[str]]()
    for name in names:
        end = next((end for end in ends if end and name.endswith(end)), "")
        match = _FIELD.match(name.removesuffix(end))
        if match is not None:
            found.setdefault(match[1], set()).add(match[2])
    return {path: frozenset(fields) for path, fields in found.items()}


@functools.cache
def _transformations() -> dict[frozenset[str], list[str]]:
    """Returns the names of Optax's transformations by the fields of their states; the main module's come first."""
    found: dict[frozenset[str], list[str]] = {}
    for module in (optax, optax.contrib):
        for name, kind in sorted(vars(module).items()):
            fields: Any = getattr(kind, "_fields", ())
            if isinstance(kind, type) and name.endswith("State") and fields:
                # ScaleByAdamState is the state of scale_by_adam.
                words = re.findall(r"[A-Z]+(?![a-z])|[A-Z][a-z0-9]*", name.removesuffix("State"))
                found.setdefault(frozenset(fields), []).append("_".join(words).lower())
    return found
