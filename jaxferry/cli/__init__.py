"""The command line: `jaxferry COMMAND`.

Each command is a function of its name in one of this room's modules. Only the module of the command that runs is
imported: planning starts without JAX, and a list of the commands without NumPy.

`main` runs a command and exits. `COMMANDS` names the commands. Programs of one's own use `run` (errors, status),
`compare` (bench), `recording` and `report` (recorded steps and their page) and `workload` (models by name).
"""

import contextlib
import gc
import importlib
import io
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import typer
from typer import Option

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

_MODULES = {"simulate": "plan", "tune": "plan", "weights": "plan", "build-native": "doctor"}
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
        bool, Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    with_traceback: Annotated[
        bool, Option("--traceback", help="Print the traceback of an error that ends the command.")
    ] = False,
) -> None:
    """Declares the options of the command line as a whole; `main` reads `--traceback`, wherever it stands."""


# Some versions of typer bundle click; others depend on the package.
_UsageError: type[Exception] = next(
    base for base in typer.BadParameter.__mro__ if issubclass(base, Exception) and base.__name__ == "ClickException"
)


def main(arguments: list[str] | None = None) -> None:
    """Runs a command and exits, as `run` says; an empty command line prints help."""

    def call(arguments: list[str]) -> Any:
        command = next((argument for argument in arguments if not argument.startswith("-")), None)
        with _rare_collections():
            app = make_app(command)
        with contextlib.nullcontext() if command in _ON_DEVICE else _rare_collections():
            return app(arguments or ["--help"], prog_name="jaxferry", standalone_mode=False)

    sys.exit(run(call, arguments, "jaxferry"))


def run(call: Callable[[list[str]], Any], arguments: list[str] | None, program: str) -> int:
    """Runs a command line, by default the process's own, and returns its exit status; an error is one line on stderr.

    The status is the command's own, 130 for an interrupt, 2 for what is refused, such as wrong input, and 1 for any
    other error. `--traceback`, or `JAXFERRY_TRACEBACK=1`, prints the error's traceback too; `call` does not see the
    flag.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # letters that the terminal cannot encode must not fail
    has_traceback = "--traceback" in arguments or os.environ.get(TRACEBACK_VARIABLE) == "1"
    try:
        with _warnings_in_a_line(program):
            status = call([argument for argument in arguments if argument != "--traceback"])
        return status if isinstance(status, int) else 0
    except (typer.Abort, KeyboardInterrupt):
        return 130
    except _UsageError as error:
        message, status = getattr(error, "format_message", error.__str__)(), 2
    except Exception as error:  # noqa: BLE001 - told in a line
        if has_traceback:
            traceback.print_exception(error)
        is_file = isinstance(error, OSError) and error.filename is not None
        is_refused = isinstance(error, JaxFerryError) and not isinstance(error, InternalError | TaskError)
        name = "" if isinstance(error, JaxFerryError) or is_internal(error) else f"{type(error).__name__}: "
        message, status = name + described(error), 2 if is_refused or is_file else 1
    print(f"{program}: {' '.join(message.split())}", file=sys.stderr)
    return status


@contextlib.contextmanager
def _warnings_in_a_line(program: str) -> Iterator[None]:
    """Shows warnings without the line of code that has made them, which is none of the user's."""
    before = warnings.formatwarning
    warnings.formatwarning = lambda message, *_, **__: f"{program}: warning: {' '.join(str(message).split())}\n"
    try:
        yield
    finally:
        warnings.formatwarning = before


@contextlib.contextmanager
def _rare_collections() -> Iterator[None]:
    """Collects garbage less often: imports and traces make many objects that stay."""
    before = gc.get_threshold()
    gc.set_threshold(_COLLECTED_OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
