"""What each segment keeps between its forward and its backward: the argument `remat`, segment by segment.

    remat = "none" | "full" | policy | "auto"     one choice for all
          | {name: choice} | name -> choice       one for each segment; what a mapping leaves out is "none"

A policy is one of `jax.checkpoint_policies`, or a function like them. Segments of one program that keep different
values are different programs from then on, with numbers that stay the same whatever the others choose.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxferry.errors import InputError
from jaxferry.partition.derivative import AUTO, REMAT
from jaxferry.partition.segments import Partition


def check_remat(remat: Any) -> Any:
    """Checks what can be checked before there is a model; returns it.

    Raises:
      InputError: if it is no choice, no mapping to choices and no function.
    """
    if isinstance(remat, Mapping):
        for name, choice in remat.items():
            _check_choice(choice, f"remat[{name!r}]")
        return dict(remat)
    if callable(remat):
        return remat
    return _check_choice(remat, "remat")


def remat_of(partition: Partition, remat: Any) -> tuple[Any, ...]:
    """The choice of each segment: one of `REMAT`, `AUTO`, or a policy.

    Args:
      partition: the segments.
      remat: what `check_remat` has let pass. Names are those of segments, or of layers for all of their segments.

    Raises:
      InputError: if a mapping names what is not there, or a function returns no choice.
    """
    layers = [partition.layers[segment.layer].name for segment in partition.segments]
    names = [segment.name for segment in partition.segments]
    if isinstance(remat, Mapping):
        unknown = [name for name in remat if name not in names and name not in layers]
        if unknown:
            raise InputError(f"remat names {unknown[0]!r}, which is no segment; those are {', '.join(names)}")
        return tuple(remat.get(name, remat.get(layer, "none")) for name, layer in zip(names, layers, strict=True))
    if callable(remat) and not _is_policy(remat):
        return tuple(_check_choice(remat(name), f"remat({name!r})") for name in names)
    return (remat,) * len(names)


def with_remat(partition: Partition, choices: Sequence[Any]) -> Partition:
    """A partition as it was made, with a choice for each segment: one of `REMAT`, `AUTO` or a policy."""
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
    """Whether a function takes an operation's parameters, as policies do; one of names takes a name alone."""
    if not callable(value):
        return False
    return any(p.kind is inspect.Parameter.VAR_KEYWORD for p in _parameters(value))


def _parameters(function: Callable[..., Any]) -> Sequence[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return []
