"""Chooses modes, gradients and recomputation from one memory budget: the fastest plan that fits, or one equal to it.

The search fills a pool of plans independently of the budget: the plans of all policies, including `exact`, with several
reserve factors; families of plans that switch one layer after another to DHA, RELOAD or RESIDENT; and neighbours of the
best plans for their memory. The budget then picks the fastest plan in the steady state that fits, in either order of
updates (`planner/search.py`). So more memory never makes it slower, and no policy that fits is faster. For up to
`MOST_ENUMERATED` layers the pool contains every plan. Of the plans that count as equal to the fastest, `auto` takes the
one that relies least on the machine model (`planner/preference.py`).

If the profile states the cost of recomputation, a second pool starts from the best plans of the first: families of
plans that recompute one layer after another, and neighbours. The first pool does not depend on the second, so the
option to recompute makes no plan slower.

A plan with all layers DHA and all gradients GO holds only activations. With GO allowed, this is the smallest feasible
budget. No budget means unlimited memory: the search takes the fastest plan of the pool.

Where a profile states `update_gpu_s`, groups may also be updated on the device, where their optimizer state then stays
(`planner/device_updates.py`). Where it also states `state_up_s` and `state_down_s`, updates may stream through the GPU
(`planner/streamed_updates.py`). A plan for such a profile states its gap to a bound (`planner/planning.py`).

A given reserve factor below 1 is an upper bound: fewer gradients may stay if that saves memory or time. With 1 no
gradient is GO.
"""

import dataclasses
import decimal
import itertools
from collections.abc import Collection
from typing import Any

import numpy as np

from jaxferry.costs import Profile
from jaxferry.modes import Subgroups, UpdatePlace
from jaxferry.planner.base import (
    Objective,
    Policy,
    Request,
    best_order,
    capacity_bytes,
    check_budget,
    gains_s,
    gradients_to_host,
)
from jaxferry.planner.device_updates import DeviceUpdateSearch, Placed
from jaxferry.planner.effort import FEW_LAYERS, fewer, is_searched, streamable_groups, updatable_groups
from jaxferry.planner.exact import explore, known_plans, reserve_factors
from jaxferry.planner.frontier import ForwardOptimum, optimal_forward
from jaxferry.planner.neighbours import ALL_MODES, MOST_WORK, Limits, Neighbours, prefix_family, refine, replaced
from jaxferry.planner.preference import Best, longest_equal_s, plan_of, preferred, scores
from jaxferry.planner.search import Pool
from jaxferry.planner.streamed_updates import StreamedUpdateSearch
from jaxferry.step import (
    DHA,
    GFGB,
    RELOAD,
    RESIDENT,
    Lane,
    Loads,
    Plan,
    StepSchedules,
    Updates,
    schedule_step,
    slots_bytes,
)

MOST_ENUMERATED = 4
"""The most layers for which all plans are tried."""

_LEVELS = (1.0, 0.75, 0.5, 0.25, 0.0)
_POINTS = 24
_LEAST_POINTS = 4
_ORDERS = 4
_LEAST_STARTS = 3
_RECOMPUTING_STARTS = 6
_ROUNDING = 1e-12
_UNLIMITED_BYTES = 2**53
_MUCH = 0.1  # of the least memory of any plan: the room that small subgroups must save to be tried


class Auto(Policy):
    """The fastest plan in the steady state that fits into the memory budget."""

    name = "auto"
    summary = "modes, gradients and resident layers from a memory budget alone"

    def plan(self, profile: Profile, request: Request | None = None) -> Plan:
        """The plan of the search that fits and that `planner/preference.py` prefers."""
        request = dataclasses.replace(request or Request(), objective=Objective.STEADY)
        return AutoSearch(profile, request).plan(request.memory_budget_bytes)


