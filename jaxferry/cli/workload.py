"""What a command line trains: the workload that it names, the optimizer, and the options of a training step."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import math
import os
import pathlib
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import jax
import jax.numpy as jnp
import optax
from typer import Option

from jaxferry.errors import InputError, JaxFerryError, PartitionError, call_users, origin_of
from jaxferry.modes import BLOCK, MODULE
from jaxferry.optimizer import adam, adamw, lion, sgd
from jaxferry.partition import AUTO, OFF, REMAT, result_shapes
from jaxferry.training import read_compute_dtype

if TYPE_CHECKING:
    from jaxferry.engine import TrainState
    from jaxferry.training import TrainStep


EXAMPLES = ("gpt2", "llama", "bert", "roberta", "transformer_xl", "vit", "resnet", "pi0")
"""Examples whose models have names by size, such as `gpt2:6.7b`."""

FORMS = "module:function, file.py:function, or an example's name and size such as gpt2:6.7b"

OPTIMIZERS: Mapping[str, Callable[[float], optax.GradientTransformation]] = {
    "adamw": adamw,
    "adamw-bf16": functools.partial(adamw, moments="bfloat16"),
    "adamw-int8": functools.partial(adamw, moments="int8"),
    "adamw-int8-bf16": functools.partial(adamw, moments="int8", masters="bfloat16"),
    "adam": adam,
    "lion": lion,
    "adafactor": optax.adafactor,
    "momentum": functools.partial(sgd, momentum=0.9),
    "sgd": sgd,
}
"""Optimizers by name, as functions of the learning rate."""

_PACKAGE = pathlib.Path(__file__).parents[1]

ModelName = Annotated[
    str,
    Option(
        "--model",
        metavar="WORKLOAD",
        help=f"A function that returns (loss_fn, params, batch): {FORMS}.",
        show_default=False,
    ),
]
Optimizer = Annotated[str, Option(help=f"One of {', '.join(OPTIMIZERS)}.")]
MemoryBudget = Annotated[str | None, Option(metavar="SIZE", help='Device memory, such as "8GiB".')]
ReserveFactor = Annotated[
    float | None, Option(help="Share of all gradient bytes, in [0, 1], that may stay on the device.")
]
ComputeDtype = Annotated[str | None, Option(help="Dtype of the parameters on the device.")]
Remat = Annotated[str, Option(help="What is recomputed in the backward.")]
Tiles = Annotated[
    str, Option(metavar="off|auto|N|NAME=N,...", help="Tiles in which programs of segments run, along batch or tokens.")
]
OffloadActivations = Annotated[
    bool | None,
    Option("--offload-activations/--keep-activations", help="All or no activations leave. [default: by policy auto]"),
]
GradientBuffers = Annotated[
    str, Option(metavar="auto|all|N", help="Programs whose gradients host memory holds; auto: as many as it can.")
]


def check_fixed_granularity(granularity: str) -> str:
    """Returns the granularity; raises `InputError` unless it is block or module."""
    if granularity not in (BLOCK, MODULE):
        raise InputError(f"--granularity must be {BLOCK} or {MODULE}, got {granularity!r}")
    return granularity


FixedGranularity = Annotated[
    str,
    Option("--granularity", callback=check_fixed_granularity, help="Layers that plans move: block, or module (finer)."),
]
Devices = Annotated[
    int, Option(min=1, help="Devices that share each batch; without an accelerator, virtual CPU devices.")
]
Seed = Annotated[int, Option(help="Seed of the initial parameters, if a function makes them.")]


def read_remat(remat: str) -> str:
    """Checks the option `--remat` of a command that plans; raises InputError if it is no choice."""
    if remat not in (*REMAT, AUTO):
        raise InputError(f"--remat must be one of {', '.join((*REMAT, AUTO))}, got {remat!r}")
    return remat


def read_number_or_word(text: str) -> str | int:
    """Reads the value of `--gradient-buffers`, or a number of tiles: a number or a word, which `train_step` checks."""
    return int(text) if text.isdecimal() else text


def read_offloading(value: bool | None) -> bool | str:
    """Reads `--offload-activations` and its opposite; without either, policy auto chooses."""
    return AUTO if value is None else value


def read_tiles(text: str) -> str | int | dict[str, Any]:
    """Reads the option `--tiles`: off, auto, a number, or numbers by segment (`a=2,b=4`), which `train_step` checks."""
    if "=" not in text:
        if not text.isdigit() and text not in (OFF, AUTO):
            raise InputError(f"--tiles must be off, auto, a number, or NAME=N,... by segment, got {text!r}")
        return read_number_or_word(text)
    parts = [part.rpartition("=")[::2] for part in text.split(",")]
    if not all(name for name, _ in parts) or len(dict(parts)) < len(parts):
        raise InputError(f"--tiles must be off, auto, a number, or NAME=N,... with each name once, got {text!r}")
    return {name: read_number_or_word(number) for name, number in parts}


@dataclasses.dataclass(frozen=True)
class UserModel:
    """The return value of the user's function, with the name given on the command line.

    `params` and `batch` are trees of arrays or shapes; or functions that return the tree, of parameters for a PRNG key,
    layer by layer, or the batch for a step's number. The loss is `loss_fn(params, batch)`.
    """

    name: str
    loss_fn: Callable[..., Any]
    params: Any
    batch: Any

    def shapes(self) -> Any:
        """Returns the parameters' shapes."""
        return result_shapes(self.params, jax.random.key(0)) if callable(self.params) else self.params

    def batch_of(self, number: int) -> Any:
        """Returns the batch of a step."""
        return call_users(self.batch, number) if callable(self.batch) else self.batch

    def batch_shapes(self) -> Any:
        """Returns the shapes of the first batch."""
        if callable(self.batch):
            return jax.eval_shape(lambda: self.batch_of(0))
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf)), self.batch)

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
    """Calls the function of that name (`find_function`) and checks what it returns."""
    return read_workload(name, call_users(find_function(name)))


