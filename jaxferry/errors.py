"""The errors that JaxFerry raises; all derive from `JaxFerryError`. Tells whose mistake another error is.

A message names the argument, its value and the remedy, on one line unless it contains a table.

Any other error is the machine's, the user's or internal. It is the user's if its innermost frame is the user's own
code, an installed package, or `call_users`; frames of libraries that JaxFerry calls itself do not count.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import inspect
import pathlib
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

TRACEBACK_VARIABLE = "JAXFERRY_TRACEBACK"
"""The environment variable that is `1` for the traceback of any error that ends a command."""

_LIBRARIES = {
    *("jax", "jaxlib", "numpy", "ml_dtypes", "scipy", "orbax", "tensorstore", "etils", "rich", "typer", "click"),
    *("jinja2", "matplotlib", "xxhash", "lazy_loader"),
    *sys.stdlib_module_names,
}
"""Packages that JaxFerry calls itself: what they raise is no more the user's than what JaxFerry raises."""

_OF_DEVICES = ("JaxRuntimeError", "XlaRuntimeError")
"""Names of the error of a device or the compiler, often for want of memory."""

_OF_PEERS = re.compile(r"Gloo \w+ failed.*(Connection (reset|closed)|[Tt]imed out)", re.DOTALL)
_OF_LEAKS = "UnexpectedTracerError"
"""The name of JAX's error for a tracer that a function of the user's has kept, wherever JAX meets it."""

_CALL = re.compile(r'File "([^"]+)", line (\d+), in ')

_STAGES = {
    "partition.tracing": "tracing",
    **dict.fromkeys(("partition", "training.cuts"), "partition"),
    **dict.fromkeys(("costs", "training"), "costs"),
    **dict.fromkeys(("training.entry", "training.options"), "arguments"),
    **dict.fromkeys(("planner", "step", "weights", "training.choice"), "planning"),
    **dict.fromkeys((f"engine.{name}" for name in ("lowering", "memory", "lifetimes")), "compilation"),
    **dict.fromkeys((f"engine.program{name}" for name in ("s", "_functions")), "compilation"),
    **dict.fromkeys(("training.compiler", "training.step"), "compilation"),
    "engine": "step",
    "optimizer": "update",
    "transport": "transfer",
    **dict.fromkeys(("checkpoint", "training.saving"), "checkpoint"),
    "processes": "messages between processes",
    "native": "native library",
    **dict.fromkeys(("partition.graph", "training.trainer", "engine.pending"), ""),
}
"""The stage of the innermost function of a room or module; one without a stage does the work of its caller."""


class JaxFerryError(Exception):
    """Base class of all errors that this package raises deliberately."""


class InputError(JaxFerryError, ValueError):
    """A user's value is invalid: an argument, a file, a field of a record."""


class PartitionError(JaxFerryError, ValueError):
    """The function cannot be partitioned: the loss is not a real scalar, or it depends on no parameter."""


class BudgetError(InputError):
    """No plan fits into the memory budget.

    Attributes:
      smallest_bytes: the smallest budget for which a plan exists, in bytes.
    """

    def __init__(self, message: str, smallest_bytes: int):
        super().__init__(message)
        self.smallest_bytes = smallest_bytes


class NonFiniteError(JaxFerryError, FloatingPointError):
    """The loss or a gradient is NaN or infinite.

    Attributes:
      step: the step in which it occurred, counted from 0.
      layer: the first layer with a non-finite output; if all outputs are finite, the first with a non-finite gradient.
    """

    def __init__(self, message: str, step: int, layer: str | None):
        super().__init__(message)
        self.step = step
        self.layer = layer


class CheckpointError(JaxFerryError):
    """A checkpoint is missing, damaged, or belongs to another model or optimizer."""


class StateError(JaxFerryError):
    """A training state is used with another step or by two threads, or a failure left it between two steps."""


class HostMemoryError(JaxFerryError, MemoryError):
    """Host memory cannot hold a training state, a copy of it, or what a step keeps beside it."""


class ScratchError(JaxFerryError, OSError):
    """The scratch file of a training state (`scratch=`) cannot be read or written, or is damaged."""


class TaskError(JaxFerryError, RuntimeError):
    """A task of a training step failed: a transfer, a program, an update.

    The message states the outcome: the state is that before the step, or that after the last update (with
    `accumulate`), or it is damaged and every further use raises `StateError`. `state.step` is the number of the next
    batch.

    Attributes:
      layer: the layer of the task; empty where the device does not tell which of its programs failed, and for what
        depends on the batch alone.
    """

    def __init__(self, message: str, layer: str):
        super().__init__(message)
        self.layer = layer


