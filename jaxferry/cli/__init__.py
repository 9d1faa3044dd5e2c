"""The command line: `jaxferry COMMAND`; each command is a module with `register(app)`."""

import importlib.metadata
import io
import sys
from typing import Annotated

import typer

from jaxferry.cli import bench, build_native, doctor, fit, plan, profile, report, simulate, train, tune, weights
from jaxferry.errors import JaxFerryError

app = typer.Typer(
    name="jaxferry",
    help="Trains Flax models too big for their GPU, with a provably good plan for what is where.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
_COMMANDS = (fit, profile, plan, simulate, weights, tune, train, bench, report, doctor, build_native)
for _command in _COMMANDS:
    _command.register(app)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print(f"jaxferry {importlib.metadata.version('jaxferry')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options of the command line as a whole."""


# Some versions of typer bundle click; others depend on the package.
_UsageError: type[Exception] = next(
    base for base in typer.BadParameter.__mro__ if issubclass(base, Exception) and base.__name__ == "ClickException"
)


def main(arguments: list[str] | None = None) -> None:
    """Runs a command and exits: 0, or 2 for bad input with one line on standard error.

    Args:
      arguments: the command line without the program's name; None uses this process's own. An empty one prints help.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # letters that the terminal cannot encode must not fail
    try:
        status = app(arguments or ["--help"], prog_name="jaxferry", standalone_mode=False)
    except JaxFerryError as error:
        _fail(str(error))
    except typer.Abort:
        sys.exit(130)
    except _UsageError as error:
        _fail(getattr(error, "format_message", error.__str__)())
    sys.exit(status if isinstance(status, int) else 0)


def _fail(message: str) -> None:
    print(f"jaxferry: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)
