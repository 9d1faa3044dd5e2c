"""Checks the arguments of `train_step`."""

from __future__ import annotations

import dataclasses
import math
import numbers
import os
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxferry.costs import Profile
from jaxferry.engine import LossScale, Rules
from jaxferry.errors import InputError
from jaxferry.modes import BLOCK
from jaxferry.partition import Trainable, check_remat, check_tiles
from jaxferry.planner import check_granularity, make_policy
from jaxferry.settings import looks_for_nans
from jaxferry.step import Plan
from jaxferry.units import parse_bytes

MEASURE, ESTIMATE = "measure", "estimate"
"""Keywords accepted instead of a profile; a file with such a name is given as `./measure`."""

CACHED_SHAPES = 64
"""Shapes of batches whose compiled programs a step keeps unless it is told otherwise."""


@dataclasses.dataclass(frozen=True)
class Numerics:
    """The arguments of `train_step` that decide what a step computes."""

    clip_norm: float | None = None
    compute_dtype: Any = None
    skip_nonfinite: bool = False
    check_gradients: bool | None = None
    accumulate: int = 1
    weight: str | None = None
    extra_args: Mapping[str, Any] | None = None
    loss_scale: LossScale | None = None
    trainable: Trainable | None = None

    @property
    def is_weighted(self) -> bool:
        """Whether micro-batches have weights of their own; of one batch, a weight divides out."""
        return self.weight is not None and self.accumulate > 1

    @property
    def rules(self) -> Rules:
        """When updates may run, and which are skipped."""
        clips, check = self.clip_norm is not None, self.check_gradients
        is_adapted = self.loss_scale is not None and self.loss_scale.is_dynamic
        # Where updates wait for the norm anyway, the check costs nothing. Who looks for a NaN wants no update with one.
        checks = clips or self.accumulate > 1 or looks_for_nans() if check is None else check
        return Rules(clips, self.skip_nonfinite, is_adapted or checks, self.accumulate, self.is_weighted)


@dataclasses.dataclass(frozen=True)
class Planning:
    """The arguments of `train_step` that decide how a step is cut, planned and laid out in memory."""

    memory_budget_bytes: int | None = None
    takes_device_budget: bool = True
    reserve_factor: float | None = None
    plan: Plan | None = None
    policy: str | None = None
    profile: Profile | str | None = None
    remat: Any = "none"
    tiles: Any = 1
    offload_activations: bool = False
    merge_small: bool = True
    granularity: str = BLOCK

    def on(self, memory_bytes: int | None) -> Planning:
        """The same on a device whose allocator has this limit in bytes: the memory budget if none was given."""
        if not self.takes_device_budget:
            return self
        return dataclasses.replace(self, memory_budget_bytes=memory_bytes)

    @property
    def chooser(self) -> str | None:
        """The policy that chooses a step's plan; None if none does."""
        if self.policy is None and self.reserve_factor is not None and self.reserve_factor < 1:
            return "native-overlapped"
        return self.policy

    @property
    def lets_policy_choose(self) -> bool:
        """Whether a policy chooses the plan, which is not given."""
        return self.plan is None and self.chooser is not None

    @property
    def given_names(self) -> tuple[str, ...]:
        """The names of the layers of the given plan or profile; empty without any."""
        given = self.plan if self.plan is not None else self.profile
        return () if given is None or isinstance(given, str) else tuple(layer.name for layer in given.layers)


@dataclasses.dataclass(frozen=True)
class Options:
    """The checked arguments of `jaxferry.train_step`, which documents them, by who reads them."""

    numerics: Numerics = Numerics()
    planning: Planning = Planning()
    record_steps: int = 0
    cached_shapes: int = CACHED_SHAPES


