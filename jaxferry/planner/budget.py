"""Decides on the plan of a step within a memory budget of which somebody else counts the bytes.

    policy --fastest_that_fits--> plan --fit--> the same plan, or one changed the least

The engine knows what programs need once they are compiled, and what a device's allocator takes beyond buffers. Both may
be more than the planner's model says. A policy then plans again, for a budget that is smaller by the excess
(`fastest_that_fits`). A plan that no policy chose, or that needs too much even so, is changed layer by layer (`fit`),
by bytes alone: updates move to the host, gradients get less room, layers RELOAD, and at last recompute.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from jaxferry.costs import JAX_SHARE, JAX_SHARE_VARIABLE
from jaxferry.errors import BudgetError
from jaxferry.modes import Mode, Remat, UpdatePlace
from jaxferry.partition import Layer
from jaxferry.planner.baselines import L2L, NativeOverlapped
from jaxferry.planner.preference import longest_equal_s
from jaxferry.step import LayerPlan, Loads, Plan
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
    may_recompute: Sequence[int],
    layers: Sequence[Layer],
    updates: Sequence[Sequence[int]] = (),
    is_devices: bool = False,
) -> Plan:
    """Changes a plan as little as possible, by bytes alone, until it fits; each next change only if all before fail.

    As few updates as possible move from the device to the host, else all. Gradients in flight get less memory. As few
    segments as possible switch to RELOAD, first to last: the first hold parameters longest, so free the most. If all of
    that is not enough, as few as possible also recompute.

    Args:
      plan: the plan.
      budget_bytes: the budget; None for no limit.
      peak_of: counts what a plan needs.
      may_recompute: the segments that may recompute, in the order in which they are chosen.
      layers: the parameter groups, which errors name.
      updates: the segments of each update, in the order in which they move to the host.
      is_devices: whether the budget is JAX's own limit.

    Raises:
      BudgetError: if no such plan fits; it names the smallest budget.
    """

    def fits(plan: Plan) -> bool:
        return peak_of(plan).fits(budget_bytes)

    if budget_bytes is None or fits(plan):
        return plan
    if any(layer.update is not UpdatePlace.HOST for layer in plan.layers):
        fewer = _fewer_updates(plan, updates)
        found = bisect.bisect_left(fewer, True, key=fits)
        if found < len(fewer):
            return fewer[found]
        return fit(plan.updated_on_host(), budget_bytes, peak_of, may_recompute, layers, is_devices=is_devices)
    if plan.memory_bytes is not None:
        excess_bytes = peak_of(plan).total - budget_bytes
        for left_bytes in (max(plan.memory_bytes - excess_bytes, 0), None):
            plan = dataclasses.replace(plan, memory_bytes=left_bytes)
            if fits(plan):
                return plan
    needs = list[tuple[Peak, int]]()
    for tried in (plan, *_recomputing(plan, may_recompute)):
        for fallback in _fallbacks(tried):
            peak = peak_of(fallback)
            if peak.fits(budget_bytes):
                for number, layer in enumerate(fallback.layers):
                    if fits(tried):
                        break
                    tried = _with_layers(tried, {number: layer})
                return tried
            needs.append((peak, sum(tried.recomputes)))
    smallest, num_recomputing = min(needs, key=lambda need: need[0].counted)
    is_whole = all(layer.tiles == 1 for layer in plan.layers)
    raise _too_small(layers, budget_bytes, smallest, num_recomputing, is_whole, is_devices)


def _fewer_updates(plan: Plan, updates: Sequence[Sequence[int]]) -> list[Plan]:
    """The plan with one update moved to the host, with two, and so on; all but the last one at most."""
    plans = [plan]
    for segments in updates:
        changed = {
            number: dataclasses.replace(plan.layers[number], update=UpdatePlace.HOST)
            for number in segments
            if plan.layers[number].update is not UpdatePlace.HOST
        }
        if changed:
            plans.append(_with_layers(plans[-1], changed))
    return plans[1:-1]


def _recomputing(plan: Plan, may_recompute: Sequence[int]) -> list[Plan]:
    """The plan with one more segment that recomputes, two more, and so on."""
    plans = []
    for number in may_recompute:
        if plan.layers[number].remat is not Remat.FULL:
            plan = _with_layers(plan, {number: dataclasses.replace(plan.layers[number], remat=Remat.FULL)})
            plans.append(plan)
    return plans


def _fallbacks(plan: Plan) -> list[Plan]:
    """The plans that need the least memory, in order of preference. DHA stays unless its temporaries do not fit."""
    modes = [[mode if mode is Mode.DHA else Mode.RELOAD for mode in plan.modes]]
    if Mode.DHA in modes[0]:
        modes.append([Mode.RELOAD] * len(plan.layers))
    return [_with_layers(plan, {i: plan.layers[i].with_mode(mode) for i, mode in enumerate(each)}) for each in modes]


def _with_layers(plan: Plan, changed: Mapping[int, LayerPlan]) -> Plan:
    layers = tuple(changed.get(number, layer) for number, layer in enumerate(plan.layers))
    # With bulk loads all forwards wait for all loads, but a RELOAD layer's load waits for a forward.
    loads = Loads.LAYERWISE if any(layer.mode is Mode.RELOAD for layer in layers) else plan.loads
    return dataclasses.replace(plan, layers=layers, loads=loads)


def _too_small(
    layers: Sequence[Layer], budget_bytes: int, smallest: Peak, num_recomputing: int, is_whole: bool, is_devices: bool
) -> BudgetError:
    largest = max(layers, key=lambda layer: layer.num_bytes)
    how = f", with {num_recomputing} segments that recompute their activations" if num_recomputing else ""
    remedies = " or ".join(["a smaller batch", *["tiles='auto'"] * is_whole, *["remat='auto'"] * (not how)])
    share = f"; of a card, JAX takes the share {JAX_SHARE_VARIABLE}, by default {JAX_SHARE}" if is_devices else ""
    return BudgetError(
        f"memory_budget {format_bytes(budget_bytes)} ({budget_bytes} bytes) is too small: the smallest possible is "
        f"{format_bytes(smallest.total)} ({smallest.total} bytes){how}, of which parameters take at most "
        f"{format_bytes(smallest.parameters)} (the largest group, {largest.name!r}, has "
        f"{format_bytes(largest.num_bytes)}); {remedies} needs less for activations, gradients and temporaries{share}",
        smallest.total,
    )
