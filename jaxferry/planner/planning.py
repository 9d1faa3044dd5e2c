"""All policies by name, and the plans of one of them, with their predictions and gaps."""

import dataclasses
import functools
from collections.abc import Callable

from jaxferry.costs import Profile
from jaxferry.errors import InputError
from jaxferry.modes import Mode, UpdatePlace
from jaxferry.planner.auto import Auto, AutoSearch
from jaxferry.planner.base import Objective, Policy, Request, read_objective, with_deferred_updates
from jaxferry.planner.baselines import L2L, NativeOffload, NativeOverlapped, ZeroOffload
from jaxferry.planner.columns import updatable_groups
from jaxferry.planner.exact import Exact, gap_details
from jaxferry.planner.memferry import GOMemFerry, MemFerry
from jaxferry.planner.place_bound import any_plan_lower_bound_s
from jaxferry.planner.twin_flow import TwinFlow
from jaxferry.step import Plan, Updates, buffers_of, predict

Planner = Callable[[int | None], Plan]
"""The plan for a memory budget in bytes, or for none."""


FULL_LAYERS = 96
_SECONDS_OF = {Objective.FORWARD: "forward_s", Objective.STEP: "step_s", Objective.STEADY: "steady_step_s"}


_POLICIES: dict[str, type[Policy]] = {
    policy.name: policy
    for policy in (
        ZeroOffload,
        NativeOffload,
        NativeOverlapped,
        L2L,
        TwinFlow,
        MemFerry,
        GOMemFerry,
        Exact,
        Auto,
    )
}


def policies() -> tuple[str, ...]:
    """The names of all policies, baselines first."""
    return tuple(_POLICIES)


def make_policy(name: str) -> Policy:
    """The policy with this name.

    Raises:
      InputError: if there is none; the message lists all policies.
    """
    if name not in _POLICIES:
        raise InputError(f"unknown policy {name!r}; the policies are {', '.join(policies())}")
    return _POLICIES[name]()


def make_plan(
    profile: Profile,
    policy: str = "exact",
    *,
    objective: Objective | str = Objective.STEADY,
    reserve_factor: float | None = None,
    memory_budget_bytes: int | None = None,
    progress: Callable[[str], None] | None = None,
) -> Plan:
    """The plan of a policy for a profile, with `predicted`.

    Args:
      profile: the layers' times in seconds and sizes in bytes.
      policy: one of `policies()`.
      objective: what `exact` makes least.
      reserve_factor: share of all gradient bytes, in [0, 1], that may stay on the device; None for the policy's
        default.
      memory_budget_bytes: device memory that the plan must fit into; None for no limit.
      progress: called with a short description as each part of a long search starts.

    Raises:
      InputError: if an argument is not acceptable.
      BudgetError: if no plan of the policy fits; it names the smallest feasible budget.
    """
    return plan_for(profile, policy, Request(reserve_factor, memory_budget_bytes, read_objective(objective), progress))


def plan_for(profile: Profile, policy: str, request: Request) -> Plan:
    """Like `make_plan`, for a request."""
    budget_bytes = request.memory_budget_bytes
    return with_gap(profile, planner_of(profile, policy, request)(budget_bytes), budget_bytes)


def planner_of(profile: Profile, policy: str, request: Request) -> Planner:
    """A function that plans for any budget, without the gap of `plan_for`; `auto` searches once for all budgets."""
    plan: Planner = functools.partial(_plan_within, profile, policy, request)
    if policy == Auto.name:
        plan = AutoSearch(profile, request).plan
    return lambda budget_bytes: predict(profile, with_deferred_updates(profile, as_run(profile, plan(budget_bytes))))


def _plan_within(profile: Profile, policy: str, request: Request, budget_bytes: int | None) -> Plan:
    return make_policy(policy).plan(profile, dataclasses.replace(request, memory_budget_bytes=budget_bytes))


def with_gap(profile: Profile, plan: Plan, budget_bytes: int | None) -> Plan:
    """The plan with its gap to a proven bound on all plans within the budget, or to the policy's own bound.

    Unless a search of all plans was possible: with few layers, and no choice of where each group is updated.
    """
    is_searched = plan.policy != Auto.name or not updatable_groups(profile)
    if plan.predicted is None or (is_searched and len(profile.layers) <= FULL_LAYERS):
        return plan
    objective = Objective(plan.details.get("objective", Objective.STEADY))
    value_s = getattr(plan.predicted, _SECONDS_OF[objective])
    bound_s = plan.details.get("lower_bound_s") or any_plan_lower_bound_s(profile, budget_bytes)
    return dataclasses.replace(plan, details={**plan.details, **gap_details(objective, value_s, bound_s)})


def as_run(profile: Profile, plan: Plan) -> Plan:
    """The plan; with updates after all gradients, or as many gradient buffers, as the profile says.

    Of several devices, updates that would stream are on the host; so are all updates of several processes.
    """
    if profile.num_devices > 1:
        plan = plan.without_streams() if profile.num_processes == 1 else plan.updated_on_host()
    updates, num = Updates.AFTER_ALL if profile.updates_after_all else plan.updates, buffers_of(profile, plan)
    is_same = (updates, num) == (plan.updates, plan.gradient_buffers)
    return plan if is_same else dataclasses.replace(plan, updates=updates, gradient_buffers=num)


def check_updates(profile: Profile, plan: Plan) -> None:
    """Raises InputError if the plan updates a layer on the device, and the profile does not state what that costs."""
    for layer, planned in zip(profile.layers, plan.layers, strict=True):
        missing = [key for key in ("update_gpu_s", "state_bytes") if not getattr(layer, key)]
        if planned.update is not UpdatePlace.HOST and layer.has_gradient and missing:
            raise InputError(
                f"layer {layer.name!r} has the update {planned.update.value!r}, but the profile does not state its "
                f"{missing[0]!r}: estimated profiles do, and so do those measured on an accelerator"
            )


def copies_bytes(profile: Profile, plan: Plan) -> int:
    """Host memory that each of several processes needs for layers that programs read there; they have these whole."""
    if profile.num_processes == 1:
        return 0
    layers = zip(profile.layers, plan.modes, strict=True)
    read = {layer.parameters: layer.param_bytes for layer, mode in layers if mode in (Mode.DHA, Mode.DFGB)}
    return sum(read.values())
