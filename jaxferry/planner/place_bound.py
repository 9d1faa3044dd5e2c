"""A proven lower bound on plans that choose everything for each layer, within a memory budget.

What each choice for a parameter group costs in a step: seconds of each lane, and bytes at some places.

The choices of a group: where it is updated (on the host, through the GPU, through the GPU with a RESIDENT copy, on the
device), how its layers read parameters, whether they recompute, and whether the backward writes the gradient (GO).
Layers read as with GFGB and RESIDENT (held from forward to backward), DFGB, RELOAD or DHA. A layer's **place** is that
of its forward.

All costs are the least that any plan with that choice has, so `jaxferry.planner.place_bound` may bound plans with them:
updates stream in small subgroups.

Each group takes one of the choices of `jaxferry.planner.place_bound`. A period T of the step is no shorter than

- the work of each lane, and what it loses to the others (`Contention`);
- each **loop**: from a layer's forward through the forwards and backwards of all layers from there on, and then all
  updates on the host, all transfers up or all transfers down that start after the backward of a group up to that layer.
  In any order, the last of these belongs to a group whose next forward waits for it. Likewise with what one group does
  alone between its backward and its forward.

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

from jaxferry.costs import DOWN as DOWN_LANE
from jaxferry.costs import HOST as HOST_LANE
from jaxferry.costs import SHARING, LayerProfile, Profile
from jaxferry.costs import UP as UP_LANE
from jaxferry.modes import Subgroups
from jaxferry.planner.effort import updatable_groups
from jaxferry.step import SLOTS, num_subgroups, slot_bytes

GPU, H2D, D2H, HOST, PROGRAMS, UP, DOWN, OWN, SLOT, COPIES_UP, COPIES_DOWN, BYTES = range(12)
"""Columns of `Options.table`. The first four are a step's seconds on the lanes, and bytes at the places come last.

`PROGRAMS`: GPU time of forwards and backwards, without updates. `UP`, `DOWN`: transfers that start after the group's
last backward and end before its next forward could start. `OWN`: seconds from the last backward to the next forward if
the group is alone. `SLOT`: if the update streams through the GPU, the device memory of one subgroup. `COPIES_UP`,
`COPIES_DOWN`: what of the links' work is transfers, and not part of a program.
"""

TASKS = {UP_LANE: COPIES_UP, DOWN_LANE: COPIES_DOWN, HOST_LANE: HOST}
"""The column of a lane's own tasks."""

NUM_LANES = 4
_HELD, _BETWEEN, _AGAIN, _READ = "held", "DFGB", "RELOAD", "DHA"
_MOST_TOGETHER = 512
"""The most combinations of the choices of layers that share parameters."""


@dataclasses.dataclass(frozen=True)
class Options:
    """The choices of one group.

    Attributes:
      first: its first layer.
      table: (choices, columns); none of them is worse than another one in every column.
      num_slots: how many of its subgroups are on the device at once if the group streams.
    """

    first: int
    table: np.ndarray
    num_slots: int


def options(profile: Profile, places: tuple[int, ...]) -> list[Options]:
    """The choices of all groups.

    Args:
      profile: the layers.
      places: the layers at whose forwards bytes count.
    """
    may_update, known = frozenset(updatable_groups(profile)), dict[bytes, np.ndarray]()
    found = []
    for group, members in enumerate(profile.groups):
        layer = profile.layers[members[0]]
        table = _of_group(profile, group, group in may_update, places)
        key = table.tobytes()
        if key not in known:
            known[key] = _undominated(table)
        found.append(Options(members[0], known[key], min(num_subgroups(layer, Subgroups.SMALL), SLOTS)))
    return found


def recompute_choices(layer: LayerProfile) -> tuple[bool, ...]:
    """Whether a layer may recompute."""
    return (False, True) if layer.can_recompute else (False,)


def _undominated(table: np.ndarray) -> np.ndarray:
    table = np.unique(table, axis=0)
    as_good = (table[:, None] <= table[None]).all(axis=2) & ~np.eye(len(table), dtype=bool)
    return table[~as_good.any(axis=0)]


