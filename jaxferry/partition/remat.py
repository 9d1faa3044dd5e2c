"""Applies the argument `remat`: what each segment keeps between its forward and its backward.

    remat = "none" | "products" | "full" | policy | "auto"    one choice for all segments
          | {name: choice} | name -> choice    one choice per segment; names missing from a mapping get "none"

A policy is one of `jax.checkpoint_policies`, or a function with the same signature. Segments of one program with
different choices become different programs. Their numbers do not depend on the choices of other segments.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from jaxferry.errors import InputError
from jaxferry.partition.derivatives import AUTO, REMAT
from jaxferry.partition.segments import Partition


def check_remat(remat: Any) -> Any:
    """Checks `remat` as far as possible without a model, and returns it.

    Raises:
      InputError: if it is neither a choice, nor a mapping to choices, nor a function.
    """
    if isinstance(remat, Mapping):
        for name, choice in remat.items():
            _check_choice(choice, f"remat[{name!r}]")
        return dict(remat)
    if callable(remat):
        return remat
    return _check_choice(remat, "remat")


def remat_of(partition: Partition, remat: Any) -> tuple[Any, ...]:
    """Returns each segment's choice: one of `REMAT`, `AUTO`, or a policy.

    Args:
      partition: the segments.
      remat: a result of `check_remat`. Its names are names of segments, or of blocks for all of their segments.

    Raises:
      InputError: if a mapping names an unknown segment, or a function returns something other than a choice.
    """
    layers = [partition.layers[segment.groups[0]] for segment in partition.segments]
    blocks = [layer.block or layer.name for layer in layers]
    names = [segment.name for segment in partition.segments]
    if isinstance(remat, Mapping):
        unknown = [name for name in remat if name not in names and name not in blocks]
        if unknown:
            raise InputError(f"remat names {unknown[0]!r}, which is not a segment; use one of {', '.join(names)}")
        return tuple(remat.get(name, remat.get(block, "none")) for name, block in zip(names, blocks, strict=True))
    if callable(remat) and not _is_policy(remat):
        return tuple(_check_choice(remat(name), f"remat({name!r})") for name in names)
    return (remat,) * len(names)


def with_remat(partition: Partition, choices: Sequence[Any]) -> Partition:
    """Returns a freshly built partition with each segment's choice applied: one of `REMAT`, `AUTO`, or a policy."""
    size = 1 + max(segment.program for segment in partition.segments)
    kinds: list[Any] = list(REMAT)
    segments = []
    for segment, choice in zip(partition.segments, choices, strict=True):
        kind = "none" if choice == AUTO else choice
        if kind not in kinds:
            kinds.append(kind)
        program = segment.program + size * kinds.index(kind)
        segments.append(dataclasses.replace(segment, program=program, remat=choice))
    return dataclasses.replace(partition, segments=tuple(segments))


def _check_choice(choice: Any, where: str) -> Any:
    if choice in (*REMAT, AUTO) if isinstance(choice, str) else _is_policy(choice):
        return choice
    raise InputError(
        f"{where} must be one of {', '.join(REMAT)}, {AUTO}, a policy such as jax.checkpoint_policies.dots_saveable, "
        f"or one of these for each segment, got {choice!r}"
    )


def _is_policy(value: Any) -> bool:
    """Whether a function takes an operation's parameters, as policies do; a function of names takes only a name."""
    try:
        parameters = inspect.signature(value).parameters.values() if callable(value) else ()
    except (TypeError, ValueError):
        return False
    return any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
