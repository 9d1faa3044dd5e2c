"""The interface of all policies, which gradients stay on the device, and the order of the host's updates.

The order of host updates that gives a plan the shorter steady step.

By need is a greedy order, and usually the better one. But loads follow the order of the list, and RESIDENT copies are
refreshed in backward order. By need, all refreshes would wait for the updates that come last.

GO-MemFerry: which gradients stay on the device (MemFerry, section IV-D).

Names: `gain_s` is T_GBP - T_CBP, the seconds that a backward saves when its gradient stays, less what its transfer
takes longer than the backwards that follow; the capacity is the reserve factor's share of all gradient bytes. The paper
counts no link time, which for the first layers, whose transfers nothing hides, may exceed T_GBP - T_CBP. Its table D
over (layer, bytes) is kept as its Pareto frontier, so byte sizes are exact: states (bytes, gain) that no other state
beats, less those that Dantzig's bound rules out.

The result is optimal unless the frontier exceeds `MOST_STATES` (hundreds of layers of unrelated sizes with gain
proportional to size). Sizes are then rounded up to multiples of capacity / 32768, which keeps within the capacity. If
even that needs more than `MOST_STATES_IN_ALL` states, the densest gradients stay that fit; at most one gradient's gain
is lost.
"""

import abc
import dataclasses
import decimal
import enum
import functools
from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np

from jaxferry.costs import Profile
from jaxferry.errors import BudgetError
from jaxferry.modes import GradientPlace, Mode, Remat
from jaxferry.records import check_bytes, check_choice, check_share
from jaxferry.step import (
    MODES,
    Lane,
    LayerPlan,
    Loads,
    Plan,
    StepSchedules,
    UpdateOrder,
    Updates,
    may_defer,
    needed_bytes,
)
from jaxferry.units import format_bytes

_ROUNDING = 1e-12


def steady_s(schedules: StepSchedules, memory_bytes: int | None, by_need: bool) -> float:
    """The seconds of the steady step."""
    return schedules.steady(memory_bytes).seconds(by_need)


def with_update_order(profile: Profile, plan: Plan) -> Plan:
    """The plan with the order of updates that has the shorter steady step, see `best_order`.

    If no times are known, the order is by need unless a layer is RESIDENT.

    Raises:
      InputError: if the plan is for another profile.
    """
    schedules = StepSchedules(profile, plan)
    if any(task.duration_s > 0 for task in schedules.within(plan.memory_bytes).tasks):
        return with_deferred_updates(profile, best_order(plan, schedules)[0])
    is_backward = Mode.RESIDENT in plan.modes or not schedules.may_reorder
    order = UpdateOrder.BACKWARD if is_backward else UpdateOrder.NEED
    return dataclasses.replace(plan, update_order=order)


_DEFERRED_SHARES = (0.0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75)


def with_deferred_updates(profile: Profile, plan: Plan) -> Plan:
    """The plan with the number of deferred updates that has the shortest steady step, ties with the fewest.

    With none, the scratch file has nothing to do from the last update to the next backward.
    """
    if not may_defer(profile, plan):
        return plan
    tried = [dataclasses.replace(plan, deferred_updates=int(share * len(profile.groups))) for share in _DEFERRED_SHARES]
    seconds = [steady_s(StepSchedules(profile, each), each.memory_bytes, False) for each in tried]
    least_s = min(seconds) * (1 + _ROUNDING)
    return next(each for each, own_s in zip(tried, seconds, strict=True) if own_s <= least_s)


def best_order(
    plan: Plan,
    schedules: StepSchedules,
    seconds: Callable[[StepSchedules, int | None, bool], float] = steady_s,
    may_gain: Callable[[float], bool] = lambda _: True,
    is_thorough: bool = True,
) -> tuple[Plan, float]:
    """The plan with the order of updates that takes less time, with its seconds; ties go to backward order.

    More `memory_bytes` never makes the result slower. In backward order, fewer waits never slow a step. By need they
    could, since a greedy order gives no such guarantee. So by need the plan is tried without `memory_bytes`, and with
    them only if they end all waits for room.

    Args:
      plan: the plan.
      schedules: its tasks.
      seconds: what is to be least, from the tasks, `memory_bytes` and whether updates go by need.
      may_gain: whether updates by need may be faster than these seconds in backward order.
      is_thorough: whether it tries updates by need without `memory_bytes` even if these make no program wait.
    """
    memory_bytes, schedules = plan.memory_bytes, schedules.in_order(UpdateOrder.BACKWARD)
    least_s = seconds(schedules, memory_bytes, False)
    best = dataclasses.replace(plan, update_order=UpdateOrder.BACKWARD)
    num_updates = sum(task.lane is Lane.HOST for task in schedules.within(memory_bytes).tasks)
    if num_updates < 2 or not schedules.may_reorder or not may_gain(least_s):
        return best, least_s
    by_need = schedules.in_order(UpdateOrder.NEED)
    for tried_bytes in _memories_by_need(by_need, memory_bytes, is_thorough):
        found_s = seconds(by_need, tried_bytes, True)
        if found_s < least_s * (1 - _ROUNDING):
            best = dataclasses.replace(plan, update_order=UpdateOrder.NEED, memory_bytes=tried_bytes)
            least_s = found_s
    return best, least_s


