"""The errors that JaxFerry raises, all of them kinds of `JaxFerryError`.

A message names the argument, its value and the remedy, and is one line long unless it holds a table.
"""


class JaxFerryError(Exception):
    """Base of every error raised on purpose by this package."""


class InputError(JaxFerryError, ValueError):
    """A value given by the user is not acceptable: an argument, a file, a field of a record."""


class PartitionError(JaxFerryError, ValueError):
    """The loss function cannot be trained: it returns no scalar, or a parameter has no gradient."""


class BudgetError(InputError):
    """No plan fits into the memory budget.

    Attributes:
      smallest_bytes: the smallest budget that a plan exists for, in bytes.
    """

    def __init__(self, message: str, smallest_bytes: int):
        super().__init__(message)
        self.smallest_bytes = smallest_bytes


class NonFiniteError(JaxFerryError, FloatingPointError):
    """The loss or a gradient is NaN or infinite.

    Attributes:
      step: the step in which it was seen, counted from 0.
      layer: the first layer with a non-finite output, or None where every output is finite.
    """

    def __init__(self, message: str, step: int, layer: str | None):
        super().__init__(message)
        self.step = step
        self.layer = layer


class CheckpointError(JaxFerryError):
    """A checkpoint is missing, damaged, or belongs to another model or optimizer."""


class StateError(JaxFerryError):
    """A training state is used where it does not belong, or a failure left it between two steps."""


class TaskError(JaxFerryError, RuntimeError):
    """A task of a training step failed: a transfer, a program, an update.

    The step is taken back, or what is left of it is tried again whenever the state is next used, or the state is that
    after the last update, as the message says. To go on, call `state.block_until_ready()`: from then on `state.step` is
    the number of the batch that comes next.

    Attributes:
      layer: whose task it was.
    """

    def __init__(self, message: str, layer: str):
        super().__init__(message)
        self.layer = layer


class NativeError(JaxFerryError):
    """A native library cannot be built, or one is asked for that cannot be used."""