def _of_group(profile: Profile, group: int, may_update: bool, places: tuple[int, ...]) -> np.ndarray:
    members, layer = profile.groups[group], profile.layers[profile.groups[group][0]]
    update_s, gpu_s = profile.group_update_s[group], layer.streamed_update_s

    def programs(place: str) -> np.ndarray:
        each = [_of_layer(profile, member, place, len(members) == 1, places) for member in members]
        if np.prod([len(choices) for choices in each]) > _MOST_TOGETHER:
            each = [choices.min(axis=0, keepdims=True) for choices in each]
        return np.array([sum(chosen) for chosen in itertools.product(*each)])

    def more(num_bytes: float = 0.0, **seconds: float) -> np.ndarray:
        row = np.array([0.0] * BYTES + [num_bytes] * len(places))
        for name, value in seconds.items():
            row[_COLUMNS[name]] = value
        return row

    found = [programs("host" if layer.has_gradient else "none") + more(host=update_s, own=update_s)]
    if may_update:
        up_s, down_s, state_s = layer.state_up_s, layer.state_down_s, layer.state_down_for(copy_stays=True)
        if up_s is not None and down_s is not None and state_s is not None:
            number, held = num_subgroups(layer, Subgroups.SMALL), layer.param_bytes
            slots = [float(slot_bytes(layer, copy_stays, Subgroups.SMALL)) for copy_stays in (False, True)]
            copies = {"copies_up": up_s, "copies_down": down_s}
            transfers = {"h2d": up_s, "d2h": down_s, "up": up_s, "down": down_s, **copies}
            own_s = up_s + (gpu_s + down_s) / number
            found.append(programs("gpu") + more(gpu=gpu_s, own=own_s, slot=slots[0], **transfers))
            # The next forward waits for no transfer down.
            copies = {"copies_up": up_s, "copies_down": state_s}
            transfers, own_s = {"h2d": up_s, "d2h": state_s, "up": up_s, **copies}, up_s + gpu_s / number
            found.append(programs("device") + more(held, gpu=gpu_s, own=own_s, slot=slots[1], **transfers))
        kept_bytes = layer.state_bytes + layer.param_bytes
        found.append(programs("device") + more(kept_bytes, gpu=layer.update_gpu_s or 0.0))
    return np.concatenate(found)


_COLUMNS = {
    "gpu": GPU, "h2d": H2D, "d2h": D2H, "host": HOST, "up": UP, "down": DOWN, "own": OWN, "slot": SLOT,
    "copies_up": COPIES_UP, "copies_down": COPIES_DOWN,
}  # fmt: skip


def _of_layer(profile: Profile, index: int, update: str, alone: bool, places: tuple[int, ...]) -> np.ndarray:
    """The choices of a layer's programs and transfers, (choices, columns).

    Layers that share parameters may share one copy, so only one `alone` needs a load and memory for it. Without a
    gradient its copy can stay for ever.
    """
    layer, found = profile.layers[index], []
    loadings = (_HELD,) if update == "device" else (_HELD, _BETWEEN, _AGAIN, _READ)
    by_backward = (True,) if update == "host" and not layer.gradient_rows else ()
    for loading, again, is_go in itertools.product(loadings, recompute_choices(layer), (False, *by_backward)):
        row = np.zeros(BYTES + len(places))
        forward_s, backward_s = _programs_s(layer, loading, again, is_go)
        row[GPU] = row[PROGRAMS] = forward_s + backward_s
        if update == "host":
            row[COPIES_DOWN] = 0.0 if is_go else layer.offload_s
            row[D2H] = min(layer.backward_write_s, backward_s) if is_go else layer.offload_s
        if update != "device":
            row[COPIES_UP] = _loads_s(layer, loading, again, alone)
            row[H2D] = row[COPIES_UP] + _reads_s(layer, loading, again, backward_s)
        if alone and update == "host" and not is_go:
            row[DOWN] = row[OWN] = layer.offload_s
        if alone and update in ("host", "gpu") and loading in (_HELD, _AGAIN):
            row[UP] = layer.load_s
            row[OWN] += layer.load_s
        holds = alone and update != "device" and layer.has_backward
        for number, place in enumerate(places):
            kept = layer.kept_bytes(again) if index <= place else 0
            row[BYTES + number] = kept + layer.param_bytes * (holds and _is_held(profile, index, loading, place))
        found.append(row)
    return np.array(found)


def _is_held(profile: Profile, index: int, loading: str, place: int) -> bool:
    """Whether a copy is certainly there during the forward at `place`."""
    if loading == _BETWEEN:  # earlier loads may have to wait until the last forward
        return place == len(profile.layers) - 1 and profile.program_ends[index][1] < place
    return (loading == _HELD and index <= place) or (loading == _AGAIN and index == place)


def _programs_s(layer: LayerProfile, loading: str, again: bool, is_go: bool) -> tuple[float, float]:
    """The time of a layer's forward and backward."""
    forward_s = layer.forward_dha_s if loading in (_READ, _BETWEEN) else layer.forward_s
    forward_s += layer.inter_forward_s
    if not layer.has_backward:
        return forward_s, 0.0
    return forward_s, layer.inter_backward_s + layer.backward_for(loading == _READ, is_go, again)


