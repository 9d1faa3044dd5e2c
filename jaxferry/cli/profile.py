"""`jaxferry profile`: what each layer of a model costs on a machine."""

import contextlib
import functools
import importlib
import os
import pathlib
import sys
import sysconfig
import traceback
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any

import jax.numpy as jnp
import optax
import rich.markup
import rich.table
import typer

from jaxferry.cli.common import AsJson, print_json, print_report
from jaxferry.engine import TRANSPORTS
from jaxferry.errors import InputError, JaxFerryError
from jaxferry.partition import AUTO, REMAT, partition
from jaxferry.profiling.estimate import estimate_profile
from jaxferry.profiling.machines import MACHINES, find_machine
from jaxferry.profiling.records import Profile
from jaxferry.profiling.segment_costs import partition_costs
from jaxferry.train_step import train_step

OPTIMIZERS: Mapping[str, Callable[[float], optax.GradientTransformation]] = {
    "adamw": optax.adamw,
    "adam": optax.adam,
    "lion": optax.lion,
    "adafactor": optax.adafactor,
    "momentum": functools.partial(optax.sgd, momentum=0.9),
    "sgd": optax.sgd,
}
"""Whose update is measured, by name; made from a learning rate, on which no time depends."""


def register(app: typer.Typer) -> None:
    """Adds the command to the application."""
    app.command("profile")(profile)


