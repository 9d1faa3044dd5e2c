"""A proven lower bound on plans that choose everything for each layer, within a memory budget.

Each group takes one of the choices of `jaxferry.planner.options`. A period T of the step is no shorter than

- the work of each lane, and what it loses to the others (`Contention`);
- each **loop**: from a layer's forward through the forwards and backwards of all layers from there on, and then all
  updates on the host, all transfers up or all transfers down that start after the backward of a group up to that layer.
  In any order, the last of these belongs to a group whose next forward waits for it. Likewise with what one group does
  alone between its backward and its forward;
- the activations that leave for host memory, and then the backwards but for the first two, which wait for them.
  Likewise all forwards, and then the activations that return.

**Bytes** count at up to two places: the last forward, and the forward that needs the most if all layers recompute. A
forward needs the copies that are held across it, the kept activations of all layers so far, and its own workspace.
Subgroups of streamed updates have slots all the time: the four largest ones of all that stream. Which size the fourth
has is tried for up to `_MOST_SIZES` intervals; in each of them the slots' bytes are linear in the choices.

Shares of choices in place of one choice for each group make this a linear program, which HiGHS solves. Its prices prove
the bound: for any weights w of the times that add up to 1, and any prices p of a byte,

    T  >=  sum over groups of the cheapest choice's (w . seconds + p . bytes)  -  p . budgets

(Lagrange's relaxation). So the bound holds however exactly the program was solved.

What a lane loses to others delays its own next tasks. A plan without any (whose programs may still read and write host
memory) is delayed by nothing: the bound is the least over the plans with and without tasks of each lane that can lose.
"""

import collections
import dataclasses
import importlib
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxferry.costs import SHARING, Profile
from jaxferry.modes import ActivationPlace
from jaxferry.planner.base import Objective
from jaxferry.planner.columns import Column, Columns
from jaxferry.planner.options import (
    BYTES,
    D2H,
    DOWN,
    FIRST,
    FORWARDS,
    H2D,
    HOST,
    LEAVES,
    NUM_LANES,
    OWN,
    PROGRAMS,
    RETURNS,
    SLOT,
    TASKS,
    UP,
    Options,
    group_options,
)
from jaxferry.step import SLOTS

_MOST_LOOPS = 12
_FIRST_LOOPS = 4
_MOST_SIZES = 6
_LEAST_SHARE = 0.002
"""The share of the budget from which on the size of a slot counts."""

_CYCLED = (HOST, UP, DOWN)
_SHARING = [H2D, D2H, HOST]
"""The lanes of `contention.SHARING`."""
_ROUNDING = 1e-9
_TOO_MUCH = 1e6


def any_plan_lower_bound_s(profile: Profile, budget_bytes: int | None = None) -> float:
    """No plan within the budget has a smaller `steady_step_s`, wherever its groups are updated."""
    return solve(profile, budget_bytes).bound_s


@dataclasses.dataclass(frozen=True)
class Solution:
    """The solution of the linear programme.

    Attributes:
      bound_s: the bound that its prices prove, in seconds.
      shares: for groups that are equal to it, given as lists of their layers, how many have each choice: (groups,
        columns of the members, number).
    """

    bound_s: float
    shares: tuple[tuple[tuple[tuple[int, ...], ...], tuple[tuple[Column, ...], ...], np.ndarray], ...] = ()


def solve(
    profile: Profile,
    budget_bytes: int | None = None,
    columns: Columns | None = None,
    objective: Objective = Objective.STEADY,
) -> Solution:
    """The bound on all plans within a budget, and the shares of choices that reach it.

    Args:
      profile: the layers.
      budget_bytes: the budget.
      columns: the plans; None for all.
      objective: what the bound is on.
    """
    if objective is Objective.STEP:
        profile = _without_last_backwards(profile)
    places = () if budget_bytes is None else _places(profile)
    budgets = np.array([_left_bytes(profile, place, budget_bytes or 0) for place in places])
    found = group_options(profile, places, columns)
    most_s = sum(float(each.table[:, :NUM_LANES].sum(axis=1).max()) for each in found)
    if most_s == 0:
        return Solution(0.0)
    program = _Program(found, profile, budgets, most_s, objective=objective)
    least_s = program.bound_s(most_s)
    for idle in _idle_lanes(profile) if objective is Objective.STEADY else ():
        chosen = _without_tasks(found, idle)
        if chosen is not None:
            least_s = _Program(chosen, profile, budgets, most_s, idle, program.prices).bound_s(least_s)
    return Solution(least_s, program.solution(profile))


