"""The forward optimum over GFGB and DHA, by dynamic programming over a Pareto frontier.

Names: a state is (X, C), the link's end and the GPU's end after the layers so far (MemFerry, section IV-B). Both of a
  layer's
transitions are monotone in X and C,

    DHA   (X, C + forward_dha_s + inter_forward_s)
    GFGB  (X + load_s, max(C, X + load_s) + forward_s + inter_forward_s),

so a state that is no better in X nor in C can never end better, and is dropped. States from which even the fastest
rest exceeds a known plan are dropped too. Optimal always; the frontier is some hundred states in practice.
Where parameter groups have several layers, frontiers are kept apart by which groups' copies are on the device.
"""

import numpy as np

from jaxferry.plan.memferry import Forward, forward_modes
from jaxferry.plan.recurrences import DHA, GFGB
from jaxferry.profiling.records import Profile


def optimal_forward(
    profile: Profile, head: int = 0, lead_s: float = 0.0, limit_s: float = np.inf
) -> tuple[np.ndarray, float]:
    """The modes, (layers,) codes of GFGB and DHA, whose forward ends first, and that end in seconds.

    Args:
      profile: the layers.
      head: this many first layers are DHA.
      lead_s: seconds before the forward's start at which the loads begin, as they may in a chain of steps.
      limit_s: an optimum above this is not looked for; what is returned then is above it too, but not the optimum.
    """
    known = _known_plans(profile, head, lead_s)
    limit = min(limit_s, *(end for _, end in known))
    fastest_rest = np.array([min(x.forward_s, x.forward_dha_s) + x.inter_forward_s for x in profile.layers])
    rest = np.concatenate([np.cumsum(fastest_rest[::-1])[::-1][1:], [0.0]])
    shared = [group for group, members in enumerate(profile.groups) if len(members) > 1]
    states = _States(np.full(1, -lead_s), np.zeros(1), np.zeros(1, dtype=np.int64))
    history = []
    for index in range(len(profile.layers)):
        group = profile.group_of[index]
        bit = 1 << shared.index(group) if group in shared else 0
        states, origin = states.after(profile, index, bit)
        allowed = states.gpu + rest[index] <= limit * (1 + 1e-12)
        if index < head:
            allowed &= origin % 2 == 0
        keep = states.frontier(np.flatnonzero(allowed))
        states, origin = states.take(keep), origin[keep]
        history.append(origin)
    if len(states.gpu) == 0 or states.gpu.min() >= min(end for _, end in known):
        return min(known, key=lambda plan: plan[1])
    return _trace(history, int(np.argmin(states.gpu))), float(states.gpu.min())


def forward_s(profile: Profile, modes: np.ndarray, lead_s: float = 0.0) -> float:
    """Seconds to the end of the forward for (layers,) codes; DFGB counts as DHA."""
    forward = Forward(profile)
    forward.link = np.full(1, -lead_s)
    for index in range(len(modes)):
        forward.layer(index, modes[index : index + 1] != GFGB)
    return float(forward.gpu[0])


def _known_plans(profile: Profile, head: int, lead_s: float) -> list[tuple[np.ndarray, float]]:
    size = len(profile.layers)
    plans = [np.full(size, DHA, dtype=np.int8), np.full(size, GFGB, dtype=np.int8)]
    plans += [forward_modes(profile)] if head == 0 else []
    for modes in plans:
        modes[:head] = DHA
    return [(modes, forward_s(profile, modes, lead_s)) for modes in plans]


class _States:
    """States after some layers: X, C, and the groups of several layers whose copies are held, as bits."""

    def __init__(self, link: np.ndarray, gpu: np.ndarray, held: np.ndarray):
        self.link, self.gpu, self.held = link, gpu, held

    def take(self, keep: np.ndarray) -> "_States":
        return _States(self.link[keep], self.gpu[keep], self.held[keep])

    def after(self, profile: Profile, index: int, bit: int) -> tuple["_States", np.ndarray]:
        """All states after one more layer, DHA first; and where each came from: 2 * state, + 1 for GFGB."""
        layer = profile.layers[index]
        by_dha = self.gpu + layer.forward_dha_s + layer.inter_forward_s
        loads = (self.held & bit) == 0
        link = np.where(loads, self.link + layer.load_s, self.link)
        start = np.where(loads, np.maximum(self.gpu, link), self.gpu)
        loaded = start + layer.forward_s + layer.inter_forward_s
        origin = 2 * np.arange(len(self.gpu))
        states = _States(
            np.concatenate([self.link, link]),
            np.concatenate([by_dha, loaded]),
            np.concatenate([self.held, self.held | bit]),
        )
        return states, np.concatenate([origin, origin + 1])

    def frontier(self, among: np.ndarray) -> np.ndarray:
        """Indices of the states, of those given, that none with the same copies held beats in both X and C."""
        kept = []
        for held in np.unique(self.held[among]):
            same = among[self.held[among] == held]
            order = same[np.lexsort((self.gpu[same], self.link[same]))]
            best_before = np.concatenate([[np.inf], np.minimum.accumulate(self.gpu[order])[:-1]])
            kept.append(order[self.gpu[order] < best_before])
        return np.concatenate(kept) if kept else among


def _trace(history: list[np.ndarray], state: int) -> np.ndarray:
    modes = np.full(len(history), DHA, dtype=np.int8)
    for index in reversed(range(len(history))):
        state, loaded = divmod(int(history[index][state]), 2)
        if loaded:
            modes[index] = GFGB
    return modes
