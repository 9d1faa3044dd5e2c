"""Rows of (layers, plans) arrays as `recurrences.py` reads them: most are zeros, or flags of all or no plans."""

import functools

import numpy as np


class LayerFlags:
    """Flags of layers or groups, (layers, plans): a row of all or of none costs a step nothing.

    Attributes:
      any, all: of each layer, whether its flags are set in some plan, and in all.
    """

    def __init__(self, flags: np.ndarray):
        self.flags = flags
        self.any: list[bool] = some_of_rows(flags)
        self.all: list[bool] = [not some for some in some_of_rows(~flags)]

    @functools.cached_property
    def _delays(self) -> list[np.ndarray]:
        """What to add to a time that counts only where flags are set."""
        return list(np.where(self.flags, 0.0, -np.inf))

    def pick(self, layer: int, chosen: np.ndarray, other: np.ndarray) -> np.ndarray:
        """`chosen` where the layer's flags are set, else `other`; (plans,)."""
        return chosen if self.all[layer] else np.where(self.flags[layer], chosen, other)

    def latest(self, layer: int, time: np.ndarray, other: np.ndarray) -> np.ndarray:
        """`time`, or the later of both where the layer's flags are set; (plans,)."""
        if not self.any[layer]:
            return time
        return np.maximum(time, other if self.all[layer] else other + self._delays[layer])


def some_of_rows(flags: np.ndarray) -> list[bool]:
    """Of each row, whether a flag is set."""
    return [bool(some) for some in np.atleast_1d(flags.any(axis=1))]


def rows(seconds: np.ndarray) -> list[np.ndarray | None]:
    """The rows of a (layers, plans) array, None for zeros."""
    return [row if some else None for row, some in zip(seconds, some_of_rows(seconds != 0), strict=True)]


def plus(end: np.ndarray, seconds: np.ndarray | None) -> np.ndarray:
    """The sum; None stands for zeros."""
    return end if seconds is None else end + seconds