def _without_last_backwards(profile: Profile) -> Profile:
    """The profile without the backwards after that of the first trained layer: a step ends with its last update."""
    trained = (
        first for layer, (first, _) in zip(profile.layers, profile.program_ends, strict=True) if layer.has_gradient
    )
    first = next(trained, 0)
    ended = (dataclasses.replace(layer, has_backward=False) for layer in profile.layers[:first])
    return dataclasses.replace(profile, layers=(*ended, *profile.layers[first:])) if first else profile


def _idle_lanes(profile: Profile) -> list[tuple[str, ...]]:
    """The sets of lanes that can lose time and may have no tasks of their own, but for the empty set."""
    lanes = list(profile.contention.shares)
    return [chosen for num in range(1, len(lanes) + 1) for chosen in itertools.combinations(lanes, num)]


def _without_tasks(found: Sequence[Options], lanes: Sequence[str]) -> list[Options] | None:
    """The choices that give these lanes no tasks; None if some group has none of them."""
    kept = {
        id(each.table): each.table[(each.table[:, [TASKS[lane] for lane in lanes]] == 0).all(axis=1)] for each in found
    }
    if not all(map(len, kept.values())):
        return None
    return [dataclasses.replace(each, table=kept[id(each.table)], chosen=[]) for each in found]


@dataclasses.dataclass(frozen=True)
class _Case:
    """The fourth largest slot has at least `low` bytes and less than `high`."""

    low: int
    high: float


