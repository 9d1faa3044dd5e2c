"""Options, output and progress shared by the commands."""

import contextlib
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import rich.markup
from rich.console import Console, RenderableType
from rich.table import Table
from typer import Argument, Option

from jaxferry.costs import JAX_SHARE, JAX_SHARE_VARIABLE, Lines, default_budget_bytes, shown
from jaxferry.errors import BudgetError, InputError
from jaxferry.step import Plan
from jaxferry.units import format_bytes, parse_bytes

ProfilePath = Annotated[Path, Argument(metavar="PROFILE.json", help="The profile of the model on the machine.")]
Granularity = Annotated[
    str,
    Option(
        help="Layers of the plan, for a profile of modules: module as the profile has them, block for one layer a "
        "program, auto for the faster of both, including the time to issue copies."
    ),
]
PlanOutput = Annotated[Path | None, Option("-o", "--output", metavar="PLAN.json", help="Write the plan.")]
AsJson = Annotated[bool, Option("--json", help="Print one JSON document and nothing else.")]

_WIDTH_IN_FILES = 140


def print_result(as_json: bool, document: Any, *parts: RenderableType, note: str = "") -> None:
    """Prints the note, tables and lines, or the JSON document alone: the note then is on standard error."""
    if note:
        print(note, file=sys.stderr if as_json else sys.stdout)
    if as_json:
        sys.stdout.write(json.dumps(document, indent=2, allow_nan=False) + "\n")
        return
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, _WIDTH_IN_FILES)
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, str))


def make_table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], title: str | None = None, is_plain: bool = False
) -> Table:
    """Returns a table whose columns after the first are numbers; a plain one has no lines."""
    table = Table(title=title, box=None, pad_edge=False, padding=(0, 2, 0, 0)) if is_plain else Table(title=title)
    for number, name in enumerate(heads):
        table.add_column(name, justify="right" if number else "left", no_wrap=is_plain)
    for row in rows:
        table.add_row(rich.markup.escape(row[0]), *row[1:])
    return table


def plan_table(plan: Plan) -> Table:
    """Returns modes and gradient places, and what else any layer has; a row per run of equal layers."""
    keys = ["mode", "gradient"]
    keys += ["remat"] if any(plan.recomputes) else []
    keys += ["activations"] if plan.offloads_activations else []
    keys += ["update"] if any(plan.updates_on_device) or any(plan.updates_streamed) else []
    keys += ["tiles"] if any(layer.tiles > 1 for layer in plan.layers) else []
    rows = []
    for values, equal in itertools.groupby(plan.layers, key=lambda layer: [str(getattr(layer, key)) for key in keys]):
        names = [layer.name for layer in equal]
        span = names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"
        rows.append([span, str(len(names)), *values])
    return make_table(["layers", "", *keys], rows, title=f"{plan.policy}, reserve factor {plan.reserve_factor:g}")


def plan_counts(plan: Plan) -> dict[str, int]:
    """Returns the number of layers in each mode."""
    modes = [mode.value for mode in plan.modes]
    return {mode: modes.count(mode) for mode in dict.fromkeys(modes)}


@contextlib.contextmanager
def progress(what: str) -> Iterator[Callable[[str], None]]:
    """Shows the state of a long search on standard error: at once on a terminal, elsewhere every few seconds."""
    console = Console(stderr=True)
    if not console.is_terminal:
        lines = Lines()
        yield lambda part: lines.tell(f"{what}: {part}")
        return
    with console.status(what) as status, shown(what):
        yield lambda part: status.update(f"{what}: {part}")


@contextlib.contextmanager
def naming(*paths: Path) -> Iterator[None]:
    """Prefixes errors about the content of files with the files' names, if there are any."""
    prefix = " and ".join(str(path) for path in paths) + ": " * bool(paths)
    try:
        yield
    except BudgetError as error:
        raise BudgetError(f"{prefix}{error}", error.smallest_bytes) from error
    except InputError as error:
        raise InputError(f"{prefix}{error}") from error


class Budget(NamedTuple):
    """A limit on device memory, None for no limit; `note` says where a default comes from."""

    num_bytes: int | None
    note: str = ""


def read_budget_on(machine: Mapping[str, Any], size: str | None) -> Budget:
    """Reads a memory budget such as "8GiB", or `none` for no limit; by default, what a machine's device has.

    Raises `InputError` if it is not a size.
    """
    if size is not None:
        return Budget(None if size == "none" else read_budget(size))
    num_bytes = default_budget_bytes(machine)
    if num_bytes is None:
        return Budget(None)
    share = "" if "memory_limit_bytes" in machine else f"{JAX_SHARE:.0%} of "
    where = f"{share}the device memory of {machine.get('name', 'the machine')}"
    why = f" (JAX's own limit, {JAX_SHARE_VARIABLE})" if share else ""
    return Budget(num_bytes, f"memory budget {format_bytes(num_bytes)}: {where}{why}; --memory-budget overrides it")


def read_budget(size: str | None) -> int | None:
    """Reads a memory budget such as "8GiB" as bytes; None stays None; raises `InputError` if it is not a size."""
    return None if size is None else parse_bytes(size, "memory budget")
