"""The arguments of `train_step`, checked."""

from __future__ import annotations

import dataclasses
import math
import numbers
import os
from typing import Any

import jax.numpy as jnp

from jaxferry.errors import InputError
from jaxferry.partition import REMAT
from jaxferry.plan.records import Plan
from jaxferry.plan.registry import make_policy
from jaxferry.profiling.records import Profile
from jaxferry.units import parse_bytes


@dataclasses.dataclass(frozen=True)
class Options:
    """The checked arguments of `jaxferry.train_step`, which says what they mean."""

    memory_budget_bytes: int | None
    reserve_factor: float | None
    clip_norm: float | None
    compute_dtype: Any
    plan: Plan | None
    policy: str | None
    profile: Profile | None
    remat: str
    skip_nonfinite: bool
    record_steps: int


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
    record_steps: Any,
) -> Options:
    """Checks the arguments of `train_step`; reads plan and profile where they are files.

    Raises:
      InputError: if one of them is not acceptable.
    """
    if reserve_factor is not None and not (_is_number(reserve_factor) and 0 <= reserve_factor <= 1):
        raise InputError(f"reserve_factor must lie in [0, 1], got {reserve_factor!r}")
    if clip_norm is not None and not (_is_number(clip_norm) and math.isfinite(clip_norm) and clip_norm > 0):
        raise InputError(f"clip_norm must be a positive number or None, got {clip_norm!r}")
    if remat not in REMAT:
        raise InputError(f"remat must be one of {', '.join(REMAT)}, got {remat!r}")
    if not isinstance(skip_nonfinite, bool):
        raise InputError(f"skip_nonfinite must be True or False, got {skip_nonfinite!r}")
    if isinstance(record_steps, bool) or not isinstance(record_steps, int) or record_steps < 0:
        raise InputError(f"record_steps must be a number of steps, 0 or more, got {record_steps!r}")
    if plan is not None and policy is not None:
        raise InputError(f"plan and policy exclude each other, got both (policy {policy!r})")
    if policy is not None:
        make_policy(policy)
    return Options(
        memory_budget_bytes=None if memory_budget is None else parse_bytes(memory_budget, "memory_budget"),
        reserve_factor=reserve_factor,
        clip_norm=clip_norm,
        compute_dtype=_read_dtype(compute_dtype),
        plan=_read_record(Plan, plan, "plan"),
        policy=policy,
        profile=_read_record(Profile, profile, "profile"),
        remat=remat,
        skip_nonfinite=skip_nonfinite,
        record_steps=record_steps,
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _read_dtype(value: Any) -> Any:
    if value is None:
        return None
    try:
        dtype = jnp.dtype(value)
    except TypeError:
        dtype = None
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        raise InputError(f"compute_dtype must be a floating dtype such as jnp.bfloat16, or None, got {value!r}")
    return dtype


def _read_record(kind: Any, value: Any, name: str) -> Any:
    if value is None or isinstance(value, kind):
        return value
    if not isinstance(value, str | os.PathLike):
        raise InputError(f"{name} must be a {kind.__name__} or the path of its JSON file, got {value!r}")
    return kind.load(value)
