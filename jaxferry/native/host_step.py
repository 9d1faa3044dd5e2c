"""Runs an optimizer step on host memory in one pass: the function `jaxferry_host_update` (`xla_ffi/README.md`)."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxferry.errors import NativeError
from jaxferry.native.library import library
from jaxferry.native.targets import DTYPE_NUMBERS

KINDS = ("adam", "nadam", "lion", "sgd", "momentum", "nesterov")
"""Update rules of the native library, in its numbering."""

NUM_MOMENTS = {"adam": 2, "nadam": 2, "lion": 1, "sgd": 0, "momentum": 1, "nesterov": 1}
"""Number of moments, arrays of a parameter's shape, that each rule keeps."""

FACTORS = ("unscale", "clip", "rate", "decay", "first", "gradient", "second")
"""Factors that change from step to step, in the order of the argument `factors`."""

_BRIEF_PARAMETERS = 1 << 15
"""A step of so many takes the time of some ten calls from Python, on one thread."""


@dataclasses.dataclass(frozen=True)
class StepRule:
    """The arithmetic of a step.

    Attributes:
      kind: one of `KINDS`.
      b1: decay of the first moment or the momentum.
      b2: decay of the second moment; for Lion, of the stored moment.
      eps: added to Adam's denominator.
      eps_root: added under the denominator's root.
    """

    kind: str
    b1: float = 0.0
    b2: float = 0.0
    eps: float = 0.0
    eps_root: float = 0.0


@dataclasses.dataclass(frozen=True)
class StepPart:
    """A parameter's location in the vectors of gradients and of the compute copy.

    Attributes:
      vector: index of the vector.
      offset: its first element in the vector.
      decays: whether weight decay applies.
    """

    vector: int
    offset: int
    decays: bool


class HostStep:
    """Updates parameters in host memory in place: what does not change from step to step is prepared once.

    Args:
      rule: the arithmetic.
      parts: each parameter's location in the vectors.
      masters: writable fp32 arrays, contiguous; they stay where they are.
      moments: for each moment of the rule, such arrays of the masters' sizes.
      gradient_dtypes: of each vector of gradients: fp32, bf16 or fp16.
      copy_dtypes: likewise of the compute copy.

    Raises:
      NativeError: if the CPU library cannot be used.
    """

    def __init__(
        self,
        rule: StepRule,
        parts: Sequence[StepPart],
        masters: Sequence[np.ndarray],
        moments: Sequence[Sequence[np.ndarray]],
        gradient_dtypes: Sequence[np.dtype],
        copy_dtypes: Sequence[np.dtype],
    ) -> None:
        self._kept = (masters, moments)
        self._rule = KINDS.index(rule.kind)
        self._constants = np.asarray([rule.b1, rule.b2, rule.eps, rule.eps_root])
        self._rows = np.zeros((len(parts), 9), np.int64)
        for row, part, *arrays in zip(self._rows, parts, masters, *moments, strict=True):
            dtypes = (gradient_dtypes[part.vector], copy_dtypes[part.vector])
            numbers = [DTYPE_NUMBERS[np.dtype(dtype)] for dtype in dtypes]
            row[:6] = part.vector, part.offset, arrays[0].size, part.decays, *numbers
            for array in arrays:
                if array.dtype != np.float32 or array.size != row[2] or not array.flags.carray:
                    raise ValueError(f"masters and moments are writable fp32 arrays, got {array.dtype}{array.shape}")
            row[6 : 6 + len(arrays)] = [array.ctypes.data for array in arrays]
        self._library, self._is_brief = library("cpu"), self._rows[:, 2].sum() <= _BRIEF_PARAMETERS
        self._vectors = ctypes.c_void_p * len(copy_dtypes)
        self._prepared = [ctypes.c_void_p(array.ctypes.data) for array in (self._constants, self._rows)]

    def run(self, factors: np.ndarray, gradients: Sequence[int], copies: Sequence[int]) -> None:
        """Runs one step; nothing else may use the arrays meanwhile.

        Args:
          factors: fp32 `[7]`, see `FACTORS`.
          gradients: the address of each vector of gradients.
          copies: the address of each vector of the compute copy, which is overwritten.

        Raises:
          NativeError: if there is no memory for the call; nothing has changed then.
        """
        constants, rows = self._prepared
        vectors = (self._vectors(*gradients), self._vectors(*copies))
        data, count = ctypes.c_void_p(factors.ctypes.data), ctypes.c_int64(len(self._rows))
        if not self._library.host_update(self._rule, constants, data, count, rows, *vectors, is_brief=self._is_brief):
            raise NativeError("the host has no memory for the arguments of an update")
