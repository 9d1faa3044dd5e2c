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

from jaxferry.costs import LayerProfile, Machine, Profile
from jaxferry.errors import BudgetError, InputError
from jaxferry.modes import BLOCK, FASTER, GRANULARITIES, MODULE, ActivationPlace, Remat
from jaxferry.planner.auto import Auto
from jaxferry.planner.base import Request
from jaxferry.planner.planning import as_run, planner_of, with_gap
from jaxferry.planner.preference import Placed, longest_equal_s, preferred, score_of
from jaxferry.step import Kind, LayerPlan, Plan, needed_bytes, predict, schedule_step

_SUMS = (
    *("param_bytes", "grad_bytes", "state_bytes", "load_s", "forward_s", "forward_dha_s", "backward_s"),
    *("backward_dha_s", "backward_go_s", "offload_s", "update_s", "inter_forward_s", "inter_backward_s"),
    *("forward_read_s", "backward_read_s", "backward_write_s"),
)
_SUMS_IF_ALL = ("state_up_s", "state_down_s", "state_read_s", "state_write_s")
_COPIES = (Kind.LOAD, Kind.RELOAD, Kind.REFRESH, Kind.OFFLOAD, Kind.STATE_UP, Kind.STATE_DOWN)
_LAUNCHES = 4
"""What `Machine.issue_s` covers: a forward, a backward, a load and an offload."""


def coarser(profile: Profile) -> Profile:
    """The profile with one layer for each program, which has all of its parameters.

    Programs that share only some of their parameters, or of their block's, with others keep their layers.
    """
    latency_s, launch_s = _figure(profile, "link_latency_s"), _figure(profile, "launch_s")
    blocks = ([profile.layers[layer] for layer in members] for members in _blocks(profile))
    readers = profile.once(_readers_of_blocks)
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
    found, readers = list[tuple[int, ...]](), profile.once(_readers_of_blocks)
    for members, of_program in zip(profile.programs, groups, strict=True):
        blocks = {profile.layers[member].block for member in members}
        is_alone = all(len(sharing[group]) == 1 for group in of_program)
        is_alone &= all(len(readers.get(block, ())) < 2 for block in blocks)
        found += [members] if is_alone else [(member,) for member in members]
    return found


def profile_of_plan(profile: Profile, plan: Plan) -> Profile:
    """The profile whose layers a plan has: this one, or its blocks; this one if the plan is for neither."""
    names = [layer.name for layer in plan.layers]
    if names == [layer.name for layer in profile.layers]:
        return profile
    blocks = coarser(profile)
    return blocks if names == [layer.name for layer in blocks.layers] else profile


def finer(profile: Profile, plan: Plan) -> Plan:
    """The plan of a coarser profile for the layers of this one, with its own prediction."""
    layers: list[LayerPlan] = []
    for members, own in zip(_blocks(profile), plan.layers, strict=True):
        first, *others = (dataclasses.replace(own, name=profile.layers[member].name) for member in members)
        keeps: dict[str, Any] = {"remat": Remat.NONE, "activations": ActivationPlace.DEVICE}
        layers += [first, *(dataclasses.replace(layer, **keeps) for layer in others)]
    return predict(profile, as_run(profile, dataclasses.replace(plan, layers=tuple(layers))))


def check_granularity(granularity: str) -> None:
    """Raises InputError if there is no such granularity."""
    if granularity not in GRANULARITIES:
        raise InputError(f"granularity must be one of {', '.join(GRANULARITIES)}, got {granularity!r}")


def plan_finest(profile: Profile, policy: str, request: Request, granularity: str) -> tuple[Profile, Plan]:
    """The plan of a policy for the layers of a profile, for its blocks, or for whichever is faster.

    Args:
      profile: the layers; finer ones share programs.
      policy: name of the policy.
      request: its requirements.
      granularity: `"module"` for the layers as they are, `"block"` for one a program, `"auto"` for layers as they are
        where these are faster and do not count as equal (`planner/preference.py`), or where blocks do not fit, and else
        for blocks. What policy `auto` plans for layers as they are is equal to its plan for blocks, or faster.

    Returns:
      The profile that was planned for, and the plan.

    Raises:
      BudgetError: if neither fits; it names the smaller of both needs.
    """
    budget_bytes = request.memory_budget_bytes
    chosen, plan = FinestPlanner(profile, policy, request, granularity).plan(budget_bytes)
    return chosen, with_gap(chosen, plan, budget_bytes)


