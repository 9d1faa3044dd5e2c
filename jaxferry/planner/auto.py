"""Chooses everything from one memory budget: the fastest plan that fits, or one equal to it (`planner/search.py`).

A plan with all layers DHA and all gradients GO holds only activations. With GO allowed, it leads to the smallest
feasible budget. No budget means unlimited memory.

Where a profile states `update_gpu_s`, groups may also be updated on the device, where their optimizer state then stays.
Where it also states `state_up_s` and `state_down_s`, updates may stream through the GPU. A plan states its gap to the
bound on all plans (`planner/planning.py`).

A given reserve factor below 1 is an upper bound: fewer gradients may stay if that saves memory or time. With 1 no
gradient is GO.
"""

import dataclasses
import decimal
from collections.abc import Collection
from typing import Any

import numpy as np

from jaxferry.costs import Profile
from jaxferry.errors import BudgetError
from jaxferry.modes import GradientPlace, UpdatePlace
from jaxferry.planner.base import Objective, Policy, Request, capacity_bytes, gains_s
from jaxferry.planner.baselines import L2L, NativeOverlapped
from jaxferry.planner.columns import ALL_PLACES, Columns
from jaxferry.planner.judge import Judge, Judged
from jaxferry.planner.memferry import GOMemFerry, MemFerry
from jaxferry.planner.preference import longest_equal_s
from jaxferry.planner.search import Search
from jaxferry.step import Lane, Plan

_SHARE_WITHOUT_BUDGET = 0.2
"""The work of a search whose plan only tells what would be possible without the budget."""


class Auto(Policy):
    """The fastest plan in the steady state that fits into the memory budget."""

    name = "auto"
    summary = "modes, gradients and resident layers from a memory budget alone"

    def plan(self, profile: Profile, request: Request | None = None) -> Plan:
        """The plan of the search that fits and that `planner/preference.py` prefers."""
        request = request or Request()
        return AutoSearch(profile, request).plan(request.memory_budget_bytes)


class AutoSearch:
    """The search for one profile and reserve factor; answers any number of budgets.

    Args:
      profile: the profile.
      request: its `reserve_factor` limits the gradients that stay; None lets the search choose. Its budget is ignored.
      places: where updates may run, besides the host.
    """

    def __init__(self, profile: Profile, request: Request, places: Collection[UpdatePlace] = ALL_PLACES):
        self.profile, self.request, self.factor = profile, request, request.reserve_factor
        if self.factor is not None and self.factor < 1:
            places = ()  # gradients that leave are updated on the host
        self.columns = Columns(profile, places, may_go=self.factor is None or self.factor < 1)
        self._goes = np.array([column.gradient is GradientPlace.HOST for column in self.columns.all])
        self._stays_here = np.array([column.update is UpdatePlace.RESIDENT for column in self.columns.all])
        self._may_go = self.columns.allowed[:, self._goes].any(axis=1)
        self._sizes = [layer.grad_bytes for layer in profile.layers]
        self._no_gain = np.array(gains_s(profile)) <= 0
        self._trained = np.array([layer.has_gradient for layer in profile.layers])
        judge = Judge(self.columns, Auto.name, Objective.STEADY, self._reserve_factor)
        self.search = Search(judge, self._allows, self._starts, request.report)

    def plan(self, budget_bytes: int | None) -> Plan:
        """The plan to take within the budget, by `planner/preference.py`. None means no limit.

        Raises:
          BudgetError: if no plan fits.
        """
        chosen = self.search.within(budget_bytes).chosen()
        unlimited = chosen if budget_bytes is None else self.search.within(None, _SHARE_WITHOUT_BUDGET).chosen()
        details = self._details(chosen, unlimited, budget_bytes)
        return dataclasses.replace(chosen.plan, details=details, memory_bytes=_needed_memory(chosen))

    def fastest(self, budget_bytes: int | None) -> Judged | None:
        """The fastest plan that the search finds, before `planner/preference.py` chooses; None if no plan fits."""
        try:
            return self.search.within(budget_bytes).best
        except BudgetError:
            return None

    @property
    def smallest_bytes(self) -> int:
        """The smallest budget that some plan fits into."""
        return self.search.judge.needed_bytes(self.search.leanest)

    def _starts(self) -> list[Plan]:
        factors = (1.0, 0.0) if self.factor is None else (self.factor,)
        policies = (NativeOverlapped(), L2L(), MemFerry(), GOMemFerry())
        return [policy.plan(self.profile, Request(factor)) for policy in policies for factor in factors]

    def _allows(self, codes: np.ndarray) -> bool:
        """Whether gradients may stay where they are by the reserve factor, and updates run where they do."""
        if self.profile.updates_together:
            here = self._stays_here[codes[self._trained]]
            if here.any() and not here.all():
                return False
        if self.factor is None or self.factor >= 1:
            return True
        stays = ~self._goes[codes] & self._may_go  # rows of lookups are never GO
        used = sum(size for size, stay in zip(self._sizes, stays, strict=True) if stay)
        return used <= capacity_bytes(self.profile, self.factor) and not (stays & self._no_gain).any()

    def _reserve_factor(self, codes: np.ndarray) -> float:
        """The request's factor, or the smallest six-digit one that the plan satisfies."""
        if self.factor is not None:
            return self.factor
        goes = self._goes[codes]
        total, stays = sum(self._sizes), sum(x for x, host in zip(self._sizes, goes, strict=True) if not host)
        if not goes.any() or total == 0:
            return 1.0
        share = decimal.Decimal(stays) / decimal.Decimal(total)
        return float(min(share.quantize(decimal.Decimal("1e-6"), rounding=decimal.ROUND_CEILING), decimal.Decimal(1)))

    def _details(self, chosen: Judged, unlimited: Judged, budget_bytes: int | None) -> dict[str, Any]:
        """What limits a plan's steady step, and what is possible without a budget."""
        busy_s = dict.fromkeys(Lane, 0.0)
        for task in chosen.schedules.within(chosen.plan.memory_bytes).tasks:
            busy_s[task.lane] += task.duration_s
        limited = chosen.objective_s > longest_equal_s(unlimited.objective_s)
        return {
            "objective": Objective.STEADY.value,
            **({} if budget_bytes is None else {"memory_budget_bytes": budget_bytes}),
            "binding": "memory" if limited else max(busy_s, key=lambda lane: busy_s[lane]).value,
            "unlimited_steady_step_s": unlimited.objective_s,
            "unlimited_needed_bytes": unlimited.needed_bytes,
        }


def _needed_memory(chosen: Judged) -> int | None:
    """The plan's bytes for gradients; None if no backward waits for room even so."""
    given = chosen.plan.memory_bytes
    schedules = chosen.schedules
    return None if schedules.within(None) == schedules.within(given) else given
