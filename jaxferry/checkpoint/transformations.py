"""The transformations of an optimizer, told by the names of its state's leaves.

A checkpoint holds leaves by path, such as "[0].mu['w']": the first transformation of a chain keeps a field `mu` for
each parameter. Which of Optax's transformations has these fields is looked up in its states.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Mapping
from typing import Any

import optax

from jaxferry.errors import CheckpointError

_FIELD = re.compile(r"^(.*)\.(\w+)$", re.DOTALL)
_MOST_NAMED = 3


def check_transformations(saved: Collection[str], expected: Collection[str], params: Collection[str]) -> None:
    """Checks that a checkpoint's state and an optimizer's are of the same transformations.

    Args:
      saved: paths of the leaves of the checkpoint's state.
      expected: those of the optimizer's.
      params: paths of the parameters.

    Raises:
      CheckpointError: if they are not; it names the transformations of both where they differ.
    """
    known, wanted = _fields(saved, params), _fields(expected, params)
    places = sorted(place for place in {*known, *wanted} if known.get(place) != wanted.get(place))
    if places:
        told = [_told(found, places[:_MOST_NAMED]) for found in (known, wanted)]
        raise CheckpointError(
            f"the checkpoint does not match the optimizer: it was saved with {told[0]}, and this optimizer has "
            f"{told[1]}: pass the optimizer that it was saved with"
        )


def _fields(names: Collection[str], params: Collection[str]) -> dict[str, frozenset[str]]:
    """Fields of the states that have any, by the states' paths."""
    ends, found = sorted(params, key=len, reverse=True), dict[str, set[str]]()
    for name in names:
        of_params = next((end for end in ends if end and name.endswith(end)), "")
        match = _FIELD.match(name.removesuffix(of_params))
        if match is not None:
            found.setdefault(match[1], set()).add(match[2])
    return {place: frozenset(fields) for place, fields in found.items()}


def _told(found: Mapping[str, frozenset[str]], places: Collection[str]) -> str:
    told = [f"{_name(found[place])} at {place or 'the top'}" for place in places if place in found]
    return ", ".join(told) or f"nothing at {', '.join(places)}"


def _name(fields: frozenset[str]) -> str:
    names = _names().get(fields, [])
    kind = " or ".join(names[:2]) if names else "a transformation"
    return f"{kind} ({', '.join(sorted(fields))})"


@functools.cache
def _names() -> dict[frozenset[str], list[str]]:
    """The names of Optax's transformations by the fields of their states, those of the main module first."""
    found: dict[frozenset[str], list[str]] = {}
    for module in (optax, optax.contrib):
        for name, kind in sorted(vars(module).items()):
            fields: Any = getattr(kind, "_fields", ())
            if isinstance(kind, type) and name.endswith("State") and fields:
                # ScaleByAdamState is that of scale_by_adam.
                words = re.findall(r"[A-Z]+(?![a-z])|[A-Z][a-z0-9]*", name.removesuffix("State"))
                found.setdefault(frozenset(fields), []).append("_".join(words).lower())
    return found