def read_options(
    *,
    memory_budget: Any,
    reserve_factor: Any,
    clip_norm: Any,
    compute_dtype: Any,
    plan: Any,
    policy: Any,
    profile: Any,
    remat: Any,
    skip_nonfinite: Any,
    check_gradients: Any,
    record_steps: Any,
    accumulate: Any,
    loss_scale: Any,
    weight: Any = None,
    extra_args: Any = None,
    trainable: Any = None,
    tiles: Any = 1,
    offload_activations: Any = False,
    cached_shapes: Any = CACHED_SHAPES,
    merge_small: Any = True,
    granularity: Any = BLOCK,
) -> Options:
    """Checks the arguments of `train_step`; reads plan and profile if they are files."""
    if plan is not None and policy is not None:
        raise InputError(f"plan and policy exclude each other, got both (policy {policy!r}): give one")
    if policy is not None:
        make_policy(policy)
    check_granularity(granularity)
    if reserve_factor is not None and not (_is_number(reserve_factor) and 0 <= reserve_factor <= 1):
        raise InputError(f"reserve_factor must lie in [0, 1], got {reserve_factor!r}")
    if clip_norm is not None and not (_is_number(clip_norm) and math.isfinite(clip_norm) and clip_norm > 0):
        raise InputError(f"clip_norm must be a positive number or None, got {clip_norm!r}")
    if weight is not None and not (isinstance(weight, str) and weight):
        raise InputError(f"weight must be the name of an entry of the loss function's aux, or None, got {weight!r}")
    has_budget, dtype = memory_budget not in (None, "none"), read_compute_dtype(compute_dtype)
    numerics = Numerics(
        clip_norm=clip_norm,
        compute_dtype=dtype,
        skip_nonfinite=_read_flag(skip_nonfinite, "skip_nonfinite"),
        check_gradients=None if check_gradients is None else _read_flag(check_gradients, "check_gradients"),
        accumulate=_read_count(accumulate, 1, "accumulate must be a number of micro-batches"),
        weight=weight,
        extra_args=_read_extra_args(extra_args),
        loss_scale=_read_loss_scale(loss_scale, dtype, accumulate),
        trainable=trainable,
    )
    planning = Planning(
        memory_budget_bytes=parse_bytes(memory_budget, "memory_budget") if has_budget else None,
        takes_device_budget=memory_budget is None,
        reserve_factor=reserve_factor,
        plan=_read_record(Plan, plan, "plan"),
        policy=policy,
        profile=profile if profile in (MEASURE, ESTIMATE) else _read_record(Profile, profile, "profile"),
        remat=check_remat(remat),
        tiles=check_tiles(tiles),
        offload_activations=_read_flag(offload_activations, "offload_activations"),
        merge_small=_read_flag(merge_small, "merge_small"),
        granularity=granularity,
    )
    return Options(
        numerics,
        planning,
        record_steps=_read_count(record_steps, 0, "record_steps must be a number of steps"),
        cached_shapes=_read_count(cached_shapes, 1, "cached_shapes must be a number of shapes"),
    )


def _read_extra_args(value: Any) -> dict[str, Any] | None:
    if value is None:
        return None
    try:
        named = {str(name): each for name, each in value.items()}
        return jax.tree.map(lambda leaf: np.array(leaf, jax.dtypes.result_type(leaf)), named)
    except (AttributeError, TypeError, ValueError) as error:
        raise InputError(f"extra_args must map names to numbers, arrays or trees of them, got {value!r}") from error


def _read_flag(value: Any, name: str) -> bool:
    if not isinstance(value, bool):
        raise InputError(f"{name} must be True or False, got {value!r}")
    return value


def _read_count(value: Any, least: int, rule: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InputError(f"{rule}, {least} or more, got {value!r}")
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def read_compute_dtype(value: Any, name: str = "compute_dtype") -> Any:
    """Reads a floating dtype; None stays None.

    Raises:
      InputError: if it is no floating dtype of at least 16 bits that JAX has.
    """
    if value is None:
        return None
    try:
        dtype = jnp.dtype(value)
    except TypeError:
        dtype = None
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        raise InputError(f'{name} must be a floating dtype such as "bfloat16", got {value!r}')
    if dtype.itemsize < 2:
        raise InputError(f"{name} must have at least 16 bits, since gradients are summed in it, got {value!r}")
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise InputError(f"{name} {value!r} needs 64-bit numbers: jax.config.update('jax_enable_x64', True)")
    return dtype


def _read_loss_scale(value: Any, compute_dtype: Any, accumulate: int) -> LossScale | None:
    if value is None:
        return LossScale() if compute_dtype == jnp.float16 else None
    if value == "dynamic":
        return LossScale()
    if not (_is_number(value) and math.isfinite(value) and value > 0):
        raise InputError(f'loss_scale must be "dynamic", a positive number or None, got {value!r}')
    # Gradients are divided by loss_scale * accumulate in fp32, where subnormal numbers count as zero.
    least, most = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
    if not least <= value <= most / accumulate:
        raise InputError(
            f"loss_scale must lie in the range of fp32, here [{least:.3g}, {most / accumulate:.3g}], got {value!r}"
        )
    return None if value == 1 else LossScale(float(value), is_dynamic=False)


def _read_record(kind: Any, value: Any, name: str) -> Any:
    if value is None or isinstance(value, kind):
        return value
    if not isinstance(value, str | os.PathLike):
        raise InputError(f"{name} must be a {kind.__name__} or the path of its JSON file, got {value!r}")
    return kind.load(value)
