"""Twin-Flow (DeepSpeed, ZeRO-Offload++): a fixed share of the parameters is updated on the GPU, the others on the host.

Masters and optimizer state of that share stay on the device. All else is ZeRO-Offload: bulk loads, and updates after
all gradients, those on the device at the same time as those on the host. Twin-Flow leaves the share to its user; here
it is the best of `RATIOS` that fits (`planner/preference.py`), unless given.
"""

import dataclasses

import numpy as np

from jaxferry.costs import Profile
from jaxferry.modes import GradientPlace, Mode, UpdatePlace
from jaxferry.planner.base import Policy, Request, best_order, check_budget, coded_plan, gradients_to_host
from jaxferry.planner.columns import updatable_groups
from jaxferry.planner.preference import Placed, preferred, score_of
from jaxferry.records import check_share
from jaxferry.step import GFGB, Loads, Plan, StepSchedules, Updates, needed_bytes

RATIOS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""The shares of parameter bytes to try."""


class TwinFlow(Policy):
    """ZeRO-Offload with a fixed share of the parameters updated on the device.

    All updates stay on the host if the profile states no `update_gpu_s` or one update covers all groups, and with a
    reserve factor below 1.

    Args:
      ratio: the share of parameter bytes, in [0, 1], that is updated on the device at most; None for the best of
        `RATIOS`.

    Raises:
      InputError: if `ratio` is not a share.
    """

    name = "twin-flow"
    summary = "DeepSpeed's Twin-Flow: ZeRO-Offload with a fixed share of updates on the GPU"

    def __init__(self, ratio: float | None = None):
        self.ratios = RATIOS if ratio is None else (check_share(ratio, "ratio"),)

    def plan(self, profile: Profile, request: Request | None = None) -> Plan:
        """The ratio that fits and is preferred: the fastest, or one that counts as equal and needs less memory."""
        request = request or Request()
        reserve_factor, budget_bytes = self.reserve_factor(request), request.memory_budget_bytes
        may_share = reserve_factor >= 1 and updatable_groups(profile) and not profile.updates_together
        ratios = self.ratios if may_share else (0.0,)
        plans = [self._plan_of(profile, reserve_factor, ratio) for ratio in ratios]
        needed = [needed_bytes(profile, plan) for plan in plans]
        if budget_bytes is not None:
            check_budget(self.name, budget_bytes, min(needed))
        found = []
        for plan, num_bytes in zip(plans, needed, strict=True):
            if budget_bytes is None or num_bytes <= budget_bytes:
                plan = dataclasses.replace(plan, memory_bytes=budget_bytes)
                found.append(Placed(*best_order(plan, StepSchedules(profile, plan)), num_bytes))
        return preferred(found, lambda placed: score_of(profile, placed.plan)).plan

    def _plan_of(self, profile: Profile, reserve_factor: float, ratio: float) -> Plan:
        kind = (Loads.BULK, Updates.AFTER_ALL)
        modes = np.full(len(profile.layers), GFGB, dtype=np.int8)
        plan = coded_plan(self.name, reserve_factor, profile, modes, gradients_to_host(profile, reserve_factor), *kind)
        own = {member for group in _share(profile, ratio) for member in profile.groups[group]}
        layers = tuple(
            dataclasses.replace(layer, mode=Mode.RESIDENT, gradient=GradientPlace.DEVICE, update=UpdatePlace.RESIDENT)
            if index in own
            else layer
            for index, layer in enumerate(plan.layers)
        )
        return dataclasses.replace(plan, layers=layers)


def _share(profile: Profile, ratio: float) -> list[int]:
    """The last groups with at most this share of all parameter bytes."""
    sizes = {group: profile.layers[profile.groups[group][0]].param_bytes for group in range(len(profile.groups))}
    left, chosen = ratio * sum(sizes.values()), []
    for group in reversed(updatable_groups(profile)):
        left -= sizes[group]
        if left < 0:
            break
        chosen.append(group)
    return chosen
