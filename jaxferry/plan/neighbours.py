"""Plans that differ from a known one in one layer."""

import numpy as np

from jaxferry.holdings import DFGB, DHA, GFGB, RELOAD, RESIDENT
from jaxferry.plan.search import Best

ALL_MODES = (GFGB, DHA, DFGB, RELOAD, RESIDENT)


def neighbours(best: Best, can_recompute: np.ndarray | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Plans with one layer's mode, gradient place or recomputation changed: codes and flags, (plans, layers) each."""
    size = len(best.modes)
    one = np.eye(size, dtype=bool)
    others = [np.where(one, np.int8(mode), best.modes) for mode in ALL_MODES]
    modes, grad_on_host, recomputes = (
        [*others, *(best.modes,) * 2],
        [best.grad_on_host] * len(ALL_MODES),
        [best.recomputes] * len(ALL_MODES),
    )
    grad_on_host += [best.grad_on_host ^ one, best.grad_on_host]
    recomputes += [best.recomputes, best.recomputes ^ one]
    if can_recompute is None:
        modes, grad_on_host, recomputes = modes[:-1], grad_on_host[:-1], recomputes[:-1]
    plans = [
        np.concatenate([np.broadcast_to(x, one.shape) for x in parts]) for parts in (modes, grad_on_host, recomputes)
    ]
    allowed = np.ones(len(plans[0]), dtype=bool) if can_recompute is None else ~(plans[2] & ~can_recompute).any(axis=1)
    return plans[0][allowed], plans[1][allowed], plans[2][allowed]
