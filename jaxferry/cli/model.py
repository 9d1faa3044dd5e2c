"""Loads the model that the command line names, and its optimizer."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import jax
import jax.numpy as jnp
import optax
import typer

from jaxferry.cli.user_code import FORMS, find_function
from jaxferry.errors import InputError

if TYPE_CHECKING:
    from jaxferry.engine import TrainState
    from jaxferry.training.train_step import TrainStep

ModelName = Annotated[
    str,
    typer.Option(
        "--model",
        metavar="WORKLOAD",
        help=f"A function that returns (loss_fn, params, batch): {FORMS}.",
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
      name: as given on the command line.
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
    """Calls the function of that name, see `find_function`.

    Raises:
      InputError: if there is no such function, or it returns something else.
    """
    return read_workload(name, find_function(name)())


def read_workload(name: str, made: Any, option: str = "--model") -> UserModel:
    """Checks what the user's function has returned; `option` gave the name.

    Raises:
      InputError: if it is not `(loss_fn, params, batch)`.
    """
    if not isinstance(made, tuple) or len(made) != 3 or not callable(made[0]):
        raise InputError(f"{option} {name} must return (loss_fn, params, batch), got {type(made).__name__}")
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
