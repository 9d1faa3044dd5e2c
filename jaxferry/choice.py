"""Chooses the plan of a training step: the user's own, or a policy's for this machine."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any

from jaxferry.engine.facts import with_program_facts
from jaxferry.errors import BudgetError, InputError
from jaxferry.modes import Mode
from jaxferry.partition import AUTO, Derivative, Partition
from jaxferry.plan.records import LayerPlan, Plan, UpdateOrder
from jaxferry.planning import make_plan, with_update_order
from jaxferry.profiling.estimate import estimate_profile
from jaxferry.profiling.machines import MACHINES
from jaxferry.profiling.records import Profile
from jaxferry.profiling.segment_costs import partition_costs

DEFAULT_MACHINE = "h200-pcie5"
"""The machine that a profile is estimated for if the device is not a known GPU (a CPU, for example)."""

_WITHOUT_TIMES = ("zero-offload", "native-offload", "native-overlapped", "l2l")


def needs_times(policy: str | None) -> bool:
    """Whether a policy's choice depends on a profile's times. The baselines' choice does not."""
    return policy is not None and policy not in _WITHOUT_TIMES


def choose_plan(
    parts: Partition,
    derivatives: Mapping[int, Derivative],
    *,
    plan: Plan | None,
    policy: str | None,
    profile: Profile | None,
    device_kind: str,
    reserve_factor: float | None,
    memory_budget_bytes: int | None,
    remat: Any = None,
    offload_activations: bool = False,
    updates_after_all: bool = False,
) -> tuple[Plan, Profile | None]:
    """Chooses the modes of the segments; returns the plan and the profile behind it, if any.

    Args:
      parts: the segments.
      derivatives: by program number.
      plan: a plan for exactly these segments, used unchanged; None asks the policy.
      policy: the policy; None loads every layer once (GFGB), and chooses gradients by the reserve factor alone.
      profile: the profile to plan with; None estimates one by roofline.
      device_kind: the device's own name, such as `"NVIDIA H200"`.
      reserve_factor: share of all gradient bytes that may stay on the device; None for the policy's default.
      memory_budget_bytes: device memory, passed to the policy. If no plan of the policy fits, the policy plans for its
        smallest feasible budget instead: the engine counts exact bytes afterwards.
      remat: what all segments keep between forward and backward; None for each segment's own choice. `AUTO` leaves it
        to the plan.
      offload_activations: whether values wait in host memory for their backward.
      updates_after_all: whether updates wait for all gradients under any plan.

    Raises:
      InputError: if the plan or the profile is for another model, or the policy does not exist.
    """
    names = [segment.name for segment in parts.segments]
    if profile is not None:
        _check_names("profile", [layer.name for layer in profile.layers], names)
        profile = with_program_facts(profile, parts, derivatives, offload_activations)
        profile = dataclasses.replace(profile, updates_after_all=updates_after_all)
    if plan is not None:
        _check_names("plan", [layer.name for layer in plan.layers], names)
        return plan, profile
    if policy is None and reserve_factor is not None and reserve_factor < 1:
        policy = "native-overlapped"
    if policy is None:
        layers = tuple(LayerPlan(name, Mode.GFGB) for name in names)
        plan = Plan("native-overlapped", 1.0, layers, update_order=UpdateOrder.NEED)
        return plan if profile is None else with_update_order(profile, plan), profile
    if profile is None:
        machine = _machine_of(device_kind)
        profile = estimate_profile(partition_costs(parts, remat), MACHINES[machine], {"device": device_kind})
        profile = with_program_facts(profile, parts, derivatives, offload_activations)
        profile = dataclasses.replace(profile, updates_after_all=updates_after_all)
    choices = [segment.remat if remat is None else remat for segment in parts.segments]
    profile = profile.only_recomputing([choice == AUTO for choice in choices])
    options: dict[str, Any] = {"reserve_factor": reserve_factor}
    try:
        return make_plan(profile, policy, memory_budget_bytes=memory_budget_bytes, **options), profile
    except BudgetError as error:
        return make_plan(profile, policy, memory_budget_bytes=error.smallest_bytes, **options), profile


def _machine_of(device_kind: str) -> str:
    words = device_kind.lower().replace("geforce", "").replace(" ", "")
    for name in MACHINES:
        if name.split("-")[0] in words:
            return name
    if "nvidia" in words:
        warnings.warn(
            f"no performance figures for {device_kind!r}: planning with those of {DEFAULT_MACHINE}; profile= overrides",
            stacklevel=6,
        )
    return DEFAULT_MACHINE


def _check_names(what: str, given: list[str], segments: list[str]) -> None:
    if given != segments:
        differing = next((n for n in [*segments, *given] if n not in segments or n not in given), "their order")
        raise InputError(
            f"the {what} is for another model: it has {len(given)} layers, the model {len(segments)} segments, and "
            f"they differ in {differing!r}"
        )
