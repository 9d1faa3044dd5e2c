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
    **dict.fromkeys(("TrainState", "TrainStep", "train_step"), "jaxferry.training.train_step"),
}


class _Module(types.ModuleType):
    """Another name of a module, which is imported on first use."""

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(_ALIASES[self.__name__]), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("__"):
            super().__setattr__(name, value)
        else:
            setattr(importlib.import_module(_ALIASES[self.__name__]), name, value)


_ALIASES = {
    "jaxferry.distributed": "jaxferry.processes.distributed",
    "jaxferry.pretrained": "jaxferry.checkpoint.pretrained",
    "jaxferry.train_step": "jaxferry.training.train_step",
}
sys.modules.update({name: _Module(name) for name in _ALIASES})


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        value = globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
        return value
    full = f"{__name__}.{name}"
    if full in _ALIASES or (not name.startswith("_") and importlib.util.find_spec(full) is not None):
        return importlib.import_module(_ALIASES.get(full, full))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
