"""Chooses the plan of a training step: the user's own, or a policy's for this machine."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxferry.costs import (
    ADAMW,
    MACHINES,
    Machine,
    Profile,
    UpdateBytes,
    estimate_profile,
    partition_costs,
    update_on_device_s,
)
from jaxferry.engine import RematVariants, summed_groups, with_program_facts, with_sum_bytes, without_times
from jaxferry.errors import BudgetError, InputError
from jaxferry.modes import BLOCK, FASTER, MODULE, Mode
from jaxferry.partition import AUTO, Partition
from jaxferry.planner import (
    SIMPLE_POLICIES,
    FinestPlanner,
    Request,
    as_run,
    first_that_fits,
    levels_of_tiles,
    numbers_to_try,
    plan_in_tiles,
    tiles_of,
    with_update_order,
)
from jaxferry.settings import users_stacklevel
from jaxferry.step import LayerPlan, Plan, UpdateOrder, fetch_seconds_a_byte, save_seconds_a_byte
from jaxferry.training.options import Planning

DEFAULT_MACHINE = "h200-pcie5"
"""The machine that a profile is estimated for if the device is not a known GPU (a CPU, for example)."""

_WITHOUT_TIMES = ("zero-offload", "native-offload", "native-overlapped", "l2l")


def needs_times(policy: str | None) -> bool:
    """Whether a policy's choice depends on a profile's times. The baselines' choice does not."""
    return policy is not None and policy not in _WITHOUT_TIMES


@dataclasses.dataclass(frozen=True)
class Conditions:
    """What plans depend on beside the segments and their costs.

    Attributes:
      device_kind: the device's own name, such as `"NVIDIA H200"`.
      updates_after_all: whether updates wait for all gradients under any plan.
      gradient_buffers: as of `Profile`.
      updates_together: whether one update covers several groups.
      staging_bytes: device memory that transfers need besides the moved bytes.
      state_bytes: bytes of masters and optimizer state of each parameter group, by name.
      has_own_memory: whether device memory is not host memory, so that a policy may update groups on the device.
      accumulate: the number of micro-batches of an update.
      update: the bytes of an update, by parameter.
    """

    device_kind: str
    updates_after_all: bool = False
    gradient_buffers: int | None = None
    updates_together: bool = False
    staging_bytes: int = 0
    state_bytes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    has_own_memory: bool = True
    accumulate: int = 1
    update: UpdateBytes = ADAMW

    def applied(self, profile: Profile, variants: RematVariants) -> Profile:
        """The profile with the bytes of sums over micro-batches, and with when updates run."""
        groups = summed_groups(variants.base, variants.derivatives, self.accumulate)
        return dataclasses.replace(
            with_sum_bytes(profile, variants.base, groups),
            updates_after_all=self.updates_after_all,
            updates_together=self.updates_together,
            gradient_buffers=self.gradient_buffers,
        )


def planning_profile(
    variants: RematVariants,
    planning: Planning,
    given: Profile | None,
    conditions: Conditions,
    temporaries: bool = False,
) -> Profile:
    """The profile that a step is planned and lowered with, with the facts of its programs.

    Without a `given` one, the user's own or measured, it is estimated by roofline if a policy is to choose the plan.
    Otherwise it has sizes only. `temporaries`: whether to estimate what programs need besides arguments and results.
    Raises `InputError` if the given profile is for another model.
    """
    parts = variants.base
    num_devices, num_processes = parts.graph.num_devices, parts.graph.num_processes
    if given is not None:
        _check_names("profile", given, parts)
        if (given.num_devices, given.num_processes) != (num_devices, num_processes):
            by = "" if num_processes == given.num_processes else f" of {given.num_processes} processes"
            own = by and f" of {num_processes}"
            raise InputError(f"the profile is of {given.num_devices} devices{by}, and {num_devices}{own} train")
        profile = given
    elif planning.lets_policy_choose:
        costs, facts = partition_costs(parts, None, temporaries), {"device": conditions.device_kind}
        machine, devices = _machine_of(conditions.device_kind), (num_devices, num_processes)
        profile = estimate_profile(costs, machine, facts, *devices, conditions.update)
        profile = profile.without_streaming()  # those times are of all parameters alike
    else:
        profile = without_times(parts)
    is_offloaded, staging_bytes = planning.offloads, conditions.staging_bytes
    profile = with_program_facts(profile, parts, variants.derivatives, is_offloaded, staging_bytes)
    # A given plan may update groups on any device, and its tasks follow each other by the given times.
    may_update = conditions.has_own_memory or planning.plan is not None
    return with_updates_on_device(conditions.applied(profile, variants), parts, conditions, may_update)


