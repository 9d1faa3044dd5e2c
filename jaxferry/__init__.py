"""JaxFerry: a trainer for Flax models that do not fit into GPU memory.

step = jaxferry.train_step(loss_fn, optax.adamw(3e-4), memory_budget="8GiB")
state = step.init(params)
state, metrics = step(state, batch)

The names, which `__init__.pyi` lists, are imported on first use, so that the planning commands start without JAX.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from typing import Any

import lazy_loader

__version__ = "0.1.0"

_named, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

_ALIASES = {
    "jaxferry.distributed": "jaxferry.processes.distributed",
    "jaxferry.pretrained": "jaxferry.checkpoint.pretrained",
    "jaxferry.train_step": "jaxferry.training.entry",
}


def __getattr__(name: str) -> Any:
    """Returns a listed name, or a room."""
    if name in __all__:
        return _named(name)
    if name.startswith("_") or importlib.util.find_spec(f"{__name__}.{name}") is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")


class _Aliases(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports modules of rooms under names of this package."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(fullname, self) if fullname in _ALIASES else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = importlib.import_module(_ALIASES[spec.name])
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state  # the import of the alias has replaced it


class _Package(types.ModuleType):
    """The package; its attribute `train_step` is the function also where the module of that name was imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "train_step" or not isinstance(value, types.ModuleType):
            super().__setattr__(name, value)


sys.meta_path.insert(0, _Aliases())
sys.modules[__name__].__class__ = _Package