def read_workload(name: str, made: Any, option: str = "--model") -> UserModel:
    """Checks that the user's function has returned `(loss_fn, params, batch)`; `option` gave its name."""
    if not isinstance(made, tuple) or len(made) != 3 or not callable(made[0]):
        raise InputError(f"{option} {name} must return (loss_fn, params, batch), got {type(made).__name__}")
    return UserModel(name, *made)


def make_optimizer(name: str, learning_rate: float = 1e-3) -> optax.GradientTransformation:
    """Makes one of `OPTIMIZERS`; raises `InputError` for another name or a learning rate that is not above 0."""
    if not (math.isfinite(learning_rate) and learning_rate > 0):
        raise InputError(f"--learning-rate must be a number above 0, got {learning_rate:g}")
    if name not in OPTIMIZERS:
        raise InputError(f"--optimizer must be one of {', '.join(OPTIMIZERS)}, got {name!r}")
    return OPTIMIZERS[name](learning_rate)


def read_dtype(name: str | None) -> Any:
    """Reads the compute dtype by name; None stays None; raises `InputError` for anything else."""
    return read_compute_dtype(name, "--compute-dtype")


def find_function(name: str) -> Callable[..., Any]:
    """Finds the function that makes a workload; raises `InputError` if there is none, to be named by `user_code`.

    The name is `module:function`, also in modules of the current directory, `file.py:function`, or the name and size
    of an example's model, such as `gpt2:6.7b`.
    """
    module_name, colon, function_name = name.rpartition(":")
    if not (module_name and colon and function_name):
        raise InputError('the name must be "module:function", "file.py:function" or such as "gpt2:6.7b"')
    if module_name.endswith(".py"):
        module = _load(pathlib.Path(module_name))
    elif module_name in EXAMPLES and (made := _of_example(module_name, function_name)) is not None:
        return made
    else:
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if not f"{module_name}.".startswith(f"{error.name}."):
                raise  # the module exists; one of its imports does not
            raise InputError(f"no module named {error.name!r} here or on the Python path") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise InputError(f"module {module_name} has no function {function_name!r}")
    return function


def _of_example(example: str, size: str) -> Callable[..., Any] | None:
    """Returns the function that makes an example's model; None if the user has a module of the example's name."""
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
    raise InputError(f"sizes of {example} are {', '.join(workload.SIZES)}, got {size!r}")


def _load(path: pathlib.Path) -> types.ModuleType:
    """Loads a file as a module; its imports see the modules of its folder."""
    if not path.is_file():
        raise InputError(f"there is no file {os.fspath(path)!r}")
    if str(path.resolve().parent) not in sys.path:
        sys.path.insert(0, str(path.resolve().parent))
    module_name = f"jaxferry_workload_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses look for the module of their class
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def user_code(name: str, option: str = "--model") -> Iterator[None]:
    """Turns errors of the user's own code into one line with their place; refusals of what it returns name it."""
    try:
        yield
    except JaxFerryError as error:
        is_of_function = type(error) in (InputError, PartitionError) and not str(error).startswith("--")
        if not is_of_function or name in str(error):
            raise
        raise type(error)(f"{option} {name}: {error}") from error
    except (Exception, SystemExit) as error:
        origin = origin_of(error)
        if not origin.is_users:
            raise
        what = next(iter(str(error).strip().splitlines()), "")
        where = f"{origin.place}: " * bool(origin.place)
        raise InputError(f"{option} {name}: {where}{type(error).__name__}: {what}".removesuffix(": ")) from error
