"""JaxFerry: a trainer for Flax models that do not fit into GPU memory.

step = jaxferry.train_step(loss_fn, optax.adamw(3e-4), memory_budget="8GiB")
state = step.init(params)
state, metrics = step(state, batch)

Attributes that need JAX are imported on first use, so that the planning commands start without it.
"""

import importlib
import importlib.util
import sys
import types
from typing import TYPE_CHECKING, Any

from jaxferry.errors import (
    BudgetError,
    CheckpointError,
    HostMemoryError,
    InputError,
    JaxFerryError,
    NonFiniteError,
    PartitionError,
    StateError,
    TaskError,
)
from jaxferry.modes import GradientPlace, Mode

if TYPE_CHECKING:
    from jaxferry.checkpoint import SavedCheckpoint, list_checkpoints
    from jaxferry.optimizer.optimizers import adam, adamw, lion, sgd
    from jaxferry.training.train_step import TrainState, TrainStep, train_step

__version__ = "0.1.0"

__all__ = [
    "BudgetError",
    "CheckpointError",
    "GradientPlace",
    "HostMemoryError",
    "InputError",
    "JaxFerryError",
    "Mode",
    "NonFiniteError",
    "PartitionError",
    "SavedCheckpoint",
    "StateError",
    "TaskError",
    "TrainState",
    "TrainStep",
    "adam",
    "adamw",
    "lion",
    "list_checkpoints",
    "sgd",
    "train_step",
]

_MODULES = {
    **dict.fromkeys(("SavedCheckpoint", "list_checkpoints"), "jaxferry.checkpoint"),
    **dict.fromkeys(("adam", "adamw", "lion", "sgd"), "jaxferry.optimizer.optimizers"),
    **dict.fromkeys(("TrainState", "TrainStep"), "jaxferry.train_step"),
}


class _Package(types.ModuleType):
    """The package; its attribute `train_step` is the function also where the module of that name was imported."""

    @property
    def train_step(self) -> Any:
        """See `jaxferry.train_step.train_step`."""
        return self.__dict__.get("train_step") or importlib.import_module("jaxferry.train_step").train_step

    @train_step.setter
    def train_step(self, value: Any) -> None:
        if not isinstance(value, types.ModuleType):  # the import of a module binds it in its package
            self.__dict__["train_step"] = value


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        value = globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
        return value
    if not name.startswith("_") and importlib.util.find_spec(f"{__name__}.{name}") is not None:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
