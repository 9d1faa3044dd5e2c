"""How fine layers are: all parameters between two cuts, or those of each module.

    profile of modules --coarser--> profile of blocks
            `-----------plan both, the faster one-----' --> profile and plan

A block's programs are the same for both. Finer layers let a plan read the norms of a block in place while it loads the
matrices, or load some of the matrices; MemFerry plans its layers so. But each further layer is loaded and offloaded by
copies of its own, which take time to issue.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from jaxferry.errors import BudgetError, InputError
from jaxferry.modes import BLOCK, FASTER, GRANULARITIES, MODULE, Remat
from jaxferry.plan.auto import Auto
from jaxferry.plan.base import Request
from jaxferry.plan.records import LayerPlan, Plan
from jaxferry.planning import as_run, plan_for
from jaxferry.profiling.layer_records import LayerProfile
from jaxferry.profiling.machines import Machine
from jaxferry.profiling.records import Profile
from jaxferry.schedule import Kind, needed_bytes, schedule_step
from jaxferry.simulate.report import predict

_SUMS = (
    *("param_bytes", "grad_bytes", "state_bytes", "load_s", "forward_s", "forward_dha_s", "backward_s"),
    *("backward_dha_s", "backward_go_s", "offload_s", "update_s", "inter_forward_s", "inter_backward_s"),
    *("forward_read_s", "backward_read_s", "backward_write_s"),
)
_SUMS_IF_ALL = ("state_up_s", "state_down_s")
_COPIES = (Kind.LOAD, Kind.RELOAD, Kind.REFRESH, Kind.OFFLOAD, Kind.STATE_UP, Kind.STATE_DOWN)
_LAUNCHES = 4
"""What `Machine.issue_s` covers: a forward, a backward, a load and an offload."""
_WORTH = 0.99


def coarser(profile: Profile) -> Profile:
    """The profile with one layer for each program, which has all of its parameters.

    Programs that share only some of their parameters, or of their block's, with others keep their layers.
    """
    latency_s, launch_s = _figure(profile, "link_latency_s"), _figure(profile, "launch_s")
    blocks = ([profile.layers[layer] for layer in members] for members in _blocks(profile))
    readers = _readers_of_blocks(profile)
    layers = tuple(
        own[0] if len(own) == 1 and len(readers.get(own[0].block, ())) != 1 else _joined(own, latency_s, launch_s)
        for own in blocks
    )
    return dataclasses.replace(profile, layers=layers)


def _readers_of_blocks(profile: Profile) -> dict[str, set[tuple[str, ...]]]:
    """For each stated block, the parameter groups of its programs: one set of them if all read the same."""
    found: dict[str, set[tuple[str, ...]]] = {}
    for members in profile.programs:
        layers = [profile.layers[layer] for layer in members]
        for block in {layer.block for layer in layers if layer.block}:
            found.setdefault(block, set()).add(tuple(layer.parameters for layer in layers))
    return found


def _blocks(profile: Profile) -> list[tuple[int, ...]]:
    """The layers of each layer of the coarser profile."""
    sharing: dict[str, set[tuple[str, ...]]] = {}
    groups = [tuple(profile.layers[layer].parameters for layer in members) for members in profile.programs]
    for of_program in groups:
        for group in of_program:
            sharing.setdefault(group, set()).add(of_program)
    found, readers = list[tuple[int, ...]](), _readers_of_blocks(profile)
    for members, of_program in zip(profile.programs, groups, strict=True):
        blocks = {profile.layers[member].block for member in members}
        is_alone = all(len(sharing[group]) == 1 for group in of_program)
        is_alone &= all(len(readers.get(block, ())) < 2 for block in blocks)
        found += [members] if is_alone else [(member,) for member in members]
    return found


def finer(profile: Profile, plan: Plan) -> Plan:
    """The plan of a coarser profile for the layers of this one, with its own prediction."""
    layers: list[LayerPlan] = []
    for members, own in zip(_blocks(profile), plan.layers, strict=True):
        first, *others = (dataclasses.replace(own, name=profile.layers[member].name) for member in members)
        layers += [first, *(dataclasses.replace(layer, remat=Remat.NONE) for layer in others)]
    return predict(profile, as_run(profile, dataclasses.replace(plan, layers=tuple(layers))))


def check_granularity(granularity: str) -> None:
    """Raises InputError if there is no such granularity."""
    if granularity not in GRANULARITIES:
        raise InputError(f"granularity must be one of {', '.join(GRANULARITIES)}, got {granularity!r}")


def at_granularity(
    profile: Profile, policy: str, request: Request, granularity: str, is_planned: bool = True
) -> tuple[Profile, Plan | None]:
    """Like `plan_finest`; without a plan if that is not wanted and not needed to choose."""
    check_granularity(granularity)
    if is_planned or granularity == FASTER:
        return plan_finest(profile, policy, request, granularity)
    return (coarser(profile) if granularity == BLOCK else profile), None


def plan_finest(profile: Profile, policy: str, request: Request, granularity: str) -> tuple[Profile, Plan]:
    """The plan of a policy for the layers of a profile, for its blocks, or for whichever is faster.

    Args:
      profile: the layers; finer ones share programs.
      policy: name of the policy.
      request: its requirements.
      granularity: `"module"` for the layers as they are, `"block"` for one a program, `"auto"` for layers as they are
        where these are faster by more than a hundredth, or where blocks do not fit, and else for blocks. What policy
        `auto` plans for layers as they are is no slower than what it plans for blocks.

    Returns:
      The profile that was planned for, and the plan.

    Raises:
      BudgetError: if neither fits; it names the smaller of both needs.
    """
    check_granularity(granularity)
    blocks = coarser(profile)
    if blocks.layers == profile.layers:
        return profile, plan_for(profile, policy, request)
    if granularity == BLOCK:
        return blocks, plan_for(blocks, policy, request)
    if granularity == MODULE and policy != Auto.name:
        return profile, plan_for(profile, policy, request)
    found, errors = dict[str, tuple[Profile, Plan]](), list[BudgetError]()
    for name, each in ((BLOCK, blocks), (MODULE, profile)):
        try:
            found[name] = each, plan_for(each, policy, request)
        except BudgetError as error:
            errors.append(error)
    if not found:
        raise min(errors, key=lambda error: error.smallest_bytes)
    if policy == Auto.name and BLOCK in found:
        _add_finer(found, profile, request.memory_budget_bytes)
    if MODULE not in found:
        if granularity == MODULE:
            raise errors[-1]
        return found[BLOCK]
    if granularity == MODULE or BLOCK not in found:
        return found[MODULE]
    is_worth_it = step_s(*found[MODULE]) < _WORTH * step_s(*found[BLOCK])
    return found[MODULE if is_worth_it else BLOCK]


def _add_finer(found: dict[str, tuple[Profile, Plan]], profile: Profile, budget_bytes: int | None) -> None:
    """Replaces the plan for the layers as they are by that for blocks if this fits and is faster."""
    made = finer(profile, found[BLOCK][1])
    fits = budget_bytes is None or needed_bytes(profile, made) <= budget_bytes
    if fits and (MODULE not in found or step_s(profile, made) < step_s(*found[MODULE])):
        found[MODULE] = profile, made


def step_s(profile: Profile, plan: Plan) -> float:
    """Seconds of a step in a long run: predicted, or what issuing takes if that is longer."""
    tasks = schedule_step(profile, plan).tasks
    num_launches = 2 * len(profile.programs) + sum(task.kind in _COPIES for task in tasks)
    predicted_s = math.inf if plan.predicted is None else plan.predicted.steady_step_s
    return max(predicted_s, num_launches / _LAUNCHES * _figure(profile, "issue_s"))


def _figure(profile: Profile, name: str) -> float:
    """A figure of the profile's machine, or the usual one."""
    value = profile.machine.get(name, getattr(Machine, name))
    return float(value) if isinstance(value, int | float) else 0.0


