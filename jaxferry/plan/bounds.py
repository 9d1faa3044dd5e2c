"""Proven lower bounds on every plan of GFGB, DHA and DFGB: how far a plan may be from the optimum.

Three things take time whatever the plan. First, the forward ends no earlier than its optimum F (`plan/frontier.py`),
and from there to the step's end it takes at least the tail a with every backward at its least. Second, layers that
are not loaded pay for it on the GPU, by `backward_dha_s - backward_s` after F, or by that and the forward's
difference over the step; and all loads must end inside the window, so they take no longer than the forward and the
last backward together. How little must be paid for a given link time is a knapsack, bounded by cutting its last item
(Dantzig). After the GPU the first layer's gradient still has to travel and be applied. Third, in an endless chain
each lane's work of one step has to fit into one period.

In a chain, a first layer that is loaded starts only after the last update, so that a period takes as long as a step
alone; else its forward by DHA does, and only the second bound, with the period for the window, and the third are
left.
"""

import numpy as np

from jaxferry.plan.whole_step import Costs
from jaxferry.profiling.records import Profile

_BISECTIONS = 60


class _Penalty:
    """The least that unloaded layers pay on the GPU, given the link time that loads may take: convex, decreasing."""

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
        return float(self.saved[-1] - np.interp(max(link_s, 0.0), self.loads, self.saved))


def step_lower_bound_s(profile: Profile, to_host: np.ndarray, optimal_forward_s: float) -> float:
    """No plan of GFGB, DHA and DFGB within the window has a smaller `step_s`, with these gradients."""
    costs = Costs.of(profile, to_host)
    load_s = _group_loads(profile, costs)
    least_backward = float(np.minimum(costs.backward, costs.backward_dha).sum())
    last_backward = max(costs.backward[-1], costs.backward_dha[-1])
    after_gpu = float(costs.tails[0])
    backward_penalty = _Penalty(load_s, costs.backward_dha - costs.backward)
    forward_s = max(optimal_forward_s, backward_penalty.worth_it_s - last_backward)
    by_backward = forward_s + least_backward + backward_penalty(forward_s + last_backward)
    by_compute = _least_time(*_compute(costs, load_s), last_backward - least_backward)
    return float(max(optimal_forward_s + costs.least_tail(), by_backward + after_gpu, by_compute + after_gpu))


def steady_lower_bound_s(profile: Profile, to_host: np.ndarray, optimal_forward_s: float) -> float:
    """No plan of GFGB, DHA and DFGB within the window has a smaller `steady_step_s`, with these gradients."""
    costs = Costs.of(profile, to_host)
    load_s = _group_loads(profile, costs)
    after_gpu = float(costs.tails[0])
    least, penalty_s = _compute(costs, load_s)[0], _compute_penalty(costs)
    first_dha_s = max(costs.forward_dha[0] - costs.forward[0], 0.0)
    penalty_s[0] = costs.backward_dha[0] - costs.backward[0]
    unloaded_first = _least_time(least + first_dha_s, _Penalty(load_s, penalty_s), after_gpu) + after_gpu
    free_forward = float(np.minimum(costs.forward, costs.forward_dha).sum()) + first_dha_s
    unloaded_first = max(unloaded_first, free_forward + costs.least_tail())
    loaded_first = step_lower_bound_s(profile, to_host, optimal_forward_s)
    offloads = sum(x.offload_s for x, host in zip(profile.layers, to_host, strict=True) if not host)
    return float(max(min(unloaded_first, loaded_first), offloads, sum(profile.group_update_s)))


def _group_loads(profile: Profile, costs: Costs) -> np.ndarray:
    """Load times, 0 for layers of a group of several: their copies may be shared."""
    alone = np.array([len(profile.groups[group]) == 1 for group in profile.group_of])
    return np.where(alone, costs.load, 0.0)


def _compute_penalty(costs: Costs) -> np.ndarray:
    loaded = np.minimum(costs.forward, costs.forward_dha) + costs.backward
    return np.maximum(costs.forward_dha + costs.backward_dha - loaded, 0.0)


def _compute(costs: Costs, load_s: np.ndarray) -> tuple[float, _Penalty]:
    """The GPU's least work in a step, and what unloaded layers add to it."""
    loaded = np.minimum(costs.forward, costs.forward_dha) + costs.backward
    least = np.minimum(loaded, costs.forward_dha + costs.backward_dha)
    return float(least.sum()), _Penalty(load_s, _compute_penalty(costs))


def _least_time(least_s: float, penalty: _Penalty, more_link_s: float) -> float:
    """The least t with t >= least_s + penalty(t + more_link_s), from below."""
    low, high = least_s, least_s + penalty(0.0)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if middle >= least_s + penalty(middle + more_link_s) else (middle, high)
    return low
