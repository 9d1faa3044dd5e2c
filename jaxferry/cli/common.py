"""Options, output and progress shared by the commands."""

import contextlib
import dataclasses
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import rich.markup
import typer
from rich.console import Console, RenderableType
from rich.table import Table

from jaxferry.costs.machines import JAX_SHARE, default_budget_bytes
from jaxferry.costs.progress import Lines, shown
from jaxferry.errors import BudgetError, InputError
from jaxferry.step.records import Plan
from jaxferry.units import format_bytes, parse_bytes

ProfilePath = Annotated[Path, typer.Argument(metavar="PROFILE.json", help="The profile of the model on the machine.")]
Granularity = Annotated[
    str,
    typer.Option(
        help="Layers of the plan, for a profile of modules: module as the profile has them, block for one layer a "
        "program, auto for the faster of both, with the time that issuing takes."
    ),
]
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
    """Shows the state of a long search on standard error: at once on a terminal, elsewhere by a line now and then."""
    console = Console(stderr=True)
    if not console.is_terminal:
        lines = Lines()
        yield lambda part: lines.tell(f"{what}: {part}")
        return
    with console.status(what) as status, shown(what):
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


@dataclasses.dataclass(frozen=True)
class Budget:
    """A memory budget: its bytes, or None for no limit, and a note on where it comes from unless it was given."""

    num_bytes: int | None
    note: str = ""

    def tell(self, as_json: bool) -> None:
        """Prints the note; on standard error where standard output holds JSON."""
        if self.note:
            print(self.note, file=sys.stderr if as_json else sys.stdout)


def read_budget_on(machine: Mapping[str, Any], size: str | None) -> Budget:
    """Reads a memory budget; by default it is what a machine's device has, see `default_budget_bytes`.

    Args:
      machine: the machine's facts, as in a profile.
      size: such as "8GiB", `none` for no limit, or None for the default.

    Raises:
      InputError: if it is not a size.
    """
    if size is not None:
        return Budget(None if size == "none" else read_budget(size))
    num_bytes = default_budget_bytes(machine)
    if num_bytes is None:
        return Budget(None)
    share = "" if "memory_limit_bytes" in machine else f"{JAX_SHARE:.0%} of "
    where = f"{share}the device memory of {machine.get('name', 'the machine')}"
    why = " (JAX's own limit, XLA_PYTHON_CLIENT_MEM_FRACTION)" if share else ""
    return Budget(num_bytes, f"memory budget {format_bytes(num_bytes)}: {where}{why}; --memory-budget overrides it")


def read_budget(size: str | None) -> int | None:
    """Reads a memory budget such as "8GiB" as bytes; None stays None.

    Raises:
      InputError: if it is not a size.
    """
    return None if size is None else parse_bytes(size, "memory budget")


def make_table(first: str, *rest: str, title: str) -> Table:
    """Returns a table whose columns after the first are numbers."""
    table = Table(title=title)
    table.add_column(first)
    for name in rest:
        table.add_column(name, justify="right")
    return table


def plan_table(plan: Plan) -> Table:
    """Returns modes and gradient places, also remat and update if any layer has them; a row per run of equal layers."""
    shown = ["mode", "gradient"]
    shown += ["remat"] if any(plan.recomputes) else []
    shown += ["update"] if any(plan.updates_on_device) or any(plan.updates_streamed) else []
    table = make_table("layers", "", *shown, title=f"{plan.policy}, reserve factor {plan.reserve_factor:g}")
    for values, equal in itertools.groupby(plan.layers, key=lambda layer: [getattr(layer, key).value for key in shown]):
        names = [layer.name for layer in equal]
        span = names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"
        table.add_row(rich.markup.escape(span), str(len(names)), *values)
    return table


def plan_counts(plan: Plan) -> dict[str, int]:
    """Returns the number of layers in each mode."""
    modes = [mode.value for mode in plan.modes]
    return {mode: modes.count(mode) for mode in dict.fromkeys(modes)}
