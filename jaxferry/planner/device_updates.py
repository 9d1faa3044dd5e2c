"""Plans that keep the optimizer state of some groups on the device and update them there.

Which groups: the first k of several orders, from none to all; none or all if one update covers them. For each choice
the other layers take the modes and gradients of plans that the search without such updates found, or one mode for all
with a share of the layers recomputed, since state on the device takes the place of activations. Neither depends on the
budget, which only picks the fastest plan that fits; so more memory is never slower.

All choices are simulated together. Plans are left out whose lower bound is no better than the time of a known plan
without such updates that needs no more memory. Updates by need are tried for those whose bound and memory few others
beat. A local search follows (`planner/neighbours.py`), but not for a long model, whose neighbours differ too little.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence

import numpy as np

from jaxferry.costs import Profile
from jaxferry.planner.base import Objective
from jaxferry.planner.effort import FEW_LAYERS, fewer, updatable_groups
from jaxferry.planner.neighbours import Neighbours, refine
from jaxferry.planner.preference import Best, picked_plan, plan_of
from jaxferry.planner.search import Pool, on_fronts
from jaxferry.step import DHA, GFGB, RELOAD, RESIDENT, Loads, Plan, Updates, needed_bytes, simulate

_POINTS, _LEAST_POINTS = 12, 2
_STARTS = 20
_SHARES = 8
_FRONTS = 24
_ROUNDING = 1e-9


@dataclasses.dataclass(frozen=True)
class Placed:
    """A plan with updates on the device.

    Attributes:
      plan: the plan.
      objective_s: its steady step in seconds.
      needed_bytes: the least budget within which it runs.
    """

    plan: Plan
    objective_s: float
    needed_bytes: int


def plain_training(policy: str, profile: Profile) -> Placed | None:
    """Everything stays on the device and is updated there; None if some trained group may not be."""
    groups, size = updatable_groups(profile), len(profile.layers)
    trained = [group for group, members in enumerate(profile.groups) if profile.layers[members[0]].has_gradient]
    if not trained or groups != trained:
        return None
    modes, stay = np.full(size, RESIDENT, dtype=np.int8), np.zeros(size, dtype=bool)
    there = np.isin(list(profile.group_of), groups)
    best = Best(modes, stay, stay, *_KIND, objective_s=1.0, needed_bytes=0, on_device=there)
    plan = picked_plan(policy, 1.0, profile, best)
    return Placed(plan, simulate(profile, plan).steady_step_s, needed_bytes(profile, plan))


class DeviceUpdateSearch:
    """The plans of one profile; answers any number of budgets.

    Args:
      policy: the name that the plans carry.
      profile: the layers.
      starts: plans without such updates, fastest first.
    """

    def __init__(self, policy: str, profile: Profile, starts: Sequence[Best]):
        self.policy, self.profile, self.known = policy, profile, starts
        chosen = np.unique(np.linspace(0, max(len(starts) - 1, 0), _STARTS).astype(int))
        self.starts = [starts[number] for number in chosen] if starts else []
        self.choices = self._choices()

    def best(self, budget_bytes: int | None, below_s: float = np.inf) -> Placed | None:
        """The fastest plan that fits, if it is faster than `below_s`; ties go to the leanest. None if there is none."""
        found = [] if self.plain is None else [self.plain]
        if self._pool is not None:
            best = self._pool.best(Objective.STEADY, budget_bytes, leanest=True, below_s=below_s)
            found += [] if best is None else [self._placed(best)]
        fits = [
            placed
            for placed in found
            if placed.objective_s < below_s and (budget_bytes is None or placed.needed_bytes <= budget_bytes)
        ]
        return min(fits, key=lambda placed: (placed.objective_s, placed.needed_bytes), default=None)

    def preferred(self, budget_bytes: int | None, longest_s: float) -> list[Best]:
        """Plans to prefer of those that fit and take at most `longest_s`: plain training, and one of the others."""
        plain, found = self.plain_within(budget_bytes), list[Best | None]()
        if plain is not None and plain.objective_s <= longest_s:
            found.append(Best.of(plain.plan, plain.objective_s, plain.needed_bytes))
        if self._pool is not None:
            found.append(self._pool.preferred(Objective.STEADY, budget_bytes, longest_s))
        return [best for best in found if best is not None]

    def least_s(self, budget_bytes: int | None) -> float:
        """The time in seconds of some plan that fits; infinite if none is known."""
        plain, pool = self.plain_within(budget_bytes), self._pool
        known_s = np.inf if pool is None else pool.least_s(budget_bytes)
        return known_s if plain is None else min(known_s, plain.objective_s)

    def _placed(self, best: Best) -> Placed:
        return Placed(plan_of(self.policy, 1.0, self.profile, best), best.objective_s, best.needed_bytes)

    def _is_plain(self, groups: frozenset[int]) -> bool:
        return groups == frozenset(range(len(self.profile.groups)))

    def _choices(self) -> list[frozenset[int]]:
        groups, layers = updatable_groups(self.profile), self.profile.layers
        if self.profile.updates_together:
            # `best` knows plain training.
            return [frozenset(groups)] if len(groups) == len(self.profile.groups) else []
        first = {group: layers[self.profile.groups[group][0]] for group in groups}
        size = {group: max(first[group].state_bytes + first[group].param_bytes, 1) for group in groups}
        orders = [
            sorted(groups, key=lambda g: (-self.profile.group_update_s[g] / size[g], g)),
            sorted(groups, key=lambda g: (-(first[g].load_s + first[g].offload_s) / size[g], g)),
            groups,
            groups[::-1],
        ]
        most = min(fewer(_POINTS, len(layers), _LEAST_POINTS), len(groups))
        orders = orders[: fewer(len(orders), len(layers))]
        points = np.unique(np.linspace(1, len(groups), most).astype(int))
        return list(dict.fromkeys(frozenset(order[:count]) for order in orders for count in points))

    @functools.cached_property
    def _recomputing(self) -> list[np.ndarray]:
        """Flags of the first layers that save memory by recomputation: shares of them, (layers,) each."""
        layers = self.profile.layers
        useful = np.flatnonzero([x.can_recompute and x.kept_bytes(True) < x.activation_bytes for x in layers])
        counts = np.unique(np.linspace(0, len(useful), fewer(_SHARES, len(layers), 2) + 1).astype(int))[1:]
        found = np.zeros((len(counts), len(layers)), dtype=bool)
        for flags, count in zip(found, counts, strict=True):
            flags[useful[:count]] = True
        return list(found)

    @functools.cached_property
    def plain(self) -> Placed | None:
        """Plain training, if all trained groups may be updated on the device."""
        return plain_training(self.policy, self.profile)

    def plain_within(self, budget_bytes: int | None) -> Placed | None:
        """Likewise, if it fits."""
        fits = self.plain is not None and (budget_bytes is None or self.plain.needed_bytes <= budget_bytes)
        return self.plain if fits else None

    @functools.cached_property
    def _pool(self) -> Pool | None:
        """All plans that may be faster than known ones that need no more memory; None if there are none."""
        parts = [self._plans(groups) for groups in self.choices if not self._is_plain(groups)]
        if not parts:
            return None
        plans = tuple(np.concatenate(each) for each in zip(*parts, strict=True))
        pool = Pool(self.profile, by_need_on_frontier=True)
        bound_s, num_bytes = pool.evaluate.bounds(plans)
        useful = bound_s * (1 - _ROUNDING) < _least_s(self.known, num_bytes)
        marked = useful & on_fronts(bound_s, num_bytes, _FRONTS)
        if not marked.any():
            return None
        _add(pool, plans, marked, marked=True)
        pool.run()
        useful &= bound_s * (1 - _ROUNDING) < _least_s(pool.frontier(), num_bytes)
        _add(pool, plans, useful & ~marked)
        pool.run()
        if len(self.profile.layers) <= FEW_LAYERS:
            self._refine(pool)
        pool.join()
        return pool

    def _refine(self, pool: Pool) -> None:
        """Adds neighbours of the best plans for their memory."""
        can_recompute = np.array([layer.can_recompute for layer in self.profile.layers])

        def run(*plans: np.ndarray) -> None:
            _add(pool, plans, np.ones(len(plans[0]), dtype=bool))
            pool.run()

        refine(pool.frontier, Neighbours(self.profile, can_recompute, updatable_groups(self.profile)), run)

    def _plans(self, groups: frozenset[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Modes and flags of gradients, recomputation and updates for one choice, (plans, layers) each."""
        members = [member for group in groups for member in self.profile.groups[group]]
        starts = [(best.modes, best.grad_on_host, best.recomputes) for best in self.starts]
        none = np.zeros(len(self.profile.layers), dtype=bool)
        uniform = [np.full(len(none), mode, dtype=np.int8) for mode in (GFGB, DHA, RELOAD, RESIDENT)]
        starts += [(modes, grad_on_host, none) for modes in uniform for grad_on_host in (none, ~none)]
        starts += itertools.product(uniform[:2], (none, ~none), self._recomputing)
        modes, grad_on_host, recomputes = (np.stack(part) for part in zip(*starts, strict=True))
        modes[:, members], grad_on_host[:, members] = RESIDENT, False
        on_device = np.zeros_like(grad_on_host)
        on_device[:, members] = True
        return modes, grad_on_host, recomputes, on_device


_KIND = (Loads.LAYERWISE, Updates.OVERLAPPED)


def _add(pool: Pool, plans: tuple[np.ndarray, ...], which: np.ndarray, marked: bool = False) -> None:
    modes, grad_on_host, recomputes, on_device = (each[which] for each in plans)
    pool.add(modes, grad_on_host, recomputes=recomputes, on_device=on_device, marked=marked)


def _least_s(known: Sequence[Best], num_bytes: np.ndarray) -> np.ndarray:
    """The least time of known plans that need no more than so many bytes, (plans,)."""
    order = sorted(known, key=lambda best: best.needed_bytes)
    least_s = np.minimum.accumulate([np.inf, *(best.objective_s for best in order)])
    return least_s[np.searchsorted([best.needed_bytes for best in order], num_bytes, side="right")]
