"""Loads a user's model, given on the command line as `MODULE:FUNCTION`, and its optimizer."""

import contextlib
import dataclasses
import functools
import importlib
import math
import os
import pathlib
import sys
import sysconfig
import traceback
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import optax
import typer

from jaxferry.engine import TrainState
from jaxferry.errors import InputError, JaxFerryError
from jaxferry.train_step import TrainStep

ModelName = Annotated[
    str,
    typer.Option(
        "--model",
        metavar="MODULE:FUNCTION",
        help="A function without arguments that returns (loss_fn, params, batch).",
        show_default=False,
    ),
]

OPTIMIZERS: Mapping[str, Callable[[float], optax.GradientTransformation]] = {
    "adamw": optax.adamw,
    "adam": optax.adam,
    "lion": optax.lion,
    "adafactor": optax.adafactor,
    "momentum": functools.partial(optax.sgd, momentum=0.9),
    "sgd": optax.sgd,
}
"""Optimizers by name, as functions of the learning rate."""


@dataclasses.dataclass(frozen=True)
class UserModel:
    """The return value of the user's function.

    Attributes:
      name: `MODULE:FUNCTION`.
      loss_fn: `loss_fn(params, batch)`.
      params: a tree of arrays or shapes; or a function from a PRNG key to the tree, evaluated layer by layer.
      batch: a tree of arrays or shapes; or a function from a step's number to the tree.
    """

    name: str
    loss_fn: Callable[..., Any]
    params: Any
    batch: Any

    def shapes(self) -> Any:
        """Returns the parameters' shapes."""
        return jax.eval_shape(self.params, jax.random.key(0)) if callable(self.params) else self.params

    def batch_of(self, number: int) -> Any:
        """Returns the batch of a step."""
        return self.batch(number) if callable(self.batch) else self.batch

    def check_is_whole(self) -> None:
        """Raises `InputError` if parameters or batch are shapes instead of arrays."""
        for what, tree in (("parameters", () if callable(self.params) else self.params), ("batch", self.batch_of(0))):
            if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(tree)):
                raise InputError(
                    f"--model {self.name} returns shapes for the {what}: return arrays, or a function that makes them"
                )

    def new_state(self, step: TrainStep, seed: int) -> TrainState:
        """Returns the initial training state."""
        return step.init_from(self.params, jax.random.key(seed)) if callable(self.params) else step.init(self.params)


def call_model(name: str) -> UserModel:
    """Calls `module:function`.

    Raises:
      InputError: if there is no such function, or it returns something else.
    """
    made = find_function(name)()
    if not isinstance(made, tuple) or len(made) != 3 or not callable(made[0]):
        raise InputError(f"--model {name} must return (loss_fn, params, batch), got {type(made).__name__}")
    return UserModel(name, *made)


def make_optimizer(name: str, learning_rate: float = 1e-3) -> optax.GradientTransformation:
    """Makes one of `OPTIMIZERS`.

    Raises:
      InputError: if the name is unknown, or the learning rate is no number above 0.
    """
    if not (math.isfinite(learning_rate) and learning_rate > 0):
        raise InputError(f"--learning-rate must be a number above 0, got {learning_rate:g}")
    if name not in OPTIMIZERS:
        raise InputError(f"--optimizer must be one of {', '.join(OPTIMIZERS)}, got {name!r}")
    return OPTIMIZERS[name](learning_rate)


def find_function(name: str) -> Callable[[], Any]:
    """Finds the function `module:function`, also in modules of the current directory.

    Raises:
      InputError: if there is none.
    """
    module_name, colon, function_name = name.partition(":")
    if not (module_name and colon and function_name):
        raise InputError(f'--model must be given as "module:function", got {name!r}')
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    with user_code(name):
        module = _import(name, module_name)
    function = getattr(module, function_name, None)
    if not callable(function):
        raise InputError(f"--model {name}: module {module_name} has no function {function_name!r}")
    return function


def _import(name: str, module_name: str) -> types.ModuleType:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module exists; one of its imports does not
        raise InputError(f"--model {name}: no module named {error.name!r} here or on the Python path") from error


@contextlib.contextmanager
def user_code(model: str) -> Iterator[None]:
    """Turns errors of the user's own code into one line with their location; this package's errors pass unchanged."""
    try:
        yield
    except JaxFerryError:
        raise
    except (Exception, SystemExit) as error:
        what = next(iter(str(error).strip().splitlines()), "")
        location = _location_in_user_code(error)
        where = f"{location[0]}, line {location[1]}: " if location else ""
        raise InputError(f"--model {model}: {where}{type(error).__name__}: {what}".removesuffix(": ")) from error


def _location_in_user_code(error: BaseException) -> tuple[str, int] | None:
    """Returns file and line of the innermost frame that is neither installed code nor this package's."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        return error.filename, error.lineno or 1
    installed = tuple(sysconfig.get_paths()[key] for key in ("stdlib", "platstdlib", "purelib", "platlib"))
    others = (*installed, str(pathlib.Path(__file__).parents[1]), "<")
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(others)]
    return (frames[-1].filename, frames[-1].lineno or 1) if frames else None


def read_dtype(name: str | None) -> Any:
    """Reads a floating dtype by name; None stays None.

    Raises:
      InputError: if it is not a floating dtype.
    """
    if name is None:
        return None
    try:
        dtype = jnp.dtype(name)
    except TypeError:
        dtype = None
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        raise InputError(f'--compute-dtype must be a floating dtype such as "bfloat16", got {name!r}')
    return dtype
