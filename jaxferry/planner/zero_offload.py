"""ZeRO-Offload as in DeepSpeed (MemFerry, sections II-B and III-A): first loads, then programs, then updates.

Gradients leave during the backward. A load of the next step follows the update that it waits for.
"""

import numpy as np

from jaxferry.costs.records import Profile
from jaxferry.planner.base import ModePolicy
from jaxferry.step.holdings import GFGB
from jaxferry.step.records import Loads, Updates


class ZeroOffload(ModePolicy):
    """Every layer GFGB; forwards wait for all loads, updates for all gradients."""

    name = "zero-offload"
    summary = "DeepSpeed's ZeRO-Offload: bulk loads, updates after all gradients"
    loads = Loads.BULK
    updates = Updates.AFTER_ALL

    def modes(self, profile: Profile, grad_on_host: np.ndarray) -> np.ndarray:
        """GFGB for every layer."""
        return np.full(len(profile.layers), GFGB, dtype=np.int8)