def profile(
    model: Annotated[
        str,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help="A function without arguments that returns (loss_fn, params, batch); shapes alone will do.",
            show_default=False,
        ),
    ],
    estimate: Annotated[bool, typer.Option("--estimate", help="Estimates by roofline; runs nothing.")] = False,
    machine: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE", help=f"Estimates for one of {', '.join(MACHINES)}, or a JSON file."),
    ] = None,
    compute_dtype: Annotated[str | None, typer.Option(help="The dtype in which the device holds parameters.")] = None,
    remat: Annotated[
        str,
        typer.Option(help=f"What is recomputed in the backward: {' or '.join(REMAT)}; {AUTO} leaves it to plans."),
    ] = AUTO,
    optimizer: Annotated[
        str, typer.Option(help=f"Whose update is measured: {', '.join(OPTIMIZERS)}. Estimates are for adamw.")
    ] = "adamw",
    transport: Annotated[
        str | None, typer.Option(help=f"What moves layers: {' or '.join(TRANSPORTS)}; by default what a step takes.")
    ] = None,
    output: Annotated[
        pathlib.Path | None, typer.Option("--output", "-o", metavar="PROFILE.json", help="Where to write the profile.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Makes a profile of a model: bytes and times of each layer, for `plan` and `simulate`.

    Measures on the device at hand unless --estimate is given; what was measured before is taken from the cache
    (JAXFERRY_CACHE_DIR, or "off" for none).
    """
    if estimate and machine is None:
        raise InputError(f"--estimate needs --machine: one of {', '.join(MACHINES)}, or a JSON file")
    if remat not in (*REMAT, AUTO):
        raise InputError(f"--remat must be one of {', '.join((*REMAT, AUTO))}, got {remat!r}")
    if estimate and machine is not None:
        made = estimate_model(model, machine, compute_dtype, remat)
    elif machine is not None:
        raise InputError(f"--machine {machine} is for --estimate: what is measured is the device at hand")
    else:
        made = measure_model(model, optimizer, compute_dtype, remat, transport)
    if output is not None:
        made.save(output)
    if as_json:
        print_json(made.to_json())
    else:
        _print(made)


def estimate_model(model: str, machine: str, compute_dtype: str | None = None, remat: str = AUTO) -> Profile:
    """The estimated profile of the model that `module:function` names, on a machine named or described in a file.

    Raises:
      InputError: if there is no such function or machine, or the function returns something else.
    """
    figures = find_machine(machine)
    dtype = _dtype(compute_dtype)
    with _code_of_a_user(model):
        loss_fn, params, batch = _call(model)
        parts = partition(loss_fn, params, (batch,), compute_dtype=dtype)
    return estimate_profile(partition_costs(parts, remat), figures, {"model": model, "remat": remat})


def measure_model(
    model: str,
    optimizer: str = "adamw",
    compute_dtype: str | None = None,
    remat: str = AUTO,
    transport: str | None = None,
) -> Profile:
    """The profile of the model that `module:function` names, measured on JAX's first device.

    Raises:
      InputError: if there is no such function, optimizer or transport, or the function returns something else.
    """
    if optimizer not in OPTIMIZERS:
        raise InputError(f"--optimizer must be one of {', '.join(OPTIMIZERS)}, got {optimizer!r}")
    dtype = _dtype(compute_dtype)
    with _code_of_a_user(model):
        loss_fn, params, batch = _call(model)
        rate = OPTIMIZERS[optimizer](1e-3)
        made = train_step(loss_fn, rate, compute_dtype=dtype, remat=remat, transport=transport).measure(params, batch)
    return Profile({**made.machine, "model": model, "optimizer": optimizer}, made.layers)


def _call(model: str) -> tuple[Callable[..., Any], Any, Any]:
    made = find_function(model)()
    if not isinstance(made, tuple) or len(made) != 3 or not callable(made[0]):
        raise InputError(f"--model {model} must return (loss_fn, params, batch), got {type(made).__name__}")
    return made


def find_function(name: str) -> Callable[[], Any]:
    """The function that `module:function` names; modules of the current directory are found as well.

    Raises:
      InputError: if there is none.
    """
    module_name, colon, function_name = name.partition(":")
    if not (module_name and colon and function_name):
        raise InputError(f'--model must be given as "module:function", got {name!r}')
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    with _code_of_a_user(name):
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
            raise  # the module is there, what it imports is not
        raise InputError(f"--model {name}: no module named {error.name!r} here or in the Python path") from error


@contextlib.contextmanager
def _code_of_a_user(model: str) -> Iterator[None]:
    """Errors raised by the user's own code become one line that says where; those of this package stay."""
    try:
        yield
    except JaxFerryError:
        raise
    except (Exception, SystemExit) as error:
        what = next(iter(str(error).strip().splitlines()), "")
        place = _place_in_code_of_a_user(error)
        where = f"{place[0]}, line {place[1]}: " if place else ""
        raise InputError(f"--model {model}: {where}{type(error).__name__}: {what}".removesuffix(": ")) from error


def _place_in_code_of_a_user(error: BaseException) -> tuple[str, int] | None:
    """File and line of the innermost code that is neither installed nor this package's."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        return error.filename, error.lineno or 1
    installed = tuple(sysconfig.get_paths()[key] for key in ("stdlib", "platstdlib", "purelib", "platlib"))
    others = (*installed, str(pathlib.Path(__file__).parents[1]), "<")
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(others)]
    return (frames[-1].filename, frames[-1].lineno or 1) if frames else None


def _dtype(name: str | None) -> Any:
    if name is None:
        return None
    try:
        dtype = jnp.dtype(name)
    except TypeError:
        dtype = None
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        raise InputError(f'--compute-dtype must be a floating dtype such as "bfloat16", got {name!r}')
    return dtype


def _print(made: Profile) -> None:
    table = rich.table.Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("layer", no_wrap=True)
    for heading in ("weights", "kept", "load", "fwd", "fwd DHA", "bwd", "bwd DHA", "bwd GO", "update"):
        table.add_column(heading, justify="right", no_wrap=True)
    for layer in made.layers:
        sizes = [layer.param_bytes / 2**20, layer.activation_bytes / 2**20]
        times_s = [layer.load_s, layer.forward_s, layer.forward_dha_s, layer.backward_s, layer.backward_dha_s]
        times_s += [layer.backward_go_s, layer.update_s]
        name = rich.markup.escape(layer.name)
        table.add_row(name, *(f"{number:.3g}" for number in (*sizes, *(1e3 * time for time in times_s))))
    estimated = f"Estimated for {made.machine['name']}: nothing was measured."
    note = estimated if made.machine.get("estimated") else f"Measured on {made.machine['name']}."
    note += " Sizes in MiB, times in ms."
    print_report(note, "", table)
