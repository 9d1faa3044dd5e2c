"""A plan as searches hold it: arrays in place of a record."""

import dataclasses

import numpy as np

from jaxferry.costs.records import Profile
from jaxferry.modes import Subgroups, UpdatePlace
from jaxferry.planner.base import make_plan
from jaxferry.planner.effort import is_searched
from jaxferry.planner.order import with_update_order
from jaxferry.step.holdings import gradient_flags, mode_codes
from jaxferry.step.records import Loads, Plan, UpdateOrder, Updates


@dataclasses.dataclass(frozen=True)
class Best:
    """A plan that a search found.

    Attributes:
      modes, grad_on_host, recomputes: mode codes, gradient flags and recomputation flags, (layers,).
      loads, updates, update_order, memory_bytes: as in `Plan`.
      on_device: whether each layer is updated on the device, where it stays, (layers,); None for none.
      through_gpu: whether each layer's update streams through the GPU, (layers,); None for none.
      subgroups: the size of what streams at once.
      objective_s: the objective in seconds.
      needed_bytes: the least budget within which it runs.
    """

    modes: np.ndarray
    grad_on_host: np.ndarray
    recomputes: np.ndarray
    loads: Loads
    updates: Updates
    objective_s: float
    needed_bytes: int
    update_order: UpdateOrder = UpdateOrder.BACKWARD
    memory_bytes: int | None = None
    on_device: np.ndarray | None = None
    through_gpu: np.ndarray | None = None
    subgroups: Subgroups = Subgroups.LARGE

    @classmethod
    def of(cls, plan: Plan, objective_s: float, needed_bytes: int) -> "Best":
        """Returns a plan's arrays, with its objective in seconds and the least budget in bytes."""
        on_device, through_gpu = np.array(plan.updates_on_device), np.array(plan.updates_streamed)
        return cls(
            mode_codes(plan),
            gradient_flags(plan),
            np.array(plan.recomputes),
            plan.loads,
            plan.updates,
            objective_s,
            needed_bytes,
            plan.update_order,
            plan.memory_bytes,
            on_device if on_device.any() else None,
            through_gpu if through_gpu.any() else None,
            plan.subgroups,
        )

    @property
    def columns(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Modes and flags of gradients, recomputation and updates on the device, (layers,) each."""
        there = np.zeros(len(self.modes), dtype=bool) if self.on_device is None else self.on_device
        return self.modes, self.grad_on_host, self.recomputes, there


def plan_of(policy: str, reserve_factor: float, profile: Profile, best: Best) -> Plan:
    """The plan picked from a pool; of a long model, or without times, with the order of updates that is faster."""
    plan = picked_plan(policy, reserve_factor, profile, best)
    is_ordered = is_searched(len(profile.layers)) and best.objective_s > 0
    return plan if is_ordered else with_update_order(profile, plan)


def picked_plan(policy: str, reserve_factor: float, profile: Profile, best: Best) -> Plan:
    """The plan with the order of updates that it was picked with."""
    kind = (best.loads, best.updates)
    plan = make_plan(policy, reserve_factor, profile, best.modes, best.grad_on_host, *kind, recomputes=best.recomputes)
    plan = dataclasses.replace(
        plan, update_order=best.update_order, memory_bytes=best.memory_bytes, subgroups=best.subgroups
    )
    for place, flags in ((UpdatePlace.RESIDENT, best.on_device), (UpdatePlace.GPU, best.through_gpu)):
        if flags is not None:
            layers = (
                dataclasses.replace(layer, update=place) if there else layer
                for layer, there in zip(plan.layers, flags, strict=True)
            )
            plan = dataclasses.replace(plan, layers=tuple(layers))
    return plan
