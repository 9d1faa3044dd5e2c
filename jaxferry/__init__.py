"""JaxFerry: a trainer for Flax models that do not fit into GPU memory.

step = jaxferry.train_step(loss_fn, optax.adamw(3e-4), memory_budget="8GiB")
state = step.init(params)
state, metrics = step(state, batch)

Attributes that need JAX are imported on first use, so that the planning commands start without it.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from typing import TYPE_CHECKING, Any

from jaxferry.errors import (
    BudgetError,
    CheckpointError,
    HostMemoryError,
    InputError,
    InternalError,
    JaxFerryError,
    NonFiniteError,
    PartitionError,
    StateError,
    TaskError,
)
from jaxferry.modes import GradientPlace, Mode

if TYPE_CHECKING:
    from jaxferry.checkpoint import SavedCheckpoint, list_checkpoints
    from jaxferry.engine import TrainState
    from jaxferry.optimizer import adam, adamw, lion, sgd
    from jaxferry.training import TrainStep, train_step


__version__ = "0.1.0"

__all__ = [
    "BudgetError",
    "CheckpointError",
    "GradientPlace",
    "HostMemoryError",
    "InputError",
    "InternalError",
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
    "TrainState": "jaxferry.engine",
    **dict.fromkeys(("TrainStep", "train_step"), "jaxferry.training"),
}


_ALIASES = {
    "jaxferry.distributed": "jaxferry.processes.distributed",
    "jaxferry.pretrained": "jaxferry.checkpoint.pretrained",
    "jaxferry.train_step": "jaxferry.training.entry",
}


class _Aliases(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports modules of rooms under names of this package."""

    def __init__(self) -> None:
        self._specs: dict[str, Any] = {}

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(fullname, self) if fullname in _ALIASES else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = importlib.import_module(_ALIASES[spec.name])
        self._specs[module.__name__] = module.__spec__
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        module.__spec__ = self._specs[module.__name__]  # the import of the alias has replaced it


class _Package(types.ModuleType):
    """The package; its attribute `train_step` is the function also where the module of that name was imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "train_step" or not isinstance(value, types.ModuleType):
            super().__setattr__(name, value)


sys.meta_path.insert(0, _Aliases())
sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        value = globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
        return value
    full = f"{__name__}.{name}"
    if not name.startswith("_") and importlib.util.find_spec(full) is not None:
        return importlib.import_module(full)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
