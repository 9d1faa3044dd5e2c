"""A plan as searches hold it: arrays in place of a record."""

import dataclasses

import numpy as np

from jaxferry.modes import UpdatePlace
from jaxferry.plan.base import make_plan
from jaxferry.plan.effort import is_searched
from jaxferry.plan.order import with_update_order
from jaxferry.plan.records import Loads, Plan, UpdateOrder, Updates
from jaxferry.profiling.records import Profile


@dataclasses.dataclass(frozen=True)
class Best:
    """A plan picked from a pool.

    Attributes:
      modes, grad_on_host, recomputes: mode codes, gradient flags and recomputation flags, (layers,).
      loads, updates, update_order, memory_bytes: as in `Plan`.
      on_device: whether each layer is updated on the device, (layers,); None for none.
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


def plan_of(policy: str, reserve_factor: float, profile: Profile, best: Best) -> Plan:
    """The plan picked from a pool; of a long model, or without times, with the order of updates that is faster."""
    plan = picked_plan(policy, reserve_factor, profile, best)
    is_ordered = is_searched(len(profile.layers)) and best.objective_s > 0
    return plan if is_ordered else with_update_order(profile, plan)


def picked_plan(policy: str, reserve_factor: float, profile: Profile, best: Best) -> Plan:
    """The plan with the order of updates that it was picked with."""
    kind = (best.loads, best.updates)
    plan = make_plan(policy, reserve_factor, profile, best.modes, best.grad_on_host, *kind, recomputes=best.recomputes)
    plan = dataclasses.replace(plan, update_order=best.update_order, memory_bytes=best.memory_bytes)
    if best.on_device is None:
        return plan
    layers = (
        dataclasses.replace(layer, update=UpdatePlace.RESIDENT) if there else layer
        for layer, there in zip(plan.layers, best.on_device, strict=True)
    )
    return dataclasses.replace(plan, layers=tuple(layers))
