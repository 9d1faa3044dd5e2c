"""Finds the function that names a workload, and turns errors of the user's own code into one line."""

import contextlib
import functools
import importlib
import importlib.util
import os
import pathlib
import sys
import sysconfig
import traceback
import types
from collections.abc import Callable, Iterator
from typing import Any

from jaxferry.errors import InputError, JaxFerryError

EXAMPLES = ("gpt2", "llama", "bert", "roberta", "transformer_xl", "vit", "resnet")
"""Examples whose models have names by size, such as `gpt2:6.7b`."""

FORMS = "module:function, file.py:function, or an example's name and size such as gpt2:6.7b"

_PACKAGE = pathlib.Path(__file__).parents[1]


def find_function(name: str, option: str = "--model") -> Callable[..., Any]:
    """Finds the function that makes a workload.

    Args:
      name: `module:function`, also in modules of the current directory; `file.py:function`; or the name and size of an
        example's model, such as `gpt2:6.7b`.
      option: the option or argument that gives the name, for errors.

    Raises:
      InputError: if there is none.
    """
    module_name, colon, function_name = name.rpartition(":")
    if not (module_name and colon and function_name):
        raise InputError(f'{option} must be "module:function", "file.py:function" or such as "gpt2:6.7b", got {name!r}')
    if module_name.endswith(".py"):
        module = _load(name, pathlib.Path(module_name), option)
    else:
        made = _of_example(name, module_name, function_name, option) if module_name in EXAMPLES else None
        if made is not None:
            return made
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
        with user_code(name, option):
            module = _import(name, module_name, option)
    function = getattr(module, function_name, None)
    if not callable(function):
        raise InputError(f"{option} {name}: module {module_name} has no function {function_name!r}")
    return function


def _of_example(name: str, example: str, size: str, option: str) -> Callable[..., Any] | None:
    """The function that makes an example's model of a size; None if a module of the user's has the example's name."""
    root = next((path for path in (_PACKAGE / "bundled", _PACKAGE.parent) if (path / "examples").is_dir()), None)
    own = pathlib.Path(example).is_dir() or pathlib.Path(f"{example}.py").exists()
    if root is None:
        return None
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    workload = importlib.import_module(f"examples.{example}.workload")
    if size in workload.SIZES:
        return functools.partial(workload.make, size)
    if own:
        return None
    raise InputError(f"{option} {name}: sizes of {example} are {', '.join(workload.SIZES)}, got {size!r}")


def _load(name: str, path: pathlib.Path, option: str) -> types.ModuleType:
    """Loads a file as a module; its imports see the modules of its folder."""
    if not path.is_file():
        raise InputError(f"{option} {name}: there is no file {os.fspath(path)!r}")
    if str(path.resolve().parent) not in sys.path:
        sys.path.insert(0, str(path.resolve().parent))
    module_name = f"jaxferry_workload_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses look for the module of their class
    with user_code(name, option):
        spec.loader.exec_module(module)
    return module


def _import(name: str, module_name: str, option: str) -> types.ModuleType:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module exists; one of its imports does not
        raise InputError(f"{option} {name}: no module named {error.name!r} here or on the Python path") from error


@contextlib.contextmanager
def user_code(name: str, option: str = "--model") -> Iterator[None]:
    """Turns errors of the user's own code into one line with their location; this package's errors pass unchanged."""
    try:
        yield
    except JaxFerryError:
        raise
    except (Exception, SystemExit) as error:
        what = next(iter(str(error).strip().splitlines()), "")
        location = _location_in_user_code(error)
        where = f"{location[0]}, line {location[1]}: " if location else ""
        raise InputError(f"{option} {name}: {where}{type(error).__name__}: {what}".removesuffix(": ")) from error


def _location_in_user_code(error: BaseException) -> tuple[str, int] | None:
    """Returns file and line of the innermost frame that is neither installed code nor this package's."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        return error.filename, error.lineno or 1
    installed = tuple(sysconfig.get_paths()[key] for key in ("stdlib", "platstdlib", "purelib", "platlib"))
    others = (*installed, str(_PACKAGE), "<")
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(others)]
    return (frames[-1].filename, frames[-1].lineno or 1) if frames else None
