"""Plans that keep the optimizer state of some groups on the device and update them there.

Which groups: the first k of several orders, from none to all; none or all if one update covers them. For each choice
the other layers take the modes and gradients of plans that the search without such updates found, or one mode for all
with a share of the layers recomputed, since state on the device takes the place of activations. Neither depends on the
budget, which only picks the fastest plan that fits; so more memory is never slower.

Choices are evaluated in the order of a lower bound on the time of their plans that fit, until no other can be faster.
"""

import dataclasses
import functools
import itertools
from collections.abc import Collection, Sequence

import numpy as np

from jaxferry.holdings import DHA, GFGB, RELOAD, RESIDENT, as_updated
from jaxferry.modes import UpdatePlace
from jaxferry.plan.base import Objective
from jaxferry.plan.effort import fewer
from jaxferry.plan.records import Loads, Plan, Updates
from jaxferry.plan.search import Best, Pool, plan_of
from jaxferry.profiling.records import Profile
from jaxferry.schedule import needed_bytes
from jaxferry.simulate.report import simulate

_POINTS, _LEAST_POINTS = 12, 2
_STARTS = 8
_SHARES = 8
_ROUNDING = 1e-9


@dataclasses.dataclass(frozen=True)
class Placed:
    """A plan with updates on the device.

    Attributes:
      plan: the plan.
      objective_s: its steady step in seconds; an upper bound if updates wait for all gradients.
      needed_bytes: the least budget within which it runs.
    """

    plan: Plan
    objective_s: float
    needed_bytes: int


@dataclasses.dataclass(frozen=True)
class _Plans:
    """The plans of a choice of groups, evaluated on demand; of each a lower bound on its time, and its memory."""

    pool: Pool
    bound_s: np.ndarray
    needed_bytes: np.ndarray


def updatable_groups(profile: Profile) -> list[int]:
    """The groups that a plan may update on the device: those whose layers state `update_gpu_s`."""
    layers = ((group, profile.layers[members[0]]) for group, members in enumerate(profile.groups))
    return [group for group, layer in layers if layer.has_gradient and layer.update_gpu_s is not None]


def streamable_groups(profile: Profile) -> list[int]:
    """The groups that a policy may stream: those whose layers state all times of that."""
    layers = {group: profile.layers[profile.groups[group][0]] for group in updatable_groups(profile)}
    return [group for group, x in layers.items() if x.state_up_s is not None and x.state_down_s is not None]


def plain_training(policy: str, profile: Profile) -> Placed | None:
    """Everything stays on the device and is updated there; None if some trained group may not be."""
    groups, size = updatable_groups(profile), len(profile.layers)
    trained = [group for group, members in enumerate(profile.groups) if profile.layers[members[0]].has_gradient]
    if not trained or groups != trained:
        return None
    modes, stay = np.full(size, RESIDENT, dtype=np.int8), np.zeros(size, dtype=bool)
    best = Best(modes, stay, stay, Loads.LAYERWISE, Updates.OVERLAPPED, objective_s=1.0, needed_bytes=0)
    plan = _with_updates(profile, plan_of(policy, 1.0, profile, best), groups)
    return Placed(plan, simulate(profile, plan).steady_step_s, needed_bytes(profile, plan))


def _with_updates(profile: Profile, plan: Plan, groups: Collection[int]) -> Plan:
    chosen = {member for group in groups for member in profile.groups[group]}
    layers = tuple(
        dataclasses.replace(layer, update=UpdatePlace.RESIDENT) if index in chosen else layer
        for index, layer in enumerate(plan.layers)
    )
    return dataclasses.replace(plan, layers=layers)


