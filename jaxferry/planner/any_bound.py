"""A proven lower bound on every plan: any modes, including RELOAD and RESIDENT, any gradients, both update orders.

Plans of different policies can be compared with it. For plans of GFGB, DHA and DFGB with known gradients,
`planner/bounds.py` proves more. Three facts hold for an endless chain of any plan. `planner/place_bound.py` combines
them for all choices of a group at once; what is here counts several layers of one group more closely.

- The host's updates of a step fit into one period.
- Each link's work and the GPU's work also fit into one period. A trained layer uses the link up at least once per step,
  by a load or a refresh; otherwise its forward and backward read host memory. Its gradient uses the link down;
  otherwise the backward writes host memory. Choosing the GPU's cheapest detours for the links' available time is two
  knapsacks, each bounded by cutting its last item.
- Layer k's forward waits for its own update of the previous step. So a period is no shorter than the loop from this
  forward through the forwards and backwards of all layers from k on, k's gradient and k's update to the next such
  forward.

No update of layers 1..k starts before the backward of layer k has ended. In any order, the last of these updates
belongs to a layer up to k, whose next forward waits for it. So the loop also holds with the updates of all layers up to
k instead of k's own.
"""

import dataclasses

import numpy as np

from jaxferry.costs.layer_records import LayerProfile
from jaxferry.costs.records import Profile
from jaxferry.planner.bounds import group_loads
from jaxferry.planner.place_bound import place_lower_bound_s
from jaxferry.planner.relaxation import Penalty, least_time
from jaxferry.planner.update_groups import updatable_groups
from jaxferry.planner.whole_step import StepCosts, first_trained


def any_plan_lower_bound_s(profile: Profile, budget_bytes: int | None = None) -> float:
    """No plan has a smaller `steady_step_s`, with any modes, gradients, loads, updates and update order.

    With a budget, that holds for the plans within it: copies, kept activations and optimizer state on the device take
    its memory (`planner/place_bound.py`).
    """
    groups = updatable_groups(profile)
    least_s = place_lower_bound_s(profile, budget_bytes)
    return max(least_s, _lower_bound_s(_without_gradients(profile, groups) if groups else profile))


def _least_gpu_s(layer: LayerProfile) -> float:
    """The least time of a layer's programs, with any mode and no gradient that leaves."""
    forward_s = min(layer.forward_s, layer.forward_dha_s) + layer.inter_forward_s
    return forward_s + min(layer.backward_s, layer.backward_dha_s) + layer.inter_backward_s


def _without_gradients(profile: Profile, groups: list[int]) -> Profile:
    """The profile with less work than any plan has that updates some of these groups on the device, or on the host."""
    chosen = {member for group in groups for member in profile.groups[group]}
    layers = tuple(_without_gradient(layer) if index in chosen else layer for index, layer in enumerate(profile.layers))
    return dataclasses.replace(profile, layers=layers)


def _without_gradient(layer: LayerProfile) -> LayerProfile:
    """The layer without a gradient, with the fastest of its backwards."""
    loaded_s, read_s = (
        min(layer.backward_for(by_dha, on_host) for on_host in (False, True)) for by_dha in (False, True)
    )
    return dataclasses.replace(layer, has_gradient=False, backward_s=loaded_s, backward_dha_s=read_s)


def _lower_bound_s(profile: Profile) -> float:
    if not any(layer.has_gradient for layer in profile.layers):
        return sum(_least_gpu_s(layer) for layer in profile.layers)
    work = _Work.of(profile)
    first = first_trained(profile)
    return max(
        sum(profile.group_update_s),
        work.period_s(0, 0.0),
        work.period_s(first + 1, work.loop_s(first)),
        work.loops_s(),
    )


@dataclasses.dataclass(frozen=True)
class _Work:
    """The costs of layers, (layers,) arrays: `costs` with the gradient on the device, `go_s` the extra cost of GO."""

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
        trained = np.array([layer.has_gradient for layer in profile.layers])
        return cls(profile, costs, np.where(trained, group_loads(profile, costs), 0.0), offload_s, go_s)

    @property
    def forward_s(self) -> np.ndarray:
        """The least time of each forward, (layers,)."""
        return np.minimum(self.costs.forward, self.costs.forward_dha)

    def period_s(self, first: int, more_s: float) -> float:
        """The least time for the GPU's work of the layers from `first` on, followed by `more_s` of other work."""
        costs, these = self.costs, slice(first, None)
        loaded = (self.forward_s + costs.backward)[these]
        unloaded = (costs.forward_dha + costs.backward_dha)[these]
        loads = Penalty(self.load_s[these], unloaded - loaded)
        gradients = Penalty(self.offload_s[these], self.go_s[these])
        least_s = np.minimum(loaded, unloaded).sum() + np.minimum(self.go_s[these], 0.0).sum()
        return least_time(float(least_s) + more_s, lambda time_s: loads(time_s) + gradients(time_s), 0.0)

    def loop_s(self, layer: int) -> float:
        """One layer's own part of the loop: forward (loaded or by DHA), backward, gradient and update."""
        group = self.profile.group_of[layer]
        load_s = min(self.profile.layers[index].load_s for index in self.profile.groups[group])
        forward_s = min(load_s + self.costs.forward[layer], self.costs.forward_dha[layer])
        backward_s = min(self.costs.backward[layer], self.costs.backward_dha[layer])
        gradient_s = min(self.offload_s[layer], self.go_s[layer])
        return float(forward_s + backward_s + gradient_s + self.profile.group_update_s[group])

    def loops_s(self) -> float:
        """The longest loop; each includes the updates of all layers up to its first one."""
        backward_s = np.minimum(self.costs.backward, self.costs.backward_dha) + np.minimum(self.go_s, 0.0)
        gpu_s = np.cumsum((self.forward_s + backward_s)[::-1])[::-1]
        arrival_s = np.minimum(self.offload_s, np.maximum(self.go_s, 0.0))
        longest, updates_s, until_arrival_s = 0.0, 0.0, np.inf
        for index, layer in enumerate(self.profile.layers):
            until_arrival_s += float(backward_s[index - 1]) if index else 0.0
            if not layer.has_gradient:
                continue
            until_arrival_s = min(until_arrival_s, float(arrival_s[index]))
            group = self.profile.group_of[index]
            if self.profile.groups[group][0] == index:
                updates_s += self.profile.group_update_s[group]
            longest = max(longest, float(gpu_s[index]) + until_arrival_s + updates_s)
        return longest
