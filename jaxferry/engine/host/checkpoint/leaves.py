"""Reads the leaves of a checkpoint one by one, so that a process can keep its own elements of each."""

from __future__ import annotations

import itertools
import math
import pathlib
from collections.abc import Mapping

import jax
import numpy as np

from jaxferry.engine.host.checkpoint.about import About, Leaf, Piece
from jaxferry.engine.host.checkpoint.arrays import files_of, folder_of, names_of, open_one
from jaxferry.engine.host.checkpoint.digests import Digest
from jaxferry.engine.host.checkpoint.paths import reason
from jaxferry.errors import CheckpointError
from jaxferry.partition import Span

Spans = Mapping[str, Mapping[str, Span]]
"""The elements to read of leaves of `params` and `optimizer`, by path."""


def read_leaves(about: About, checkpoint: pathlib.Path, spans: Spans) -> dict[str, dict[str, np.ndarray]]:
    """Reads the leaves of a checkpoint, and compares their digests.

    Args:
      about: what the checkpoint holds.
      checkpoint: its folder.
      spans: the elements to keep, flat; other leaves are read whole.

    Raises:
      CheckpointError: if a leaf is missing or damaged; the message names it and its file.
    """
    described = {"params": about.params, "optimizer": about.optimizer, "extra": about.extra}
    return {
        part: {
            leaf.path: _read(f"{part}.", number, leaf, checkpoint, spans.get(part, {}).get(leaf.path))
            for number, leaf in enumerate(leaves)
        }
        for part, leaves in described.items()
    }


def _read(part: str, number: int, leaf: Leaf, checkpoint: pathlib.Path, span: Span | None) -> np.ndarray:
    """One leaf, whole, or its elements of a span."""
    names, dtype = [part + name for name in names_of(number, leaf)], jax.numpy.dtype(leaf.dtype)
    shape_of_one = tuple(length for axis, length in enumerate(leaf.shape) if axis != leaf.axis)
    one, is_in_turn = math.prod(shape_of_one), leaf.axis in (None, 0)
    # Elements of parts along another axis do not follow each other in the whole.
    kept = span if span is not None and is_in_turn else Span(0, len(names) * one)
    made = np.empty(kept.size, dtype)
    for process, piece in enumerate(leaf.pieces or (Piece(0, one, leaf.digest or ""),)):
        if len(names) > 1 or (piece.start < kept.stop and kept.start < piece.stop):
            _read_piece(names, process, piece, leaf, checkpoint, made, kept, one)
    if span is not None and is_in_turn:
        return made
    parts = made.reshape(len(names), *shape_of_one)
    whole = parts.reshape(leaf.shape) if is_in_turn else np.ascontiguousarray(np.moveaxis(parts, 0, leaf.axis or 0))
    return whole if span is None else np.array(span.of(whole))


def _read_piece(
    names: list[str],
    process: int,
    piece: Piece,
    leaf: Leaf,
    checkpoint: pathlib.Path,
    made: np.ndarray,
    kept: Span,
    one: int,
) -> None:
    """Reads what a process has stored of a leaf, and writes what is kept of it to `made`."""
    folder, digest = checkpoint / folder_of(process), Digest()
    for name, before in zip(names, itertools.count(0, one), strict=False):
        found = np.empty(0, made.dtype)
        if piece.stop > piece.start:
            try:
                found = np.asarray(open_one(folder, name).read().result()).reshape(-1)
            except Exception as error:
                where = files_of(folder, [name])
                raise CheckpointError(f"{names[0].split('.')[0]} {leaf.path} in {where}: {reason(error)}") from error
        digest.add(found)
        first = before + piece.start
        start, stop = max(kept.start, first), min(kept.stop, first + found.size)
        if found.size == piece.stop - piece.start and found.dtype == made.dtype and start < stop:
            made[start - kept.start : stop - kept.start] = found[start - first : stop - first]
    if digest.text() != piece.digest:
        what = f"{names[0].split('.')[0]} {leaf.path} in {files_of(folder, names)}"
        raise CheckpointError(f"{what} is damaged: its digest is another")
