"""The order of host updates that makes a plan's steady step the shorter one.

By need is a greedy order, and most often the better one. But loads keep to the order of the list. RESIDENT copies are
refreshed in backward order, and all of them would wait for updates that are put off because they are needed last.
"""

import dataclasses

from jaxferry.modes import Mode
from jaxferry.plan.records import Plan, UpdateOrder
from jaxferry.profiling.records import Profile
from jaxferry.schedule import schedule_step
from jaxferry.simulate.machine import steady_step_s
from jaxferry.simulate.report import simulate_schedule

_ROUNDING = 1e-12
_UNLIMITED_BYTES = 2**53


def with_update_order(profile: Profile, plan: Plan) -> Plan:
    """The plan with the order of updates whose steady step is the shorter; ties go to backward order.

    Where no times are known, the order is by need unless a layer is RESIDENT.

    More `memory_bytes` never makes the result slower. In backward order, fewer waits never do. By need they could,
    since a greedy order has no such guarantee. So by need the plan is tried without `memory_bytes`, unless these end
    all waits for room.

    Raises:
      InputError: if the plan is for another profile.
    """
    step = schedule_step(profile, plan)
    if not any(task.duration_s > 0 for task in step.tasks):
        order = UpdateOrder.BACKWARD if Mode.RESIDENT in plan.modes else UpdateOrder.NEED
        return dataclasses.replace(plan, update_order=order)
    backward = dataclasses.replace(plan, update_order=UpdateOrder.BACKWARD)
    by_need = dataclasses.replace(plan, update_order=UpdateOrder.NEED)
    if plan.memory_bytes is not None and _waits_for_room(profile, plan):
        by_need = dataclasses.replace(by_need, memory_bytes=None)
    found = simulate_schedule(profile, schedule_step(profile, by_need))
    fits = plan.memory_bytes is None or found.peak_device_bytes <= plan.memory_bytes
    if fits and found.steady_step_s < steady_step_s(schedule_step(profile, backward)) * (1 - _ROUNDING):
        return by_need
    return backward


def _waits_for_room(profile: Profile, plan: Plan) -> bool:
    unlimited = dataclasses.replace(plan, memory_bytes=_UNLIMITED_BYTES)
    return schedule_step(profile, plan).tasks != schedule_step(profile, unlimited).tasks
