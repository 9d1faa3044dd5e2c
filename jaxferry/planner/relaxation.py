"""Which layers to load if the link has only so much time: the knapsack's relaxation, and times that it bounds."""

from collections.abc import Callable

import numpy as np

_BISECTIONS = 60


class Penalty:
    """The least GPU time that unloaded layers cost, given the link time for loads: convex, decreasing.

    Args:
      load_s: link time of each layer's load, (layers,).
      penalty_s: GPU time that each layer costs if it is not loaded, (layers,).
    """

    def __init__(self, load_s: np.ndarray, penalty_s: np.ndarray):
        penalty_s = np.maximum(penalty_s, 0.0)
        costly = (load_s > 0) & (penalty_s > 0)
        load_s, penalty_s = load_s[costly], penalty_s[costly]
        order = np.argsort(-penalty_s / load_s, kind="stable")
        self.loads = np.concatenate([[0.0], np.cumsum(load_s[order])])
        self.saved = np.concatenate([[0.0], np.cumsum(penalty_s[order])])
        self.worth_it_s = float(load_s[penalty_s > load_s].sum())
        """Link time of the layers whose penalty exceeds their load time."""

    def __call__(self, link_s: float) -> float:
        """Seconds on the GPU if loads may take `link_s` on the link."""
        return float(self.saved[-1] - np.interp(max(link_s, 0.0), self.loads, self.saved))


def least_time(least_s: float, penalty: Callable[[float], float], more_link_s: float) -> float:
    """The least t with t >= least_s + penalty(t + more_link_s), from below."""
    low, high = least_s, least_s + penalty(0.0)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if middle >= least_s + penalty(middle + more_link_s) else (middle, high)
    return low