def _reads_s(layer: LayerProfile, loading: str, again: bool, backward_s: float) -> float:
    """What programs take of the link up. A plan without loads is no slower than its programs, so no more than these."""
    if loading not in (_READ, _BETWEEN):
        return 0.0
    back_s = layer.backward_reads_for(again) if loading == _READ and layer.has_backward else 0.0
    return layer.forward_read_s + min(back_s, backward_s)


def _loads_s(layer: LayerProfile, loading: str, again: bool, alone: bool) -> float:
    """What loads take of the link up."""
    if loading == _READ or not alone:
        return 0.0
    if loading == _AGAIN:
        twice = layer.has_backward and (layer.backward_reads or again) and not layer.fused_backward
        return layer.load_s * (1 + twice)
    return layer.load_s * layer.has_gradient


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
    places = () if budget_bytes is None else _places(profile)
    budgets = np.array([_left_bytes(profile, place, budget_bytes or 0) for place in places])
    found = options(profile, places)
    most_s = sum(float(each.table[:, :NUM_LANES].sum(axis=1).max()) for each in found)
    if most_s == 0:
        return 0.0
    program = _Program(found, profile, budgets, most_s)
    least_s = program.bound_s(most_s)
    for idle in _idle_lanes(profile):
        chosen = _without_tasks(found, idle)
        if chosen is not None:
            least_s = _Program(chosen, profile, budgets, most_s, idle, program.prices).bound_s(least_s)
    return least_s


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
    return [dataclasses.replace(each, table=kept[id(each.table)]) for each in found]


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
    ):
        self.budgets, self.unit_s, num_layers = budgets, unit_s, len(profile.layers)
        self.contention, self.idle = profile.contention, [_SHARING[SHARING.index(lane)] for lane in idle]
        spread = np.linspace(0, num_layers - 1, _MOST_LOOPS - _FIRST_LOOPS).astype(int)
        starts = np.unique([*range(min(_FIRST_LOOPS, num_layers)), *spread])
        # Groups that are equal to all loops are one class: any solution is as good as its mean over them.
        classes = collections.Counter[tuple[int, int]]()
        known: dict[tuple[int, int], int] = {}
        members: list[Options] = []
        for each in choices:
            place = int(np.searchsorted(starts, each.first, side="left") + np.searchsorted(starts, each.first, "right"))
            kind = known.setdefault((id(each.table), each.num_slots), len(members))
            members += [each] if kind == len(members) else []
            classes[place, kind] += 1
        self.counts = np.array(list(classes.values()), dtype=np.float64)
        own = [members[kind] for _, kind in classes]
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
        lanes = self.table[:, :NUM_LANES].T.copy()
        lanes[_SHARING] += self.contention.lost_s(lanes[_SHARING])
        lanes[self.idle] = 0.0
        rows = [*lanes]
        for start in range(num_starts):
            programs_s = np.where(place > 2 * start, self.table[:, PROGRAMS], 0.0)
            rows += [programs_s + np.where(place <= 2 * start + 1, self.table[:, column], 0.0) for column in _CYCLED]
            alone = np.where(place == 2 * start + 1, self.table[:, OWN], 0.0)
            rows.append(programs_s + alone)
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
        return np.maximum(-result.ineqlin.marginals, 0.0) if result.status == 0 else None


def _places(profile: Profile) -> tuple[int, ...]:
    """The layers at whose forward bytes count."""
    least = np.cumsum([min(layer.kept_bytes(again) for again in recompute_choices(layer)) for layer in profile.layers])
    needs = [int(kept) + _own_bytes(profile, place) for place, kept in enumerate(least)]
    return tuple({len(needs) - 1, int(np.argmax(needs))})


def _own_bytes(profile: Profile, place: int) -> int:
    """The least memory of a forward besides copies and kept activations; the last layer's backward follows at once."""
    layer, is_last, both = profile.layers[place], place == len(profile.layers) - 1, (False, True)
    again = recompute_choices(layer)
    forward_bytes = min(layer.forward_bytes(by_dha, recomputes) for by_dha in both for recomputes in again)
    flags = [(by_dha, is_go, recomputes) for by_dha in both for is_go in both for recomputes in again]
    return max(forward_bytes, min(layer.backward_bytes(*each) for each in flags)) if is_last else forward_bytes


def _left_bytes(profile: Profile, place: int, budget_bytes: int) -> float:
    """What a budget leaves for copies and kept activations; values that wait in host memory do not count."""
    saved = sum(layer.save_bytes for layer in profile.layers[: place + 1])
    return float(budget_bytes + saved - _own_bytes(profile, place))
