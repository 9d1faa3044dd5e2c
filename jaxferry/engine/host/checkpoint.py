"""Checkpoints through Orbax: master parameters and optimizer state by path, independent of the partition.

A checkpoint is a folder. It records no modes, layers or devices, so a run may continue under another plan or budget.
Arrays that the state stores in parts (layers of a scan) are written in parts, without a copy, and read whole.
"""

from __future__ import annotations

import dataclasses
import pathlib
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from jaxferry.engine.host.pieces import Stacked
from jaxferry.engine.interrupts import deferred_interrupts
from jaxferry.errors import CheckpointError

_FORMAT = "jaxferry.checkpoint/1"


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """The content of a checkpoint.

    Attributes:
      step: number of steps taken.
      params: master parameters by path (as `jax.tree_util.keystr` writes it), in the order of the flattened tree;
        `Stacked` where they are in parts, which is never so after `load`.
      dtypes: the dtypes of the model's own parameters, in the same order.
      dictionary_paths: for a tree of plain dictionaries the keys of each parameter, else None.
      optimizer: leaves of the optimizer's state by path.
      loss_scale: value and number of finite updates of a dynamic loss scale; None without one.
    """

    step: int
    params: Mapping[str, Any]
    dtypes: Sequence[str]
    dictionary_paths: Sequence[Sequence[str]] | None
    optimizer: Mapping[str, Any]
    loss_scale: Sequence[float] | None = None

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
            node[keys[-1]] = jax.ShapeDtypeStruct(array.shape, jax.numpy.dtype(dtype))
        return tree


def save(checkpoint: Checkpoint, path: str | pathlib.Path) -> None:
    """Writes a checkpoint; an existing one is replaced once the new one is complete.

    Raises:
      CheckpointError: if the path exists and is not a checkpoint, or cannot be written.
    """
    keys = [name for name, leaf in checkpoint.optimizer.items() if _is_key(leaf)]
    about = {
        "format": _FORMAT,
        "step": checkpoint.step,
        "params": _describe(checkpoint.params),
        "dtypes": list(checkpoint.dtypes),
        "dictionary_paths": checkpoint.dictionary_paths,
        "optimizer": _describe({n: _plain(leaf) for n, leaf in checkpoint.optimizer.items()}),
        "loss_scale": checkpoint.loss_scale,
        "optimizer_keys": {name: str(jax.random.key_impl(checkpoint.optimizer[name])) for name in keys},
    }
    arrays = {
        part: _filled({name: _plain(array) for name, array in _in_parts(leaves.values()).items()})
        for part, leaves in (("params", checkpoint.params), ("optimizer", checkpoint.optimizer))
    }
    saved = ocp.args.Composite(arrays=ocp.args.StandardSave(arrays), about=ocp.args.JsonSave(about))
    # Interrupts are deferred: Orbax's own threads cannot be stopped and would continue to write.
    with deferred_interrupts():
        target, scratch = _make_scratch(path)
        try:
            with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
                checkpointer.save(scratch / "fresh", saved)
            _replace(target, scratch)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def check_target(path: str | pathlib.Path) -> None:
    """Checks that a checkpoint can be written to a path, and makes its parent folders.

    Raises:
      CheckpointError: if the path exists and is not a checkpoint, or cannot be written.
    """
    _, scratch = _make_scratch(path)
    scratch.rmdir()


