"""One checkpoint of several processes: each writes the elements that it owns.

    process 0:  scratch folder --tell--> write arrays/ ---------------------> about, publish --tell--> done
    process k:                  `------> write arrays-k/, pieces-k --tell--'                     `---> done

They speak through JAX's coordination service, not by collectives, so that a thread may save while training goes on.
The folder must be one that all of them see.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from jaxferry.checkpoint.about import Leaf, Piece
from jaxferry.checkpoint.arrays import Leaves, write_arrays
from jaxferry.checkpoint.digests import digest
from jaxferry.errors import CheckpointError
from jaxferry.optimizer.pieces import Owned
from jaxferry.processes.all_processes import Messages

_Pieces = dict[str, dict[str, Piece]]


def own_pieces(arrays: Mapping[str, Leaves]) -> _Pieces:
    """What a process stores of leaves of which it owns some elements."""
    return {
        part: {
            name: Piece(leaf.span.start, leaf.span.stop, digest(leaf))
            for name, leaf in leaves.items()
            if isinstance(leaf, Owned)
        }
        for part, leaves in arrays.items()
    }


def write_own(arrays: Mapping[str, Leaves], folder: pathlib.Path, process: int) -> None:
    """Writes the elements that a process other than the first owns, and what they are."""
    write_arrays(arrays, folder, process)
    pieces = {
        part: {name: dataclasses.astuple(piece) for name, piece in own.items()}
        for part, own in own_pieces(arrays).items()
    }
    _file(folder, process).write_text(json.dumps(pieces), encoding="utf-8")


def with_pieces(part: str, leaves: list[Leaf], arrays: Leaves, others: list[_Pieces]) -> list[Leaf]:
    """Leaves as the first process describes them, with what all processes have stored of them."""
    own = own_pieces({part: arrays})[part]
    return [
        dataclasses.replace(leaf, digest=None, pieces=(own[leaf.path], *(other[part][leaf.path] for other in others)))
        if leaf.path in own
        else leaf
        for leaf in leaves
    ]


def pieces_of_others(folder: pathlib.Path, messages: Messages) -> list[_Pieces]:
    """Lets the other processes write into a folder; returns what they have stored.

    Raises:
      CheckpointError: if one has failed.
    """
    found: list[_Pieces] = []
    for process in range(1, messages.num_processes):
        messages.hear("wrote", process)
        file = _file(folder, process)
        try:
            stored: Any = json.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise CheckpointError(
                f"process {process} has written to {folder}, but process 0 does not see it: save to a folder that all "
                f"processes share ({error.strerror})"
            ) from error
        found.append({part: {name: Piece(*piece) for name, piece in own.items()} for part, own in stored.items()})
        file.unlink()
    return found


def _file(folder: pathlib.Path, process: int) -> pathlib.Path:
    return folder / f"pieces-{process}"
