"""Fits a plan into the memory budget, and finds what may stay on the device for later loads.

Plan --too large--> segments switch to RELOAD --still too large--> segments also recompute --> Plan
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from jaxferry.costs import JAX_SHARE, JAX_SHARE_VARIABLE
from jaxferry.engine.memory import Peak, Transfers, footprints
from jaxferry.errors import BudgetError
from jaxferry.modes import Mode, Remat, UpdatePlace
from jaxferry.partition import Layer
from jaxferry.step import Lane, LayerPlan, Loads, Plan, ProgramKey, StepProgram, leading_loads
from jaxferry.units import format_bytes

PeakOf = Callable[[Plan], Peak]


def fit(
    plan: Plan,
    budget_bytes: int | None,
    peak_of: PeakOf,
    may_recompute: Sequence[int],
    layers: Sequence[Layer],
    updates: Sequence[Sequence[int]] = (),
    is_devices: bool = False,
) -> Plan:
    """Switches as few segments as possible to RELOAD. If that is not enough, as few as possible also recompute.

    Before that, as few updates as possible move from the device to the host, else all. `may_recompute` and `updates`
    (the segments of each update) are in the order in which they are chosen. `is_devices`: the budget is JAX's own
    limit.

    Raises:
      BudgetError: if no such plan fits; it names the smallest budget.
    """
    if budget_bytes is None or peak_of(plan).fits(budget_bytes):
        return plan
    if any(layer.update is not UpdatePlace.HOST for layer in plan.layers):
        fewer = _with_fewer_updates(plan, budget_bytes, peak_of, updates)
        if fewer is not None:
            return fewer
        return fit(plan.updated_on_host(), budget_bytes, peak_of, may_recompute, layers, is_devices=is_devices)
    plan = _with_less_room(plan, peak_of(plan).total - budget_bytes, budget_bytes, peak_of)
    if peak_of(plan).fits(budget_bytes):
        return plan
    peaks: list[Peak] = []
    recomputing = [plan, *_recomputing(plan, may_recompute)]
    for tried in recomputing:
        fallbacks = _fallbacks(tried)
        fallback = next((each for each in fallbacks if peak_of(each).fits(budget_bytes)), None)
        if fallback is not None:
            return _fewest_reloads(tried, fallback, budget_bytes, peak_of)
        peaks.append(min(map(peak_of, fallbacks), key=lambda peak: peak.counted))
    smallest = min(peaks, key=lambda peak: peak.counted)
    raise _too_small(layers, budget_bytes, smallest, sum(recomputing[peaks.index(smallest)].recomputes), is_devices)


def _with_fewer_updates(
    plan: Plan, budget_bytes: int, peak_of: PeakOf, updates: Sequence[Sequence[int]]
) -> Plan | None:
    """The plan with as few updates as possible moved to the host; None if it does not fit without all of them."""
    moved = [segments for segments in updates if any(plan.layers[i].update is not UpdatePlace.HOST for i in segments)]

    def without(count: int) -> Plan:
        chosen = {segment for segments in moved[:count] for segment in segments}
        layers = (
            dataclasses.replace(layer, update=UpdatePlace.HOST) if number in chosen else layer
            for number, layer in enumerate(plan.layers)
        )
        return dataclasses.replace(plan, layers=tuple(layers))

    counts = range(1, len(moved))
    found = bisect.bisect_left(counts, True, key=lambda count: peak_of(without(count)).fits(budget_bytes))
    return without(counts[found]) if found < len(counts) else None


def _with_less_room(plan: Plan, excess_bytes: int, budget_bytes: int, peak_of: PeakOf) -> Plan:
    """The plan with less memory for gradients in flight: less by the excess, or none at all."""
    if plan.memory_bytes is None:
        return plan
    smaller = dataclasses.replace(plan, memory_bytes=max(plan.memory_bytes - excess_bytes, 0))
    fits = peak_of(smaller).fits(budget_bytes)
    return smaller if fits else dataclasses.replace(plan, memory_bytes=None)


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


def _fewest_reloads(plan: Plan, fallback: Plan, budget_bytes: int, peak_of: PeakOf) -> Plan:
    """Switches segments until the step fits, first to last: the first hold parameters longest, so free the most."""
    for number in range(len(plan.layers)):
        if peak_of(plan).fits(budget_bytes):
            break
        plan = _with_layers(plan, {number: fallback.layers[number]})
    return plan


def _with_layers(plan: Plan, changed: dict[int, LayerPlan]) -> Plan:
    layers = tuple(changed.get(number, layer) for number, layer in enumerate(plan.layers))
    # With bulk loads all forwards wait for all loads, but a RELOAD layer's load waits for a forward.
    loads = Loads.LAYERWISE if any(layer.mode is Mode.RELOAD for layer in layers) else plan.loads
    return dataclasses.replace(plan, layers=layers, loads=loads)


def _too_small(
    layers: Sequence[Layer], budget_bytes: int, smallest: Peak, num_recomputing: int, is_devices: bool
) -> BudgetError:
    largest = max(layers, key=lambda layer: layer.num_bytes)
    how = f", with {num_recomputing} segments that recompute their activations" if num_recomputing else ""
    remedy = "a smaller batch" if how else "a smaller batch or remat='auto'"
    share = f"; of a card, JAX takes the share {JAX_SHARE_VARIABLE}, by default {JAX_SHARE}" if is_devices else ""
    return BudgetError(
        f"memory_budget {format_bytes(budget_bytes)} ({budget_bytes} bytes) is too small: the smallest possible is "
        f"{format_bytes(smallest.total)} ({smallest.total} bytes){how}, of which parameters take at most "
        f"{format_bytes(smallest.parameters)} (the largest group, {largest.name!r}, has "
        f"{format_bytes(largest.num_bytes)}); {remedy} needs less for activations, gradients and temporaries{share}",
        smallest.total,
    )


def loads_ahead(
    program: StepProgram, peak_of: Callable[[Sequence[int]], Peak], budget_bytes: int | None = None
) -> tuple[int, ...]:
    """Returns the loads that may run before their step is called: as many leading loads as fit.

    They never raise the peak of parameters within one step, and keep the total within the budget. `peak_of` takes the
    loads that run in the previous step.
    """
    leading = leading_loads(program.schedule)
    return leading[: _most(len(leading), lambda count: peak_of(leading[:count]), budget_bytes)]


def _most(num: int, peak_of: Callable[[int], Peak], budget_bytes: int | None) -> int:
    """How many of `num` fit into the budget without a higher peak of parameters than with none."""
    within = peak_of(0)

    def takes_more(count: int) -> bool:
        peak = peak_of(count)
        return peak.parameters > within.parameters or not peak.fits(budget_bytes)

    return bisect.bisect_right(range(1, num + 1), False, key=takes_more)


def groups_to_reserve(
    program: StepProgram, ahead: Sequence[int], peak_of: Callable[[StepProgram], Peak], budget_bytes: int | None = None
) -> frozenset[int]:
    """Returns the groups whose device buffers may stay allocated until their load for the next step.

    In new memory, a load would wait for all programs issued before, which may use it. The layer's own buffers are free:
    the load waits for the group's update on the host, the update for the gradient, and the gradient for the last
    program that reads the copy. Groups that are loaded first are taken, as long as the peak of parameters does not rise
    and the total is within the budget. Buffers that another load of the step takes over are left to it.
    """
    tasks, left = program.schedule.tasks, {d.load for i in program.programs for d in i.drops if not d.is_reused}
    untrained = {use.group for use in program.partition.uses if not use.is_trained}
    groups = [
        program.instructions[load].group
        for load in ahead
        if load in left and any(tasks[other].lane is Lane.HOST for other in tasks[load].after_previous)
    ]
    groups = [g for g in groups if program.loaded[g] == 1 and g not in untrained and g not in program.kept]

    def reserved(count: int) -> Peak:
        return peak_of(dataclasses.replace(program, reserved=frozenset(groups[:count])))

    return frozenset(groups[: _most(len(groups), reserved, budget_bytes)])


def groups_to_keep(
    program: StepProgram,
    temporary_bytes: Mapping[ProgramKey, int],
    other_bytes: int = 0,
    budget_bytes: int | None = None,
) -> frozenset[int]:
    """Returns the groups whose loaded copies may stay on the device between micro-batches.

    Each that fits beside the others is taken: first those that are loaded twice, then those that are needed first.
    Arguments as for `footprints`.
    """
    groups = sorted(program.loaded, key=lambda group: -program.loaded[group])
    if budget_bytes is None:
        return frozenset(groups)
    totals = np.array([found.total for found in footprints(program, temporary_bytes, other_bytes)])
    counted, kept = Transfers(program, ()).copies_of, set()
    for group in groups:
        more = program.partition.layers[group].num_bytes - counted[group]
        if (totals + more).max() <= budget_bytes:
            totals += more
            kept.add(group)
    return frozenset(kept)