def candidates(profile: Profile, granularity: str) -> dict[str, Profile]:
    """The profiles of the granularities among which a plan is chosen."""
    check_granularity(granularity)
    blocks = coarser(profile)
    if granularity == MODULE or blocks.layers == profile.layers:
        return {MODULE: profile}
    return {BLOCK: blocks} if granularity == BLOCK else {BLOCK: blocks, MODULE: profile}


class FinestPlanner:
    """Answers any number of budgets as `plan_finest` does, with plans that state no gap; arguments as there."""

    def __init__(self, profile: Profile, policy: str, request: Request, granularity: str) -> None:
        self._profile, self._policy, self._granularity = profile, policy, granularity
        # Policy auto also takes a plan for blocks as one for layers as they are.
        wanted = FASTER if granularity == MODULE and policy == Auto.name else granularity
        self._candidates = candidates(profile, wanted)
        self._planners = {name: planner_of(each, policy, request) for name, each in self._candidates.items()}

    def plan(self, budget_bytes: int | None) -> tuple[Profile, Plan]:
        """The profile that was planned for, and the plan within a budget."""
        profile, made = self._plan(budget_bytes)
        return profile, made.in_tiles([layer.tiles for layer in profile.layers])

    def _plan(self, budget_bytes: int | None) -> tuple[Profile, Plan]:
        found, errors = dict[str, tuple[Profile, Plan]](), list[BudgetError]()
        for name, planner in self._planners.items():
            try:
                found[name] = self._candidates[name], planner(budget_bytes)
            except BudgetError as error:
                errors.append(error)
        if not found:
            raise min(errors, key=lambda error: error.smallest_bytes)
        if self._policy == Auto.name and BLOCK in found and MODULE in self._candidates:
            _add_finer(found, self._profile, budget_bytes)
        if self._granularity == MODULE and MODULE not in found:
            raise errors[-1]
        if self._granularity == MODULE or BLOCK not in found:
            return found[MODULE]
        if MODULE not in found:
            return found[BLOCK]
        is_worth_it = longest_equal_s(step_s(*found[MODULE])) < step_s(*found[BLOCK])
        return found[MODULE if is_worth_it else BLOCK]

    def nearest(self, budget_bytes: int | None) -> tuple[Profile, Plan]:
        """Likewise, with the gap; within the smallest feasible budget if that is larger."""
        try:
            chosen, plan = self.plan(budget_bytes)
        except BudgetError as error:
            chosen, plan = self.plan(budget_bytes := error.smallest_bytes)
        return chosen, with_gap(chosen, plan, budget_bytes)


def _add_finer(found: dict[str, tuple[Profile, Plan]], profile: Profile, budget_bytes: int | None) -> None:
    """Replaces the plan for the layers as they are by that for blocks if this fits and is preferred."""
    made = finer(profile, found[BLOCK][1])
    known = [made] if budget_bytes is None or needed_bytes(profile, made) <= budget_bytes else []
    if MODULE in found:
        known.insert(0, found[MODULE][1])
    if known:
        placed = (Placed(plan, step_s(profile, plan), needed_bytes(profile, plan)) for plan in known)
        found[MODULE] = profile, preferred(placed, lambda each: score_of(profile, each.plan)).plan


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
    for key in ("update_gpu_s", "update_streamed_s"):
        updates = [getattr(layer, key) for layer in trained]
        known = [seconds for seconds in updates if seconds is not None]
        # A kernel that takes as long as the shortest one has next to nothing to do.
        longer_s = sum(seconds for seconds in known if seconds > launch_s)
        made[key] = max(longer_s, *known) if known and len(known) == len(updates) else None
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