def _memories_by_need(schedules: StepSchedules, memory_bytes: int | None, is_thorough: bool) -> list[int | None]:
    """The `memory_bytes` to try by need."""
    if memory_bytes is None:
        return [None]
    if schedules.needs.natural > memory_bytes:
        return []
    if schedules.waits_for_room(memory_bytes):
        return [None]
    is_same = not is_thorough or schedules.within(None).tasks == schedules.within(memory_bytes).tasks
    return [memory_bytes] if is_same else [memory_bytes, None]


MOST_STATES = 1 << 15
MOST_STATES_IN_ALL = 1 << 25
_ROUNDED_UNITS = 1 << 15


def capacity_bytes(profile: Profile, reserve_factor: float) -> int:
    """Bytes of gradients that may stay. The factor is read as a decimal, so 0.29 of 100 bytes is 29."""
    total = sum(layer.grad_bytes for layer in profile.layers)
    return int(decimal.Decimal(repr(float(reserve_factor))) * total)


def gradients_to_host(profile: Profile, reserve_factor: float) -> np.ndarray:
    """Which gradients the backward writes to the host, (layers,) bools: all except the fitting set with the most gain.

    A gradient without gain never stays. With reserve factor 1, GO is off and every gradient stays.
    """
    if reserve_factor >= 1:
        return np.zeros(len(profile.layers), dtype=bool)
    sizes = [layer.grad_bytes for layer in profile.layers]
    stays = choose_gradients(sizes, gains_s(profile), capacity_bytes(profile, reserve_factor))
    return ~np.array([layer in stays for layer in range(len(sizes))], dtype=bool)


def gains_s(profile: Profile) -> list[float]:
    """For each layer, what a step gains if its gradient stays on the device, with the links for itself."""
    gains, following_s = [], 0.0
    for layer in profile.layers:
        exposed_s = max(layer.offload_s - following_s, 0.0)
        gains.append(layer.backward_go_s - layer.backward_s - exposed_s)
        following_s += layer.backward_s + layer.inter_backward_s
    return gains


