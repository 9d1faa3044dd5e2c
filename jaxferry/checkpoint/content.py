"""What a checkpoint holds, and how it is compared with a model and an optimizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxferry.checkpoint.about import is_numeric
from jaxferry.errors import CheckpointError, InputError
from jaxferry.partition.packed import is_stored_as_bytes, shape_from_stored


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """The content of a checkpoint.

    Attributes:
      step: number of steps taken.
      params: master parameters by path (as `jax.tree_util.keystr` writes it), in the order of the flattened tree, as
        they are stored (`partition.packed`);
        `Stacked` or `Owned` where they are in parts, which is never so after `load`.
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

    def dictionary(self) -> Any:
        """Returns shapes and dtypes of the model's parameters as nested dictionaries.

        Raises:
          CheckpointError: if the tree has other containers.
        """
        if self.dictionary_paths is None:
            raise CheckpointError(
                "the parameters of this checkpoint are not a tree of dictionaries: pass restore(path, params=...) a "
                "tree of the same structure (shapes are enough, as from jax.eval_shape)"
            )
        tree: dict[str, Any] = {}
        for keys, array, dtype in zip(self.dictionary_paths, self.params.values(), self.dtypes, strict=True):
            node = tree
            for key in keys[:-1]:
                node = node.setdefault(key, {})
            node[keys[-1]] = jax.ShapeDtypeStruct(shape_from_stored(array, dtype), jax.numpy.dtype(dtype))
        return tree


def check_extra(extra: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Returns the user's arrays as NumPy arrays.

    Raises:
      InputError: if it is not a mapping from names to arrays of numbers.
    """
    if not isinstance(extra, Mapping) or not all(isinstance(name, str) and name for name in extra):
        raise InputError(f"extra must be a mapping from names to arrays, got {type(extra).__name__}")
    arrays = {name: np.asarray(array) for name, array in extra.items()}
    for name, array in arrays.items():
        if not is_numeric(array.dtype):
            raise InputError(f"extra[{name!r}] must be an array of numbers, got dtype {array.dtype}")
    # Checkpoints name dtypes without an order of bytes.
    return {name: array.astype(array.dtype.newbyteorder("="), copy=False) for name, array in arrays.items()}


def check_matches(what: str, saved: Mapping[str, Any], expected: Mapping[str, Any], check_dtypes: bool = False) -> None:
    """Checks names and shapes of saved leaves, and with `check_dtypes` their dtypes.

    Raises:
      CheckpointError: if they differ; it names the first difference.
    """
    for name in [*expected, *saved]:
        if name not in saved:
            raise CheckpointError(f"the checkpoint does not match the {what}: it has no {name}")
        if name not in expected:
            raise CheckpointError(f"the checkpoint does not match the {what}: only the checkpoint has {name}")
        if tuple(saved[name].shape) != tuple(expected[name].shape):
            raise CheckpointError(
                f"the checkpoint does not match the {what}: {name} has shape {tuple(saved[name].shape)} in the "
                f"checkpoint and {tuple(expected[name].shape)} in the {what}"
            )
        if check_dtypes and saved[name].dtype != expected[name].dtype:
            raise CheckpointError(
                f"the checkpoint does not match the {what}: {name} is {saved[name].dtype} in the checkpoint and "
                f"{expected[name].dtype} in the {what}"
            )


def check_coded(
    saved: Mapping[str, Any], dtypes: Sequence[str], expected: Mapping[str, Any], masters: Sequence[Any]
) -> None:
    """Checks that parameters that are stored as bytes were saved so, in the same dtype.

    Args:
      saved: the parameters as they were stored, by path.
      dtypes: their own dtypes.
      expected: the model's parameters, by path.
      masters: as they are stored.

    Raises:
      CheckpointError: if one differs.
    """
    there = {
        name: dtype
        for (name, stored), dtype in zip(saved.items(), dtypes, strict=True)
        if is_stored_as_bytes(jax.ShapeDtypeStruct((), jax.numpy.dtype(dtype)), stored)
    }
    pairs = zip(expected.items(), masters, strict=True)
    here = {name: str(own.dtype) for (name, own), master in pairs if is_stored_as_bytes(own, master)}
    for name in [name for name in expected if name in saved and here.get(name) != there.get(name)]:
        found, wanted = there.get(name, saved[name].dtype), here.get(name, expected[name].dtype)
        raise CheckpointError(
            f"the checkpoint does not match the model: {name} is {found} in the checkpoint and {wanted} in the model"
        )


def dictionary_paths(params: Any) -> list[list[str]] | None:
    """Returns the keys of each leaf if the tree consists of dictionaries with string keys, else None."""
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]]
    keys = [[getattr(entry, "key", None) for entry in path] for path in paths]
    tree: Any = jax.tree.structure(params)
    is_plain = tree == jax.tree.structure(_nested(keys))
    return [[str(key) for key in path] for path in keys] if is_plain else None


def _nested(paths: Sequence[Sequence[Any]]) -> Any:
    tree: dict[Any, Any] = {}
    for path in paths:
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        if not path or not isinstance(path[-1], str):
            return None
        node[path[-1]] = 0
    return tree
