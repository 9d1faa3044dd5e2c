"""Local search for one plan of GFGB, DHA and DFGB."""

from typing import Any

import numpy as np

from jaxferry.planner.base import Objective
from jaxferry.planner.effort import FULL_LAYERS
from jaxferry.planner.evaluate import PlanEvaluator
from jaxferry.planner.search import objective_values
from jaxferry.step.room import UNLIMITED

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
