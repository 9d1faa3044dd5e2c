"""The order of host updates that gives a plan the shorter steady step.

By need is a greedy order, and usually the better one. But loads follow the order of the list, and RESIDENT copies are
refreshed in backward order. By need, all refreshes would wait for the updates that come last.
"""

import dataclasses

from jaxferry.modes import Mode
from jaxferry.plan.records import Plan, UpdateOrder
from jaxferry.profiling.records import Profile
from jaxferry.schedule import schedule_step
from jaxferry.simulate.machine import steady_step_s
from jaxferry.tasks import Lane, Schedule

_ROUNDING = 1e-12
_UNLIMITED_BYTES = 2**53


def with_update_order(profile: Profile, plan: Plan) -> Plan:
    """The plan with the order of updates that has the shorter steady step; ties go to backward order.

    If no times are known, the order is by need unless a layer is RESIDENT.

    More `memory_bytes` never makes the result slower. In backward order, fewer waits never slow a step. By need they
    could, since a greedy order gives no such guarantee. So by need the plan is tried without `memory_bytes`, and with
    them only if they end all waits for room.

    Raises:
      InputError: if the plan is for another profile.
    """
    return best_order(profile, plan)[0]


def best_order(profile: Profile, plan: Plan) -> tuple[Plan, float]:
    """Likewise, with the steady step's seconds; 0 if no times are known."""
    step = schedule_step(profile, plan)
    if not any(task.duration_s > 0 for task in step.tasks):
        order = UpdateOrder.BACKWARD if Mode.RESIDENT in plan.modes else UpdateOrder.NEED
        return dataclasses.replace(plan, update_order=order), 0.0
    best = dataclasses.replace(plan, update_order=UpdateOrder.BACKWARD)
    least_s = steady_step_s(dataclasses.replace(step, updates_by_need=False))
    if sum(task.lane is Lane.HOST for task in step.tasks) < 2:
        return best, least_s  # the host has no choice
    for by_need, tasks in _plans_by_need(profile, plan, step):
        found = steady_step_s(dataclasses.replace(tasks, updates_by_need=True))
        if found < least_s * (1 - _ROUNDING):
            best, least_s = by_need, found
    return best, least_s


def _plans_by_need(profile: Profile, plan: Plan, step: Schedule) -> list[tuple[Plan, Schedule]]:
    """The plans by need to try, with their tasks; `step` has those of the plan. The order is not part of the tasks."""
    by_need = dataclasses.replace(plan, update_order=UpdateOrder.NEED)
    if plan.memory_bytes is None:
        return [(by_need, step)]
    without = dataclasses.replace(by_need, memory_bytes=None)
    tasks_without = schedule_step(profile, without)
    if _waits_for_room(profile, plan, step):
        return [(without, tasks_without)]
    if tasks_without.tasks == step.tasks:
        return [(by_need, step)]
    return [(by_need, step), (without, tasks_without)]


def _waits_for_room(profile: Profile, plan: Plan, step: Schedule) -> bool:
    unlimited = dataclasses.replace(plan, memory_bytes=_UNLIMITED_BYTES)
    return step.tasks != schedule_step(profile, unlimited).tasks