class _Program:
    """The linear program.

    Args:
      choices: of each group.
      profile: the layers.
      budgets: bytes at each place, (places,).
      unit_s: the program's unit of time.
      idle: lanes without tasks, whose work and losses delay nothing.
      prices: good ones of a similar program, tried first; None for those of the lane with the most work.
      objective: the times that the bound is on.

    Attributes:
      prices: the last ones, of each time, each place's bytes and the slots.
    """

    def __init__(
        self,
        choices: Sequence[Options],
        profile: Profile,
        budgets: np.ndarray,
        unit_s: float,
        idle: Sequence[str] = (),
        prices: np.ndarray | None = None,
        objective: Objective = Objective.STEADY,
    ):
        self.objective = objective
        self.budgets, self.unit_s, num_layers = budgets, unit_s, len(profile.layers)
        self.contention, self.idle = profile.contention, [_SHARING[SHARING.index(lane)] for lane in idle]
        spread = np.linspace(0, num_layers - 1, _MOST_LOOPS - _FIRST_LOOPS).astype(int)
        starts = np.unique([*range(min(_FIRST_LOOPS, num_layers)), *spread])
        # Groups that are equal to all loops are one class: any solution is as good as its mean over them.
        classes = collections.Counter[tuple[int, int]]()
        known: dict[tuple[int, int], int] = {}
        members: list[Options] = []
        self.groups: dict[tuple[int, int], list[int]] = {}
        for group, each in enumerate(choices):
            place = int(np.searchsorted(starts, each.first, side="left") + np.searchsorted(starts, each.first, "right"))
            kind = known.setdefault((id(each.table), each.num_slots), len(members))
            members += [each] if kind == len(members) else []
            classes[place, kind] += 1
            self.groups.setdefault((place, kind), []).append(group)
        self.counts = np.array(list(classes.values()), dtype=np.float64)
        own = [members[kind] for _, kind in classes]
        self.chosen = [each.chosen for each in own]
        self.shares: np.ndarray | None = None
        firsts = [place for place, _ in classes]
        sizes = [len(each.table) for each in own]
        self.begins = np.concatenate([[0], np.cumsum(sizes)[:-1]])
        self.table = np.concatenate([each.table for each in own])
        self.row_of = np.repeat(np.arange(len(own)), sizes)
        self.slot_bytes = self.table[:, SLOT]
        self.num_slots = np.repeat([each.num_slots for each in own], sizes) * (self.slot_bytes > 0)
        self.times = self._times(np.repeat(firsts, sizes), len(starts)) / unit_s
        self.prices = self._of_lanes() if prices is None else prices

    def _times(self, place: np.ndarray, num_starts: int) -> np.ndarray:
        """The seconds that each choice adds to each lane and each loop, (times, choices).

        `place` is 2 * i + 1 for groups whose first layer is that of loop i, 2 * i for those before it.
        """
        if self.objective is not Objective.STEADY:
            return self._times_of_one_step(place, num_starts)
        lanes = self.table[:, :NUM_LANES].T.copy()
        lanes[_SHARING] += self.contention.lost_s(lanes[_SHARING])
        lanes[self.idle] = 0.0
        rows = [*lanes]
        if self.table[:, LEAVES].any():
            rows += [self.table[:, LEAVES], self.table[:, RETURNS]]
        for start in range(num_starts):
            programs_s = np.where(place > 2 * start, self.table[:, PROGRAMS], 0.0)
            rows += [programs_s + np.where(place <= 2 * start + 1, self.table[:, column], 0.0) for column in _CYCLED]
            alone = np.where(place == 2 * start + 1, self.table[:, OWN], 0.0)
            rows.append(programs_s + alone)
        return np.array(rows)

    def _times_of_one_step(self, place: np.ndarray, num_starts: int) -> np.ndarray:
        """Likewise for a step alone, or for its forwards: loads up to a layer come before its forward."""
        is_forward = self.objective is Objective.FORWARD
        lanes = self.table[:, :NUM_LANES].T.copy()
        if is_forward:
            lanes = np.stack([self.table[:, FORWARDS], *np.zeros((NUM_LANES - 1, len(self.table)))])
        rows = [*lanes]
        for start in range(num_starts):
            first_s = np.where(place <= 2 * start + 1, self.table[:, FIRST], 0.0)
            programs_s = np.where(place > 2 * start, self.table[:, FORWARDS if is_forward else PROGRAMS], 0.0)
            if is_forward:
                rows.append(first_s + programs_s)
                continue
            updates_s = np.where(place <= 2 * start + 1, self.table[:, HOST], 0.0)
            alone_s = np.where(place == 2 * start + 1, self.table[:, HOST] + self.table[:, DOWN], 0.0)
            rows += [first_s + programs_s + updates_s, first_s + programs_s + alone_s]
        return np.array(rows)

    def bound_s(self, below_s: float) -> float:
        """The least bound of all cases, or `below_s` if that is less.

        The case for which known prices prove the least is solved next: its prices often prove enough for the others.
        """
        least_s, every = below_s / self.unit_s, map(self._limited, self._cases())
        left = [limited for limited in every if limited is not None]
        while left:
            proven = [self._proven(self.prices, limited) for limited in left]
            limited = left.pop(int(np.argmin(proven)))
            if min(proven) >= least_s:
                break
            self.prices = self._prices(limited)
            least_s = min(least_s, self._proven(self.prices, limited))
        return max(float(least_s), 0.0) * self.unit_s

    def solution(self, profile: Profile) -> tuple[Any, ...]:
        """The shares of `Solution`; none if no programme was solved."""
        if self.shares is None:
            return ()
        parts = np.split(self.shares, self.begins[1:])
        return tuple(
            (tuple(profile.groups[group] for group in groups), tuple(chosen), part)
            for groups, chosen, part in zip(self.groups.values(), self.chosen, parts, strict=True)
        )

    def _of_lanes(self) -> np.ndarray:
        """Prices of the lane alone that certainly has the most work."""
        least = self._least(self.times[:NUM_LANES]).sum(axis=1)
        prices = np.zeros(len(self.times) + len(self.budgets) + 1)
        prices[int(least.argmax())] = 1.0
        return prices

    def _cases(self) -> list[_Case]:
        most = self.budgets.min(initial=np.inf)
        # The largest slot of each class: a slot of a group whose compute copy stays is hardly smaller.
        largest = np.maximum.reduceat(self.slot_bytes, self.begins)
        sizes = np.unique(largest[largest > _LEAST_SHARE * most]) if len(self.budgets) else np.zeros(0)
        sizes = sizes[np.unique(np.linspace(0, len(sizes) - 1, _MOST_SIZES).astype(int))] if len(sizes) else sizes
        bounds = [0, *(int(size) for size in sizes)]
        return [_Case(low, high) for low, high in zip(bounds, [*bounds[1:], np.inf], strict=True)][::-1]

    def _limited(self, case: _Case) -> np.ndarray | None:
        """The shares that each choice takes of the budgets and of the large slots; None if no choices fit."""
        is_large = self.slot_bytes >= case.high
        more = np.where(is_large, (self.slot_bytes - case.low) * self.num_slots, 0.0)
        limits = self.budgets - SLOTS * case.low
        num_bytes = (self.table[:, BYTES:] + more[:, None]).T / np.maximum(limits, 1.0)[:, None]
        limited = np.vstack([num_bytes, is_large * self.num_slots / (SLOTS - 1.0)])
        fits = (limits >= 0).all() and (self._least(limited).sum(axis=1) <= 1.0 + _ROUNDING).all()
        return limited if fits else None

    def _least(self, costs: np.ndarray) -> np.ndarray:
        """The cheapest choice of each class, for all of its groups, (..., classes)."""
        return np.minimum.reduceat(costs, self.begins, axis=-1) * self.counts

    def _proven(self, prices: np.ndarray, limited: np.ndarray) -> float:
        costs = prices @ np.vstack([self.times, limited])
        return float(self._least(costs).sum() - prices[len(self.times) :].sum())

    def _prices(self, limited: np.ndarray) -> np.ndarray:
        """The prices of the times, which add up to 1, and of the limits: good ones, if HiGHS succeeds."""
        num_times = len(self.times)
        below = np.vstack([self.times, limited])
        most = np.concatenate([np.zeros(num_times), np.ones(len(limited))])
        prices = self._dual(below, most, num_times)
        if prices is not None:
            return prices / max(prices[:num_times].sum(), 1e-300)
        # If no choices keep the limits, prices of the limits alone prove that: no bound is too high for these.
        conflict = self._dual(limited, np.ones(len(limited)), len(limited)) if len(limited) else None
        more = np.zeros(len(limited)) if conflict is None else _TOO_MUCH * conflict
        return np.concatenate([np.full(NUM_LANES, 1 / NUM_LANES), np.zeros(num_times - NUM_LANES), more])

    def _dual(self, below: np.ndarray, most: np.ndarray, num_raised: int) -> np.ndarray | None:
        """The prices of `below @ shares <= most` if the first limits may rise together; None on failure."""
        scipy: Any = importlib.import_module("scipy")  # here, since it takes longer than a short plan
        linprog: Any = scipy.optimize.linprog  # SciPy's stubs do not accept sparse matrices here
        size = self.table.shape[0]
        raised = np.concatenate([-np.ones(num_raised), np.zeros(len(below) - num_raised)])[:, None]
        shares = scipy.sparse.csr_array((np.ones(size), (self.row_of, np.arange(size))), (len(self.counts), size + 1))
        result = linprog(
            np.append(np.zeros(size), 1.0),
            A_ub=scipy.sparse.csr_array(np.hstack([below, raised])),
            b_ub=most,
            A_eq=shares,
            b_eq=self.counts,
            method="highs-ds",
        )
        if result.status == 0 and num_raised == len(self.times):
            self.shares = result.x[:-1]
        return np.maximum(-result.ineqlin.marginals, 0.0) if result.status == 0 else None


