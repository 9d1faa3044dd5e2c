"""What the searching policies share: pools of plans, families of plans that need less and less memory, local search.

Nothing here looks at a memory budget. A pool depends on the profile and the gradients alone, and a budget only picks
from it; so a larger budget never makes a plan slower. Nor does anything look at a clock.
"""

import dataclasses

import numpy as np

from jaxferry.holdings import DHA
from jaxferry.plan.base import Objective
from jaxferry.plan.evaluate import Outcomes, PlanEvaluator
from jaxferry.plan.records import Loads, Updates
from jaxferry.profiling.records import Profile


@dataclasses.dataclass(frozen=True)
class Best:
    """A plan picked from a pool: mode codes, gradient flags, flags of recomputation, (layers,); its times and bytes."""

    modes: np.ndarray
    to_host: np.ndarray
    recomputes: np.ndarray
    loads: Loads
    updates: Updates
    objective_s: float
    peak_bytes: int


class Pool:
    """Plans for one profile; DFGB outside MemFerry's window is never picked."""

    def __init__(self, profile: Profile):
        self.profile, self.evaluate = profile, PlanEvaluator(profile)
        self.parts: dict[tuple[Loads, Updates], list[np.ndarray]] = {}
        self.evaluated: list[tuple[tuple[Loads, Updates], np.ndarray, Outcomes]] = []

    def add(
        self,
        modes: np.ndarray,
        to_host: np.ndarray,
        loads: Loads = Loads.LAYERWISE,
        updates: Updates = Updates.OVERLAPPED,
        recomputes: np.ndarray | bool = False,
    ) -> None:
        """Adds plans: (plans, layers) or (layers,) mode codes; flags of gradients and of recomputation likewise."""
        modes = np.atleast_2d(np.asarray(modes, dtype=np.int8))
        codes = np.asarray(to_host, dtype=np.int8) + _RECOMPUTES * np.asarray(recomputes, dtype=np.int8)
        self.parts.setdefault((loads, updates), []).append(
            np.stack([modes, np.broadcast_to(codes, modes.shape)], axis=1)
        )

    def run(self, peak: bool) -> None:
        """Evaluates all plans that were added, each once."""
        for kind, parts in self.parts.items():
            unique = np.unique(np.concatenate(parts), axis=0)
            bulk, after_all = kind[0] is Loads.BULK, kind[1] is Updates.AFTER_ALL
            to_host, recomputes = _flags(unique[:, 1])
            outcomes = self.evaluate(unique[:, 0], to_host, recomputes, bulk=bulk, after_all=after_all, peak=peak)
            self.evaluated.append((kind, unique, outcomes))
        self.parts = {}

    def best(self, objective: Objective, budget_bytes: int | None) -> Best | None:
        """The plan with the least objective that fits into the budget; ties go to steady time, step, memory."""
        found, least = None, None
        for number, (_, _, outcomes) in enumerate(self.evaluated):
            fits = outcomes.in_window.copy()
            if budget_bytes is not None:
                fits &= outcomes.peak_bytes <= budget_bytes
            index = _least(outcomes, objective, fits)
            if index is None:
                continue
            key = [float(values[index]) for values in _keys(outcomes, objective)]
            if least is None or key < least:
                least, found = key, self._picked(number, index, key[0])
        return found

    def frontier(self) -> list[Best]:
        """The plans that no other plan of the pool beats in both steady time and peak memory, fastest first."""
        rows = [np.flatnonzero(outcomes.in_window) for _, _, outcomes in self.evaluated]
        source = [(number, int(row)) for number, found in enumerate(rows) for row in found]
        steady_s = np.concatenate([x[2].steady_step_s[found] for x, found in zip(self.evaluated, rows, strict=True)])
        peaks = np.concatenate([x[2].peak_bytes[found] for x, found in zip(self.evaluated, rows, strict=True)])
        order = np.lexsort((peaks, steady_s))
        smallest_before = np.minimum.accumulate(np.concatenate([[np.iinfo(np.int64).max], peaks[order]]))[:-1]
        picks = [(source[index], float(steady_s[index])) for index in order[peaks[order] < smallest_before]]
        return [self._picked(number, row, objective_s) for (number, row), objective_s in picks]

    def _picked(self, number: int, row: int, objective_s: float) -> Best:
        kind, plans, outcomes = self.evaluated[number]
        peak_bytes = int(outcomes.peak_bytes[row])
        return Best(plans[row, 0], *_flags(plans[row, 1]), *kind, objective_s, peak_bytes)

    def smallest_peak_bytes(self) -> int:
        """The smallest peak of all plans of the pool."""
        return min(int(out.peak_bytes[out.in_window].min()) for _, _, out in self.evaluated if out.in_window.any())


