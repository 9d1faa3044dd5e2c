"""Runs an optimizer step on host memory in one pass: the operation `jaxferry_host_step` (`xla_ffi/README.md`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxferry.native.library import library
from jaxferry.native.targets import DTYPE_NUMBERS

KINDS = ("adam", "nadam", "lion", "sgd", "momentum", "nesterov")
"""Update rules of the native library, in its numbering."""

NUM_MOMENTS = {"adam": 2, "nadam": 2, "lion": 1, "sgd": 0, "momentum": 1, "nesterov": 1}
"""Number of moments, arrays of a parameter's shape, that each rule keeps."""

FACTORS = ("unscale", "clip", "rate", "decay", "first", "gradient", "second")
"""Factors that change from step to step, in the order of the operand `factors`."""


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


def host_step(
    rule: StepRule,
    parts: Sequence[StepPart],
    factors: jax.Array,
    gradients: Sequence[jax.Array],
    masters: Sequence[jax.Array],
    moments: Sequence[Sequence[jax.Array]],
    copies: Sequence[Any] | jax.Array,
    copy_dtypes: Sequence[Any] = (),
) -> tuple[list[jax.Array], list[list[jax.Array]], list[jax.Array]]:
    """Updates all parameters of a layer, inside a jitted function on the CPU backend.

    Args:
      rule: the arithmetic.
      parts: each parameter's location in the vectors.
      factors: fp32 `[7]`, see `FACTORS`.
      gradients: flat vectors, fp32, bf16 or fp16.
      masters: the fp32 parameters, of any shapes; donated.
      moments: for each moment of the rule, fp32 arrays of the masters' shapes; donated.
      copies: the flat vectors of the compute copy, donated; or `jax.ShapeDtypeStruct`s to allocate them. Or one array,
        uint8 `[8 * vectors]`: the addresses of vectors in host memory with the shapes of the gradients. They are
        overwritten, and must outlive the call.
      copy_dtypes: the dtypes of copies at addresses; not read otherwise.

    Returns:
      Masters, moments and copies, in the buffers of the donated arguments. No copies if their addresses are given.

    Raises:
      NativeError: if the CPU library cannot be used.
    """
    library("cpu")
    updated = [*masters, *(array for moment in moments for array in moment)]
    aliased, made, addresses = list(updated), list(updated), []
    if isinstance(copies, jax.Array):
        addresses = [copies]
    else:
        aliased += [copy for copy in copies if isinstance(copy, jax.Array)]
        made += copies
    structs = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in made]
    first = 1 + len(gradients)
    aliases = {first + i: i for i in range(len(aliased))}
    call = jax.ffi.ffi_call("jaxferry_host_step", structs, input_output_aliases=aliases)
    results = list(
        call(
            factors,
            *gradients,
            *aliased,
            *addresses,
            rule=np.int64(KINDS.index(rule.kind)),
            vectors=np.asarray([part.vector for part in parts], np.int64),
            offsets=np.asarray([part.offset for part in parts], np.int64),
            decays=np.asarray([part.decays for part in parts], np.int64),
            copies=np.asarray([DTYPE_NUMBERS[np.dtype(dtype)] for dtype in copy_dtypes if addresses], np.int64),
            b1=np.float64(rule.b1),
            b2=np.float64(rule.b2),
            eps=np.float64(rule.eps),
            eps_root=np.float64(rule.eps_root),
        )
    )
    n = len(masters)
    split = [results[start : start + n] for start in range(0, len(updated), n)] if n else [[], *([] for _ in moments)]
    return split[0], split[1:], results[len(updated) :]
