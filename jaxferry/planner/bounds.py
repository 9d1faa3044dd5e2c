"""Proven lower bounds: on plans with known gradients, and on every plan.

Proven lower bounds on every plan of GFGB, DHA and DFGB with given gradients, in either order of updates.

Waits for room and for saved values only delay tasks, so a bound proven without them holds with them.

**A step** of any plan has three lower bounds. First, the forward ends no earlier than its optimum F
(`planner/frontier.py`). From F to the step's end takes at least the tail a with every backward at its minimum. The tail
assumes no order of updates (`whole_step.gradient_tails`). Second, each unloaded layer costs GPU time:
`backward_dha_s - backward_s` after F, or over the whole step also the forward's difference. All loads must end inside
the window, so they take no longer than the forward and the last backward together. The least cost for a given link time
is a knapsack, bounded by cutting its last item (Dantzig). Third, after the last backward of a trained layer its
gradient still has to be transferred and applied.

**In an endless chain** each lane's work of one step fits into one period. Layer k's forward waits for its own update of
the previous step. So a period is no shorter than any of these loops:

- From the update of k through the forwards and backwards of all layers from k on, and k's gradient, to k's next update.
  The updates of all layers up to k may replace k's own: none of them starts before k's backward has ended, and a
  forward of a layer up to k waits for the last of them, in any order.
- Let g be the first layer that is loaded for its forward. Its load follows its update, and all other loads follow that
  load. So after g's update the forward of the layers from g on takes at least its optimum without any lead.
- If g is not the first layer, the layers before it run their forward by DHA. The GPU's work of a step includes this.

For each g the largest of these holds. The bound is the minimum over all g. None of this depends on the order of the
host's updates.

A proven lower bound on every plan: any modes, including RELOAD and RESIDENT, any gradients, both update orders.

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

from jaxferry.costs import LayerProfile, Profile
from jaxferry.planner.effort import fewer, updatable_groups
from jaxferry.planner.frontier import Penalty, least_time, optimal_forward
from jaxferry.planner.place_bound import place_lower_bound_s
from jaxferry.planner.whole_step import StepCosts, first_trained

_MOST_EXACT = 24


def step_lower_bound_s(profile: Profile, grad_on_host: np.ndarray, optimal_forward_s: float) -> float:
    """No plan of GFGB, DHA and DFGB within the window has a smaller `step_s`, with these gradients."""
    costs = StepCosts.of(profile, grad_on_host)
    load_s = group_loads(profile, costs)
    least_backward = float(np.minimum(costs.backward, costs.backward_dha).sum())
    last_backward = costs.longest_window_s()
    after_gpu = float(costs.tails[first_trained(profile)])
    backward_penalty = Penalty(load_s, costs.backward_dha - costs.backward)
    forward_s = max(optimal_forward_s, backward_penalty.worth_it_s - last_backward)
    by_backward = forward_s + least_backward + backward_penalty(forward_s + last_backward)
    least, penalty = _compute(costs, load_s, np.minimum(costs.forward, costs.forward_dha))
    by_compute = least_time(least, penalty, last_backward - least_backward)
    return float(max(optimal_forward_s + costs.least_tail(), by_backward + after_gpu, by_compute + after_gpu))


def steady_lower_bound_s(
    profile: Profile, grad_on_host: np.ndarray, optimal_forward_s: float, known_s: float = np.inf
) -> float:
    """No plan of GFGB, DHA and DFGB within the window has a smaller `steady_step_s`, with these gradients.

    `known_s` is the value of a known plan; the search for a higher bound stops there.
    """
    costs = StepCosts.of(profile, grad_on_host)
    base_s = max(_lanes_s(profile, costs), _loops_s(profile, costs))
    best = known_s
    num_exact = min(len(profile.layers), fewer(_MOST_EXACT, len(profile.layers)))
    for first in range(num_exact + 1):  # from here on the bound grows with the first loaded layer
        quick = max(base_s, _unloaded_bound(profile, costs, first))
        if quick >= best:
            break
        if first < num_exact and profile.layers[first].has_gradient:
            quick = max(quick, _loaded_loop_s(profile, grad_on_host, costs, first, optimal_forward_s, best))
        best = min(best, quick)
    return float(best)


def _lanes_s(profile: Profile, costs: StepCosts) -> float:
    """The larger of the total work of the link down and that of the host."""
    return max(float(costs.offload.sum()), sum(profile.group_update_s))


def _own_tail_s(profile: Profile, costs: StepCosts, layer: int) -> float:
    """From the end of a layer's backward to the end of its own update; 0 without a gradient."""
    if not profile.layers[layer].has_gradient:
        return 0.0
    return float(costs.offload[layer]) + profile.group_update_s[profile.group_of[layer]]


