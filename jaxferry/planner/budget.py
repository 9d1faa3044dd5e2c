"""Decides on the plan of a step within a memory budget of which somebody else counts the bytes.

    policy --fastest_that_fits--> plan --fit--> the same plan, or one changed the least

The engine knows what programs need once they are compiled, and what a device's allocator takes beyond buffers. Both may
be more than the planner's model says. A policy then plans again, for a budget that is smaller by the excess
(`fastest_that_fits`). A plan that no policy chose, or that needs too much even so, is changed layer by layer (`fit`),
by bytes alone: updates move to the host, gradients get less room, layers RELOAD, and at last recompute. That is a
knapsack by what layers load again, filled with the largest ones first, and the engine's own count decides what fits.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from jaxferry.costs import JAX_SHARE, JAX_SHARE_VARIABLE, Profile
from jaxferry.errors import BudgetError
from jaxferry.modes import Mode, Remat
from jaxferry.planner.baselines import L2L, NativeOverlapped
from jaxferry.planner.preference import longest_equal_s
from jaxferry.step import LayerPlan, Loads, Plan, reads_back
from jaxferry.units import format_bytes

T = TypeVar("T")

SIMPLE_POLICIES = (NativeOverlapped.name, L2L.name)
"""Policies whose plans `auto` takes where they fit as counted and are faster than what it plans itself and fits."""

_MOST_PLANS = 8
"""The most budgets that are tried."""
_FINEST = 1 / 512
"""Of the budget: nearer budgets are not told apart."""


@dataclasses.dataclass(frozen=True)
class Peak:
    """The most device memory that a step needs, in bytes.

    Attributes:
      parameters: parameters only.
      array_bytes: parameters, values between segments, residuals and gradients.
      counted: all of these and the temporaries of the running program.
      unsplit: returns the memory to leave for what the device's allocator hands out beyond that.
    """

    parameters: int
    array_bytes: int
    counted: int
    unsplit: Callable[[], int] = dataclasses.field(default=int, repr=False, compare=False)

    @functools.cached_property
    def total(self) -> int:
        """What the device's allocator may report as in use."""
        return self.counted + self.unsplit()

    def fits(self, budget_bytes: int | None) -> bool:
        """Whether a budget has room for it; None has room for everything."""
        return budget_bytes is None or (self.counted <= budget_bytes and self.total <= budget_bytes)


def first_that_fits(attempts: Iterable[Callable[[], T]]) -> T:
    """Returns the result of the first attempt that raises no `BudgetError`.

    Raises:
      BudgetError: if all do: the one that names the smallest budget.
    """
    errors = list[BudgetError]()
    for attempt in attempts:
        try:
            return attempt()
        except BudgetError as error:
            errors.append(error)
    raise min(errors, key=lambda error: error.smallest_bytes)


def fastest_that_fits(
    plan_of: Callable[[int], Plan],
    excess_of: Callable[[Plan], int],
    budget_bytes: int,
    least_bytes: int = 1,
    others: Callable[[], Iterable[Plan]] = tuple,
) -> Plan | None:
    """Returns the fastest plan found that needs no more than a budget, as counted; None if none does.

    What a plan needs beyond the planner's model differs from plan to plan, so a budget that is smaller by the excess
    may be too small. Between a budget whose plan fits and one whose plan does not, further ones are tried as long as
    that may be worth it.

    Args:
      plan_of: plans for a budget in bytes.
      excess_of: counts the bytes that a plan needs beyond the budget; 0 or less if it fits.
      budget_bytes: the budget.
      least_bytes: the smallest budget to plan for.
      others: makes plans to take in place of the fastest one where they fit and are faster; called if a plan of these
        does not fit and another one does.
    """
    left, best, low, failed = budget_bytes, None, None, None
    for _ in range(_MOST_PLANS):
        plan = plan_of(left)
        excess_bytes = excess_of(plan)
        if excess_bytes <= 0:
            low = left
            if best is None or _step_s(plan) < _step_s(best):
                best = plan
        else:
            failed = left, plan
        if failed is None or (low is None and failed[0] <= least_bytes):
            break
        high, too_large = failed
        if low is None:
            left = max(left - excess_bytes, least_bytes)
            continue
        assert best is not None
        if high - low <= budget_bytes * _FINEST or _step_s(best) <= longest_equal_s(_step_s(too_large)):
            break
        left = (low + high) // 2
    if failed is None or best is None:
        return best
    for other in others():
        if longest_equal_s(_step_s(other)) < _step_s(best) and excess_of(other) <= 0:
            best = dataclasses.replace(other, policy=failed[1].policy, details=failed[1].details)
    return best


def _step_s(plan: Plan) -> float:
    return 0.0 if plan.predicted is None else plan.predicted.steady_step_s


