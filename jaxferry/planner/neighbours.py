"""Local changes of plans: families, neighbours, and replacements of choices that rely on the model.

Local search over a whole pool: neighbours of the best plans for their memory.

A neighbour changes the mode, gradient, recomputation or place of update of one layer (or group), or of several layers
that are equal and treated equally so far: the first or the last two, four, ... of them. Plans spread over the frontier
of time and memory are expanded, independently of any budget, within a limit on work. Layers of a long model change only
together with such others; there layers of equal bytes and about equal times count as equal, as those that were measured
one by one.

Replaces choices that rely on the machine model, where the plan stays equal to the fastest one without them.

    plan --neighbours with less score--> judged --those that fit and count as equal--> the one with the least score
     ^                                                                                              |
     `----------------------------------------------------------------------------------------------'

`planner/preference.py` defines scores and equality, `planner/neighbours.py` neighbours: one layer, or several equal
layers, become GFGB, RESIDENT or RELOAD in place of DHA, DFGB or RELOAD, keep their gradient on the device, or do not
recompute. The score falls with each step, so the search ends; for a long model it ends after `MOST_WORK` or
`MOST_SIMULATED` layers. The place of each update stays.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence

import numpy as np

from jaxferry.costs import LayerProfile, Profile
from jaxferry.planner.base import Objective, best_order
from jaxferry.planner.effort import FEW_LAYERS
from jaxferry.planner.evaluate import PlanEvaluator
from jaxferry.planner.preference import Best, picked_plan, scores
from jaxferry.planner.search import objective_values
from jaxferry.step import (
    DFGB,
    DHA,
    GFGB,
    RELOAD,
    RESIDENT,
    UNLIMITED,
    Loads,
    StepSchedules,
    UpdateOrder,
    Updates,
    needed_bytes,
)


def prefix_family(
    profile: Profile, modes: np.ndarray, mode: int = DHA, points: int | None = None, num_orders: int = 4
) -> np.ndarray:
    """Plans with the first k layers of several orders in the given mode: (plans, layers) codes.

    The orders: least slowdown by DHA per byte first, largest first, forward order, backward order; the first
    `num_orders` of these count. Each order gives one plan per change, or about `points` plans.
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
    for order in orders[:num_orders]:
        changes = [index for index in order if modes[index] != mode]
        stride = 1 if points is None else max(1, len(changes) // points)
        current = np.array(modes, dtype=np.int8)
        for number, index in enumerate(changes, start=1):
            current[index] = mode
            if number % stride == 0 or number == len(changes):
                family.append(current.copy())
    return np.array(family, dtype=np.int8).reshape(len(family), len(layers))


ALL_MODES = (GFGB, DHA, DFGB, RELOAD, RESIDENT)
MOST_WORK = 840_000
"""The most layers of neighbours that a search tries."""

_EXPANDED_AT_ONCE = 8
_BYTES, _SECONDS = ("param_bytes", "activation_bytes"), ("forward_s", "load_s")
_ABOUT = 1.25
"""The ratio of times that are about equal."""
_MODE, _GRAD_ON_HOST, _RECOMPUTES, _ON_DEVICE = range(4)
_Change = tuple[list[int], dict[int, int]]


class Neighbours:
    """What may change in one plan.

    Args:
      profile: the layers.
      can_recompute: the layers whose recomputation may change, (layers,) flags.
      groups: the parameter groups whose place of update may change.
    """

    def __init__(self, profile: Profile, can_recompute: np.ndarray, groups: Collection[int] = ()):
        self.can_recompute = can_recompute
        self.groups = [list(profile.groups[group]) for group in groups]
        self.is_alone = np.zeros(len(profile.layers), dtype=bool)
        self.is_alone[[members[0] for members in self.groups if len(members) == 1]] = True
        self.one_by_one = len(profile.layers) <= FEW_LAYERS
        self.kinds = _kinds(profile, can_recompute, 1.0 if self.one_by_one else _ABOUT)

    def of(self, best: Best) -> list[np.ndarray]:
        """Modes and flags of gradients, recomputation and updates of all neighbours, (plans, layers) each."""
        own = np.stack([each.astype(np.int8) for each in best.columns])
        together = list(self._equal_layers(own))
        changes = [*self._of_layers(own, together), *self._of_groups(own, together)]
        found = np.repeat(own[None], len(changes), axis=0)
        cells, layers, counts = list[tuple[int, int, int]](), list[int](), list[int]()
        for number, (chosen, values) in enumerate(changes):
            cells += [(number, column, value) for column, value in values.items()]
            layers += chosen * len(values)
            counts += [len(chosen)] * len(values)
        plan, column, value = np.repeat(np.array(cells, dtype=np.int64).reshape(-1, 3), counts, axis=0).T
        found[plan, column, layers] = value
        return [found[:, _MODE], *(found[:, column].astype(bool) for column in range(1, len(own)))]

    def _of_layers(self, own: np.ndarray, together: list[list[int]]) -> Iterator[_Change]:
        for layers in together:
            mode, grad_on_host, recomputes, there = own[:, layers[0]].tolist()
            if self.can_recompute[layers[0]]:
                yield layers, {_RECOMPUTES: not recomputes}
            if not there:
                yield layers, {_GRAD_ON_HOST: not grad_on_host}
                yield from ((layers, {_MODE: other}) for other in ALL_MODES if other != mode)

    def _of_groups(self, own: np.ndarray, together: list[list[int]]) -> Iterator[_Change]:
        alone = (layers for layers in together if len(layers) > 1 and self.is_alone[layers].all())
        for layers in (*self.groups, *alone):
            if own[_ON_DEVICE, layers[0]]:
                yield from ((layers, {_MODE: mode, _ON_DEVICE: 0}) for mode in (GFGB, DHA, RELOAD, RESIDENT))
            else:
                yield layers, {_MODE: RESIDENT, _GRAD_ON_HOST: 0, _ON_DEVICE: 1}

    def _equal_layers(self, own: np.ndarray) -> Iterator[list[int]]:
        """Layers that may change together."""
        classes: dict[tuple[object, ...], list[int]] = {}
        for layer, key in enumerate(zip(self.kinds, *own.tolist(), strict=True)):
            classes.setdefault(key, []).append(layer)
        if self.one_by_one:
            yield from ([layer] for layer in range(len(self.kinds)))
        for layers in classes.values():
            counts = {*(1 << power for power in range(len(layers).bit_length())), len(layers)}
            for count in sorted(counts - {1} if self.one_by_one else counts):
                yield layers[:count]
                if count < len(layers):
                    yield layers[-count:]


def _kinds(profile: Profile, can_recompute: np.ndarray, most: float) -> list[int]:
    """The first layer of each layer's kind: of equal bytes, and times whose ratio is at most `most`."""
    found: list[int] = []
    firsts: dict[tuple[object, ...], list[int]] = {}
    for index, (layer, can) in enumerate(zip(profile.layers, can_recompute, strict=True)):
        of_bytes = firsts.setdefault((*(getattr(layer, key) for key in _BYTES), bool(can)), [])
        kind = next((first for first in of_bytes if _is_about(layer, profile.layers[first], most)), index)
        of_bytes += [index] if kind == index else []
        found.append(kind)
    return found


def _is_about(layer: LayerProfile, other: LayerProfile, most: float) -> bool:
    """Whether no time of one layer is more than so many times that of the other."""
    times = (sorted((getattr(layer, key), getattr(other, key))) for key in _SECONDS)
    return all(high <= low * most for low, high in times)


def refine(
    frontier: Callable[[], Sequence[Best]],
    neighbours: Neighbours,
    run: Callable[..., None],
    most_work: int = MOST_WORK,
) -> None:
    """Tries neighbours until all plans on the frontier are expanded, or the limit on work is reached.

    Args:
      frontier: gives the plans known by now that no other beats in time and memory, fastest first.
      neighbours: what may change.
      run: evaluates plans, given like `Neighbours.of`.
      most_work: the limit, in layers of neighbours.
    """
    expanded, work = set[bytes](), 0
    while work < most_work:
        fresh = [best for best in frontier() if _key(best) not in expanded]
        if not fresh:
            return
        spread = np.unique(np.linspace(0, len(fresh) - 1, _EXPANDED_AT_ONCE).astype(int))
        expanded |= {_key(fresh[number]) for number in spread}
        parts = zip(*(neighbours.of(fresh[number]) for number in spread), strict=True)
        plans = [np.concatenate(part) for part in parts]
        work += plans[0].size
        run(*plans)


def _key(best: Best) -> bytes:
    return b"".join(each.tobytes() for each in best.columns)


MOST_REPLACED_WORK = 8_000
"""The most layers of plans that are evaluated for one plan."""

MOST_SIMULATED = 160
"""Likewise if its updates stream, so that each plan is simulated by itself."""

_AT_ONCE = 16
_OPTIONS = ((UpdateOrder.BACKWARD, True), (UpdateOrder.NEED, False), (UpdateOrder.NEED, True))
"""Orders of updates, and whether gradients have room, as in `planner/base.py`."""

Columns = tuple[np.ndarray, ...]
"""Modes and flags of gradients, recomputation and updates on the device, (plans, layers) each."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """What every plan must keep.

    Attributes:
      objective: the quantity that the search minimizes.
      longest_s: the longest time, in seconds, that counts as equal to the fastest plan's.
      budget_bytes: device memory; None for no limit.
      memory_bytes: those of the plans, which gradients may fill.
      allows: tells of plans, given as `Columns`, which ones the request allows: flags, (plans,).
    """

    objective: Objective
    longest_s: float
    budget_bytes: int | None
    memory_bytes: int | None
    allows: Callable[..., np.ndarray]

    @property
    def most_bytes(self) -> int:
        """The most bytes that a plan may need."""
        return UNLIMITED if self.budget_bytes is None else self.budget_bytes


def replaced(profile: Profile, start: Best, limits: Limits) -> Best:
    """Returns the plan after all replacements that keep the limits, which the plan itself keeps.

    Args:
      profile: the layers.
      start: the plan.
      limits: what every plan must keep.
    """
    judge = _Evaluated(profile, start, limits) if start.through_gpu is None else _Simulated(profile, start, limits)
    neighbours = Neighbours(profile, np.array([layer.can_recompute for layer in profile.layers]))
    found: Best | None = start
    while found is not None:
        current, found = found, None
        score = scores(profile, *(each[None] for each in current.columns))[0]
        plans = neighbours.of(current)
        plans = _some(plans, scores(profile, *plans) < score)
        plans = _some(plans, limits.allows(*plans) & judge.may_keep(*plans))
        if len(plans[0]):
            found = judge.best(plans, scores(profile, *plans))
    return current


def _some(plans: Sequence[np.ndarray], which: np.ndarray) -> list[np.ndarray]:
    """The plans at these places."""
    return [each[which] for each in plans]


class _Evaluated:
    """Judges plans whose updates do not stream, all at once, in either order of updates."""

    def __init__(self, profile: Profile, start: Best, limits: Limits):
        self.start, self.limits, self.evaluate, self.work = start, limits, PlanEvaluator(profile), 0
        num_options = 1 if limits.objective is Objective.FORWARD else len(_OPTIONS) - (limits.memory_bytes is None)
        self.options = _OPTIONS[:num_options]
        self.bulk, self.after_all = start.loads is Loads.BULK, start.updates is Updates.AFTER_ALL

    def may_keep(self, *plans: np.ndarray) -> np.ndarray:
        """Flags of the plans that may keep the limits, (plans,), by bounds."""
        bounds_s, needed_bytes = self.evaluate.bounds(plans)
        if self.limits.objective is not Objective.STEADY:
            return needed_bytes <= self.limits.most_bytes
        return (needed_bytes <= self.limits.most_bytes) & (bounds_s <= self.limits.longest_s)

    def best(self, plans: list[np.ndarray], score: np.ndarray) -> Best | None:
        """Returns the plan with the least score, then memory, then time, of the first ones that keep the limits."""
        order = np.argsort(score, kind="stable")
        for first in range(0, len(order), _AT_ONCE):
            rows = order[first : first + _AT_ONCE]
            for update_order, has_room in self.options:
                if self.work >= MOST_REPLACED_WORK:
                    return None
                found = self._best_of(_some(plans, rows), score[rows], update_order, has_room)
                if found is not None:
                    return found
        return None

    def _best_of(self, plans: list[np.ndarray], score: np.ndarray, order: UpdateOrder, has_room: bool) -> Best | None:
        """Likewise of all these plans, with one order of updates, and room for gradients or none."""
        limits, by_need = self.limits, order is UpdateOrder.NEED
        memory_bytes = limits.memory_bytes if has_room else None
        if by_need and memory_bytes is not None:  # fewer waits could be slower
            waits = self.evaluate.waits_for_room(plans, self.bulk, self.after_all, memory_bytes)
            plans, score = _some(plans, ~waits), score[~waits]
        if len(score) == 0:
            return None
        self.work += plans[0].size
        outcomes = self.evaluate(
            *plans, bulk=self.bulk, after_all=self.after_all, by_need=by_need, memory_bytes=memory_bytes
        )
        seconds = objective_values(outcomes, limits.objective)
        fits = np.flatnonzero((seconds <= limits.longest_s) & (outcomes.needed_bytes <= limits.most_bytes))
        if len(fits) == 0:
            return None
        row = fits[np.lexsort((seconds[fits], outcomes.needed_bytes[fits], score[fits]))[0]]
        modes, grad_on_host, recomputes, on_device = (each[row] for each in plans)
        return dataclasses.replace(
            self.start,
            modes=modes,
            grad_on_host=grad_on_host,
            recomputes=recomputes,
            on_device=on_device if on_device.any() else None,
            needed_bytes=int(outcomes.needed_bytes[row]),
            objective_s=float(seconds[row]),
            update_order=order,
            memory_bytes=memory_bytes,
        )


class _Simulated:
    """Judges plans whose updates stream, one after another, the least score first."""

    def __init__(self, profile: Profile, start: Best, limits: Limits):
        self.profile, self.start, self.limits, self.work = profile, start, limits, 0
        plan = picked_plan("replaced", 1.0, profile, start)
        self.room_bytes = start.needed_bytes - needed_bytes(profile, plan)

    def may_keep(self, modes: np.ndarray, *_: np.ndarray) -> np.ndarray:
        """Flags of the plans whose streamed groups keep no other copies on the device than before, (plans,)."""
        same = (modes == RESIDENT) == (self.start.modes == RESIDENT)
        return same[:, self.start.through_gpu].all(axis=1)

    def best(self, plans: list[np.ndarray], score: np.ndarray) -> Best | None:
        """Returns the plan with the least score of those that keep the limits; None after `MOST_SIMULATED`."""
        for row in np.argsort(score, kind="stable"):
            if self.work >= MOST_SIMULATED:
                return None
            self.work += len(self.profile.layers)
            modes, grad_on_host, recomputes, _ = (each[row] for each in plans)
            changed = {"modes": modes, "grad_on_host": grad_on_host, "recomputes": recomputes}
            made = picked_plan(
                "replaced", 1.0, self.profile, dataclasses.replace(self.start, **changed, memory_bytes=None)
            )
            schedules = StepSchedules(self.profile, made)
            num_bytes = int(schedules.needs.natural[0]) + self.room_bytes
            if num_bytes > self.limits.most_bytes:
                continue
            made = dataclasses.replace(made, memory_bytes=num_bytes if self.room_bytes > 0 else None)
            made, seconds = best_order(made, schedules)
            if seconds <= self.limits.longest_s:
                return Best.of(made, seconds, num_bytes)
        return None
