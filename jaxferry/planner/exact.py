"""The best plan under the machine model: the default of this package.

- Objective `forward`: always the optimum over GFGB and DHA, by dynamic programming (`planner/frontier.py`).
- Objectives `step` and `steady`, over GFGB, DHA and DFGB: by enumeration for up to `MOST_ENUMERATED` layers. That is
  optimal for updates in backward order, and for up to `MOST_PROVEN` layers for both orders. For more layers the plan is
  the best from four sources: the forward optimum with its optimal DFGB; a dynamic program over whole steps with a beam
  (`planner/whole_step.py`), with loads that begin with the step and, for chains, before it; all other policies' plans;
  and a local search from these. The best of them are also tried with updates by need. A plan states its `gap` to the
  proven `lower_bound_s` (`planner/bounds.py`), which holds for both orders.

Of the plans that count as equal to the best one, `exact` takes the one that relies least on the machine model
(`planner/preference.py`); its gap is that plan's.

The reserve factor decides the gradients, as for any policy: with 1 no gradient is GO; with less, GO-MemFerry chooses
those that stay (`planner/base.py`). Without a given factor the policies have two defaults: 0 for `go-memferry`, 1
for all others. `exact` then plans with both, so its search loses to no policy. It takes 1 unless 0 is worth it, and the
plan states the factor. The bound holds for both.

With a memory budget, plans with fewer and fewer loaded layers compete too. The bound of plans that are not enumerated
ignores the budget. `auto` can be faster still, because it may keep layers on the device (RESIDENT) and choose any
gradients, at the price of their memory.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxferry.costs import Profile
from jaxferry.planner.base import Objective, Policy, Request, check_budget, gradients_to_host, with_update_order
from jaxferry.planner.bounds import steady_lower_bound_s, step_lower_bound_s
from jaxferry.planner.effort import FULL_LAYERS, fewer_of_exact, is_searched
from jaxferry.planner.evaluate import PlanEvaluator
from jaxferry.planner.frontier import ForwardOptimum, optimal_forward
from jaxferry.planner.memferry import GOMemFerry, with_dfgb
from jaxferry.planner.neighbours import Limits, prefix_family, replaced
from jaxferry.planner.preference import Best, longest_equal_s, plan_of, preferred, scores
from jaxferry.planner.search import Pool, objective_values
from jaxferry.planner.whole_step import StepSearch
from jaxferry.step import DFGB, DHA, GFGB, UNLIMITED, Loads, Plan, UpdateOrder, Updates

_SWAP_DISTANCE = 4
_MOST_TOGETHER = 24


class LocalSearch:
    """Improves a plan by changing one layer's mode or swapping nearby layers' modes; combines the best changes."""

    def __init__(
        self, evaluate: PlanEvaluator, grad_on_host: np.ndarray, objective: Objective, allowed: tuple[int, ...]
    ):
        self.evaluate, self.grad_on_host, self.objective, self.allowed = evaluate, grad_on_host, objective, allowed

    def values(self, modes: np.ndarray) -> np.ndarray:
        """Seconds of each of (plans, layers) modes without waits for room; infinite outside the window."""
        steady = self.objective is Objective.STEADY
        options: dict[str, Any] = {"steady": steady, "memory": False, "memory_bytes": UNLIMITED}
        return objective_values(self.evaluate(modes, self.grad_on_host, **options), self.objective)

    def improve(self, modes: np.ndarray, most_work: int) -> np.ndarray:
        """A local optimum, or the best plan after `most_work` evaluations of a layer."""
        return self.improve_all(modes[None], most_work)[0]

    def improve_all(self, starts: np.ndarray, most_work: int) -> np.ndarray:
        """Likewise from each of several plans, (plans, layers), all at once."""
        found, best, work = starts.copy(), self.values(starts), np.zeros(len(starts), dtype=int)
        active = list(range(len(starts)))
        while active:
            changed = [self.neighbours(found[number]) for number in active]
            work[active] += [each.size for each in changed]
            steps = []
            for number, each, values in zip(active, changed, self._values_of(changed), strict=True):
                helps = np.flatnonzero(values < best[number])
                ranked = helps[np.argsort(values[helps], kind="stable")][:_MOST_TOGETHER]
                if len(helps):
                    steps.append((number, self.together(found[number], each[ranked])))
            for (number, plans), values in zip(steps, self._values_of([plans for _, plans in steps]), strict=True):
                found[number], best[number] = plans[int(np.argmin(values))], float(values.min())
            active = [number for number, _ in steps if work[number] < most_work]
        return found

    def _values_of(self, parts: list[np.ndarray]) -> list[np.ndarray]:
        """`values` of several arrays of plans."""
        if not parts:
            return []
        return np.split(self.values(np.concatenate(parts)), np.cumsum([len(part) for part in parts])[:-1])

    def together(self, modes: np.ndarray, changed: np.ndarray) -> np.ndarray:
        """The first change alone, the first two, ...: (plans, layers)."""
        current, plans = modes, []
        for change in changed:
            current = np.where(change != modes, change, current)
            plans.append(current)
        return np.array(plans, dtype=np.int8)

    def neighbours(self, modes: np.ndarray) -> np.ndarray:
        """All plans one change away, (plans, layers); of a long model, some spread over all."""
        size = len(modes)
        plans = []
        for mode in self.allowed:
            layers = np.flatnonzero(modes != mode)
            single = np.repeat(modes[None], len(layers), axis=0)
            single[np.arange(len(layers)), layers] = mode
            plans.append(single)
        for distance in range(1, min(_SWAP_DISTANCE, size - 1) + 1):
            low = np.flatnonzero(modes[:-distance] != modes[distance:])
            swap = np.repeat(modes[None], len(low), axis=0)
            rows = np.arange(len(low))
            swap[rows, low], swap[rows, low + distance] = modes[low + distance], modes[low]
            plans.append(swap)
        found = np.concatenate(plans)
        most = len(found) if size <= FULL_LAYERS else max(1, 4 * FULL_LAYERS**2 // size)
        return found[np.unique(np.linspace(0, len(found) - 1, most).astype(int))]


Fewer = Callable[..., int]
"""`fewer` or `fewer_of_exact` of `planner/effort.py`."""

MOST_ENUMERATED = 10
"""The most layers for which all plans of GFGB, DHA and DFGB are tried."""

MOST_PROVEN = 6
"""The most layers for which all of these are tried in both update orders, so that the best one is the optimum."""

_ALLOWED = (GFGB, DHA, DFGB)
_BEAM = 64
_LEAST_BEAM = 16
_WORK_A_START = 120_000
_WORK_FOR_BEST = 300_000
_STARTS = 4
_POINTS = 48
_LEAST_POINTS = 4
_ORDERS = 4
_LEAST_ORDERS = 1
_HEADS = (1, 2, 4, 8, 16)
_ROUNDING = 1e-12
_CLOSE = 1e-4
"""The share of the time that a long model's search may leave."""
_NO_PLAN = 2**63


