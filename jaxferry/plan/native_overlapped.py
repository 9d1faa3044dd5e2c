"""Offloading with loads and updates layer by layer: the most overlap without direct host access."""

import numpy as np

from jaxferry.holdings import GFGB
from jaxferry.plan.base import ModePolicy
from jaxferry.profiling.records import Profile


class NativeOverlapped(ModePolicy):
    """Every layer GFGB; a forward waits for its own load only, an update for its own gradients only."""

    name = "native-overlapped"
    summary = "loads and updates layer by layer"

    def modes(self, profile: Profile, grad_on_host: np.ndarray) -> np.ndarray:
        """GFGB for every layer."""
        return np.full(len(profile.layers), GFGB, dtype=np.int8)
