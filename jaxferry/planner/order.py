"""The order of host updates that gives a plan the shorter steady step.

By need is a greedy order, and usually the better one. But loads follow the order of the list, and RESIDENT copies are
refreshed in backward order. By need, all refreshes would wait for the updates that come last.
"""

import dataclasses

from jaxferry.costs.records import Profile
from jaxferry.modes import Mode
from jaxferry.step.records import Plan, UpdateOrder
from jaxferry.step.schedule import StepSchedules
from jaxferry.step.simulate.machine import SteadyStep
from jaxferry.step.tasks import Lane

_ROUNDING = 1e-12


def with_update_order(profile: Profile, plan: Plan) -> Plan:
    """The plan with the order of updates that has the shorter steady step; ties go to backward order.

    If no times are known, the order is by need unless a layer is RESIDENT.

    More `memory_bytes` never makes the result slower. In backward order, fewer waits never slow a step. By need they
    could, since a greedy order gives no such guarantee. So by need the plan is tried without `memory_bytes`, and with
    them only if they end all waits for room.

    Raises:
      InputError: if the plan is for another profile.
    """
    return best_order(plan, StepSchedules(profile, plan))[0]


def best_order(plan: Plan, schedules: StepSchedules) -> tuple[Plan, float]:
    """Likewise, with the steady step's seconds; 0 if no times are known. `schedules` are those of the plan."""
    step = schedules.within(plan.memory_bytes)
    if not any(task.duration_s > 0 for task in step.tasks):
        order = UpdateOrder.BACKWARD if Mode.RESIDENT in plan.modes else UpdateOrder.NEED
        return dataclasses.replace(plan, update_order=order), 0.0
    best, steady = dataclasses.replace(plan, update_order=UpdateOrder.BACKWARD), SteadyStep(step)
    least_s = steady.seconds(by_need=False)
    if sum(task.lane is Lane.HOST for task in step.tasks) < 2:
        return best, least_s  # the host has no choice
    for memory_bytes in _memories_by_need(schedules, plan.memory_bytes):
        tasks = schedules.within(memory_bytes)
        found = (steady if tasks is step else SteadyStep(tasks)).seconds(by_need=True)
        if found < least_s * (1 - _ROUNDING):
            best = dataclasses.replace(plan, update_order=UpdateOrder.NEED, memory_bytes=memory_bytes)
            least_s = found
    return best, least_s


def _memories_by_need(schedules: StepSchedules, memory_bytes: int | None) -> list[int | None]:
    """The `memory_bytes` to try by need."""
    if memory_bytes is None or schedules.waits_for_room(memory_bytes):
        return [None]
    return (
        [memory_bytes] if schedules.within(None).tasks == schedules.within(memory_bytes).tasks else [memory_bytes, None]
    )
