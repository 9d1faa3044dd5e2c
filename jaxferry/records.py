"""Reads and writes the JSON files of all records, and checks their fields."""

import contextlib
import difflib
import json
import numbers
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from jaxferry.errors import InputError
from jaxferry.units import MAX_BYTES

Record = TypeVar("Record")

MAX_SECONDS = 1e12
"""The longest time of a record, so that sums stay finite."""
_SIMILAR = 0.8
"""How much a misspelt key resembles the key that is meant, by `difflib`: one letter of five may differ."""


def read_json(path: str | os.PathLike[str]) -> Any:
    """Reads a JSON file.

    Raises:
      InputError: if the file cannot be read, is not JSON (the message gives file, line and column), or has an object
        with a duplicate key.
    """
    try:
        text = pathlib.Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot read {os.fspath(path)}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{os.fspath(path)} is not UTF-8 text (byte {error.start}); give a JSON file") from error
    try:
        return json.loads(text, object_pairs_hook=_unique_keys)
    except InputError as error:
        raise InputError(f"malformed JSON in {os.fspath(path)}: {error}") from error
    except json.JSONDecodeError as error:
        place = f"{os.fspath(path)}, line {error.lineno}, column {error.colno}"
        raise InputError(f"malformed JSON in {place}: {error.msg}") from error
    except ValueError as error:
        raise InputError(f"malformed JSON in {os.fspath(path)}: {str(error).split(';')[0]}") from error
    except RecursionError as error:
        raise InputError(f"malformed JSON in {os.fspath(path)}, line 1, column 1: nested too deeply") from error


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Makes an object of key-value pairs; rejects duplicate keys, which would silently hide the first value."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        of = f" of {json.dumps(fields['name'])}" if isinstance(fields.get("name"), str) else ""
        raise InputError(f"key {json.dumps(twice)}{of} occurs twice in one object")
    return fields


def load_record(path: str | os.PathLike[str], from_json: Callable[[Any], Record]) -> Record:
    """Reads a record from a JSON file; `InputError` as in `read_json`, and errors about its content name the file."""
    document = read_json(path)
    try:
        return from_json(document)
    except InputError as error:
        raise InputError(f"{os.fspath(path)}: {error}") from error


def write_json(path: str | os.PathLike[str], document: Any) -> None:
    """Writes an indented JSON file with a final newline; raises `InputError` if it cannot be written."""
    write_text(path, json.dumps(document, indent=2, allow_nan=False) + "\n")


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Writes a file; raises `InputError` if it cannot be written."""
    with naming_target(path):
        pathlib.Path(path).write_text(text, encoding="utf-8")


@contextlib.contextmanager
def naming_target(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turns an error of the file system in the block into an `InputError` that names the file to write."""
    try:
        yield
    except OSError as error:
        raise InputError(f"cannot write {os.fspath(path)}: {error.strerror or error}") from error


def check_format(document: Any, expected: str) -> Mapping[str, Any]:
    """Returns the document if it is a JSON object of the expected `format`; else raises `InputError`."""
    if not isinstance(document, Mapping):
        raise InputError(f'must be a JSON object with "format": "{expected}", got {_show(document)}')
    check_spelling(document, ("format",), "document")
    if document.get("format") != expected:
        raise InputError(f'format must be "{expected}", got {_show(document.get("format"))}')
    return document


def required(fields: Mapping[str, Any], key: str, where: str) -> Any:
    """Returns `fields[key]`; if the key is missing, the error names `where` and the key."""
    if key not in fields:
        raise InputError(f'{where}: key "{key}" is missing')
    return fields[key]


Reader = Callable[[Any, str, str], Any]
"""Reads and checks the value of a key, given the key and the record that errors name; such as `check_text`."""


def read_fields(document: Any, readers: Mapping[str, Reader], where: str) -> dict[str, Any]:
    """Reads each key of an object by its reader; raises InputError for a missing or unknown key or a bad value."""
    check_keys(check_object(document, "", where), tuple(readers), where)
    return {key: read(required(document, key, where), key, where) for key, read in readers.items()}


