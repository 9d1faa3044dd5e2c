"""Offloading with loads and updates layer by layer: the most overlap without direct host access."""

import numpy as np

from jaxferry.costs.records import Profile
from jaxferry.planner.base import ModePolicy
from jaxferry.step.holdings import GFGB


class NativeOverlapped(ModePolicy):
    """Every layer GFGB; a forward waits for its own load only, an update for its own gradients only."""

    name = "native-overlapped"
    summary = "loads and updates layer by layer"

    def modes(self, profile: Profile, grad_on_host: np.ndarray) -> np.ndarray:
        """GFGB for every layer."""
        return np.full(len(profile.layers), GFGB, dtype=np.int8)