def fit(
    plan: Plan,
    budget_bytes: int | None,
    peak_of: Callable[[Plan], Peak],
    profile: Profile,
    may_recompute: Sequence[int] = (),
    updates: Sequence[Sequence[int]] = (),
    is_devices: bool = False,
) -> Plan:
    """Changes a plan as little as possible, by bytes alone, until it fits; each next change only if all before fail.

    Updates move from the device to the host. Gradients in flight get less memory. Segments switch to RELOAD. If all of
    that is not enough, as few segments as possible also recompute. Of updates, and of segments that RELOAD, as many
    bytes as fit stay as they were: the largest are tried first, and of equal ones the last, since the first hold
    parameters longest.

    Args:
      plan: the plan.
      budget_bytes: the budget; None for no limit.
      peak_of: counts what a plan needs.
      profile: the layers, with the sizes that errors name.
      may_recompute: the segments that may recompute, in the order in which they are chosen.
      updates: the segments of each update.
      is_devices: whether the budget is JAX's own limit.

    Raises:
      BudgetError: if no such plan fits; it names the smallest budget.
    """

    def fits(plan: Plan) -> bool:
        return peak_of(plan).fits(budget_bytes)

    if budget_bytes is None or fits(plan):
        return plan
    if (on_host := plan.updated_on_host()) != plan:
        if fits(on_host):
            sizes = [sum(profile.layers[number].param_bytes for number in segments) for segments in updates]
            return _nearest(plan, on_host, [*zip(sizes, updates, strict=True)], fits)
        plan = on_host
    if plan.memory_bytes is not None:
        excess_bytes = peak_of(plan).total - budget_bytes
        for left_bytes in (max(plan.memory_bytes - excess_bytes, 0), None):
            plan = dataclasses.replace(plan, memory_bytes=left_bytes)
            if fits(plan):
                return plan
    tried, needs = [plan, *_recomputing(plan, may_recompute)], list[tuple[Peak, int]]()
    # To recompute more may need more, so if all that may recompute is too much, each number is tried.
    fewest = bisect.bisect_left(tried, True, key=lambda each: any(map(fits, _fallbacks(each))))
    for each in tried[fewest:] or tried:
        again = [
            (layer.param_bytes * (reads_back(layer, remat) and not layer.fused_backward), (number,))
            for number, (layer, remat) in enumerate(zip(profile.layers, each.remats, strict=True))
        ]
        for fallback in _fallbacks(each):
            peak = peak_of(fallback)
            if peak.fits(budget_bytes):
                return _nearest(each, fallback, again, fits)
            needs.append((peak, sum(each.recomputes)))
    smallest, num_recomputing = min(needs, key=lambda need: need[0].counted)
    is_whole = all(layer.tiles == 1 for layer in plan.layers)
    raise _too_small(profile, budget_bytes, smallest, num_recomputing, is_whole, is_devices)


def _nearest(
    plan: Plan, fitting: Plan, parts: Sequence[tuple[int, Sequence[int]]], fits: Callable[[Plan], bool]
) -> Plan:
    """A plan that fits, with as many bytes as possible as in another plan: the largest parts first.

    `parts` are bytes and segments. If one is too large, so are those of as many bytes that are before it.
    """
    changed = [number for number, layer in enumerate(plan.layers) if layer != fitting.layers[number]]
    left = sorted((part for part in parts if part[1][0] in changed), key=lambda part: (-part[0], -part[1][0]))
    while left:
        with_first = functools.partial(_with_first, fitting, plan, left)
        number = bisect.bisect_right(range(1, len(left) + 1), False, key=lambda number: not fits(with_first(number)))
        fitting = with_first(number)
        left = [part for part in left[number:] if part[0] < left[number][0]]
    return fitting


def _with_first(fitting: Plan, plan: Plan, parts: Sequence[tuple[int, Sequence[int]]], number: int) -> Plan:
    """A plan that fits, with the segments of the first parts as in another plan."""
    layers = list(fitting.layers)
    for segment in itertools.chain.from_iterable(segments for _, segments in parts[:number]):
        layers[segment] = plan.layers[segment]
    return dataclasses.replace(fitting, layers=tuple(layers))


def _recomputing(plan: Plan, may_recompute: Sequence[int]) -> list[Plan]:
    """The plan with one more segment that recomputes, two more, and so on."""
    plans = []
    for number in may_recompute:
        if plan.layers[number].remat is not Remat.FULL:
            layers = list(plan.layers)
            layers[number] = dataclasses.replace(layers[number], remat=Remat.FULL)
            plans.append(plan := dataclasses.replace(plan, layers=tuple(layers)))
    return plans


def _fallbacks(plan: Plan) -> list[Plan]:
    """The plans that need the least memory, in order of preference. DHA stays unless its temporaries do not fit."""
    modes = [[mode if mode is Mode.DHA else Mode.RELOAD for mode in plan.modes]]
    if Mode.DHA in modes[0]:
        modes.append([Mode.RELOAD] * len(plan.layers))
    # With bulk loads all forwards wait for all loads, but a RELOAD layer's load waits for a forward.
    loads = [Loads.LAYERWISE if Mode.RELOAD in each else plan.loads for each in modes]
    return [
        dataclasses.replace(plan, layers=tuple(map(LayerPlan.with_mode, plan.layers, each)), loads=own)
        for each, own in zip(modes, loads, strict=True)
    ]


def _too_small(
    profile: Profile, budget_bytes: int, smallest: Peak, num_recomputing: int, is_whole: bool, is_devices: bool
) -> BudgetError:
    largest = max(profile.layers, key=lambda layer: layer.param_bytes)
    size = format_bytes(largest.param_bytes)
    kept = (
        "1 segment that recomputes its" if num_recomputing == 1 else f"{num_recomputing} segments that recompute their"
    )
    how = f", with {kept} activations" if num_recomputing else ""
    remedies = " or ".join(["a smaller batch", *["tiles='auto'"] * is_whole, *["remat='auto'"] * (not how)])
    share = f"; of a card, JAX takes the share {JAX_SHARE_VARIABLE}, by default {JAX_SHARE}" if is_devices else ""
    return BudgetError(
        f"memory_budget {format_bytes(budget_bytes)} ({budget_bytes} bytes) is too small: the smallest possible is "
        f"{format_bytes(smallest.total)} ({smallest.total} bytes){how}, of which parameters take at most "
        f"{format_bytes(smallest.parameters)} (the largest group, {largest.parameters!r}, has {size}); "
        f"{remedies} needs less for activations, gradients and temporaries{share}",
        smallest.total,
    )
