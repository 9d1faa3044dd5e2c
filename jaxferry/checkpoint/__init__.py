"""Checkpoints: master parameters and optimizer state by path, independent of plan, budget and devices.

    NAME/save_7/about/metadata   what the arrays are, and their digests     `about`
    NAME/save_7/arrays/          the arrays, written by Orbax               `arrays`, read by `leaves`
    NAME/save_7/arrays-1/ ...    the elements that other processes own

A save is a numbered folder that one rename publishes (`saves`). The checks here compare a checkpoint with a model and
an optimizer. `pretrained` reads and writes safetensors files.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import pathlib
import re
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar, overload

import jax
import numpy as np
import optax

from jaxferry.checkpoint.about import (
    FILE,
    FORMAT,
    IN_PIECES,
    WITHOUT_DIGESTS,
    About,
    Checkpoint,
    dictionary_paths,
    is_numeric,
    read_about,
)
from jaxferry.checkpoint.arrays import reason, write_arrays, write_own
from jaxferry.checkpoint.leaves import StoredLeaf, cannot_read, stored_content
from jaxferry.checkpoint.saves import (
    Keep,
    SavedCheckpoint,
    check_writable,
    leftovers,
    list_in,
    local_path,
    new_save,
    newest_in,
    newest_save,
    next_time_s,
    path_in,
    prune,
)
from jaxferry.errors import CheckpointError, InputError, JaxFerryError, ScratchError, is_internal
from jaxferry.partition import dtype_named, is_stored_as_bytes
from jaxferry.processes import Messages, is_key
from jaxferry.transport import deferred_interrupts

__all__ = [
    "Checkpoint",
    "Keep",
    "SavedCheckpoint",
    "StoredLeaf",
    "check_coded",
    "check_extra",
    "check_matches",
    "check_metric",
    "check_target",
    "check_transformations",
    "dictionary_paths",
    "list_checkpoints",
    "load",
    "local_path",
    "save",
]

Path = str | os.PathLike[str]
Made = TypeVar("Made")

_ATTEMPTS = 100
_FIELD = re.compile(r"^(.*)\.(\w+)$", re.DOTALL)
_MAX_NAMED = 3


def save(checkpoint: Checkpoint, path: Path, keep: Keep | None = None, messages: Messages | None = None) -> None:
    """Writes a checkpoint; it takes the place of an existing one once it is complete and on the disk.

    Args:
      checkpoint: the content.
      path: the checkpoint's folder; with `keep`, the folder above it, in which it is named by its step.
      keep: which other checkpoints of that folder to keep.
      messages: to and from the processes that write it together; each calls this. None for one process.

    Raises:
      CheckpointError: if the path is not a local one, exists and is not a checkpoint, or cannot be written. What was
        there stays.
    """
    # Interrupts are deferred: Orbax's own threads cannot be stopped and would continue to write.
    with deferred_interrupts():
        if messages is None or not messages.process:
            with contextlib.nullcontext() if messages is None else messages.reporting("done", "folder"):
                _save(checkpoint, path, keep, messages)
        else:
            folder = pathlib.Path(messages.receive("folder", 0))
            with messages.reporting("wrote"):
                write_own(checkpoint, folder, messages.process)
            messages.receive("done", 0)


def _save(checkpoint: Checkpoint, path: Path, keep: Keep | None, messages: Messages | None) -> None:
    target = _target(path, checkpoint.step, keep)
    with _errors_about(target):
        with new_save(target) as folder:
            saved_at_s = time.time() if keep is None else next_time_s(target.parent)
            if messages is not None:
                messages.send("folder", os.fspath(folder))
            written = write_arrays(checkpoint, folder, messages)
            of_optimizer, of_extra = map(_kinds_of_keys, (checkpoint.optimizer, checkpoint.extra))
            form = FORMAT if messages is None else IN_PIECES
            About(written, of_optimizer, saved_at_s, form, of_extra).write(folder)
        if keep is not None:
            prune(target.parent, keep)


def check_target(path: Path, step: int = 0, keep: Keep | None = None) -> None:
    """Creates the parent folders of a step's checkpoint; raises `CheckpointError` if it cannot be written there."""
    target = _target(path, step, keep)
    with _errors_about(target):
        check_writable(target)


def _target(path: Path, step: int, keep: Keep | None) -> pathlib.Path:
    target = local_path(path)
    if keep is None:
        return target
    if newest_save(target) is not None or (target.exists() and not target.is_dir()):
        what = "is one checkpoint" if target.is_dir() else "is a file"
        raise CheckpointError(f"{path} {what}, not a folder for several: choose another path, or omit keep_last")
    return path_in(target, step)


