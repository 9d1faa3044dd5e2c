"""Chooses the plan of a training step: the user's own, or a policy's for this machine."""

from __future__ import annotations

import dataclasses
import warnings

from jaxferry.engine import RematVariants
from jaxferry.engine.facts import with_program_facts
from jaxferry.errors import BudgetError, InputError
from jaxferry.modes import Mode
from jaxferry.options import Options
from jaxferry.partition import AUTO
from jaxferry.plan.base import Request
from jaxferry.plan.records import LayerPlan, Plan, UpdateOrder, Updates
from jaxferry.planning import plan_for, with_update_order
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
    variants: RematVariants,
    options: Options,
    profile: Profile | None,
    device_kind: str,
    updates_after_all: bool,
    staging_bytes: int = 0,
) -> tuple[Plan, Profile | None]:
    """Chooses the modes of the segments; returns the plan and the profile behind it, if any.

    A given plan is used for exactly these segments. Without plan and policy, every layer is loaded once (GFGB), and the
    reserve factor alone chooses gradients. If no plan of a policy fits into the memory budget, the policy plans for its
    smallest feasible budget instead: the engine counts exact bytes afterwards.

    Args:
      variants: the segments and their derivatives.
      options: those of the training step.
      profile: the profile to plan with; None estimates one by roofline if the policy needs one.
      device_kind: the device's own name, such as `"NVIDIA H200"`.
      updates_after_all: whether updates wait for all gradients under any plan.
      staging_bytes: device memory that transfers need besides the moved bytes.

    Raises:
      InputError: if the plan or the profile is for another model, or the policy does not exist.
    """
    names = [segment.name for segment in variants.base.segments]
    policy = options.policy
    if policy is None and options.reserve_factor is not None and options.reserve_factor < 1:
        policy = "native-overlapped"
    if profile is None and options.plan is None and policy is not None:
        machine = MACHINES[_machine_of(device_kind)]
        profile = estimate_profile(partition_costs(variants.base, None), machine, {"device": device_kind})
    if profile is not None:
        _check_names("profile", [layer.name for layer in profile.layers], names)
        is_offloaded = options.offload_activations
        profile = with_program_facts(profile, variants.base, variants.derivatives, is_offloaded, staging_bytes)
        profile = dataclasses.replace(profile, updates_after_all=updates_after_all)
    if options.plan is not None:
        _check_names("plan", [layer.name for layer in options.plan.layers], names)
        return _with_updates(options.plan, profile, updates_after_all), profile
    if policy is None or profile is None:
        layers = tuple(LayerPlan(name, Mode.GFGB) for name in names)
        plan = Plan("native-overlapped", 1.0, layers, update_order=UpdateOrder.NEED)
        plan = plan if profile is None else with_update_order(profile, plan)
        return _with_updates(plan, profile, updates_after_all), profile
    profile = profile.only_recomputing([segment.remat == AUTO for segment in variants.base.segments])
    request = Request(options.reserve_factor, options.memory_budget_bytes)
    try:
        return plan_for(profile, policy, request), profile
    except BudgetError as error:
        leanest = dataclasses.replace(request, memory_budget_bytes=error.smallest_bytes)
        return plan_for(profile, policy, leanest), profile


def _with_updates(plan: Plan, profile: Profile | None, after_all: bool) -> Plan:
    """The plan, with updates after all gradients where they must wait."""
    if not after_all or plan.updates is Updates.AFTER_ALL:
        return plan
    plan = dataclasses.replace(plan, updates=Updates.AFTER_ALL)
    return plan if profile is None else with_update_order(profile, plan)


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
