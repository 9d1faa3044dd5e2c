"""The best plan under the machine model: the default of this package.

- Objective `forward`: the optimum over GFGB and DHA by dynamic programming (`plan/frontier.py`), always.
- Objectives `step` and `steady`, over GFGB, DHA and DFGB: by enumeration for up to `MOST_ENUMERATED` layers, always
  optimal. Beyond that the best of: the forward optimum with the optimal DFGB for it; the dynamic programme over whole
  steps with a beam (`plan/whole_step.py`), from loads that begin with the step and, for chains, before it; all other
  policies' plans; and a local search from these. A plan states its `gap` to the proven `lower_bound_s`
  (`plan/bounds.py`).

With a memory budget the same plans and plans with fewer and fewer loaded layers compete. The bound of plans that are
not enumerated is that without a budget.
"""

import dataclasses

import numpy as np

from jaxferry.plan.base import Objective, Policy, Request, check_budget, make_plan
from jaxferry.plan.bounds import steady_lower_bound_s, step_lower_bound_s
from jaxferry.plan.frontier import optimal_forward
from jaxferry.plan.gradients import gradients_to_host
from jaxferry.plan.memferry import MemFerry
from jaxferry.plan.memferry_printed import MemFerryPrinted
from jaxferry.plan.records import Loads, Plan, Updates
from jaxferry.plan.recurrences import DFGB, DHA, GFGB
from jaxferry.plan.search import LocalSearch, Pool, objective_values, prefix_family
from jaxferry.plan.whole_step import StepSearch
from jaxferry.profiling.records import Profile

MOST_ENUMERATED = 10
"""Layers up to which all plans of GFGB, DHA and DFGB are tried."""

_ALLOWED = (GFGB, DHA, DFGB)
_BEAM = 64
_WORK_A_START = 120_000
_WORK_FOR_BEST = 300_000
_STARTS = 4
_POINTS = 48
_HEADS = (1, 2, 4, 8, 16)


class Exact(Policy):
    """The optimum of the forward, or the best known plan of the step with its gap to a proven bound."""

    name = "exact"
    summary = "the optimum under the machine model, or its proven gap"

    def plan(self, profile: Profile, request: Request | None = None) -> Plan:
        """The best plan of the explored pool, with `objective`, `lower_bound_s` and `gap` as details."""
        request = request or Request()
        reserve_factor = self.reserve_factor(request)
        to_host = gradients_to_host(profile, reserve_factor)
        optimum = optimal_forward(profile)
        optimum_s = optimum.bound_s
        pool = Pool(profile)
        explore(pool, to_host, request, optimum.modes)
        pool.run(peak=request.memory_budget_bytes is not None)
        best = pool.best(request.objective, request.memory_budget_bytes)
        if best is None:
            check_budget(self.name, request.memory_budget_bytes or 0, pool.smallest_peak_bytes())
        assert best is not None
        plan = make_plan(self.name, reserve_factor, profile, best.modes, to_host, best.loads, best.updates)
        enumerated = len(profile.layers) <= MOST_ENUMERATED
        bound_s = best.objective_s
        if request.objective is Objective.FORWARD:
            bound_s = optimum_s
        elif not enumerated and request.objective is Objective.STEP:
            bound_s = step_lower_bound_s(profile, to_host, optimum_s)
        elif not enumerated:
            bound_s = steady_lower_bound_s(profile, to_host, optimum_s, best.objective_s)
        return dataclasses.replace(plan, details=_gap(request.objective, best.objective_s, bound_s))


def _gap(objective: Objective, value_s: float, bound_s: float) -> dict[str, object]:
    bound_s = min(bound_s, value_s)
    gap = value_s / bound_s - 1 if bound_s > 0 else 0.0
    return {"objective": objective.value, "lower_bound_s": bound_s, "gap": gap}


def explore(pool: Pool, to_host: np.ndarray, request: Request, optimum: np.ndarray) -> None:
    """Adds all plans of GFGB, DHA and DFGB that are worth a look; `optimum` has the optimal forward's modes."""
    profile = pool.profile
    request.report("plans of all policies")
    known = _known(profile, to_host, optimum)
    pool.add(known, to_host)
    gfgb = np.full(len(profile.layers), GFGB)
    pool.add(gfgb, to_host, Loads.LAYERWISE, Updates.AFTER_ALL)
    pool.add(gfgb, to_host, Loads.BULK, Updates.AFTER_ALL)
    if len(profile.layers) <= MOST_ENUMERATED:
        pool.add(_all_modes(len(profile.layers)), to_host)
        return
    objective = Objective.STEP if request.objective is Objective.FORWARD else request.objective
    search = LocalSearch(pool.evaluate, to_host, objective, _ALLOWED)
    request.report("whole steps by dynamic programming")
    found = np.concatenate([known, _whole_steps(profile, to_host, search, known)])
    values = search.values(found)
    request.report("local search")
    improved = np.array([search.improve(start, _WORK_A_START) for start in _different(found, values)], dtype=np.int8)
    best = search.improve(improved[int(np.argmin(search.values(improved)))], _WORK_FOR_BEST)
    pool.add(found, to_host)
    pool.add(improved, to_host)
    pool.add(best, to_host)
    for start in (best, gfgb, optimum):
        pool.add(_within_window(pool, prefix_family(profile, start, points=_POINTS), to_host), to_host)


def _different(modes: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The best plan, and the best ones with another number of unloaded first layers: starts in different valleys."""
    starts: dict[int, np.ndarray] = {}
    for index in np.argsort(values, kind="stable"):
        starts.setdefault(int(np.argmax(np.append(modes[index], GFGB) == GFGB)), modes[index])
    return np.array(list(starts.values())[:_STARTS])


def _known(profile: Profile, to_host: np.ndarray, optimum: np.ndarray) -> np.ndarray:
    size = len(profile.layers)
    plans = [np.full(size, GFGB), np.full(size, DHA), optimum]
    plans += [policy.modes(profile, to_host) for policy in (MemFerry(), MemFerryPrinted())]
    best_dfgb = StepSearch(profile, to_host, _BEAM).best(np.inf, fixed=optimum)
    return np.concatenate([np.array(plans, dtype=np.int8), best_dfgb])


def _all_modes(size: int) -> np.ndarray:
    codes = np.indices((3,) * size, dtype=np.int8).reshape(size, -1).T
    return codes[codes[:, -1] != DFGB]


def _whole_steps(profile: Profile, to_host: np.ndarray, search: LocalSearch, known: np.ndarray) -> np.ndarray:
    """Whole steps with a beam; for chains also with a lead of the loads, by as much as the first updates take."""
    step_s = search.evaluate(known, to_host, steady=False, peak=False)
    limit_s = float(objective_values(step_s, Objective.STEP).min())
    found = [StepSearch(profile, to_host, _BEAM).best(limit_s)]
    if search.objective is Objective.STEADY:
        limit_s = float(search.values(known).min())
        for head in (head for head in _HEADS if head < len(profile.layers)):
            lead_s = sum(profile.group_update_s[profile.group_of[index]] for index in range(head))
            found.append(StepSearch(profile, to_host, _BEAM // 2).best(limit_s, head=head, lead_s=lead_s))
    return np.concatenate(found)


def _within_window(pool: Pool, modes: np.ndarray, to_host: np.ndarray) -> np.ndarray:
    """The plans whose DFGB fits; the others with their DFGB layers back at DHA."""
    if len(modes) == 0:
        return modes
    fits = pool.evaluate(modes, to_host, steady=False, peak=False).in_window
    return np.where(fits[:, None] | (modes != DFGB), modes, DHA).astype(np.int8)