@contextlib.contextmanager
def _errors_about(path: Path) -> Iterator[None]:
    """Turns errors of the block into the error that a path cannot be written."""
    try:
        yield
    except Exception as error:
        if isinstance(error, CheckpointError | ScratchError) or is_internal(error):
            raise
        is_short = isinstance(error, MemoryError) or "start new thread" in str(error)
        remedy = "free host memory, or raise ulimit -v and -u" if is_short else "make room, or choose another path"
        raise CheckpointError(f"cannot write to {path}: {reason(error)}; {remedy}") from error


def list_checkpoints(folder: Path) -> list[SavedCheckpoint]:
    """Returns the checkpoints that `step.save(..., keep_last=...)` has left in a folder, oldest first.

    Warns:
      UserWarning: if one cannot be read; it is left out.
    """
    return list_in(local_path(folder))


def check_metric(metric: float | None) -> float | None:
    """Returns a metric as a number; None for one that is not finite; raises InputError if it is not a number."""
    try:
        number = None if metric is None else float(metric)
    except (TypeError, ValueError) as error:
        raise InputError(f"metric must be a number, the lower the better, got {metric!r}") from error
    return number if number is not None and math.isfinite(number) else None


@overload
def load(path: Path) -> Checkpoint: ...
@overload
def load(path: Path, use: Callable[[Checkpoint], Made]) -> Made: ...
def load(path: Path, use: Callable[[Checkpoint], Any] | None = None) -> Any:
    """Reads a checkpoint; from a folder of several, the one that was saved last.

    While another process replaces the checkpoint, this reads the old or the new one.

    Args:
      path: the folder.
      use: receives the content, with a `StoredLeaf` or a `StoredKey` in place of each array, reads the arrays that it
        wants, and returns the result of `load`. It is called again if the checkpoint is replaced meanwhile. None reads
        all arrays into host memory.

    Raises:
      CheckpointError: if there is no checkpoint, or it is damaged; the message names the leaf and the file.
    """
    target = local_path(path)
    for _ in range(_ATTEMPTS):
        folder, error, made = _current(target), None, None
        try:
            content = _content(folder, path)
            made = use(content) if use else content.map_arrays(lambda field, name, leaf: leaf.read())
        except JaxFerryError as failure:
            error = failure
        # A save that was removed while it was read is no longer the newest.
        if _current(target) == folder:
            break
    if error is not None:
        raise error
    return made


def _current(target: pathlib.Path) -> pathlib.Path:
    return newest_save(target) or newest_save(newest_in(target) or target) or target


def _content(folder: pathlib.Path, path: Path) -> Checkpoint:
    """Returns a checkpoint's content; none of its arrays has been read."""
    if not (folder / FILE).is_file():
        left = leftovers(folder)
        whole = [str(file.parents[1]) for each in left for file in each.rglob(FILE)]
        of_saves = f"; interrupted saves left {', '.join(map(str, left))}" if left else ""
        of_saves += f": try to restore {whole[-1]}" if whole else ""
        raise CheckpointError(f"{path} is not a JaxFerry checkpoint{of_saves}")
    try:
        about = read_about(folder)
    except (CheckpointError, InputError, OSError, MemoryError) as error:
        raise cannot_read(path, error) from error
    content = stored_content(about, folder, path)
    if about.format == WITHOUT_DIGESTS:
        warnings.warn(
            f"{path} has format {WITHOUT_DIGESTS!r}, without digests: damage to its arrays goes unnoticed; save it "
            "again to add them",
            stacklevel=2,
        )
    return content


def _kinds_of_keys(arrays: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(jax.random.key_impl(leaf)) for name, leaf in arrays.items() if is_key(leaf)}


def check_extra(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the user's arrays as NumPy arrays, and PRNG keys as they are.

    Raises:
      InputError: unless names map to arrays of numbers or keys.
    """
    if not isinstance(extra, Mapping) or not all(isinstance(name, str) and name for name in extra):
        raise InputError(f"extra must be a mapping from names to arrays, got {type(extra).__name__}")
    return {name: array if is_key(array) else _numbers(name, array) for name, array in extra.items()}


def _numbers(name: str, given: Any) -> np.ndarray:
    if isinstance(given, Mapping):
        raise InputError(
            f"extra[{name!r}] must be an array, got a {type(given).__name__}: of a tree, pass the leaves "
            "(jax.tree.flatten), each by a name of its own"
        )
    array = np.asarray(given)
    if not is_numeric(array.dtype):
        raise InputError(f"extra[{name!r}] must be an array of numbers or PRNG keys, got dtype {array.dtype}")
    # Checkpoints name dtypes without a byte order.
    return array.astype(array.dtype.newbyteorder("="), copy=False)


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