class NativeError(JaxFerryError):
    """A native library cannot be built, or a required one cannot be used."""


class InternalError(JaxFerryError, RuntimeError):
    """A mistake of JaxFerry's own, which is the `__cause__`. The message names the stage and what the state is now."""


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where an error was raised.

    Attributes:
      is_users: whether that is the user's own code, or a function that the user has passed.
      place: file and line of the user's code, or of ours; empty if neither is known.
      stage: what JaxFerry was doing.
    """

    is_users: bool
    place: str
    stage: str = ""


def call_users(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Calls a function that the user has passed: whatever is raised within is an error of the user's."""
    return function(*args, **kwargs)


def origin_of(error: BaseException) -> Origin:
    """Returns where an error was raised, by its traceback."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        return Origin(True, f"{error.filename}, line {error.lineno or 1}")
    installed, ours, stage = "", "", ""
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        module, file = frame.f_globals.get("__name__") or "", frame.f_code.co_filename
        place = f"{file}, line {line}"
        if not ours and frame.f_code is call_users.__code__:
            return Origin(True, installed or _definition(frame.f_locals["function"]))
        room, _, name = module.partition(".")
        if room == __package__:
            if not ours and installed:
                return Origin(True, installed)
            ours = ours or place
            stage = stage or next((_STAGES[key] for key in (name, name.partition(".")[0]) if key in _STAGES), "")
        elif not ours and room not in _LIBRARIES:
            if not {"site-packages", "dist-packages"}.intersection(pathlib.Path(file).parts):
                return Origin(True, place)
            installed = place
    return Origin(bool(installed) and not ours, ours or installed, stage or "command")


def _definition(function: Any) -> str:
    """Returns the file and line where a function is defined; empty if it is not written in Python."""
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(inspect.unwrap(function), "__code__", None)
    return "" if code is None else f"{code.co_filename}, line {code.co_firstlineno}"


def is_internal(error: BaseException) -> bool:
    """Whether an error is JaxFerry's own mistake: not raised deliberately, not the user's, not the machine's."""
    if isinstance(error, (JaxFerryError, OSError, MemoryError, Warning)) or not isinstance(error, Exception):
        return False
    is_known = type(error).__name__ in (*_OF_DEVICES, _OF_LEAKS) or _OF_PEERS.search(str(error)) is not None
    return not is_known and not origin_of(error).is_users


def described(error: BaseException) -> str:
    """Returns an error's message for that of another: the user's with its place, an internal one as such."""
    if isinstance(error, JaxFerryError):
        return str(error)
    origin, name = origin_of(error), type(error).__name__
    if _OF_PEERS.search(str(error)):
        return f"another process has ended, or cannot be reached: {str(error).strip().splitlines()[0]}"
    if is_internal(error):
        what = f"internal error of JaxFerry in {origin.place}, stage {origin.stage}: {name}: {error}"
        return f"{what}; please report it{_issues()} with its traceback, {_TRACEBACK}"
    if origin.is_users and origin.place:
        return f"{error} ({name} in {origin.place})"
    if name in _OF_DEVICES and (calls := _CALL.findall(str(error))):  # a callback's traceback is a part of the text
        return f"{str(error).strip().splitlines()[-1]} (in {calls[-1][0]}, line {calls[-1][1]}, a callback)"
    return str(error)


_TRACEBACK = f"which `jaxferry --traceback` or {TRACEBACK_VARIABLE}=1 prints (in Python: that of `__cause__`)"


def _issues() -> str:
    """Returns where to report errors, as the package's metadata say."""
    metadata = importlib.import_module("importlib.metadata")  # nothing else needs it
    try:
        urls = metadata.metadata(__package__).get_all("Project-URL") or []
    except metadata.PackageNotFoundError:
        return ""
    return next((f" at {url.removeprefix('Issues, ')}" for url in urls if url.startswith("Issues, ")), "")


@contextlib.contextmanager
def internal_errors(outcome: Callable[[], str] = str) -> Iterator[None]:
    """Raises an error of the body that `is_internal` as an `InternalError`; others pass.

    Args:
      outcome: returns what the error has left, in words; by default nothing.
    """
    try:
        yield
    except Exception as error:
        if is_internal(error):
            fate = outcome()
            raise InternalError(f"{described(error)}{fate and f' ({fate})'}") from error
        raise
