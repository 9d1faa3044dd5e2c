"""Options, output and progress shared by the commands."""

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType

from jaxferry.errors import BudgetError, InputError
from jaxferry.units import parse_bytes

ProfilePath = Annotated[Path, typer.Argument(metavar="PROFILE.json", help="The profile of the model on the machine.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]

_WIDTH_IN_FILES = 140


def print_json(document: Any) -> None:
    """Prints one JSON document on standard output."""
    sys.stdout.write(json.dumps(document, indent=2, allow_nan=False) + "\n")


def print_report(*parts: RenderableType) -> None:
    """Prints tables and lines for human readers on standard output."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, _WIDTH_IN_FILES)
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, str))


@contextlib.contextmanager
def progress(what: str) -> Iterator[Callable[[str], None]]:
    """Shows the state of a long search on standard error, if that is a terminal."""
    console = Console(stderr=True)
    with console.status(what) as status:
        yield lambda part: status.update(f"{what}: {part}")


@contextlib.contextmanager
def naming(*paths: Path) -> Iterator[None]:
    """Prefixes errors about the content of files with the files' names."""
    names = " and ".join(str(path) for path in paths)
    try:
        yield
    except BudgetError as error:
        raise BudgetError(f"{names}: {error}", error.smallest_bytes) from error
    except InputError as error:
        raise InputError(f"{names}: {error}") from error


def read_budget(size: str | None) -> int | None:
    """Reads a memory budget such as "8GiB" as bytes; None stays None.

    Raises:
      InputError: if it is not a size.
    """
    return None if size is None else parse_bytes(size, "memory budget")