def choose_gradients(sizes_bytes: list[int], gains_s: list[float], capacity: int) -> set[int]:
    """The indices with the largest total gain whose total size is at most the capacity (0/1 knapsack).

    Args:
      sizes_bytes: whole numbers, 0 or more.
      gains_s: seconds; indices with a gain of 0 or less are never chosen.
      capacity: bytes.
    """
    useful = [i for i, gain in enumerate(gains_s) if gain > 0 and sizes_bytes[i] <= capacity]
    chosen = {i for i in useful if sizes_bytes[i] == 0}
    rest = [i for i in useful if sizes_bytes[i] > 0]
    rest.sort(key=lambda i: (-gains_s[i] / sizes_bytes[i], i))
    sizes = np.array([sizes_bytes[i] for i in rest], dtype=object)
    gains = np.array([gains_s[i] for i in rest])
    if sum(sizes) <= capacity:
        return chosen | set(rest)
    picked = _knapsack(sizes.astype(np.int64), gains, capacity, MOST_STATES)
    if picked is None and len(rest) * _ROUNDED_UNITS > MOST_STATES_IN_ALL:
        picked = _greedy(sizes.astype(np.int64), gains, capacity)
    if picked is None:
        unit = -(-capacity // _ROUNDED_UNITS)
        picked = _knapsack((-(-sizes // unit)).astype(np.int64), gains, capacity // unit, None)
    assert picked is not None
    return chosen | {rest[i] for i in picked}


def _knapsack(sizes: np.ndarray, gains: np.ndarray, capacity: int, most_states: int | None) -> list[int] | None:
    """The frontier over (bytes, gain), densest items first; None if it outgrows `most_states`."""
    size_sums, gain_sums = np.concatenate([[0], np.cumsum(sizes)]), np.concatenate([[0.0], np.cumsum(gains)])
    least = float(gains[_greedy(sizes, gains, capacity)].sum())
    used, gained = np.zeros(1, dtype=np.int64), np.zeros(1)
    parents: list[np.ndarray] = []
    num_states = 0
    for item in range(len(sizes)):
        fits = np.flatnonzero(used + sizes[item] <= capacity)
        origin = np.concatenate([np.arange(len(used)), fits + len(used)])
        used = np.concatenate([used, used[fits] + sizes[item]])
        gained = np.concatenate([gained, gained[fits] + gains[item]])
        order = np.lexsort((-gained, used))
        used, gained, origin = used[order], gained[order], origin[order]
        best_before = np.concatenate([[-np.inf], np.maximum.accumulate(gained)[:-1]])
        bound = gained + _dantzig(size_sums, gain_sums, item + 1, capacity - used)
        keep = (gained > best_before) & (bound >= least * (1 - 1e-12))
        used, gained, origin = used[keep], gained[keep], origin[keep]
        parents.append(origin)
        num_states += len(used)
        if most_states is not None and (len(used) > most_states or num_states > MOST_STATES_IN_ALL):
            return None
    return _trace(parents, int(np.argmax(gained)))


def _trace(parents: list[np.ndarray], state: int) -> list[int]:
    """Which items were taken. An origin at or beyond the previous frontier's size means taken."""
    picked = []
    for item in reversed(range(len(parents))):
        size_before = len(parents[item - 1]) if item else 1
        state = int(parents[item][state])
        if state >= size_before:
            picked.append(item)
            state -= size_before
    return picked


def _greedy(sizes: np.ndarray, gains: np.ndarray, capacity: int) -> list[int]:
    """The items that fit, densest first."""
    picked = []
    for item, size in enumerate(sizes):
        if size <= capacity:
            capacity = capacity - size
            picked.append(item)
    return picked


def _dantzig(size_sums: np.ndarray, gain_sums: np.ndarray, first: int, room: np.ndarray) -> np.ndarray:
    """The largest gain of items from `first` on within the room, if the last one may be cut."""
    reach = np.searchsorted(size_sums, size_sums[first] + room, side="right") - 1
    whole = gain_sums[reach] - gain_sums[first]
    left = size_sums[first] + room - size_sums[reach]
    following = np.minimum(reach, len(size_sums) - 2)
    density = (gain_sums[following + 1] - gain_sums[following]) / (size_sums[following + 1] - size_sums[following])
    return whole + np.where(reach < len(size_sums) - 1, left * density, 0.0)


class Objective(enum.StrEnum):
    """The quantity that a search minimizes."""

    FORWARD = "forward"
    STEP = "step"
    STEADY = "steady"


def read_objective(name: str) -> Objective:
    """The objective with this name.

    Raises:
      InputError: if there is none; the message lists all objectives.
    """
    return Objective(check_choice(name, "objective", tuple(Objective)))


@dataclasses.dataclass(frozen=True)
class Request:
    """The requirements on a plan.

    Attributes:
      reserve_factor: share of all gradient bytes, in [0, 1], that may stay on the device, for any policy. None means
        the policy's default: 1 (no gradient is GO), but 0 for `go-memferry`. `exact` chooses between these two, `auto`
        freely. A plan states the factor that it satisfies.
      memory_budget_bytes: device memory that the plan must fit into, or None for no limit.
      objective: the quantity that a search minimizes; policies that do not search ignore it.
      progress: called with a short description as each part of a long search starts.

    Raises:
      InputError: if a field is not acceptable.
    """

    reserve_factor: float | None = None
    memory_budget_bytes: int | None = None
    objective: Objective = Objective.STEADY
    progress: Callable[[str], None] | None = None

    def __post_init__(self) -> None:
        if self.reserve_factor is not None:
            object.__setattr__(self, "reserve_factor", check_share(self.reserve_factor, "reserve_factor"))
        if self.memory_budget_bytes is not None:
            check_bytes(self.memory_budget_bytes, "memory_budget_bytes", "request")
        object.__setattr__(self, "objective", read_objective(self.objective))

    def report(self, what: str) -> None:
        """Calls `progress`, if given."""
        if self.progress is not None:
            self.progress(what)


class Policy(abc.ABC):
    """Decides the mode and the gradient place of each layer of a profile.

    One test suite checks this contract for every policy:

    - the plan has the profile's layers in the same order;
    - gradients on the device, rows of lookups aside, take at most the reserve factor's share of all gradient bytes;
      with 1 no gradient is GO;
    - DFGB keeps MemFerry's window: its loads end before the first gradient leaves, and the last layer is never DFGB;
    - the plan fits into the budget however long transfers take, or `BudgetError` names the smallest feasible one;
    - `update_order` is the one with the shorter steady step, and `memory_bytes` is at most the budget;
    - results are deterministic: no policy uses a clock or random numbers.
    """

    name: ClassVar[str]
    """The name in the command line and in plans."""

    summary: ClassVar[str]
    """A short description."""

    default_reserve_factor: ClassVar[float] = 1.0
    """The reserve factor of a request without one."""

    @abc.abstractmethod
    def plan(self, profile: Profile, request: Request | None = None) -> Plan:
        """Makes a plan; the simulator adds `predicted` later.

        Args:
          profile: times in seconds and sizes in bytes of each layer.
          request: the requirements; None means the defaults.

        Raises:
          BudgetError: if no plan of this policy fits into `request.memory_budget_bytes`.
        """

    def reserve_factor(self, request: Request) -> float:
        """The request's reserve factor, or this policy's default."""
        return self.default_reserve_factor if request.reserve_factor is None else request.reserve_factor


class ModePolicy(Policy):
    """A policy that decides modes without regard to memory; the reserve factor decides the gradients."""

    loads: ClassVar[Loads] = Loads.LAYERWISE
    updates: ClassVar[Updates] = Updates.OVERLAPPED

    @abc.abstractmethod
    def modes(self, profile: Profile, grad_on_host: np.ndarray) -> np.ndarray:
        """The mode codes of all layers, (layers,), given the flags of gradients written to the host, (layers,)."""

    def plan(self, profile: Profile, request: Request | None = None) -> Plan:
        """This policy's modes, with the gradients that the reserve factor lets stay."""
        request = request or Request()
        reserve_factor = self.reserve_factor(request)
        grad_on_host = gradients_to_host(profile, reserve_factor)
        modes = self.modes(profile, grad_on_host)
        plan = coded_plan(self.name, reserve_factor, profile, modes, grad_on_host, self.loads, self.updates)
        if request.memory_budget_bytes is not None:
            check_budget(self.name, request.memory_budget_bytes, needed_bytes(profile, plan))
        return with_update_order(profile, dataclasses.replace(plan, memory_bytes=request.memory_budget_bytes))


def coded_plan(
    policy: str,
    reserve_factor: float,
    profile: Profile,
    modes: np.ndarray,
    grad_on_host: np.ndarray,
    loads: Loads = Loads.LAYERWISE,
    updates: Updates = Updates.OVERLAPPED,
    remats: Sequence[Remat] | None = None,
) -> Plan:
    """A plan from mode codes, gradient flags and what is kept for backwards, (layers,) each; all by default."""
    places, kept = (GradientPlace.DEVICE, GradientPlace.HOST), remats or [Remat.NONE] * len(modes)
    layers = tuple(
        _layer_plan(layer.name, MODES[int(mode)], places[int(host)], remat)
        for layer, mode, host, remat in zip(profile.layers, modes, grad_on_host, kept, strict=True)
    )
    return Plan(policy, reserve_factor, layers, loads, updates)


@functools.lru_cache(maxsize=1 << 14)
def _layer_plan(name: str, mode: Mode, gradient: GradientPlace, remat: Remat) -> LayerPlan:
    """One object for equal ones: a search makes many plans, which differ in few layers."""
    return LayerPlan(name, mode, gradient, remat)


def check_budget(policy: str, budget_bytes: int, smallest_bytes: int, num_recomputing: int = 0) -> None:
    """Raises BudgetError if the smallest feasible budget of a policy's plans exceeds the budget.

    `num_recomputing` is the number of layers that recompute in the plan for that smallest budget.
    """
    if smallest_bytes > budget_bytes:
        raise BudgetError(
            f"memory budget {format_bytes(budget_bytes)} ({budget_bytes} bytes) is too small: the smallest feasible "
            f"for policy {policy} is {format_bytes(smallest_bytes)} ({smallest_bytes} bytes)"
            + (f", with {num_recomputing} layers that recompute their activations" if num_recomputing else ""),
            smallest_bytes,
        )
