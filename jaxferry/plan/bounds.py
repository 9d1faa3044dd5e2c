"""Proven lower bounds on every plan of GFGB, DHA and DFGB with given gradients: how far one may be from the optimum.

Three things take time whatever the plan. First, the forward ends no earlier than its optimum F (`plan/frontier.py`),
and from there to the step's end it takes at least the tail a with every backward at its least. Second, layers that
are not loaded pay for it on the GPU, by `backward_dha_s - backward_s` after F, or by that and the forward's
difference over the step; and all loads must end inside the window, so they take no longer than the forward and the
last backward together. How little must be paid for a given link time is a knapsack, bounded by cutting its last item
(Dantzig). After the GPU the first layer's gradient still has to travel and be applied. Third, in an endless chain
each lane's work of one step has to fit into one period.

In a chain, a first layer that is loaded starts only after the last update, so that a period takes as long as a step
alone. Else let g be the first layer that is loaded for its forward: layers before it run by DHA, and loads lead the
step's start by at most the time between the update of g and the last one, which the tails of the backward limit. For
each g the first two bounds hold with that lead; the least of them over all g is the bound.
"""

from collections.abc import Callable

import numpy as np

from jaxferry.plan.frontier import optimal_forward
from jaxferry.plan.whole_step import StepCosts
from jaxferry.profiling.records import Profile

_BISECTIONS = 60
_MOST_EXACT = 24


class Penalty:
    """The least that unloaded layers pay on the GPU, given the link time that loads may take: convex, decreasing.

    Args:
      load_s: link time of each layer's load, (layers,).
      penalty_s: what each pays on the GPU without it, (layers,).
    """

    def __init__(self, load_s: np.ndarray, penalty_s: np.ndarray):
        penalty_s = np.maximum(penalty_s, 0.0)
        costly = (load_s > 0) & (penalty_s > 0)
        load_s, penalty_s = load_s[costly], penalty_s[costly]
        order = np.argsort(-penalty_s / load_s, kind="stable")
        self.loads = np.concatenate([[0.0], np.cumsum(load_s[order])])
        self.saved = np.concatenate([[0.0], np.cumsum(penalty_s[order])])
        self.worth_it_s = float(load_s[penalty_s > load_s].sum())
        """Link time of the layers whose penalty exceeds their load."""

    def __call__(self, link_s: float) -> float:
        """Seconds on the GPU if loads may take `link_s` on the link."""
        return float(self.saved[-1] - np.interp(max(link_s, 0.0), self.loads, self.saved))


def step_lower_bound_s(profile: Profile, to_host: np.ndarray, optimal_forward_s: float) -> float:
    """No plan of GFGB, DHA and DFGB within the window has a smaller `step_s`, with these gradients."""
    costs = StepCosts.of(profile, to_host)
    load_s = group_loads(profile, costs)
    least_backward = float(np.minimum(costs.backward, costs.backward_dha).sum())
    last_backward = max(costs.backward[-1], costs.backward_dha[-1])
    after_gpu = float(costs.tails[0])
    backward_penalty = Penalty(load_s, costs.backward_dha - costs.backward)
    forward_s = max(optimal_forward_s, backward_penalty.worth_it_s - last_backward)
    by_backward = forward_s + least_backward + backward_penalty(forward_s + last_backward)
    least, penalty = _compute(costs, load_s, np.minimum(costs.forward, costs.forward_dha))
    by_compute = least_time(least, penalty, last_backward - least_backward)
    return float(max(optimal_forward_s + costs.least_tail(), by_backward + after_gpu, by_compute + after_gpu))


def steady_lower_bound_s(
    profile: Profile, to_host: np.ndarray, optimal_forward_s: float, known_s: float = np.inf
) -> float:
    """No plan of GFGB, DHA and DFGB within the window has a smaller `steady_step_s`, with these gradients.

    `known_s` is that of a known plan; a higher bound is not looked for.
    """
    costs = StepCosts.of(profile, to_host)
    best = min(known_s, step_lower_bound_s(profile, to_host, optimal_forward_s))
    leads_s = _most_leads(profile, costs, to_host)
    size = len(profile.layers)
    for first in range(1, size + 1):
        quick = _unloaded_bound(profile, costs, first)
        if quick >= best:
            break
        if np.isfinite(leads_s[first]) and first <= _MOST_EXACT:
            quick = max(quick, _bound_with_lead(profile, costs, first, float(leads_s[first]), best))
        best = min(best, quick)
    offloads = sum(x.offload_s for x, host in zip(profile.layers, to_host, strict=True) if not host)
    return float(max(best, offloads, sum(profile.group_update_s)))


