"""The errors that JaxFerry raises; all derive from `JaxFerryError`.

A message names the argument, its value and the remedy, on one line unless it contains a table.
"""


class JaxFerryError(Exception):
    """Base class of all errors that this package raises deliberately."""


class InputError(JaxFerryError, ValueError):
    """A user's value is invalid: an argument, a file, a field of a record."""


class PartitionError(JaxFerryError, ValueError):
    """The function cannot be partitioned: the loss is not a real scalar, or it depends on no parameter."""


class BudgetError(InputError):
    """No plan fits into the memory budget.

    Attributes:
      smallest_bytes: the smallest budget for which a plan exists, in bytes.
    """

    def __init__(self, message: str, smallest_bytes: int):
        super().__init__(message)
        self.smallest_bytes = smallest_bytes


class NonFiniteError(JaxFerryError, FloatingPointError):
    """The loss or a gradient is NaN or infinite.

    Attributes:
      step: the step in which it occurred, counted from 0.
      layer: the first layer with a non-finite output; if all outputs are finite, the first with a non-finite gradient.
    """

    def __init__(self, message: str, step: int, layer: str | None):
        super().__init__(message)
        self.step = step
        self.layer = layer


class CheckpointError(JaxFerryError):
    """A checkpoint is missing, damaged, or belongs to another model or optimizer."""


class StateError(JaxFerryError):
    """A training state is used with another step or by two threads, or a failure left it between two steps."""


class HostMemoryError(JaxFerryError, MemoryError):
    """Host memory cannot hold a training state, a copy of it, or what a step keeps beside it."""


class TaskError(JaxFerryError, RuntimeError):
    """A task of a training step failed: a transfer, a program, an update.

    The message states the outcome: the state is that before the step, or that after the last update (with
    `accumulate`), or it is damaged and every further use raises `StateError`. `state.step` is the number of the next
    batch.

    Attributes:
      layer: the layer of the task; empty where the device does not tell which of its programs failed, and for what
        depends on the batch alone.
    """

    def __init__(self, message: str, layer: str):
        super().__init__(message)
        self.layer = layer


class NativeError(JaxFerryError):
    """A native library cannot be built, or a required one cannot be used."""
