"""L2L (Pudipeddi et al., 2020): every layer is loaded for its forward, dropped, and loaded again for its backward."""

import numpy as np

from jaxferry.costs.records import Profile
from jaxferry.planner.base import ModePolicy
from jaxferry.step.holdings import RELOAD


class L2L(ModePolicy):
    """Every layer RELOAD: at most two layers' parameters are on the device, but each layer is loaded twice."""

    name = "l2l"
    summary = "every layer loaded twice, two on the device at a time"

    def modes(self, profile: Profile, grad_on_host: np.ndarray) -> np.ndarray:
        """RELOAD for every layer."""
        return np.full(len(profile.layers), RELOAD, dtype=np.int8)
