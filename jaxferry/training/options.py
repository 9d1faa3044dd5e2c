"""The checked arguments of `train_step`, by who reads them, and the metrics that a step returns under them."""

from __future__ import annotations

import dataclasses
import math
import numbers
import os
import warnings
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxferry.costs import Profile
from jaxferry.engine import LossScale, Rules, StepResult
from jaxferry.errors import InputError, NonFiniteError
from jaxferry.modes import BLOCK
from jaxferry.partition import AUTO, Partition, Trainable, check_remat, check_tiles
from jaxferry.planner import check_granularity, make_policy
from jaxferry.settings import looks_for_nans, users_stacklevel
from jaxferry.step import Plan
from jaxferry.units import parse_bytes

MEASURE, ESTIMATE = "measure", "estimate"
"""Keywords accepted instead of a profile; a file with such a name is given as `./measure`."""

ALL = "all"
"""`gradient_buffers` for memory of its own for each gradient."""

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
    offload_activations: bool | str = False
    gradient_buffers: int | str = AUTO
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
    def offloads(self) -> bool | str:
        """Whether activations wait in host memory, or `AUTO`: a plan says which."""
        is_planned = self.plan is not None and self.plan.offloads_activations
        return AUTO if is_planned and not self.offload_activations else self.offload_activations

    @property
    def lets_policy_choose(self) -> bool:
        """Whether a policy chooses the plan, which is not given."""
        return self.plan is None and self.chooser is not None

    @property
    def given_names(self) -> tuple[str, ...]:
        """The names of the layers of the given plan or profile; empty without any."""
        return () if self.given is None else tuple(layer.name for layer in self.given.layers)

    @property
    def given(self) -> Plan | Profile | None:
        """The given plan, or profile; None without any."""
        given = self.plan if self.plan is not None else self.profile
        return None if isinstance(given, str) else given


@dataclasses.dataclass(frozen=True)
class Options:
    """The checked arguments of `jaxferry.train_step`, which documents them."""

    numerics: Numerics = Numerics()
    planning: Planning = Planning()
    record_steps: int = 0
    cached_shapes: int = CACHED_SHAPES
    scratch: str | None = None
    host_memory_bytes: int | None = None


def read_options(given: Mapping[str, Any]) -> Options:
    """Checks the arguments of `train_step`, by name; reads plan and profile if they are files."""
    plan, policy, profile, dtype = given["plan"], given["policy"], given["profile"], given["compute_dtype"]
    reserve_factor, clip_norm, weight = given["reserve_factor"], given["clip_norm"], given["weight"]
    if plan is not None and policy is not None:
        raise InputError(f"plan and policy exclude each other, got both (policy {policy!r}): give one")
    if policy is not None:
        make_policy(policy)
    check_granularity(given["granularity"])
    if reserve_factor is not None and not (_is_number(reserve_factor) and 0 <= reserve_factor <= 1):
        raise InputError(f"reserve_factor must lie in [0, 1], got {reserve_factor!r}")
    if clip_norm is not None and not (_is_number(clip_norm) and math.isfinite(clip_norm) and clip_norm > 0):
        raise InputError(f"clip_norm must be a positive number or None, got {clip_norm!r}")
    if weight is not None and not (isinstance(weight, str) and weight):
        raise InputError(f"weight must be the name of an entry of the loss function's aux, or None, got {weight!r}")
    flags = {name: _read_flag(given, name) for name in ("skip_nonfinite", "merge_small")}
    offload = given["offload_activations"]
    if not (isinstance(offload, bool) or (isinstance(offload, str) and offload == AUTO)):
        raise InputError(f'offload_activations must be True, False or "auto", got {offload!r}')
    budget, dtype = given["memory_budget"], read_compute_dtype(dtype)
    numerics = Numerics(
        clip_norm=clip_norm,
        compute_dtype=dtype,
        skip_nonfinite=flags["skip_nonfinite"],
        check_gradients=None if given["check_gradients"] is None else _read_flag(given, "check_gradients"),
        accumulate=_read_count(given, "accumulate", 1, "micro-batches"),
        weight=weight,
        extra_args=_read_extra_args(given["extra_args"]),
        loss_scale=_read_loss_scale(given["loss_scale"], dtype, given["accumulate"]),
        trainable=given["trainable"],
    )
    plan = _read_record(Plan, plan, "plan")
    planning = Planning(
        memory_budget_bytes=None if budget in (None, "none") else parse_bytes(budget, "memory_budget"),
        takes_device_budget=budget is None,
        reserve_factor=reserve_factor,
        plan=plan,
        policy=policy,
        profile=profile if profile in (MEASURE, ESTIMATE) else _read_record(Profile, profile, "profile"),
        remat=check_remat(given["remat"]),
        tiles=check_tiles(given["tiles"]),
        offload_activations=offload,
        gradient_buffers=_read_gradient_buffers(given["gradient_buffers"], numerics.rules, plan),
        merge_small=flags["merge_small"],
        granularity=given["granularity"],
    )
    counts = _read_count(given, "record_steps", 0, "steps"), _read_count(given, "cached_shapes", 1, "shapes")
    scratch, host_memory = given["scratch"], given["host_memory"]
    if host_memory is not None and scratch is None:
        raise InputError(f"host_memory={host_memory!r} needs scratch=, the folder for what it does not hold")
    if scratch is not None and not (isinstance(scratch, str | os.PathLike) and os.fspath(scratch)):
        raise InputError(f"scratch must be the path of a folder, got {scratch!r}")
    host_memory_bytes = None if host_memory is None else parse_bytes(host_memory, "host_memory")
    if host_memory_bytes == 0:
        raise InputError(f"host_memory must be positive, got {host_memory!r}")
    return Options(numerics, planning, *counts, None if scratch is None else os.fspath(scratch), host_memory_bytes)


