"""Proven lower bounds on every plan of GFGB, DHA and DFGB with given gradients, in either order of updates.

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
"""

import dataclasses

import numpy as np

from jaxferry.costs import Profile
from jaxferry.planner.effort import fewer
from jaxferry.planner.frontier import Penalty, least_time, optimal_forward
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
