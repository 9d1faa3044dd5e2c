"""JaxFerry: a trainer for Flax models that do not fit into GPU memory.

step = jaxferry.train_step(loss_fn, optax.adamw(3e-4), memory_budget="8GiB")
state = step.init(params)
state, metrics = step(state, batch)
"""

from jaxferry.engine.host.checkpoint import SavedCheckpoint, list_checkpoints
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
from jaxferry.optimizers import adam, adamw, lion, sgd
from jaxferry.train_step import TrainState, TrainStep, train_step

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