class Exact(Policy):
    """A plan equal to the optimum of the forward, or to the best known plan of the step, with its gap to a bound."""

    name = "exact"
    summary = "the optimum under the machine model, or its proven gap"

    def plan(self, profile: Profile, request: Request | None = None) -> Plan:
        """The preferred plan of the explored pools, with `objective`, `lower_bound_s` and `gap` as details."""
        request = request or Request()
        search = _Search(profile, request)
        search.run()
        if not search.explored:
            check_budget(self.name, request.memory_budget_bytes or 0, search.smallest_bytes)
        best, factor = search.chosen()
        plan = plan_of(self.name, factor, profile, best)
        if request.objective is not Objective.STEP:
            plan = with_update_order(profile, plan)
        return dataclasses.replace(plan, details=gap_details(request.objective, best.objective_s, search.bound_s))


def reserve_factors(request: Request) -> tuple[float, ...]:
    """The reserve factors to plan with, the preferred one first: the request's, or the defaults of all policies."""
    if request.reserve_factor is not None:
        return (request.reserve_factor,)
    return (Exact.default_reserve_factor, GOMemFerry.default_reserve_factor)


@dataclasses.dataclass(frozen=True)
class _Choice:
    """A reserve factor, its rank in the order of preference, its gradient flags, and initial plans."""

    factor: float
    rank: int
    grad_on_host: np.ndarray
    known: np.ndarray


