"""Runs an optimizer step on host memory in one pass: the function `jaxferry_host_update` (`xla_ffi/README.md`)."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from jaxferry.errors import NativeError
from jaxferry.native.loading import library
from jaxferry.native.targets import DTYPE_NUMBERS

KINDS = ("adam", "nadam", "lion", "sgd", "momentum", "nesterov")  # update rules of the native library, in its numbering
NUM_MOMENTS = {"adam": 2, "nadam": 2, "lion": 1, "sgd": 0, "momentum": 1, "nesterov": 1}
"""Number of moments, arrays of a parameter's shape, that each rule keeps."""

FACTORS = ("unscale", "clip", "rate", "decay", "first", "gradient", "second")
"""Factors that change from step to step, in the order of the argument `factors`."""

_REST_BITS = 17
"""What a bf16 copy lacks of an fp32 number: 16 bits, and whether it was rounded up."""

MOMENT_BLOCK = 256
"""Number of elements that share a scale if moments are codes."""

_MOMENT_DTYPES = {np.dtype(jnp.bfloat16): DTYPE_NUMBERS[np.dtype(jnp.bfloat16)], np.dtype(np.uint8): 3}

_NO_MEMORY = 1
_BRIEF_PARAMETERS = 1 << 15  # a step of so many takes the time of some ten calls from Python, on one thread


@dataclasses.dataclass(frozen=True)
class StepRule:
    """The arithmetic of a step, one of `KINDS`.

    `b1` is the decay of the first moment or the momentum, `b2` of the second moment, for Lion of the stored one. `eps`
    is added to Adam's denominator, `eps_root` under its root. With `rounds_masters`, masters are rounded to bf16 as
    moments are.
    """

    kind: str
    b1: float = 0.0
    b2: float = 0.0
    eps: float = 0.0
    eps_root: float = 0.0
    rounds_masters: bool = False


@dataclasses.dataclass(frozen=True)
class StepPart:
    """Where a parameter begins in the vectors of gradients and of the compute copy, and whether it decays."""

    vector: int
    offset: int
    decays: bool


def rest_size(num_masters: int) -> int:
    """How many numbers of 16 bits hold what a bf16 copy of so many fp32 masters lacks."""
    return num_masters + -(-num_masters // 16)


class StepFactors:
    """The factors that several steps read: fp32 `[7]` (`FACTORS`); and int32 `counts` of steps, before the step."""

    def __init__(self, num_counts: int) -> None:
        self.values, self.counts = np.zeros(len(FACTORS), np.float32), np.full(num_counts, -1, np.int32)


class HostStep:
    """Updates parameters in host memory in place: all that the library is told is prepared once.

    A step of a small layer finds the code of a hundred calls of Python's in memory, not in a cache: each takes some
    ten microseconds then. Masters and moments (for each of the rule's) are writable, contiguous fp32 arrays that stay
    where they are; all moments may be bf16, rounded by a hash that includes the first count. Two moments may be codes,
    uint8, followed by the fp32 scales of their blocks of 256 elements, of which the last may be part of one.
    Instead of a master whose compute copy is bf16, there may be a uint16 array of what that copy lacks
    (`NativeLibrary.split`), an empty one if the rule rounds masters to bf16: the step then reads the copy too. `counts`
    are int32 scalars that each step increments up to their maximum. `gradients` and `copies` have the address of each
    vector of gradients and of the compute copy, in fp32, bf16 or fp16, to be set before a step.

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
        counts: Sequence[np.ndarray],
        factors: StepFactors,
    ) -> None:
        rows = np.zeros((len(parts), 13), np.int64)
        for row, part, *arrays in zip(rows, parts, masters, *moments, strict=True):
            dtypes = (gradient_dtypes[part.vector], copy_dtypes[part.vector])
            numbers = [DTYPE_NUMBERS[np.dtype(dtype)] for dtype in dtypes]
            is_split = arrays[0].dtype == np.uint16 and dtypes[1] == jnp.bfloat16
            size = arrays[0].size
            if is_split:
                size = arrays[1].size if rule.rounds_masters else arrays[0].size * 16 // _REST_BITS
            row[:7] = part.vector, part.offset, size, part.decays, *numbers, is_split + 2 * rule.rounds_masters
            dtype = next((array.dtype for array in arrays[1:] if array.dtype in _MOMENT_DTYPES), np.dtype(np.float32))
            num_moments = 2 if dtype == np.uint8 else len(arrays) - 1
            wanted = [(np.dtype(np.float32), size), *[(dtype, size)] * num_moments]
            wanted += [(np.dtype(np.float32), -(-size // MOMENT_BLOCK))] * (num_moments if dtype == np.uint8 else 0)
            for array, known in zip(arrays[is_split:], wanted[is_split:], strict=True):
                if (array.dtype, array.size) != known or not array.flags.carray:
                    raise ValueError(f"masters and moments are writable fp32 arrays, got {array.dtype}{array.shape}")
            row[7] = _MOMENT_DTYPES.get(dtype, 0)
            row[8 : 8 + len(arrays)] = [array.ctypes.data for array in arrays]
        if len(counts) != factors.counts.size or any(count.dtype != np.int32 for count in counts):
            raise ValueError(f"the factors are of {factors.counts.size} counts, int32, got {counts}")
        self.gradients, self.copies = ((ctypes.c_void_p * len(each))() for each in (gradient_dtypes, copy_dtypes))
        constants = np.asarray([rule.b1, rule.b2, rule.eps, rule.eps_root])
        of_counts = np.asarray([count.ctypes.data for count in counts], np.int64)
        record = np.asarray(
            [
                *(KINDS.index(rule.kind), len(parts), len(counts)),
                *(constants.ctypes.data, rows.ctypes.data),
                *(ctypes.addressof(self.gradients), ctypes.addressof(self.copies)),
                *(array.ctypes.data for array in (of_counts, factors.values, factors.counts)),
            ]
        )
        self._kept = (masters, moments, counts, factors, rows, constants, of_counts, record)
        self._library, self._is_brief = library("cpu"), bool(rows[:, 2].sum() <= _BRIEF_PARAMETERS)
        self._record = ctypes.c_void_p(record.ctypes.data)

    def run(self) -> bool:
        """Runs a step, while nothing else may use the arrays; False if the factors are of other counts."""
        result = self._library.host_update(self._record, self._is_brief)
        if result == _NO_MEMORY:
            raise NativeError("the host has no memory for an update")
        return not result
