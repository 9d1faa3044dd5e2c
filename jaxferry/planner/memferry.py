"""MemFerry and GO-MemFerry: the papers' algorithms.

MemFerry's schedule (section IV-B): Algorithm 1 for the forward, a greedy for the backward.

Names: X is the link's end and C the GPU's end before layer l; T_res = C - X is the reserved overlap time. Where the
profile states what a DHA layer's reads take of the link, they are part of X.

Algorithm 1 as printed has four slips. The max in line 3 has no effect, since no time is negative. Line 30 adds the time
`base`, counted from the step's start, to T_all as if it were a duration. Line 26 moves T_res^b but not T_all^b. Line 20
also visits layers that are not GFGB. `benchmarks/papers/memferry_printed.py` runs it as printed.

This module follows the paper's text instead. A layer is DHA if that takes no longer than its forward on the device
plus the part of its load that T_res does not hide. A GFGB layer that stalls makes earlier GFGB layers DHA, wherever the
exact time up to its own forward's end strictly drops.

Quality: near the optimum of `exact` on average. Each layer is decided once, so single plans can be far from it.
At worst 2 L passes of array operations over L layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from jaxferry.costs import Profile
from jaxferry.planner.base import ModePolicy
from jaxferry.step import DFGB, DHA, GFGB


class MemFerry(ModePolicy):
    """GFGB, DHA and DFGB by MemFerry's two algorithms."""

    name = "memferry"
    summary = "MemFerry's Algorithm 1 as its text means, then the DFGB greedy"

    def modes(self, profile: Profile, grad_on_host: np.ndarray) -> np.ndarray:
        """Algorithm 1, then the greedy."""
        return with_dfgb(profile, forward_modes(profile), grad_on_host)


class Forward:
    """The forward of GFGB and DHA layers, program by program; `held` are the groups whose copy is on the device."""

    def __init__(self, profile: Profile, link_s: float = 0.0, gpu_s: float = 0.0, held: Iterable[int] = ()):
        self.profile, self.link_s, self.gpu_s, self.held = profile, link_s, gpu_s, set(held)

    def program(self, members: Sequence[int], modes: np.ndarray) -> list[float]:
        """Runs the layers of a program, of a plan with these (layers,) modes; returns when each forward ends."""
        layers, start_s = self.profile.layers, self.gpu_s
        for index in members:
            group = self.profile.group_of[index]
            if modes[index] != DHA and group not in self.held:
                self.held.add(group)
                self.link_s += layers[index].load_s
                start_s = max(start_s, self.link_s)
        for index in members:
            layer, by_dha = layers[index], modes[index] == DHA
            self.link_s += layer.forward_read_s if by_dha else 0.0
            end_s = start_s + (layer.forward_dha_s if by_dha else layer.forward_s)
            self.gpu_s = start_s = end_s + layer.inter_forward_s
        return [end_s] * len(members)


def forward_modes(profile: Profile) -> np.ndarray:
    """GFGB or DHA for each layer, (layers,) codes, by Algorithm 1 as its text means."""
    modes = np.full(len(profile.layers), GFGB, dtype=np.int8)
    costs = _ForwardCosts(profile)
    before = Forward(profile)
    for index, layer in enumerate(profile.layers):
        loaded = profile.group_of[index] in before.held
        load_s = 0.0 if loaded else layer.load_s
        if layer.forward_dha_s <= layer.forward_s + max(load_s - (before.gpu_s - before.link_s), 0.0):
            modes[index] = DHA
        elif not loaded and before.link_s + layer.load_s > before.gpu_s:
            before = _backtrack(costs, modes, index)
        before.program([index], modes)
    return modes