def _make_scratch(path: str | pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
    """Returns the absolute path and a new folder beside it; raises as `save` does."""
    target = pathlib.Path(path).absolute()
    try:
        if target.exists() and not _is_checkpoint(target):
            raise CheckpointError(f"{path} exists and is not a JaxFerry checkpoint: choose another path")
        target.parent.mkdir(parents=True, exist_ok=True)
        return target, pathlib.Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise CheckpointError(f"cannot write to {path}: {error.strerror or error}; choose another path") from error


def _replace(target: pathlib.Path, scratch: pathlib.Path) -> None:
    """Moves the new checkpoint to its place; the old one stays if that fails."""
    if not target.exists():
        (scratch / "fresh").rename(target)
        return
    target.rename(scratch / "old")
    try:
        (scratch / "fresh").rename(target)
    except BaseException:
        (scratch / "old").rename(target)
        raise


def load(path: str | pathlib.Path) -> Checkpoint:
    """Reads a checkpoint into host memory.

    Raises:
      CheckpointError: if there is no checkpoint, or it is damaged.
    """
    source = pathlib.Path(path).absolute()
    if not _is_checkpoint(source):
        raise CheckpointError(f"{path} is not a JaxFerry checkpoint")
    try:
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
            about = checkpointer.restore(source, ocp.args.Composite(about=ocp.args.JsonRestore()))["about"]
            if about["format"] != _FORMAT:
                raise CheckpointError(f"{path} has format {about['format']!r}, this package reads {_FORMAT!r}")
            empty = {part: _empty(about[part]) for part in ("params", "optimizer")}
            wanted = {part: _filled(leaves) for part, leaves in empty.items()}
            restore = ocp.args.Composite(arrays=ocp.args.StandardRestore(wanted))
            read = checkpointer.restore(source, restore)["arrays"]
        params, optimizer = (_whole(about[part], {**empty[part], **read.pop(part)}) for part in ("params", "optimizer"))
        for name, kind in about["optimizer_keys"].items():
            optimizer[name] = jax.random.wrap_key_data(optimizer[name], impl=kind)
        return Checkpoint(
            about["step"], params, about["dtypes"], about["dictionary_paths"], optimizer, about["loss_scale"]
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        what = str(error).splitlines()[0][:200] if str(error) else ""
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {what}") from error


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


def _is_checkpoint(path: pathlib.Path) -> bool:
    return (path / "about").is_dir() and (path / "arrays").is_dir()


def _is_key(leaf: Any) -> bool:
    return bool(jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def _plain(leaf: Any) -> Any:
    return leaf if isinstance(leaf, Stacked) else np.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf)


def _describe(leaves: Mapping[str, Any]) -> list[dict[str, Any]]:
    described: list[dict[str, Any]] = []
    for name, leaf in leaves.items():
        axis = {"axis": leaf.axis} if isinstance(leaf, Stacked) else {}
        described.append({"path": name, "shape": list(leaf.shape), "dtype": str(leaf.dtype), **axis})
    return described


def _in_parts(leaves: Iterable[Any]) -> dict[str, Any]:
    """Returns the arrays to write, by the number of the leaf, and of the part for a leaf in parts."""
    arrays: dict[str, Any] = {}
    for i, leaf in enumerate(leaves):
        parts = {f"{i}.{k}": part for k, part in enumerate(leaf.parts)} if isinstance(leaf, Stacked) else {str(i): leaf}
        arrays |= parts
    return arrays


def _empty(described: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns uninitialised arrays of the saved shapes and dtypes."""
    made: dict[str, Any] = {}
    for i, leaf in enumerate(described):
        shape, axis = list(leaf["shape"]), leaf.get("axis")
        names = [str(i)] if axis is None else [f"{i}.{k}" for k in range(shape.pop(axis))]
        made |= {name: np.empty(shape, jax.numpy.dtype(leaf["dtype"])) for name in names}
    return made


def _filled(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the arrays that have elements; Orbax accepts no others."""
    return {name: array for name, array in arrays.items() if array.size}


def _whole(described: Sequence[Mapping[str, Any]], arrays: dict[str, Any]) -> dict[str, Any]:
    """Returns the leaves by path, made from the saved arrays; removes these from `arrays`."""
    found: dict[str, Any] = {}
    for i, leaf in enumerate(described):
        axis = leaf.get("axis")
        if axis is None:
            found[leaf["path"]] = arrays.pop(str(i))
        else:
            parts = [arrays.pop(f"{i}.{k}") for k in range(leaf["shape"][axis])]
            found[leaf["path"]] = Stacked(tuple(parts), axis).whole()
    return found