def _loops_s(profile: Profile, costs: StepCosts) -> float:
    """The longest loop through a forward, a backward and the updates of all layers up to it."""
    backward = np.minimum(costs.backward, costs.backward_dha)
    gpu_s = np.cumsum((np.minimum(costs.forward, costs.forward_dha) + backward)[::-1])[::-1]
    longest, updates_s, until_arrival_s = 0.0, 0.0, np.inf
    for index, layer in enumerate(profile.layers):
        until_arrival_s += float(backward[index - 1]) if index else 0.0
        if not layer.has_gradient:
            continue
        until_arrival_s = min(until_arrival_s, float(costs.offload[index]))
        group = profile.group_of[index]
        if profile.groups[group][0] == index:
            updates_s += profile.group_update_s[group]
        longest = max(longest, float(gpu_s[index]) + until_arrival_s + updates_s)
    return longest


def _unloaded_bound(profile: Profile, costs: StepCosts, first: int) -> float:
    """The GPU's work if the layers before `first` run their forward by DHA; it grows with `first`.

    If layer 0 has a gradient, its transfer and update belong to the loop through the GPU's work.
    """
    load_s, after_gpu = group_loads(profile, costs), _own_tail_s(profile, costs, 0)
    forward = np.minimum(costs.forward, costs.forward_dha)
    forward[:first] = costs.forward_dha[:first]
    least, penalty = _compute(costs, load_s, forward)
    return least_time(least, penalty, after_gpu) + after_gpu


def _loaded_loop_s(
    profile: Profile, grad_on_host: np.ndarray, costs: StepCosts, first: int, optimal_forward_s: float, best: float
) -> float:
    """The loop through the first loaded layer. A value above `best` proves only that it exceeds `best`."""
    own_s = _own_tail_s(profile, costs, first)
    layers = dataclasses.replace(profile.layers[first], shares_program=False), *profile.layers[first + 1 :]
    rest = dataclasses.replace(profile, layers=layers)
    of_rest = StepCosts.of(rest, grad_on_host[first:])
    least_backward = float(np.minimum(of_rest.backward, of_rest.backward_dha).sum())
    forward_s = optimal_forward_s
    if first > 0:
        forward_s = optimal_forward(rest, limit_s=best - least_backward - own_s).bound_s
    last_backward = of_rest.longest_window_s()
    penalty = Penalty(group_loads(rest, of_rest), of_rest.backward_dha - of_rest.backward)
    forward_s = max(forward_s, penalty.worth_it_s - last_backward)
    return forward_s + least_backward + penalty(forward_s + last_backward) + own_s


def group_loads(profile: Profile, costs: StepCosts) -> np.ndarray:
    """Load times; 0 for layers of a group with several layers, since these may share a copy."""
    alone = np.array([len(profile.groups[group]) == 1 for group in profile.group_of])
    return np.where(alone, costs.load, 0.0)


def _compute(costs: StepCosts, load_s: np.ndarray, forward: np.ndarray) -> tuple[float, Penalty]:
    """The GPU's least work in a step, and the penalty of unloaded layers; `forward` is that of loaded layers."""
    loaded, unloaded = forward + costs.backward, costs.forward_dha + costs.backward_dha
    return float(np.minimum(loaded, unloaded).sum()), Penalty(load_s, unloaded - loaded)


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