def _backtrack(costs: _ForwardCosts, modes: np.ndarray, stalled: int) -> Forward:
    """Makes GFGB layers before a stalled one DHA, first to last; returns the forward before the stalled layer.

    All remaining candidates are tried at once; after the first one that helps, the later ones are tried again.

    Args:
      costs: the layers' times.
      modes: (layers,) codes, changed in place.
      stalled: the layer that waits for its load.
    """
    first = 0
    while True:
        before = _DecidedForward(costs, modes[:stalled] == DHA)
        candidates = first + np.flatnonzero(modes[first:stalled] == GFGB)
        if len(candidates) == 0 or before.link_s + costs.load[stalled] <= before.gpu_s:
            return before.state()
        helps = np.flatnonzero(before.start_s_if_dha(candidates) < before.start_s() * (1 - _ROUNDING))
        if len(helps) == 0:
            return before.state()
        chosen = int(candidates[helps[0]])
        modes[chosen] = DHA
        first = chosen + 1


class _ForwardCosts:
    """The layers' times, (layers,) each, and the layers of groups with several layers, by group."""

    def __init__(self, profile: Profile):
        self.profile = profile
        inter = np.array([layer.inter_forward_s for layer in profile.layers])
        self.load = np.array([layer.load_s for layer in profile.layers])
        self.read = np.array([layer.forward_read_s for layer in profile.layers])
        self.forward = np.array([layer.forward_s for layer in profile.layers]) + inter
        self.forward_dha = np.array([layer.forward_dha_s for layer in profile.layers]) + inter
        shared = [(member, group) for group, members in enumerate(profile.groups) for member in members[1:] and members]
        self.shared, self.group = np.array(shared, dtype=np.int64).reshape(-1, 2).T


class _DecidedForward:
    """The forward of the layers so far, and what it would be with one more of them DHA.

    Without stalls the GPU reaches layer l after the sum of the computes before it. A load that ends later delays all
    that follows by the difference, its stall. So the GPU's end is the sum of all computes plus the largest stall.

    Args:
      costs: the times of all layers.
      by_dha: the layers so far, flags of those that are DHA.
    """

    def __init__(self, costs: _ForwardCosts, by_dha: np.ndarray):
        self.costs, self.by_dha, size = costs, by_dha, len(by_dha)
        self.loads, self.heir = ~by_dha, np.full(size, size)
        self._share_copies()
        self.load = np.where(self.loads, costs.load[:size], 0.0)
        compute = np.where(by_dha, costs.forward_dha[:size], costs.forward[:size])
        until = np.concatenate([[0.0], np.cumsum(compute)])
        link = np.cumsum(self.load + np.where(by_dha, costs.read[:size], 0.0))
        self.link_s, self.compute_s = (float(link[-1]), float(until[-1])) if size else (0.0, 0.0)
        self.late = link - until[:-1]
        stalls = np.where(self.loads, self.late, -np.inf)
        self.before = np.concatenate([[0.0], np.maximum(np.maximum.accumulate(stalls), 0.0)])
        self.after = np.concatenate([np.maximum.accumulate(stalls[::-1])[::-1], [-np.inf]])
        self.stalls = stalls
        self.gpu_s = self.compute_s + float(self.before[-1])

    def _share_copies(self) -> None:
        """Only a group's first loaded layer loads a copy; its `heir` is the one that would load it instead."""
        so_far = self.costs.shared < len(self.by_dha)
        members, group = self.costs.shared[so_far], self.costs.group[so_far]
        loaded = ~self.by_dha[members]
        members, group = members[loaded], group[loaded]
        self.held = group
        follows = np.concatenate([[False], group[1:] == group[:-1]])[: len(group)]
        self.loads[members[follows]] = False
        has_heir = ~follows & np.append(follows[1:], False)[: len(group)]
        self.heir[members[has_heir]] = members[1:][has_heir[:-1]]

    def state(self) -> Forward:
        """The forward, which can continue."""
        return Forward(self.costs.profile, self.link_s, self.gpu_s, self.held.tolist())

    def start_s(self) -> float:
        """When the next layer starts if it is loaded next."""
        size = len(self.by_dha)
        return max(self.gpu_s, self.link_s + float(self.costs.load[size]))

    def start_s_if_dha(self, candidates: np.ndarray) -> np.ndarray:
        """Likewise with one of these GFGB layers DHA, (candidates,)."""
        costs, size, heir = self.costs, len(self.by_dha), self.heir[candidates]
        load = self.load[candidates]
        more = costs.forward_dha[candidates] - costs.forward[candidates]
        between = _largest_between(self.stalls, candidates + 1, heir)
        inherited = heir < size
        late = np.maximum(between - load, self.after[np.minimum(heir + 1, size)])
        late = np.maximum(late, np.where(inherited, self.late[np.minimum(heir, size - 1)], -np.inf))
        late = late + costs.read[candidates]
        gpu = self.compute_s + more + np.maximum(self.before[candidates], late - more)
        link = self.link_s - np.where(inherited, 0.0, load) + costs.read[candidates]
        return np.maximum(gpu, link + costs.load[size])