class AutoSearch:
    """The pool for one profile and reserve factor; answers any number of budgets.

    Args:
      profile: the profile.
      request: its `reserve_factor` limits the gradients that stay; None lets the search choose. Its budget is ignored.
    """

    def __init__(self, profile: Profile, request: Request):
        self.profile, self.request = profile, request
        self.pool = Pool(profile, by_need_on_frontier=True)
        self.recomputing = Pool(profile, by_need_on_frontier=True)
        self.recomputes = False
        self._placed: DeviceUpdateSearch | None = None
        self._streamed: list[StreamedUpdateSearch] = []
        self.saved_bytes = np.array([x.activation_bytes - x.kept_bytes(x.can_recompute) for x in profile.layers])
        self.gains = np.array(gains_s(profile))
        self.sizes = [layer.grad_bytes for layer in profile.layers]
        self._fill()
        if (self.saved_bytes > 0).any():
            self._recompute()

    def plan(self, budget_bytes: int | None, places: Collection[UpdatePlace] = tuple(UpdatePlace)) -> Plan:
        """The plan to take within the budget, by `planner/preference.py`. None means no limit.

        Args:
          budget_bytes: the budget.
          places: where updates may run, besides the host.

        Raises:
          BudgetError: if no plan fits.
        """
        chosen = self._chosen(budget_bytes, places)
        if chosen is None:
            leanest = self._frontier()[-1]
            check_budget(Auto.name, budget_bytes or 0, leanest.needed_bytes, int(leanest.recomputes.sum()))
        unlimited = chosen if budget_bytes is None else self._chosen(None, places)
        assert chosen is not None and unlimited is not None
        details = _details(self.profile, chosen, unlimited, budget_bytes)
        plan = dataclasses.replace(chosen.plan, details=details)
        return _without_needless_memory(self.profile, plan) if budget_bytes is None else plan

    def fastest(self, budget_bytes: int | None, places: Collection[UpdatePlace] = tuple(UpdatePlace)) -> Placed | None:
        """The fastest plan that the search finds, before `planner/preference.py` chooses; None if no plan fits."""
        best, placed = self._fastest(budget_bytes, places)
        if placed is not None or best is None:
            return placed
        return Placed(self._plan_of(best), best.objective_s, best.needed_bytes)

    def _chosen(self, budget_bytes: int | None, places: Collection[UpdatePlace]) -> Placed | None:
        """The plan to take within the budget, by `planner/preference.py`; None if no plan fits."""
        best, placed = self._fastest(budget_bytes, places)
        if placed is not None:
            best = Best.of(placed.plan, placed.objective_s, placed.needed_bytes)
        if best is None:
            return None
        room = self._room(budget_bytes)
        longest_s = longest_equal_s(best.objective_s)
        device = self._placed if UpdatePlace.RESIDENT in places and not self._gradients_leave else None
        known = [pool.preferred(Objective.STEADY, budget_bytes, longest_s) for pool in self._pools]
        known += [] if device is None else device.preferred(budget_bytes, longest_s)
        chosen = preferred([best, *filter(None, known)], self._score)
        limits = Limits(Objective.STEADY, longest_s, budget_bytes, room, self._allows)
        chosen = replaced(self.profile, chosen, limits)
        if chosen is not best:
            return self._made(chosen, room)
        return placed or Placed(self._plan_of(best), best.objective_s, best.needed_bytes)

    def _score(self, best: Best) -> int:
        return int(scores(self.profile, *(each[None] for each in best.columns))[0])

    def _made(self, chosen: Best, room: int | None) -> Placed:
        """The plan in its better order of updates, with as much room for gradients, in bytes."""
        if chosen.through_gpu is None:
            chosen = dataclasses.replace(chosen, memory_bytes=room)
        plan = self._plan_of(chosen)
        plan, seconds = best_order(plan, StepSchedules(self.profile, plan))
        return Placed(plan, seconds, chosen.needed_bytes)

    def _plan_of(self, best: Best) -> Plan:
        is_updated_on_host = best.on_device is None and best.through_gpu is None
        factor = self._used_reserve_factor(best.grad_on_host) if is_updated_on_host else 1.0
        return plan_of(Auto.name, factor, self.profile, best)

    def _room(self, budget_bytes: int | None) -> int | None:
        """Bytes that gradients may fill."""
        return _UNLIMITED_BYTES if budget_bytes is None and is_searched(len(self.sizes)) else budget_bytes

    @property
    def _gradients_leave(self) -> bool:
        """Whether a reserve factor below 1 asks for gradients that leave, so that no update is on the device."""
        factor = self.request.reserve_factor
        return factor is not None and factor < 1

    def _fastest(self, budget_bytes: int | None, places: Collection[UpdatePlace]) -> tuple[Best | None, Placed | None]:
        """The fastest plan with updates on the host alone that fits, and a faster one with other updates.

        Each search leaves out what others have beaten, so those that find the fastest plans come first. Where there is
        a faster plan, the one with updates on the host alone need not be the best.
        """
        known_s = min(pool.least_s(budget_bytes) for pool in self._pools)
        placed = self._faster(budget_bytes, known_s, places)
        best = self._best(self._room(budget_bytes), np.inf if placed is None else placed.objective_s)
        if best is not None and placed is not None and best.objective_s <= placed.objective_s:
            placed = None
        return best, placed

    def _faster(self, budget_bytes: int | None, best_s: float, places: Collection[UpdatePlace]) -> Placed | None:
        """The fastest plan with updates on the device or through the GPU that fits, if it is faster than `best_s`."""
        if self._gradients_leave:
            return None
        device = self._on_device if UpdatePlace.RESIDENT in places else None
        if UpdatePlace.GPU not in places or not streamable_groups(self.profile):
            return None if device is None else device.best(budget_bytes, best_s)
        known_s = best_s if device is None else min(best_s, device.least_s(budget_bytes))
        streamed: Placed | None = None
        for search in self._through_gpu():
            streamed = search.best(budget_bytes, known_s if streamed is None else streamed.objective_s) or streamed
        below_s = best_s if streamed is None else streamed.objective_s
        return (None if device is None else device.best(budget_bytes, below_s)) or streamed

    def _through_gpu(self) -> list[StreamedUpdateSearch]:
        """The searches of plans whose updates stream: in large subgroups, and in small ones if large ones take much."""
        if not self._streamed:
            self.request.report("updates streamed through the GPU")
            frontier, groups = self._frontier(), streamable_groups(self.profile)
            large_bytes, small_bytes = (slots_bytes(self.profile, groups, size=size) for size in Subgroups)
            saves = large_bytes - small_bytes > _MUCH * frontier[-1].needed_bytes
            sizes = list(Subgroups) if saves else [Subgroups.LARGE]
            self._streamed = [StreamedUpdateSearch(Auto.name, self.profile, frontier, size) for size in sizes]
        return self._streamed

    @property
    def _on_device(self) -> DeviceUpdateSearch | None:
        """The search of plans with updates on the device, if some groups may be updated there."""
        if self._placed is None and updatable_groups(self.profile):
            self.request.report("updates on the device")
            self._placed = DeviceUpdateSearch(Auto.name, self.profile, self._frontier())
        return self._placed

    @property
    def _pools(self) -> list[Pool]:
        return [pool for pool in (self.pool, self.recomputing) if pool.evaluated]

    def _best(self, budget_bytes: int | None, below_s: float) -> Best | None:
        """The fastest plan that fits; ties go to the leanest. It recomputes only if no other is as fast.

        Plans that are no faster than `below_s` may be left out, as in `Pool.best`.
        """
        found: Best | None = None
        for pool in self._pools:
            known_s = min(below_s, np.inf if found is None else found.objective_s)
            rival = pool.best(Objective.STEADY, budget_bytes, leanest=True, below_s=known_s)
            if rival is None:
                continue
            if found is None or rival.objective_s < found.objective_s * (1 - _ROUNDING):
                found = rival
            elif pool is not self.recomputing and rival.objective_s <= found.objective_s * (1 + _ROUNDING):
                found = min(found, rival, key=lambda best: best.needed_bytes)
        return found

    def _fill(self) -> None:
        size = len(self.profile.layers)
        if size <= MOST_ENUMERATED:
            self._enumerate(size)
        optimum = optimal_forward(self.profile)
        flags = self._gradient_choices()
        explored = [gradients_to_host(self.profile, factor) for factor in reserve_factors(self.request)]
        if not is_searched(size):
            self._explore_one(optimum, flags)
            return
        choices = np.unique([*explored, flags[-1]], axis=0)
        for grad_on_host in choices[: fewer(len(choices), size)]:
            pool = Pool(self.profile)
            self._explore(pool, grad_on_host, optimum)
            pool.run()
            self.pool.take(pool)
        self.request.report("memory of all these plans")
        self.pool.run()
        fastest = self.pool.best(Objective.STEADY, None)
        assert fastest is not None
        for grad_on_host in flags:
            self._families(fastest.modes, grad_on_host)
        self.request.report("families of plans for less memory")
        self.pool.run()
        self._refine()

    def _explore(self, pool: Pool, grad_on_host: np.ndarray, optimum: ForwardOptimum) -> None:
        """Adds the plans of `exact` with these gradients to a pool."""
        known = known_plans(self.profile, grad_on_host, optimum, fewer)
        explore(pool, grad_on_host, self.request, known, optimum.modes, fewer)

    def _explore_one(self, optimum: ForwardOptimum, flags: list[np.ndarray]) -> None:
        """Likewise for a long model: the plans of `exact` with one choice of gradients, and all families at once."""
        self._explore(self.pool, flags[0], optimum)
        for grad_on_host in flags:
            self._families(optimum.modes, grad_on_host)
        self.request.report("families of plans for less memory")
        self.pool.run()

    def _recompute(self) -> None:
        """Fills the second pool with plans that recompute layers, and with neighbours of the best plans."""
        self.recomputes = True
        size = len(self.profile.layers)
        if size <= MOST_ENUMERATED:
            self._enumerate(size, self.saved_bytes > 0)
        fronts = self.pool.frontier()
        spread = np.unique(np.linspace(0, len(fronts) - 1, fewer(_RECOMPUTING_STARTS, size, 2)).astype(int))
        starts = [
            (best.modes, best.grad_on_host) for best in (fronts[number] for number in spread) if _is_layerwise(best)
        ]
        grad_on_host = self._gradient_choices()[-1]
        starts += [(np.full(size, mode, dtype=np.int8), grad_on_host) for mode in (GFGB, DHA, RELOAD, RESIDENT)]
        family = self._recomputing_family()
        for modes, grad_on_host in starts:
            self._add(np.repeat(modes[None], len(family), axis=0), np.broadcast_to(grad_on_host, family.shape), family)
        self.request.report("plans that recompute activations")
        self.recomputing.run()
        self._refine()

    def _recomputing_family(self) -> np.ndarray:
        """Flags of the first k layers of several orders, (plans, layers).

        The orders: least time per byte first, most bytes first, forward order, backward order.
        """
        layers, saved = self.profile.layers, self.saved_bytes
        useful = [int(index) for index in np.flatnonzero(saved > 0)]
        orders = [
            sorted(useful, key=lambda i: ((layers[i].recompute_s or 0.0) / saved[i], i)),
            sorted(useful, key=lambda i: (-saved[i], i)),
            useful,
            useful[::-1],
        ]
        size = len(layers)
        points = np.unique(np.linspace(1, len(useful), fewer(_POINTS, size, _LEAST_POINTS)).astype(int))
        orders = orders[: fewer(len(orders), size)]
        family = np.zeros((len(orders) * len(points), len(layers)), dtype=bool)
        for flags, (order, number) in zip(family, itertools.product(orders, points), strict=True):
            flags[order[:number]] = True
        return family

    def _gradient_choices(self) -> list[np.ndarray]:
        """Choices of gradients that go to the host, (layers,) flags: from the most that may stay to all GO."""
        factor = self.request.reserve_factor
        if factor is not None and factor >= 1:
            return [gradients_to_host(self.profile, 1.0)]
        levels = list(_LEVELS) if factor is None else [factor, factor / 2, 0.0]
        kept = levels[:-1] if is_searched(len(self.sizes)) else levels[:1]
        return [gradients_to_host(self.profile, level) for level in kept] + [np.ones(len(self.sizes), dtype=bool)]

    def _enumerate(self, size: int, can_recompute: np.ndarray | None = None) -> None:
        """Adds all plans; with `can_recompute`, (layers,), those that recompute any of these layers."""
        choices = np.indices((len(ALL_MODES), 2) * size, dtype=np.int8).reshape(2 * size, -1).T
        modes, grad_on_host = choices[:, 0::2], choices[:, 1::2].astype(bool)
        if can_recompute is None:
            self._add(modes, grad_on_host)
            return
        for again in itertools.product(*((False, True) if can else (False,) for can in can_recompute)):
            if any(again):
                self._add(modes, grad_on_host, np.broadcast_to(np.array(again), modes.shape))

    def _add(
        self, modes: np.ndarray, grad_on_host: np.ndarray, recomputes: np.ndarray | None = None, marked: bool = False
    ) -> None:
        """Adds the plans whose gradients may stay; `marked` as in `Pool.add`."""
        grad_on_host = np.broadcast_to(grad_on_host, modes.shape)
        recomputes = (
            np.zeros(modes.shape, dtype=bool) if recomputes is None else np.broadcast_to(recomputes, modes.shape)
        )
        allowed = self._allows(modes, grad_on_host)
        modes, grad_on_host, recomputes = modes[allowed], grad_on_host[allowed], recomputes[allowed]
        if len(modes):
            pool = self.recomputing if self.recomputes else self.pool
            pool.add(modes, grad_on_host, recomputes=recomputes, marked=marked)

    def _allows(self, modes: np.ndarray, grad_on_host: np.ndarray, *_: np.ndarray) -> np.ndarray:
        """Flags of the plans whose gradients may stay where they are by the request's reserve factor, (plans,)."""
        factor, stays = self.request.reserve_factor, ~grad_on_host
        allowed = np.ones(len(modes), dtype=bool)
        if factor is not None and factor >= 1:
            allowed &= stays.all(axis=1)
        elif factor is not None:
            used = (stays * np.array(self.sizes, dtype=np.float64)).sum(axis=1)
            allowed &= (used <= capacity_bytes(self.profile, factor)) & ~(stays & (self.gains <= 0)).any(axis=1)
        return allowed

    def _families(self, fastest: np.ndarray, grad_on_host: np.ndarray) -> None:
        size = len(self.profile.layers)
        whole = [np.full(size, mode, dtype=np.int8) for mode in (GFGB, DHA, RELOAD, RESIDENT)]
        gfgb, dha, reload, _ = whole
        plans = [*whole, fastest]
        starts = [(fastest, DHA), (fastest, RELOAD), (fastest, RESIDENT), (gfgb, RELOAD), (gfgb, RESIDENT)]
        starts += [(reload, DHA), (reload, RESIDENT), (dha, RESIDENT), (dha, GFGB)]
        points = max(_LEAST_POINTS, _POINTS * 128 // max(size, 128))
        orders, starts = fewer(_ORDERS, size), starts[: fewer(len(starts), size, _LEAST_STARTS)]
        found = [prefix_family(self.profile, start, mode, points, orders) for start, mode in starts]
        modes = np.concatenate([plans, *found])
        self._add(modes, np.broadcast_to(grad_on_host, modes.shape))
        self._add(np.array(whole), np.broadcast_to(grad_on_host, (len(whole), size)), marked=True)

    def _frontier(self) -> list[Best]:
        """The plans of both pools that no other beats in steady time and needed memory, fastest first."""
        found: list[Best] = []
        fronts = [best for pool in self._pools for best in pool.frontier()]
        for best in sorted(fronts, key=lambda best: (best.objective_s, best.needed_bytes)):
            if not found or best.needed_bytes < found[-1].needed_bytes:
                found.append(best)
        return found

    def _refine(self) -> None:
        """Adds neighbours of plans spread over the frontier of time and memory; of a long model fewer."""
        most_work = MOST_WORK if len(self.sizes) <= FEW_LAYERS else MOST_WORK // 16
        pool = self.recomputing if self.recomputes else self.pool

        def run(modes: np.ndarray, grad_on_host: np.ndarray, again: np.ndarray, _: np.ndarray) -> None:
            self.request.report("neighbours of the best plans for their memory")
            self._add(modes, grad_on_host, again)
            pool.run()

        neighbours = Neighbours(self.profile, (self.saved_bytes > 0) & self.recomputes)
        refine(lambda: list(filter(_is_layerwise, self._frontier())), neighbours, run, most_work)

    def _used_reserve_factor(self, grad_on_host: np.ndarray) -> float:
        """The request's factor, or the smallest six-digit one that the plan satisfies."""
        if self.request.reserve_factor is not None:
            return self.request.reserve_factor
        total, stays = sum(self.sizes), sum(x for x, host in zip(self.sizes, grad_on_host, strict=True) if not host)
        if not grad_on_host.any() or total == 0:
            return 1.0
        share = decimal.Decimal(stays) / decimal.Decimal(total)
        return float(min(share.quantize(decimal.Decimal("1e-6"), rounding=decimal.ROUND_CEILING), decimal.Decimal(1)))


def _details(profile: Profile, chosen: Placed, unlimited: Placed, budget_bytes: int | None) -> dict[str, Any]:
    """What limits a plan's steady step, and what is possible without a budget."""
    busy_s = dict.fromkeys(Lane, 0.0)
    for task in schedule_step(profile, chosen.plan).tasks:
        busy_s[task.lane] += task.duration_s
    limited = chosen.objective_s > longest_equal_s(unlimited.objective_s)
    return {
        "objective": Objective.STEADY.value,
        **({} if budget_bytes is None else {"memory_budget_bytes": budget_bytes}),
        "binding": "memory" if limited else max(busy_s, key=lambda lane: busy_s[lane]).value,
        "unlimited_steady_step_s": unlimited.objective_s,
        "unlimited_needed_bytes": unlimited.needed_bytes,
    }


def _without_needless_memory(profile: Profile, plan: Plan) -> Plan:
    """The plan without `memory_bytes`, if no backward waits for room even so."""
    if plan.memory_bytes is None:
        return plan
    without = dataclasses.replace(plan, memory_bytes=None)
    return without if schedule_step(profile, without) == schedule_step(profile, plan) else plan


def _is_layerwise(best: Best) -> bool:
    return best.loads is Loads.LAYERWISE and best.updates is Updates.OVERLAPPED
