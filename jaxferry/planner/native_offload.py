"""Native ZeRO-Offload, MemFerry's second baseline (section V-A): loads layer by layer, updates at the end."""

import numpy as np

from jaxferry.costs.records import Profile
from jaxferry.planner.base import ModePolicy
from jaxferry.step.holdings import GFGB
from jaxferry.step.records import Updates


class NativeOffload(ModePolicy):
    """Every layer GFGB; a forward waits only for its own load, updates wait for all gradients."""

    name = "native-offload"
    summary = "loads layer by layer, updates after all gradients"
    updates = Updates.AFTER_ALL

    def modes(self, profile: Profile, grad_on_host: np.ndarray) -> np.ndarray:
        """GFGB for every layer."""
        return np.full(len(profile.layers), GFGB, dtype=np.int8)