def with_updates_on_device(profile: Profile, parts: Partition, conditions: Conditions, may_update: bool) -> Profile:
    """The profile with the costs of updates on the device: its own, or estimated for a known GPU.

    Masters and state that stream pass the links at the speeds of loads and offloads. One update of several groups does
    not stream, nor do those of several devices.
    """
    machine, layers, is_together = known_machine(conditions.device_kind), [], profile.updates_together
    load_s_a_byte, offload_s_a_byte = fetch_seconds_a_byte(profile), save_seconds_a_byte(profile)
    for layer, use in zip(profile.layers, parts.uses, strict=True):
        seconds, group = layer.update_gpu_s, parts.layers[use.group]
        if seconds is None and machine is not None and profile.has_times:
            num = -(-group.trained.num_parameters // profile.num_devices)
            seconds = update_on_device_s(num, machine, conditions.update)
            if profile.num_devices > 1:  # exchanges among the devices are parts of a load and of an offload
                seconds += layer.load_s + layer.offload_s
        size = conditions.state_bytes.get(group.name, 0)
        up_s, down_s = layer.state_up_s, layer.state_down_s
        if profile.has_times:
            up_s = size * load_s_a_byte if up_s is None else up_s
            down_s = (size + layer.param_bytes) * offload_s_a_byte if down_s is None else down_s
        if not may_update or group.name not in conditions.state_bytes:
            seconds = None
        if is_together or profile.num_devices > 1 or seconds is None:
            up_s = down_s = None
        streamed_s = None if up_s is None else layer.update_streamed_s
        times = {"update_gpu_s": seconds, "update_streamed_s": streamed_s, "state_up_s": up_s, "state_down_s": down_s}
        layers.append({"state_bytes": size, **times})
    return profile.with_layers(layers)


def with_state_on_disk(
    profile: Profile, parts: Partition, sizes: Mapping[str, int], rates: tuple[float, float], may_update: bool
) -> Profile:
    """The profile of a step that reads and writes masters and state of some groups in a scratch file.

    Args:
      profile: the layers.
      parts: the segments.
      sizes: the bytes of masters and state of each group that is in the file, by name.
      rates: seconds a byte of a read and of a write.
      may_update: whether a plan may update such groups on the device.
    """
    none = {} if may_update else dict.fromkeys(("update_gpu_s", "update_streamed_s", "state_up_s", "state_down_s"))
    names = [parts.layers[use.group].name for use in parts.uses]
    seconds = ({"state_read_s": sizes.get(x, 0) * rates[0], "state_write_s": sizes.get(x, 0) * rates[1]} for x in names)
    return profile.with_layers(own | none if x in sizes else {} for x, own in zip(names, seconds, strict=True))


def choose_plan(variants: RematVariants, planning: Planning, profile: Profile) -> Plan:
    """Chooses the modes of the layers.

    A given plan is used for exactly these layers. Without plan and policy, every layer is loaded once (GFGB), and the
    reserve factor alone chooses gradients. If no plan of a policy fits into the memory budget, the policy plans for its
    smallest feasible budget instead: the engine counts exact bytes afterwards. Raises `InputError` if the plan is for
    another model, or the policy does not exist.
    """
    parts, policy = variants.base, planning.chooser
    if planning.plan is not None:
        _check_names("plan", planning.plan, parts)
        if profile.num_processes > 1 and planning.plan != planning.plan.updated_on_host():
            raise InputError(
                "the plan updates layers on the device, which devices of several processes do not: plan updates on the "
                'host ("update": "host")'
            )
        if profile.num_devices > 1 and planning.plan != planning.plan.without_streams():
            raise InputError(
                "the plan streams updates through the GPU, which several devices do not: plan updates on the host or "
                'where the state stays ("update": "host" or "resident")'
            )
        return _as_run(planning.plan, profile)
    if policy is None:
        layers = tuple(LayerPlan(use.name, Mode.GFGB) for use in parts.uses)
        plan = Plan("native-overlapped", 1.0, layers, update_order=UpdateOrder.NEED)
        return _as_run(with_update_order(profile, plan), profile)
    return planner_within(variants, planning, profile)(planning.memory_budget_bytes)


def tilings(
    parts: Partition,
    cut: Callable[[Any], RematVariants],
    planning: Planning,
    estimated: Callable[[RematVariants], Profile],
) -> list[Any]:
    """The numbers of tiles to try for the segments of a step, the best first.

    If they are open, a given plan or profile states them. Else they are chosen by estimates, and ever more tiles are
    tried after that: a program may need more memory than estimated.

    Args:
      parts: the segments.
      cut: makes them in tiles.
      planning: how the training step is planned.
      estimated: the estimated profile of segments, with temporaries.
    """
    given, budget_bytes = planning.given, planning.memory_budget_bytes
    is_open = planning.tiles == AUTO or (planning.tiles == 1 and planning.plan is not None)
    if is_open and given is not None and list(planning.given_names) == [use.name for use in parts.uses]:
        return [tiles_of(parts, given.layers)]
    if planning.tiles != AUTO or budget_bytes is None:
        return [1 if planning.tiles == AUTO else planning.tiles]
    in_tiles = {number: cut(number) for number in numbers_to_try(parts)}
    levels = levels_of_tiles({n: _may_recompute(each, estimated(each)) for n, each in in_tiles.items()})
    names = (planning.chooser,) if planning.chooser else SIMPLE_POLICIES

    def plan(index: int) -> Plan:
        request = Request(planning.reserve_factor)
        planners = (FinestPlanner(levels[index], name, request, MODULE) for name in names)
        return first_that_fits(functools.partial(each.plan, budget_bytes) for each in planners)[1]

    try:
        first, _ = plan_in_tiles(levels, budget_bytes, plan)
    except BudgetError:
        first = len(levels) - 1
    return [tiles_of(parts, level.layers) for level in levels[first:]]


def best_granularity(variants: RematVariants, planning: Planning, profile: Profile) -> str:
    """How fine layers should be: what a given plan or profile names, else what is faster for the policy."""
    policy = planning.chooser
    if planning.given_names:
        return MODULE if list(planning.given_names) == [use.name for use in variants.base.uses] else BLOCK
    if policy is None or not profile.has_times or not any(use.place for use in variants.base.uses):
        return BLOCK
    profile = _may_recompute(variants, profile)
    planner = FinestPlanner(profile, policy, Request(planning.reserve_factor), FASTER)
    return MODULE if planner.nearest(planning.memory_budget_bytes)[0] is profile else BLOCK


def planner_within(
    variants: RematVariants, planning: Planning, profile: Profile, policy: str | None = None
) -> Callable[[int | None], Plan]:
    """Returns a function that plans within a budget, or within the smallest feasible one if that is larger."""
    policy = policy or planning.chooser
    assert policy is not None, "without a policy there is nothing to choose"
    planner = FinestPlanner(_may_recompute(variants, profile), policy, Request(planning.reserve_factor), MODULE)
    return functools.cache(lambda budget_bytes: planner.nearest(budget_bytes)[1])


def _may_recompute(variants: RematVariants, profile: Profile) -> Profile:
    """The profile for plans that recompute only where the options leave it to them."""
    segments, uses = variants.base.segments, variants.base.uses
    return profile.only_recomputing([use.place == 0 and segments[use.segment].remat == AUTO for use in uses])


def _as_run(plan: Plan, profile: Profile) -> Plan:
    """The plan, with updates after all gradients where they must wait, and then in the better order."""
    changed = as_run(profile, plan)
    return with_update_order(profile, changed) if changed != plan and profile.has_times else changed


def known_machine(device_kind: str) -> Machine | None:
    """The built-in machine with this device, or None."""
    words = device_kind.lower().replace("geforce", "").replace(" ", "")
    return next((machine for name, machine in MACHINES.items() if name.split("-")[0] in words), None)


def _machine_of(device_kind: str) -> Machine:
    if (machine := known_machine(device_kind)) is not None:
        return machine
    if "nvidia" in device_kind.lower():
        warnings.warn(
            f"no performance figures for {device_kind!r}: planning with those of {DEFAULT_MACHINE}; profile= overrides",
            stacklevel=users_stacklevel(),
        )
    return MACHINES[DEFAULT_MACHINE]


def _check_names(what: str, given: Plan | Profile, parts: Partition) -> None:
    names, uses = [layer.name for layer in given.layers], [use.name for use in parts.uses]
    if names != uses:
        differing = next((n for n in [*uses, *names] if n not in uses or n not in names), "their order")
        raise InputError(
            f"the {what} is for another model: it has {len(names)} layers, the model {len(uses)}, and "
            f"they differ in {differing!r}{_hint(names, uses)}"
        )


def _hint(names: Sequence[str], uses: Sequence[str]) -> str:
    """What to do if the given names are those of the model's layers at another granularity."""
    for finer, coarser, wanted in ((names, uses, MODULE), (uses, names, BLOCK)):
        blocks = tuple(f"{name}/" for name in coarser)
        if len(finer) > len(coarser) and all(name in coarser or name.startswith(blocks) for name in finer):
            return f'; its layers are finer or coarser ones of this model: use granularity="{wanted}"'
    return ""