class DeviceUpdateSearch:
    """The plans of one profile; answers any number of budgets.

    Args:
      policy: the name that the plans carry.
      profile: the layers.
      starts: plans without such updates, fastest first.
    """

    def __init__(self, policy: str, profile: Profile, starts: Sequence[Best]):
        self.policy, self.profile = policy, profile
        chosen = np.unique(np.linspace(0, max(len(starts) - 1, 0), _STARTS).astype(int))
        self.starts = [starts[number] for number in chosen] if starts else []
        self.choices = self._choices()

    def best(self, budget_bytes: int | None, below_s: float = np.inf) -> Placed | None:
        """The fastest plan that fits, if it is faster than `below_s`; ties go to the leanest. None if there is none."""
        found: list[tuple[float, int, int, Placed]] = []
        least_s = below_s
        bounds = [self._bound_s(groups, budget_bytes) for groups in self.choices]
        for number in sorted(range(len(bounds)), key=lambda number: bounds[number]):
            if bounds[number] == np.inf or bounds[number] * (1 - _ROUNDING) > least_s:
                break
            placed = self.best_of(self.choices[number], budget_bytes)
            if placed is not None and placed.objective_s < below_s:
                found.append((placed.objective_s, placed.needed_bytes, number, placed))
                least_s = min(least_s, placed.objective_s)
        return min(found)[-1] if found else None

    def _bound_s(self, groups: frozenset[int], budget_bytes: int | None) -> float:
        """No plan with this choice that fits is faster; infinite if none fits."""
        if self._is_plain(groups):
            plain = self.plain_within(budget_bytes)
            return np.inf if plain is None else plain.objective_s
        state_bytes = sum(self.profile.layers[self.profile.groups[group][0]].state_bytes for group in groups)
        if budget_bytes is not None and state_bytes > budget_bytes:
            return np.inf
        plans = self._plans(groups)
        fits = True if budget_bytes is None else plans.needed_bytes <= budget_bytes
        return float(plans.bound_s.min(initial=np.inf, where=fits))

    def _is_plain(self, groups: frozenset[int]) -> bool:
        return groups == frozenset(range(len(self.profile.groups)))

    def _choices(self) -> list[frozenset[int]]:
        groups, layers = updatable_groups(self.profile), self.profile.layers
        if self.profile.updates_together:
            # `best_of` knows plain training.
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

    def best_of(self, groups: frozenset[int], budget_bytes: int | None) -> Placed | None:
        """The fastest plan with one of `choices` that fits; None if none fits."""
        if self._is_plain(groups):
            return self.plain_within(budget_bytes)
        pool = self._plans(groups).pool
        if not pool.evaluated:
            pool.run()
        best = pool.best(Objective.STEADY, budget_bytes, leanest=True)
        if best is None:
            return None
        plan = _with_updates(self.profile, plan_of(self.policy, 1.0, self.profile, best), groups)
        # Updates that wait for all gradients follow the last of them on the GPU.
        more_s = sum(self._gpu_s(group) for group in groups) if self.profile.updates_after_all else 0.0
        return Placed(plan, best.objective_s + more_s, best.needed_bytes)

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

    @functools.cache  # noqa: B019 - as long as the search lives
    def _plans(self, groups: frozenset[int]) -> _Plans:
        pool = Pool(as_updated(self.profile, groups, self.profile.updates_after_all), by_need_on_frontier=True)
        members = [member for group in groups for member in self.profile.groups[group]]
        starts = [(best.modes, best.grad_on_host, best.recomputes) for best in self.starts]
        none = np.zeros(len(self.profile.layers), dtype=bool)
        uniform = [np.full(len(none), mode, dtype=np.int8) for mode in (GFGB, DHA, RELOAD, RESIDENT)]
        starts += [(modes, grad_on_host, none) for modes in uniform for grad_on_host in (none, ~none)]
        starts += itertools.product(uniform[:2], (none, ~none), self._recomputing)
        modes, grad_on_host, recomputes = (np.stack(part) for part in zip(*starts, strict=True))
        modes[:, members], grad_on_host[:, members] = RESIDENT, False
        pool.add(modes, grad_on_host, recomputes=recomputes)
        return _Plans(pool, *pool.evaluate.bounds(modes, grad_on_host, recomputes))

    def _gpu_s(self, group: int) -> float:
        return self.profile.layers[self.profile.groups[group][0]].update_gpu_s or 0.0