class _Search:
    """The plans explored for each reserve factor, and the bound on all plans."""

    def __init__(self, profile: Profile, request: Request):
        self.profile, self.request = profile, request
        self.optimum = optimal_forward(profile)
        self.enumerates = len(profile.layers) <= MOST_ENUMERATED
        self.explored: list[tuple[_Choice, Pool, Best]] = []
        self.bound_s = np.inf
        self.smallest_bytes = _NO_PLAN

    def run(self) -> None:
        """Plans with each reserve factor, the promising one first.

        Without a budget, skips a factor that cannot win, or in a long model win more than `_CLOSE`.
        """
        flags = [(factor, gradients_to_host(self.profile, factor)) for factor in reserve_factors(self.request)]
        choices = [
            _Choice(factor, rank, grad_on_host, known_plans(self.profile, grad_on_host, self.optimum, fewer_of_exact))
            for rank, (factor, grad_on_host) in enumerate(flags)
        ]
        limited = self.request.memory_budget_bytes is not None
        if self.request.objective is Objective.FORWARD and not limited:
            choices = choices[:1]  # no forward depends on where gradients go
        is_sorted = len(choices) > 1 and is_searched(len(self.profile.layers))
        for choice in sorted(choices, key=self._known_s) if is_sorted else choices:
            if limited or self._can_be_better(choice):
                self._explore(choice)

    def _known_s(self, choice: _Choice) -> float:
        outcomes = PlanEvaluator(self.profile)(choice.known, choice.grad_on_host, memory=False)
        return float(objective_values(outcomes, self.request.objective).min())

    def _explore(self, choice: _Choice) -> None:
        request, pool = self.request, Pool(self.profile)
        explore(pool, choice.grad_on_host, request, choice.known, self.optimum.modes, fewer_of_exact)
        pool.run()
        self.smallest_bytes = min(self.smallest_bytes, pool.smallest_needed_bytes())
        found = pool.best(request.objective, request.memory_budget_bytes)
        if found is None:
            return
        self.bound_s = min(self.bound_s, self._bound_s(choice, found.objective_s))
        self.explored.append((choice, pool, found))

    @property
    def fastest_s(self) -> float:
        """The time of the fastest plan, in seconds."""
        return min(found.objective_s for *_, found in self.explored)

    def chosen(self) -> tuple[Best, float]:
        """The plan to take, by `planner/preference.py`, and its reserve factor."""
        profile, objective, budget_bytes = self.profile, self.request.objective, self.request.memory_budget_bytes
        longest_s = longest_equal_s(self.fastest_s)
        factors, known = dict[int, _Choice](), list[Best]()
        for choice, pool, found in sorted(self.explored, key=lambda each: each[0].rank):
            for best in (found, pool.preferred(objective, budget_bytes, longest_s)):
                if best is not None:
                    factors[id(best)] = choice
                    known.append(best)
        best = preferred(known, lambda each: int(scores(profile, *(x[None] for x in each.columns))[0]))
        choice = factors[id(best)]

        def allows(modes: np.ndarray, grad_on_host: np.ndarray, *_: np.ndarray) -> np.ndarray:
            allowed: np.ndarray = np.isin(modes, _ALLOWED).all(axis=1) & (grad_on_host == choice.grad_on_host).all(
                axis=1
            )
            return allowed

        best = replaced(profile, best, Limits(objective, longest_s, budget_bytes, budget_bytes, allows))
        has_room = best.update_order is UpdateOrder.BACKWARD or best.memory_bytes is not None
        return dataclasses.replace(best, memory_bytes=budget_bytes if has_room else None), choice.factor

    def _can_be_better(self, choice: _Choice) -> bool:
        """Whether plans with these gradients may be taken, or be faster than the fastest."""
        if not self.explored or self.enumerates:
            return True
        best_s, is_preferred = self.fastest_s, choice.rank < self.explored[0][0].rank
        bound_s = self._bound_s(choice, best_s * (1 + 2 * _ROUNDING))
        if is_searched(len(self.profile.layers)) or best_s > bound_s * (1 + _CLOSE):
            return bound_s <= (longest_equal_s(best_s) if is_preferred else best_s * (1 - _ROUNDING))
        self.bound_s = min(self.bound_s, bound_s)
        return False

    def _bound_s(self, choice: _Choice, known_s: float) -> float:
        """A lower bound on all plans with these gradients; one above `known_s` proves only that they exceed it."""
        forward_s = self.optimum.bound_s
        if self.request.objective is Objective.FORWARD:
            return forward_s
        if len(self.profile.layers) <= MOST_PROVEN:
            return known_s
        if self.request.objective is Objective.STEP:
            return step_lower_bound_s(self.profile, choice.grad_on_host, forward_s)
        return steady_lower_bound_s(self.profile, choice.grad_on_host, forward_s, known_s)


def gap_details(objective: Objective, value_s: float, bound_s: float) -> dict[str, object]:
    """The details of a plan that state its gap to a lower bound; a bound above the value proves no more than that."""
    bound_s = min(bound_s, value_s)
    gap = value_s / bound_s - 1 if bound_s > 0 else 0.0
    return {"objective": objective.value, "lower_bound_s": bound_s, "gap": gap}


