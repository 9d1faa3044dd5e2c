"""A proven lower bound on every plan, of any modes, RELOAD and RESIDENT too, and with any gradients.

It is what plans of different policies can be held against together; for plans of GFGB, DHA and DFGB with known
gradients `plan/bounds.py` proves more. Three things hold for an endless chain whatever the plan.

- The host's updates of a step fit into one period.
- So does each link's work, and the GPU's. A layer takes the link up at least once a step, by a load or a refresh, or
  its forward and backward read host memory; its gradient takes the link down, or the backward writes host memory. Which
  detours of the GPU cost least for what the links have time for are two knapsacks, bounded by cutting the last item.
- The first layer's forward waits for its own update of the step before, the last one of that step. So a period is no
  shorter than the loop from this forward by way of all forwards, backwards and that update to the next such forward.
"""

import dataclasses

import numpy as np

from jaxferry.plan.bounds import Penalty, group_loads, least_time
from jaxferry.plan.whole_step import StepCosts
from jaxferry.profiling.records import Profile


def any_plan_lower_bound_s(profile: Profile) -> float:
    """No plan has a smaller `steady_step_s`, whatever its modes, gradients, loads and updates."""
    work = _Work.of(profile)
    forward_s = work.first_forward_s() + float(work.forward_s[1:].sum())
    loop_s = work.first_layer_s() + profile.group_update_s[profile.group_of[0]]
    return max(
        sum(profile.group_update_s),
        work.period_s(0, 0.0),
        work.period_s(1, loop_s),
        forward_s + work.tail_s(),
    )


@dataclasses.dataclass(frozen=True)
class _Work:
    """What each layer costs, (layers,) arrays: `costs` with the gradient on the device, `go_s` what GO adds to that."""

    profile: Profile
    costs: StepCosts
    load_s: np.ndarray
    offload_s: np.ndarray
    go_s: np.ndarray

    @classmethod
    def of(cls, profile: Profile) -> "_Work":
        costs = StepCosts.of(profile, np.zeros(len(profile.layers), dtype=bool))
        offload_s = np.array([layer.offload_s for layer in profile.layers])
        go_s = np.array([layer.backward_go_s - layer.backward_s for layer in profile.layers])
        return cls(profile, costs, group_loads(profile, costs), offload_s, go_s)

    @property
    def forward_s(self) -> np.ndarray:
        """The least time of each forward, (layers,)."""
        return np.minimum(self.costs.forward, self.costs.forward_dha)

    def period_s(self, first: int, more_s: float) -> float:
        """The least time for the GPU's work of the layers from `first` on and `more_s` of other work in a row."""
        costs, these = self.costs, slice(first, None)
        loaded = (self.forward_s + costs.backward)[these]
        unloaded = (costs.forward_dha + costs.backward_dha)[these]
        loads = Penalty(self.load_s[these], unloaded - loaded)
        gradients = Penalty(self.offload_s[these], self.go_s[these])
        least_s = np.minimum(loaded, unloaded).sum() + np.minimum(self.go_s[these], 0.0).sum()
        return least_time(float(least_s) + more_s, lambda time_s: loads(time_s) + gradients(time_s), 0.0)

    def first_forward_s(self) -> float:
        """From the first layer's update to the end of its forward: loaded or refreshed first, or by DHA."""
        return float(min(self.profile.layers[0].load_s + self.costs.forward[0], self.costs.forward_dha[0]))

    def first_layer_s(self) -> float:
        """The first layer's own part of the loop, without its update."""
        backward_s = min(self.costs.backward[0], self.costs.backward_dha[0])
        return self.first_forward_s() + float(backward_s + min(self.offload_s[0], self.go_s[0]))

    def tail_s(self) -> float:
        """From the GPU's arrival at the backward of the last layer to the last update's end, at the least."""
        backward = np.minimum(self.costs.backward, self.costs.backward_dha)
        updated, updates_s, tail = set[int](), 0.0, 0.0
        for index, group in enumerate(self.profile.group_of):
            if group not in updated:
                updated.add(group)
                updates_s += self.profile.group_update_s[group]
            stays = max(tail, self.offload_s[index] + updates_s)
            goes = self.go_s[index] + max(tail, updates_s)
            tail = float(backward[index]) + min(stays, goes)
        return tail