def _joined(layers: Sequence[LayerProfile], latency_s: float, launch_s: float) -> LayerProfile:
    """One layer with the parameters of several that share a program.

    It is loaded and offloaded by one copy, as its state is, and updated by one kernel.
    """
    made: dict[str, Any] = {key: sum(getattr(layer, key) for layer in layers) for key in _SUMS}
    for key in ("load_s", "offload_s"):
        made[key] = _of_one_copy([getattr(layer, key) for layer in layers], latency_s)
    trained = [layer for layer in layers if layer.has_gradient]
    for key in _SUMS_IF_ALL:
        given = [getattr(layer, key) for layer in trained]
        made[key] = None if not given or None in given else _of_one_copy(given, latency_s)
    updates = [layer.update_gpu_s for layer in trained]
    known = [seconds for seconds in updates if seconds is not None]
    # A kernel that takes as long as the shortest one has next to nothing to do.
    longer_s = sum(seconds for seconds in known if seconds > launch_s)
    made["update_gpu_s"] = max(longer_s, *known) if known and len(known) == len(updates) else None
    made |= _names_of_block(layers)
    made |= {key: any(getattr(layer, key) for layer in layers) for key in ("backward_reads", "has_gradient")}
    if any(layer.sum_bytes for layer in layers):
        made["sum_bytes"] = sum(layer.offload_bytes for layer in layers)
    return dataclasses.replace(layers[0], **made)


def _of_one_copy(seconds: Sequence[float], latency_s: float) -> float:
    """Seconds of one copy in place of several. Those of no bytes take no time, and have no latency."""
    own = [each for each in seconds if each]
    return max(sum(own) - latency_s * (len(own) - 1), *own) if own else 0.0


def _names_of_block(layers: Sequence[LayerProfile]) -> dict[str, str]:
    """The name and the parameter group of the block of these layers: the stated one, or by the layers' own names."""
    first, blocks = layers[0], {layer.block for layer in layers}
    if len(blocks) == 1 and first.block:
        number = first.name.removeprefix(first.parameters)
        is_numbered = first.name.startswith(first.parameters) and (not number or number.startswith("#"))
        return {"name": first.block + number * is_numbered, "parameters": first.block, "block": ""}
    return {key: _block_of([getattr(layer, key) for layer in layers]) for key in ("name", "parameters")} | {"block": ""}


def _block_of(names: Sequence[str]) -> str:
    """The name of the block whose layers have these names, as in `jaxferry.partition.groups.modules_of`."""
    for name in names:
        block, _, last = name.rpartition("/")
        if last.partition("#")[0] == "vectors" and block:
            return block + "".join(last.partition("#")[1:])
    parts = [name.split("/") for name in names]
    common = []
    for keys in zip(*parts, strict=False):
        if len(set(keys)) > 1:
            break
        common.append(keys[0])
    return "/".join(common) or "+".join(dict.fromkeys(part[0] for part in parts))