def _largest_between(values: np.ndarray, first: np.ndarray, end: np.ndarray) -> np.ndarray:
    """The largest of `values[first:end]` for each pair, -inf if there is none. Ends at the last value are cheap."""
    result = np.append(np.maximum.accumulate(values[::-1])[::-1], -np.inf)[first]
    for row in np.flatnonzero(end < len(values)):
        result[row] = values[first[row] : end[row]].max(initial=-np.inf)
    return result


def with_dfgb(profile: Profile, modes: np.ndarray, grad_on_host: np.ndarray) -> np.ndarray:
    """Makes DHA layers DFGB, largest gain first. A layer is kept if all kept loads still end inside the window.

    The window opens when the last GFGB load ends. It closes when the last layer's backward ends and the first gradient
    leaves. Loads follow layer order, each not before its own DHA forward has ended. Only gains above 0 count; ties go
    to the lower layer.
    """
    forward = Forward(profile)
    ends = np.array([end for members in profile.programs for end in forward.program(members, modes)])
    opens_s, closes_s = forward.link_s, forward.gpu_s
    for index in profile.programs[-1]:
        last = profile.layers[index]
        closes_s += last.inter_backward_s + last.backward_for(bool(modes[index] == DHA), bool(grad_on_host[index]))
    gains = [layer.backward_dha_s - layer.backward_s for layer in profile.layers]
    candidates = [index for index in range(profile.programs[-1][0]) if modes[index] == DHA and gains[index] > 0]
    window = _Window(profile, {profile.group_of[index] for index in np.flatnonzero(modes == GFGB)}, opens_s, ends)
    for index in sorted(candidates, key=lambda index: (-gains[index], index)):
        window.keep_if(index, closes_s)
    modes = modes.copy()
    modes[window.kept] = DFGB
    return modes


class _Window:
    """The DFGB loads that are kept, and when the last one ends.

    Args:
      profile: the layers.
      loaded: groups whose copy is on the device anyway.
      opens: when the link is free.
      ends: when each layer's forward ends, (layers,).
    """

    def __init__(self, profile: Profile, loaded: set[int], opens: float, ends: np.ndarray):
        self.profile, self.loaded, self.opens = profile, loaded, opens
        self.kept, self.loads = np.zeros(len(ends), dtype=bool), np.zeros(len(ends), dtype=bool)
        self.load_s = np.array([layer.load_s for layer in profile.layers])
        self.ready_s = ends
        self.first_of: dict[int, int] = {}

    def keep_if(self, index: int, closes: float) -> None:
        """Keeps the layer if all loads then end by `closes`."""
        group = self.profile.group_of[index]
        first = self.first_of.get(group, len(self.kept))
        if group in self.loaded or first < index:
            self.kept[index] = True
            return
        self.loads[first : first + 1] = False
        self.loads[index] = True
        if self._end_s() <= closes:
            self.kept[index], self.first_of[group] = True, index
        else:
            self.loads[first : first + 1] = True
            self.loads[index] = False

    def _end_s(self) -> float:
        """When the last load ends: the longest of all loads from the start on, and from each layer's forward on."""
        loads = np.flatnonzero(self.loads)
        rest = np.cumsum(self.load_s[loads][::-1])[::-1]
        return float(max(self.opens + rest[0], (self.ready_s[loads] + rest).max()))


_ROUNDING = 1e-12


class GOMemFerry(MemFerry):
    """`memferry` with every gradient offloaded by default, as in the paper's evaluation."""

    name = "go-memferry"
    summary = "memferry with default reserve factor 0"
    default_reserve_factor = 0.0
