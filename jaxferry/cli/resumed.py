"""Keeps the options of a training run beside its saved state, so that a resumed run has them too."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from jaxferry.errors import InputError
from jaxferry.records import check_format, load_record, write_json
from jaxferry.training.options import ESTIMATE, MEASURE

FORMAT = "jaxferry.train/1"
_FILE = "train.json"
_EXCLUDING = {"policy": "plan", "plan": "policy"}
"""Options that exclude each other: one that is given replaces the other of the saved run."""
_TYPES: Mapping[str, tuple[str, Any]] = {
    **dict.fromkeys(("learning_rate", "reserve_factor", "clip_norm"), ("a number", (int, float))),
    **dict.fromkeys(("accumulate", "devices"), ("a whole number", int)),
    "offload_activations": ("true or false", bool),
}
"""What the value of an option is, if it is not a string."""


def save_options(folder: Path, options: Mapping[str, Any]) -> None:
    """Writes options that are not at their defaults into a saved state's folder.

    Args:
      folder: the saved state.
      options: JSON values and paths, by the names of the command's arguments.
    """
    kept = dict(options)
    for name, value in options.items():
        if name == "plan" or (name == "profile" and value not in (MEASURE, ESTIMATE)):
            # The run may be resumed in another folder.
            kept[name] = str(Path(value).absolute())
    fresh = folder / f"{_FILE}.new"
    write_json(fresh, {"format": FORMAT, "options": kept})
    os.replace(fresh, folder / _FILE)


def resumed_options(folder: Path, known: Collection[str], given: Collection[str]) -> dict[str, Any]:
    """Returns the saved run's options that this command line does not give.

    Args:
      folder: the saved state; a state that a program saved has no file of options.
      known: names of the options that are kept.
      given: names of the options on this command line.

    Raises:
      InputError: if the file is damaged.
    """
    # One of several saved states, named by its step, and a numbered save of it have their options above them.
    while not (file := folder / _FILE).is_file():
        if not folder.name.removeprefix("save_").isdigit():
            return {}
        folder = folder.parent
    options = load_record(file, _read)
    unknown = [name for name in options if name not in known]
    if unknown:
        raise InputError(f"{file}: unknown option {unknown[0]!r}; known are {', '.join(known)}")
    for name, value in options.items():
        what, types = _TYPES.get(name, ("a string", str))
        if not isinstance(value, types) or (isinstance(value, bool) and types is not bool):
            raise InputError(f"{file}: option {name} must be {what}, got {value!r}")
    replaced = {*given, *(_EXCLUDING[name] for name in given if name in _EXCLUDING)}
    return {name: value for name, value in options.items() if name not in replaced}


def as_arguments(options: Mapping[str, Any]) -> str:
    """Returns the options as the command line would give them."""
    flags = [f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}") for name, value in options.items()]
    return " ".join(flags)


def _read(document: Any) -> dict[str, Any]:
    options = check_format(document, FORMAT).get("options")
    if not isinstance(options, dict):
        raise InputError(f"options must be a JSON object, got {options!r}")
    return options
