"""MemFerry's Algorithm 1 exactly as printed, only for studies; `planner/memferry.py` has the intended reading.

Line numbers are the paper's. `tag = -1` means that there is nothing to backtrack to.
"""

import numpy as np

from jaxferry.costs import Profile
from jaxferry.planner import ModePolicy, with_dfgb
from jaxferry.step import DHA, GFGB


class MemFerryPrinted(ModePolicy):
    """Chooses GFGB and DHA by Algorithm 1 as printed, then DFGB greedily."""

    name = "memferry-printed"
    summary = "MemFerry's Algorithm 1 to the letter, for comparison"

    def modes(self, profile: Profile, grad_on_host: np.ndarray) -> np.ndarray:
        """Runs Algorithm 1 as printed, then the greedy."""
        return with_dfgb(profile, _Printed(profile).run(), grad_on_host)


class _Printed:
    def __init__(self, profile: Profile):
        self.layers = profile.layers
        self.modes = np.full(len(profile.layers), GFGB, dtype=np.int8)
        self.all_s, self.reserved_s, self.tag = 0.0, 0.0, -1  # line 1

    def run(self) -> np.ndarray:
        for index, layer in enumerate(self.layers):  # line 2
            if layer.forward_dha_s <= layer.forward_s + max(layer.load_s, 0.0):  # line 3
                self.modes[index] = DHA
                self.update(layer.forward_dha_s, layer.forward_dha_s)
            else:
                if layer.load_s < self.reserved_s:  # line 7
                    if self.tag == -1:
                        self.tag = index
                    self.update(layer.forward_s, layer.forward_s - layer.load_s)
                else:
                    self.backtrack(index)
                self.modes[index] = GFGB  # line 13
            self.update(layer.inter_forward_s, layer.inter_forward_s)  # line 15
        return self.modes

    def backtrack(self, index: int) -> None:
        layer = self.layers[index]
        all_s, reserved_s = self.all_s, self.reserved_s
        base_s = all_s + layer.load_s + layer.forward_s - reserved_s  # line 19
        candidates = range(0) if self.tag == -1 else range(self.tag, index + 1)  # line 20
        for other in candidates:
            slower_s = self.layers[other].forward_dha_s - self.layers[other].forward_s
            gain_s = self.layers[other].load_s + slower_s  # line 21
            trial_s = max(layer.load_s - reserved_s - gain_s, 0.0) + all_s + (slower_s + layer.forward_s)  # line 22
            if trial_s < base_s:  # line 24
                self.modes[other], self.tag = DHA, other + 1
                base_s, reserved_s = trial_s, reserved_s + gain_s
                if reserved_s >= layer.load_s:
                    break
        self.update(base_s, max(reserved_s - layer.load_s, 0.0) + layer.forward_s)  # line 30

    def update(self, overall_s: float, reserved_s: float) -> None:
        self.all_s, self.reserved_s = self.all_s + overall_s, self.reserved_s + reserved_s  # line 32