def _flags(codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Gradient flags, and flags of recomputation."""
    return codes % _RECOMPUTES == 1, codes >= _RECOMPUTES


def _keys(outcomes: Outcomes, objective: Objective) -> list[np.ndarray]:
    steady, step, peak = outcomes.steady_step_s, outcomes.step_s, outcomes.peak_bytes
    first = {Objective.FORWARD: outcomes.forward_s, Objective.STEP: step, Objective.STEADY: steady}[objective]
    return [first, steady, step, peak]


def _least(outcomes: Outcomes, objective: Objective, among: np.ndarray) -> int | None:
    candidates = np.flatnonzero(among)
    if len(candidates) == 0:
        return None
    keys = [values[candidates] for values in _keys(outcomes, objective)]
    return int(candidates[np.lexsort(keys[::-1])[0]])


def objective_values(outcomes: Outcomes, objective: Objective) -> np.ndarray:
    """The objective of each plan in seconds, infinite where DFGB breaks the window."""
    return np.where(outcomes.in_window, _keys(outcomes, objective)[0], np.inf)


def prefix_family(profile: Profile, modes: np.ndarray, mode: int = DHA, points: int | None = None) -> np.ndarray:
    """Plans with the first k layers of several orders in the given mode: (plans, layers) codes.

    The orders: least slowdown by DHA for a byte first, the largest first, forward order, backward order. There is one
    plan for each change, or about `points` of each order.
    """
    layers = profile.layers
    slowdown = [x.forward_dha_s - x.forward_s + x.backward_dha_s - x.backward_s for x in layers]
    orders = [
        sorted(range(len(layers)), key=lambda i: (slowdown[i] / max(layers[i].param_bytes, 1), i)),
        sorted(range(len(layers)), key=lambda i: (-layers[i].param_bytes, i)),
        list(range(len(layers))),
        list(reversed(range(len(layers)))),
    ]
    family = []
    for order in orders:
        changes = [index for index in order if modes[index] != mode]
        stride = 1 if points is None else max(1, len(changes) // points)
        current = np.array(modes, dtype=np.int8)
        for number, index in enumerate(changes, start=1):
            current[index] = mode
            if number % stride == 0 or number == len(changes):
                family.append(current.copy())
    return np.array(family, dtype=np.int8).reshape(len(family), len(layers))


class LocalSearch:
    """Improves a plan by changes of one layer's mode and by swaps of near layers' modes, the best together."""

    def __init__(self, evaluate: PlanEvaluator, to_host: np.ndarray, objective: Objective, allowed: tuple[int, ...]):
        self.evaluate, self.to_host, self.objective, self.allowed = evaluate, to_host, objective, allowed

    def values(self, modes: np.ndarray) -> np.ndarray:
        """The objective of each of (plans, layers) modes in seconds, infinite outside the window."""
        steady = self.objective is Objective.STEADY
        return objective_values(self.evaluate(modes, self.to_host, steady=steady, peak=False), self.objective)

    def improve(self, modes: np.ndarray, most_work: int) -> np.ndarray:
        """A local optimum, or what `most_work` evaluations of a layer lead to."""
        best = float(self.values(modes)[0])
        work = 0
        while work < most_work:
            changed = self.neighbours(modes)
            values = self.values(changed)
            work += changed.size
            helps = np.flatnonzero(values < best)
            if len(helps) == 0:
                return modes
            ranked = helps[np.argsort(values[helps], kind="stable")][:_MOST_TOGETHER]
            together = self.together(modes, changed[ranked])
            choice = self.values(together)
            modes, best = together[int(np.argmin(choice))], float(choice.min())
        return modes

    def together(self, modes: np.ndarray, changed: np.ndarray) -> np.ndarray:
        """The first change alone, the first two, ...: (plans, layers)."""
        current, plans = modes, []
        for change in changed:
            current = np.where(change != modes, change, current)
            plans.append(current)
        return np.array(plans, dtype=np.int8)

    def neighbours(self, modes: np.ndarray) -> np.ndarray:
        """All plans one change away, (plans, layers)."""
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
        return np.concatenate(plans)


_RECOMPUTES = 2
_SWAP_DISTANCE = 4
_MOST_TOGETHER = 24
