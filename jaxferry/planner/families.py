"""Families of plans with less and less memory."""

import numpy as np

from jaxferry.costs.records import Profile
from jaxferry.step.holdings import DHA


def prefix_family(
    profile: Profile, modes: np.ndarray, mode: int = DHA, points: int | None = None, num_orders: int = 4
) -> np.ndarray:
    """Plans with the first k layers of several orders in the given mode: (plans, layers) codes.

    The orders: least slowdown by DHA per byte first, largest first, forward order, backward order; the first
    `num_orders` of these count. Each order gives one plan per change, or about `points` plans.
    """
    layers = profile.layers
    slowdown = [x.forward_dha_s - x.forward_s + x.backward_dha_s - x.backward_s for x in layers]
    orders = [
        sorted(range(len(layers)), key=lambda i: (slowdown[i] / max(layers[i].param_bytes, 1), i)),
        sorted(range(len(layers)), key=lambda i: (-layers[i].param_bytes, i)),
        list(range(len(layers))),
        list(reversed(range(len(layers)))),
    ]
    family = []
    for order in orders[:num_orders]:
        changes = [index for index in order if modes[index] != mode]
        stride = 1 if points is None else max(1, len(changes) // points)
        current = np.array(modes, dtype=np.int8)
        for number, index in enumerate(changes, start=1):
            current[index] = mode
            if number % stride == 0 or number == len(changes):
                family.append(current.copy())
    return np.array(family, dtype=np.int8).reshape(len(family), len(layers))