def _places(profile: Profile) -> tuple[int, ...]:
    """The layers at whose forward bytes count."""
    waits = ActivationPlace.HOST
    least = np.cumsum(
        [
            min(layer.kept_bytes(each) - layer.leaving_bytes(each, waits) for each in layer.levels)
            for layer in profile.layers
        ]
    )
    needs = [int(kept) + _own_bytes(profile, place) for place, kept in enumerate(least)]
    return tuple({len(needs) - 1, int(np.argmax(needs))})


def _own_bytes(profile: Profile, place: int) -> int:
    """The least memory of a forward besides copies and kept activations; the last layer's backward follows at once."""
    layer, is_last, both = profile.layers[place], place == len(profile.layers) - 1, (False, True)
    forward_bytes = min(layer.forward_bytes(*each) for each in itertools.product(both, layer.levels))
    variants = itertools.product(both, both, layer.levels)
    return max(forward_bytes, min(layer.backward_bytes(*each) for each in variants)) if is_last else forward_bytes


def _left_bytes(profile: Profile, place: int, budget_bytes: int) -> float:
    """What a budget leaves for copies and kept activations; values that wait in host memory do not count."""
    saved = sum(layer.save_bytes for layer in profile.layers[: place + 1])
    return float(budget_bytes + saved - _own_bytes(profile, place))