def _unloaded_bound(profile: Profile, costs: StepCosts, first: int) -> float:
    """The bound by compute if the first layers run their forward by DHA, whatever the others do; grows with `first`."""
    load_s, after_gpu = group_loads(profile, costs), float(costs.tails[0])
    forward = np.minimum(costs.forward, costs.forward_dha)
    forward[:first] = costs.forward_dha[:first]
    least, penalty = _compute(costs, load_s, forward)
    by_compute = least_time(least, penalty, after_gpu) + after_gpu
    return max(by_compute, float(forward.sum()) + costs.least_tail())


def _bound_with_lead(profile: Profile, costs: StepCosts, first: int, lead_s: float, best: float) -> float:
    """The bound by the forward's optimum if loads begin with layer `first` and at most the lead before the step.

    Only bounds below `best` matter; a result above it says no more than that.
    """
    optimum_s = optimal_forward(profile, first, lead_s, best - costs.least_tail()).bound_s
    last_backward = max(costs.backward[-1], costs.backward_dha[-1])
    penalty = Penalty(group_loads(profile, costs), costs.backward_dha - costs.backward)
    forward_s = max(optimum_s, penalty.worth_it_s - last_backward - lead_s)
    least_backward = float(np.minimum(costs.backward, costs.backward_dha).sum())
    by_backward = forward_s + least_backward + penalty(forward_s + last_backward + lead_s)
    return max(optimum_s + costs.least_tail(), by_backward + float(costs.tails[0]))


def _most_leads(profile: Profile, costs: StepCosts, to_host: np.ndarray) -> np.ndarray:
    """The most that the last update can end after layer g's, for g = 0..L; infinite where groups have several layers.

    From the end of g's update, the last one ends after the updates below g, or what the link back or the GPU still had
    to do when g's gradient had left them, which was before g's update.
    """
    size = len(profile.layers)
    if len(profile.groups) < size:
        return np.full(size + 1, np.inf)
    updates, back_tail, gpu_tail = 0.0, 0.0, 0.0
    leads_s = np.zeros(size + 1)
    slowest = np.maximum(costs.backward, costs.backward_dha)
    for index, layer in enumerate(profile.layers):
        own_offload = 0.0 if to_host[index] else layer.offload_s
        behind = max(back_tail - layer.update_s, gpu_tail - layer.update_s - own_offload)
        leads_s[index] = max(leads_s[max(index - 1, 0)], updates, behind)
        updates += layer.update_s
        back_tail = back_tail if to_host[index] else float(costs.tails[index])
        gpu_tail = slowest[index] + max(gpu_tail, costs.tails[index])
    return leads_s


def group_loads(profile: Profile, costs: StepCosts) -> np.ndarray:
    """Load times, 0 for layers of a group of several: their copies may be shared."""
    alone = np.array([len(profile.groups[group]) == 1 for group in profile.group_of])
    return np.where(alone, costs.load, 0.0)


def _compute(costs: StepCosts, load_s: np.ndarray, forward: np.ndarray) -> tuple[float, Penalty]:
    """The GPU's least work in a step, and what unloaded layers add to it; `forward` is that of loaded layers."""
    loaded, unloaded = forward + costs.backward, costs.forward_dha + costs.backward_dha
    return float(np.minimum(loaded, unloaded).sum()), Penalty(load_s, unloaded - loaded)


def least_time(least_s: float, penalty: Callable[[float], float], more_link_s: float) -> float:
    """The least t with t >= least_s + penalty(t + more_link_s), from below."""
    low, high = least_s, least_s + penalty(0.0)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if middle >= least_s + penalty(middle + more_link_s) else (middle, high)
    return low