def check_gradient_buffers(value: Any) -> int | str:
    """Returns the argument `gradient_buffers` of `train_step`; raises `InputError` if it is not acceptable."""
    is_number = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    if not (is_number or (isinstance(value, str) and value in (AUTO, ALL))):
        raise InputError(f"gradient_buffers must be a whole number, 1 or more, {AUTO!r} or {ALL!r}, got {value!r}")
    checked: int | str = value
    return checked


def _read_gradient_buffers(value: Any, rules: Rules, plan: Plan | None) -> int | str:
    value = (plan.gradient_buffers or ALL) if value == AUTO and plan is not None else check_gradient_buffers(value)
    if isinstance(value, int) and rules.need_all_gradients:
        raise InputError(
            f"gradient_buffers={value} needs updates that wait for no other gradient; with clip_norm, accumulate, "
            "skip_nonfinite, check_gradients or a dynamic loss_scale they wait for all"
        )
    return value


def _read_extra_args(value: Any) -> dict[str, Any] | None:
    if value is None:
        return None
    try:
        named = {str(name): each for name, each in value.items()}
        return jax.tree.map(lambda leaf: np.array(leaf, jax.dtypes.result_type(leaf)), named)
    except (AttributeError, TypeError, ValueError) as error:
        raise InputError(f"extra_args must map names to numbers, arrays or trees of them, got {value!r}") from error


def _read_flag(given: Mapping[str, Any], name: str) -> bool:
    if not isinstance(value := given[name], bool):
        raise InputError(f"{name} must be True or False, got {value!r}")
    return value


def _read_count(given: Mapping[str, Any], name: str, least: int, what: str) -> int:
    value = given[name]
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InputError(f"{name} must be a number of {what}, {least} or more, got {value!r}")
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def read_compute_dtype(value: Any, name: str = "compute_dtype") -> Any:
    """Reads a floating dtype; None stays None.

    Raises `InputError` if it is no floating dtype of at least 16 bits that JAX has.
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


def metrics_of(number: int, parts: Partition, result: StepResult, numerics: Numerics) -> dict[str, Any]:
    """Returns the metrics of a step, see `TrainStep.__call__`."""
    aux: Any = None if parts.aux_tree is None else jax.tree.unflatten(parts.aux_tree, result.aux)
    if numerics.is_weighted:
        _, (loss, aux) = aux
        result = dataclasses.replace(result, loss=loss)
        if result.weight == -np.inf:
            raise InputError(
                f"weight must be 0 or more in every micro-batch, got a negative one in step {number}; "
                "the state is that after the last update"
            )
    is_lost = not result.is_finite and not numerics.skip_nonfinite
    scale = numerics.loss_scale
    if is_lost and scale is not None and scale.is_dynamic and result.loss_scale > 1:
        is_lost = False  # the next step has a smaller scale
    if is_lost:
        raise _nonfinite(number, parts, result, numerics)
    if result.is_applied and result.nonfinite_gradient is not None and numerics.check_gradients is None:
        warnings.warn(
            f"step {number} has applied gradients that are not finite (layer {result.nonfinite_gradient!r}): "
            "check_gradients=True raises an error before the update, skip_nonfinite=True skips it",
            stacklevel=users_stacklevel(),
        )
    metrics: dict[str, Any] = {
        "loss": result.loss,
        "device_param_bytes_peak": result.device_param_bytes_peak,
    }
    if scale is not None:
        metrics["loss_scale"] = result.loss_scale
    if numerics.skip_nonfinite or (scale is not None and scale.is_dynamic):
        metrics["skipped"] = not result.is_finite
    if result.grad_norm is not None:
        metrics["grad_norm"] = result.grad_norm
    if result.mean_loss is not None:
        metrics["mean_loss"] = result.mean_loss
    if parts.aux_tree is not None:
        metrics["aux"] = aux
    return metrics


def _nonfinite(number: int, parts: Partition, result: StepResult, numerics: Numerics) -> NonFiniteError:
    """The error for a step whose loss or gradients are not finite."""
    loss, finite = np.asarray(result.loss), [bool(flag) for flag in result.finite]
    layer = parts.segments[finite.index(False)].name if False in finite else result.nonfinite_gradient
    what = f"the loss of step {number} is {loss}; the first layer with a non-finite output is {layer!r}"
    if np.isfinite(loss) and result.nonfinite_gradient is not None:
        layer = result.nonfinite_gradient
        what = f"the loss of step {number} is {loss}, but the gradient of layer {layer!r} is not finite"
    if numerics.is_weighted and np.isfinite(loss) and not 0 < result.weight < np.inf:
        layer, what = "", f"the weights of the micro-batches up to step {number} sum to {result.weight:g}"
    left = "before the step" if numerics.accumulate == 1 else "after the last update"
    told = f"{what}; the state is that {left} (train_step(skip_nonfinite=True) skips such steps)"
    return NonFiniteError(told, number, layer)