def check_object(value: Any, key: str, where: str) -> Mapping[str, Any]:
    """Returns the value if it is a JSON object; an empty `key` stands for the record itself."""
    if not isinstance(value, Mapping):
        raise InputError(f"{where}{': ' if key else ''}{key} must be a JSON object, got {_show(value)}")
    return value


def check_text(value: Any, key: str, where: str) -> str:
    """Returns the value if it is a non-empty string that UTF-8 can encode."""
    if not isinstance(value, str) or not value:
        raise InputError(f"{where}: {key} must be a non-empty string, got {_show(value)}")
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise InputError(f"{where}: {key} must not contain an unpaired surrogate, got {_show(ascii(value))}")
    return value


def check_keys(fields: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    """Raises InputError if there is an unknown key; the message lists the known ones, and the one that is meant."""
    unknown = [key for key in fields if key not in known]
    if unknown:
        meant = _meant(fields, known, unknown[0])
        hint = "" if meant is None else f"; did you mean {json.dumps(meant)}?"
        raise InputError(f"{where}: unknown key {json.dumps(unknown[0])}; known are {', '.join(known)}{hint}")


def check_spelling(fields: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    """Raises InputError if an unknown key resembles a known one that is absent; other unknown keys pass."""
    for key in fields:
        meant = None if key in known else _meant(fields, known, key)
        if meant is not None:
            raise InputError(f"{where}: unknown key {json.dumps(key)}; did you mean {json.dumps(meant)}?")


def _meant(fields: Mapping[str, Any], known: Sequence[str], key: str) -> str | None:
    absent = [other for other in known if other not in fields]
    return next(iter(difflib.get_close_matches(str(key), absent, 1, _SIMILAR)), None)


def check_seconds(value: Any, key: str, where: str) -> float:
    """Returns the value as a float if it is a number of seconds in [0, 1e12], so that sums stay finite."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or value < 0 or not value <= MAX_SECONDS:
        raise InputError(f"{where}: {key} must be a number of seconds, 0 to 1e12, got {_show(value)}")
    return float(value)


def check_bytes(value: Any, key: str, where: str) -> int:
    """Returns the value as an int if it is a whole number of bytes in [0, 2**53], so that sums fit a machine word."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not 0 <= int(value) <= MAX_BYTES:
        raise InputError(f"{where}: {key} must be a whole number of bytes, 0 to 2**53, got {_show(value)}")
    return int(value)


def check_count(value: Any, key: str, where: str) -> int:
    """Returns the value if it is a whole number, 1 or more."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"{where}: {key} must be a whole number, 1 or more, got {_show(value)}")
    return value


def check_share(value: Any, key: str) -> float:
    """Returns the value as a float if it is a number in [0, 1]."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise InputError(f"{key} must lie in [0, 1], got {_show(value)}")
    return float(value)


def check_flag(value: Any, key: str, where: str) -> bool:
    """Returns the value if it is true or false."""
    if not isinstance(value, bool):
        raise InputError(f"{where}: {key} must be true or false, got {_show(value)}")
    return value


def check_choice(value: Any, key: str, choices: tuple[str, ...], where: str = "") -> str:
    """Returns the value if it is one of the choices; otherwise the error lists them."""
    if not isinstance(value, str) or value not in choices:
        prefix = f"{where}: " if where else ""
        raise InputError(f"{prefix}{key} must be one of {', '.join(choices)}, got {_show(value)}")
    return value


def check_list(value: Any, key: str, element: str = "layer") -> list[Any]:
    """Returns the value if it is a list with at least one element."""
    if not isinstance(value, list) or not value:
        raise InputError(f"{key} must be a list of at least one {element}, got {_show(value)}")
    return value


def check_unique(names: list[str]) -> None:
    """Raises InputError if a layer name occurs twice."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise InputError(f'layer "{name}" occurs twice; layer names must be unique')
        seen.add(name)


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def name_of_element(document: Any, index: int) -> tuple[str, str]:
    """Returns the name of an element of `layers`, and the prefix of errors about its other keys.

    Raises `InputError` if the element is not an object or has no name.
    """
    where = f"layers[{index}]"
    check_object(document, "", where)
    name = check_text(required(document, "name", where), "name", where)
    return name, f'layer "{name}"'
