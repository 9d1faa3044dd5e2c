"""MemFerry's schedule (section IV-B): Algorithm 1 for the forward, a greedy for the backward.

Names: X is the link's end and C the GPU's end before layer l; T_res = C - X is the reserved overlap time.

Algorithm 1 as printed has four slips. The max in line 3 has no effect, since no time is negative. Line 30 adds the time
`base`, counted from the step's start, to T_all as if it were a duration. Line 26 moves T_res^b but not T_all^b. Line 20
also visits layers that are not GFGB. `benchmarks/papers/memferry_printed.py` runs it as printed.

This module follows the paper's text instead. A layer is DHA if that takes no longer than its forward on the device
plus the part of its load that T_res does not hide. A GFGB layer that stalls makes earlier GFGB layers DHA, wherever the
exact time up to its own forward's end strictly drops.

Quality: near the optimum of `exact` on average. Each layer is decided once, so single plans can be far from it.
O(L^2) array operations on L layers at worst.
"""

from __future__ import annotations

import numpy as np

from jaxferry.holdings import DFGB, DHA, GFGB
from jaxferry.plan.base import ModePolicy
from jaxferry.profiling.records import LayerProfile, Profile


class MemFerry(ModePolicy):
    """GFGB, DHA and DFGB by MemFerry's two algorithms."""

    name = "memferry"
    summary = "MemFerry's Algorithm 1 as its text means, then the DFGB greedy"

    def modes(self, profile: Profile, grad_on_host: np.ndarray) -> np.ndarray:
        """Algorithm 1, then the greedy."""
        return with_dfgb(profile, forward_modes(profile), grad_on_host)


class Forward:
    """The forward of GFGB and DHA layers, layer by layer; any number of plans at once."""

    def __init__(self, profile: Profile):
        self.profile = profile
        self.link = self.gpu = np.zeros(1)
        self.held: dict[int, np.ndarray] = {}

    def layer(self, index: int, by_dha: np.ndarray) -> np.ndarray:
        """Runs the layer, by DHA where (plans,) `by_dha` says so; returns the forward's end, (plans,)."""
        profile, group = self.profile.layers[index], self.profile.group_of[index]
        loads = ~by_dha & ~self.holds(group)
        self.link = np.where(loads, self.link + profile.load_s, self.link)
        start = np.where(loads, np.maximum(self.gpu, self.link), self.gpu)
        end = start + np.where(by_dha, profile.forward_dha_s, profile.forward_s)
        self.gpu = end + profile.inter_forward_s
        if len(self.profile.groups[group]) > 1:
            self.held[group] = self.holds(group) | ~by_dha
        return end

    def copy(self) -> Forward:
        """A copy that can continue in another way."""
        other = Forward(self.profile)
        other.link, other.gpu, other.held = self.link, self.gpu, dict(self.held)
        return other

    def plan(self, number: int) -> Forward:
        """One plan only. An array of one element applies to all plans."""
        other = Forward(self.profile)
        other.link, other.gpu = _one(self.link, number), _one(self.gpu, number)
        other.held = {group: _one(held, number) for group, held in self.held.items()}
        return other

    def holds(self, group: int) -> np.ndarray:
        """Whether the group's copy is already on the device, (plans,)."""
        return self.held.get(group, np.zeros(1, dtype=bool))


def _one(array: np.ndarray, number: int) -> np.ndarray:
    return array if len(array) == 1 else array[number : number + 1]


def forward_modes(profile: Profile) -> np.ndarray:
    """GFGB or DHA for each layer, (layers,) codes, by Algorithm 1 as its text means."""
    modes = np.full(len(profile.layers), GFGB, dtype=np.int8)
    before = Forward(profile)
    history: list[Forward] = []
    for index, layer in enumerate(profile.layers):
        loaded = bool(before.holds(profile.group_of[index])[0])
        load_s = 0.0 if loaded else layer.load_s
        reserved_s = float(before.gpu[0] - before.link[0])
        if layer.forward_dha_s <= layer.forward_s + max(load_s - reserved_s, 0.0):
            modes[index] = DHA
        elif not loaded and _stalls(before, layer):
            before = _backtrack(profile, modes, history, before)
        history.append(before.copy())
        before.layer(index, modes[index : index + 1] == DHA)
    return modes


def _stalls(before: Forward, layer: LayerProfile) -> bool:
    return bool(before.link[0] + layer.load_s > before.gpu[0])


def _backtrack(profile: Profile, modes: np.ndarray, history: list[Forward], before: Forward) -> Forward:
    """Makes GFGB layers before a stalled one DHA, first to last; returns the forward before the stalled layer.

    All remaining candidates are tried at once; after the first one that helps, the later ones are tried again.

    Args:
      profile: the layers.
      modes: (layers,) codes, changed in place.
      history: the forward before each layer that precedes the stalled one, changed in place.
      before: the forward before the stalled layer.
    """
    first, stalled = 0, len(history)
    by_load = modes[stalled : stalled + 1] == DHA
    end = before.copy().layer(stalled, by_load)
    while True:
        candidates = first + np.flatnonzero(modes[first:stalled] == GFGB)
        if len(candidates) == 0 or not _stalls(before, profile.layers[stalled]):
            return before
        start = int(candidates[0])
        trials = np.repeat(modes[None, start:stalled] == DHA, len(candidates), axis=0)
        trials[np.arange(len(candidates)), candidates - start] = True
        forward, tried = history[start].copy(), []
        for index in range(start, stalled):
            tried.append(forward.copy())
            forward.layer(index, trials[:, index - start])
        ends = forward.copy().layer(stalled, by_load)
        helps = np.flatnonzero(ends < end[0])
        if len(helps) == 0:
            return before
        chosen = int(helps[0])
        modes[candidates[chosen]] = DHA
        first, end, before = int(candidates[chosen]) + 1, ends[chosen : chosen + 1], forward.plan(chosen)
        history[start:] = [each.plan(chosen) for each in tried]


def with_dfgb(profile: Profile, modes: np.ndarray, grad_on_host: np.ndarray) -> np.ndarray:
    """Makes DHA layers DFGB, largest gain first. A layer is kept if all kept loads still end inside the window.

    The window opens when the last GFGB load ends. It closes when the last layer's backward ends and the first gradient
    leaves. Loads follow layer order, each not before its own DHA forward has ended. Only gains above 0 count; ties go
    to the lower layer.
    """
    forward = Forward(profile)
    ends = [float(forward.layer(index, modes[index : index + 1] == DHA)[0]) for index in range(len(modes))]
    last, opens = profile.layers[-1], float(forward.link[0])
    closes = float(forward.gpu[0]) + last.inter_backward_s
    closes += last.backward_for(bool(modes[-1] == DHA), bool(grad_on_host[-1]))
    gains = [layer.backward_dha_s - layer.backward_s for layer in profile.layers]
    candidates = [index for index in range(len(modes) - 1) if modes[index] == DHA and gains[index] > 0]
    loaded = {profile.group_of[index] for index in np.flatnonzero(modes == GFGB)}
    kept: list[int] = []
    for index in sorted(candidates, key=lambda index: (-gains[index], index)):
        trial = sorted([*kept, index])
        if _between_end(profile, trial, opens, ends, loaded) <= closes:
            kept = trial
    modes = modes.copy()
    modes[kept] = DFGB
    return modes


def _between_end(profile: Profile, kept: list[int], opens: float, ends: list[float], loaded: set[int]) -> float:
    link, held = opens, set(loaded)
    for index in kept:
        group = profile.group_of[index]
        if group not in held:
            held.add(group)
            link = max(link, ends[index]) + profile.layers[index].load_s
    return link