def explore(
    pool: Pool, grad_on_host: np.ndarray, request: Request, known: np.ndarray, optimum: np.ndarray, fewer: Fewer
) -> None:
    """Adds all promising plans of GFGB, DHA and DFGB; of a long model fewer, see `planner/effort.py`.

    Args:
      pool: the pool to fill.
      grad_on_host: which gradients are written to the host, (layers,).
      request: its objective and progress.
      known: `known_plans`, (plans, layers) mode codes.
      optimum: the optimal forward's modes, (layers,) codes.
      fewer: how many of so many plans to try; of `planner/effort.py`.
    """
    profile = pool.profile
    request.report("plans of all policies")
    pool.add(known, grad_on_host, marked=True)
    size = len(profile.layers)
    gfgb = np.full(size, GFGB, dtype=np.int8)
    if is_searched(size):
        pool.add(gfgb, grad_on_host, Loads.LAYERWISE, Updates.AFTER_ALL, marked=True)
        pool.add(gfgb, grad_on_host, Loads.BULK, Updates.AFTER_ALL, marked=True)
    if size <= MOST_ENUMERATED:
        pool.add(_all_modes(size), grad_on_host)
        return
    objective = Objective.STEP if request.objective is Objective.FORWARD else request.objective
    search = LocalSearch(pool.evaluate, grad_on_host, objective, _ALLOWED)
    request.report("whole steps by dynamic programming")
    found = np.concatenate([known, _whole_steps(search, known, fewer)])
    pool.add(found, grad_on_host)
    starts = [gfgb, optimum]
    if is_searched(size):
        request.report("local search")
        starts.insert(0, _improve(pool, search, found, fewer))
    points, orders = fewer(_POINTS, size, _LEAST_POINTS), fewer(_ORDERS, size, _LEAST_ORDERS)
    for start in starts:
        family = prefix_family(profile, start, points=points, num_orders=orders)
        pool.add(_within_window(pool, family, grad_on_host), grad_on_host)


def _improve(pool: Pool, search: LocalSearch, found: np.ndarray, fewer: Fewer) -> np.ndarray:
    """Adds local optima near the best plans found; returns the best one."""
    starts = _different(found, search.values(found))[: fewer(_STARTS, found.shape[1])]
    improved = search.improve_all(starts, _WORK_A_START)
    best = search.improve(improved[int(np.argmin(search.values(improved)))], _WORK_FOR_BEST)
    pool.add(improved, search.grad_on_host)
    pool.add(best, search.grad_on_host)
    return best


def _different(modes: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The best plan for each of several numbers of unloaded first layers, as diverse starts of a local search."""
    starts: dict[int, np.ndarray] = {}
    for index in np.argsort(values, kind="stable"):
        starts.setdefault(int(np.argmax(np.append(modes[index], GFGB) == GFGB)), modes[index])
    return np.array(list(starts.values())[:_STARTS])


def known_plans(profile: Profile, grad_on_host: np.ndarray, optimum: ForwardOptimum, fewer: Fewer) -> np.ndarray:
    """Other policies' plans, and the optimal forward with DFGB added: (plans, layers) mode codes."""
    size = len(profile.layers)
    assert optimum.memferry is not None
    plans = [np.full(size, GFGB), np.full(size, DHA), optimum.modes]
    plans.append(with_dfgb(profile, optimum.memferry, grad_on_host))
    if not is_searched(size):
        return np.array(plans, dtype=np.int8)
    best_dfgb = StepSearch(profile, grad_on_host, _beam(size, fewer)).best(np.inf, fixed=optimum.modes)
    return np.concatenate([np.array(plans, dtype=np.int8), best_dfgb[: fewer(len(best_dfgb), size)]])


def _beam(num_layers: int, fewer: Fewer) -> int:
    return fewer(_BEAM, num_layers, _LEAST_BEAM)


def _all_modes(size: int) -> np.ndarray:
    codes = np.indices((3,) * size, dtype=np.int8).reshape(size, -1).T
    return codes[codes[:, -1] != DFGB]


def _whole_steps(search: LocalSearch, known: np.ndarray, fewer: Fewer) -> np.ndarray:
    """Whole steps with a beam; for chains also with loads that lead by the time of the first updates."""
    profile, grad_on_host = search.evaluate.profile, search.grad_on_host
    size = len(profile.layers)
    beam = _beam(size, fewer)
    if not is_searched(size):
        return StepSearch(profile, grad_on_host, beam).best(np.inf)[:1]
    step_s = search.evaluate(known, grad_on_host, steady=False, memory=False)
    limit_s = float(objective_values(step_s, Objective.STEP).min())
    found = [StepSearch(profile, grad_on_host, beam).best(limit_s)]
    if search.objective is Objective.STEADY:
        limit_s = float(search.values(known).min())
        for head in (head for head in _HEADS[: fewer(len(_HEADS), size)] if head < size):
            lead_s = sum(profile.group_update_s[profile.group_of[index]] for index in range(head))
            found.append(StepSearch(profile, grad_on_host, beam // 2).best(limit_s, head=head, lead_s=lead_s))
    return np.concatenate(found)


def _within_window(pool: Pool, modes: np.ndarray, grad_on_host: np.ndarray) -> np.ndarray:
    """The plans; those whose DFGB does not fit get DHA for these layers."""
    if len(modes) == 0 or not (modes == DFGB).any():
        return modes
    fits = pool.evaluate(modes, grad_on_host, steady=False, memory=False).in_window
    return np.where(fits[:, None] | (modes != DFGB), modes, DHA).astype(np.int8)
