"""The command line: `jaxferry COMMAND`.

Each command is a function of its name in one of this room's modules. Only the module of the command that runs is
imported: planning starts without JAX, and a list of the commands without NumPy.

`main` runs a command and exits. `COMMANDS` names the commands. Programs of one's own use `compare` (bench), `recording`
and `report` (recorded steps and their page) and `workload` (models by name).
"""

import contextlib
import gc
import importlib
import io
import os
import sys
import traceback
from collections.abc import Iterator
from typing import Annotated

import typer

from jaxferry.errors import TRACEBACK_VARIABLE, InternalError, JaxFerryError, TaskError, described, is_internal

COMMANDS = {
    "fit": "Say whether a model trains on a machine, with which batches, and how fast.",
    "profile": "Measure or estimate the costs of a model's layers, for plan and simulate.",
    "plan": "Make a plan for a profile: the mode of each layer.",
    "simulate": "Run a plan on the machine model.",
    "weights": "Choose the weights to offload under a memory limit (Weight Offloading Strategies).",
    "tune": "Sweep reserve factors and memory budgets; find the knee.",
    "train": "Train a model with its parameters and optimizer state in host memory.",
    "bench": "Train a model under several policies; compare measured and predicted steps.",
    "report": "Show the results of a bench or of a recorded run, or make one page of them.",
    "doctor": "Print devices, memories, libraries, the link's speed and a self-test.",
    "build-native": "Build the native libraries for the installed jaxlib.",
}
"""The commands with their summaries."""

_MODULES = {"simulate": "plan", "tune": "plan", "build-native": "doctor"}
"""Modules of commands that have no module of their own."""

_ON_DEVICE = ("profile", "train", "bench", "doctor")
"""Commands that run on a device, where an array in a garbage cycle holds device memory."""

_COLLECTED_OBJECTS = 100_000


def make_app(*loaded: str | None) -> typer.Typer:
    """Makes the application; commands that are not `loaded` have a name and a summary only."""
    app = typer.Typer(
        name="jaxferry",
        help="Trains Flax models that do not fit in GPU memory, by plans with a proven bound.",
        add_completion=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        pretty_exceptions_enable=False,
    )
    app.callback()(_options)
    for name, summary in COMMANDS.items():
        function = _not_loaded
        if name in loaded:
            module = importlib.import_module(f"jaxferry.cli.{_MODULES.get(name, name)}")
            function = getattr(module, name.replace("-", "_"))
        app.command(name, short_help=summary)(function)
    return app


def _not_loaded() -> None:
    raise AssertionError("main loads the command that runs")


def _print_version(is_asked: bool) -> None:
    if is_asked:
        metadata = importlib.import_module("importlib.metadata")  # nothing else needs it
        print(f"jaxferry {metadata.version('jaxferry')}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    with_traceback: Annotated[
        bool, typer.Option("--traceback", help="Print the traceback of an error that ends the command.")
    ] = False,
) -> None:
    """Declares the options of the command line as a whole; `main` reads `--traceback`, wherever it stands."""


# Some versions of typer bundle click; others depend on the package.
_UsageError: type[Exception] = next(
    base for base in typer.BadParameter.__mro__ if issubclass(base, Exception) and base.__name__ == "ClickException"
)


def main(arguments: list[str] | None = None) -> None:
    """Runs a command and exits: 0, or with one line on standard error, 2 for bad input and 1 for any other error.

    Args:
      arguments: the command line without the program's name; None uses this process's own. An empty one prints help.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # letters that the terminal cannot encode must not fail
    has_traceback = "--traceback" in arguments or os.environ.get(TRACEBACK_VARIABLE) == "1"
    arguments = [argument for argument in arguments if argument != "--traceback"]
    command = next((argument for argument in arguments if not argument.startswith("-")), None)
    try:
        with _rare_collections():
            app = make_app(command)
        with contextlib.nullcontext() if command in _ON_DEVICE else _rare_collections():
            status = app(arguments or ["--help"], prog_name="jaxferry", standalone_mode=False)
    except typer.Abort:
        sys.exit(130)
    except _UsageError as error:
        _fail(getattr(error, "format_message", error.__str__)())
    except Exception as error:  # noqa: BLE001 - told in a line
        if has_traceback:
            traceback.print_exception(error)
        name = "" if isinstance(error, JaxFerryError) or is_internal(error) else f"{type(error).__name__}: "
        is_input = isinstance(error, JaxFerryError) and not isinstance(error, InternalError | TaskError)
        _fail(name + described(error), 2 if is_input else 1)
    sys.exit(status if isinstance(status, int) else 0)


@contextlib.contextmanager
def _rare_collections() -> Iterator[None]:
    """Collects garbage less often: imports and traces make many objects that stay."""
    before = gc.get_threshold()
    gc.set_threshold(_COLLECTED_OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _fail(message: str, status: int = 2) -> None:
    print(f"jaxferry: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(status)
