"""The baselines: L2L, ZeRO-Offload as DeepSpeed has it, and offloading layer by layer.

ZeRO-Offload as in DeepSpeed (MemFerry, sections II-B and III-A): first loads, then programs, then updates.

Gradients leave during the backward. A load of the next step follows the update that it waits for.
"""

import numpy as np

from jaxferry.costs import Profile
from jaxferry.planner.base import ModePolicy
from jaxferry.step import GFGB, RELOAD, Loads, Updates


class L2L(ModePolicy):
    """Every layer RELOAD: at most two layers' parameters are on the device, but each layer is loaded twice."""

    name = "l2l"
    summary = "every layer loaded twice, two on the device at a time"

    def modes(self, profile: Profile, grad_on_host: np.ndarray) -> np.ndarray:
        """RELOAD for every layer."""
        return np.full(len(profile.layers), RELOAD, dtype=np.int8)


class EveryLayerLoaded(ModePolicy):
    """Every layer GFGB."""

    def modes(self, profile: Profile, grad_on_host: np.ndarray) -> np.ndarray:
        """GFGB for every layer."""
        return np.full(len(profile.layers), GFGB, dtype=np.int8)


class NativeOffload(EveryLayerLoaded):
    """Every layer GFGB; a forward waits only for its own load, updates wait for all gradients."""

    name = "native-offload"
    summary = "loads layer by layer, updates after all gradients"
    updates = Updates.AFTER_ALL


class NativeOverlapped(EveryLayerLoaded):
    """Every layer GFGB; a forward waits for its own load only, an update for its own gradients only."""

    name = "native-overlapped"
    summary = "loads and updates layer by layer"


class ZeroOffload(EveryLayerLoaded):
    """Every layer GFGB; forwards wait for all loads, updates for all gradients."""

    name = "zero-offload"
    summary = "DeepSpeed's ZeRO-Offload: bulk loads, updates after all gradients"
    loads = Loads.BULK
    updates = Updates.AFTER_ALL
