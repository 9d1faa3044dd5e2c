"""Finds the batches with which a model trains on a machine, and predicts how fast.

own batch --trace--> smallest budget --secant--> another size --trace--> ... --> largest batch --auto--> forecast

The device memory of the leanest plan is close to linear in the batch size, so a few traces find the largest batch: its
size was traced, and the next one, which does not fit. Larger batches may fit if layers are read in host memory. They
do not count: products of many rows read a layer again and again, so such steps take longer for each sample.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxferry.cli.profile import Traced
from jaxferry.modes import MODULE
from jaxferry.optimizer import pinned_bytes
from jaxferry.planner import (
    SIMPLE_POLICIES,
    FinestPlanner,
    Request,
    fastest_that_fits,
    plan_in_tiles,
    planner_of,
    with_gap,
    with_update_order,
)
from jaxferry.step import (
    Plan,
    find_bottleneck,
    needed_bytes,
    predict,
    simulate,
    streamed_groups,
    streamed_state_bytes,
)
from jaxferry.units import format_apart

FORMAT = "jaxferry.fit/1"
MOST_TRACES = 30  # traces of a search; linear memory needs three, nearly linear memory a few more
_MOST_GUESSES = 6  # traces at sizes where a line meets the budget; the search then halves
MOST_SAMPLES = (1 << 24) - 1  # larger batches are not tried


@dataclasses.dataclass(frozen=True)
class BatchForecast:
    """Training with batches of one size, as predicted.

    Attributes:
      tokens_per_s: integers of the batch's largest integer array a second; None without one of 2 axes.
      device_bytes: device memory by kind at the step's peak.
      busy_share: the share of a step in which each lane works: `gpu`, `h2d`, `d2h`, `host`.
      limit: what limits the speed: `GPU`, `link`, `host` or `device memory`; `reason` says it in a sentence.
    """

    batch_size: int
    step_s: float
    samples_per_s: float
    tokens_per_s: float | None
    device_bytes: Mapping[str, int]
    busy_share: Mapping[str, float]
    limit: str
    reason: str
    plan: Plan

    def to_json(self) -> dict[str, Any]:
        """Returns the forecast as JSON values."""
        return vars(self) | {"plan": self.plan.to_json()}


@dataclasses.dataclass(frozen=True)
class Fit:
    """Whether and how a model trains on a machine, as predicted.

    Attributes:
      budget_bytes: device memory that training may take.
      host_bytes: host memory that training keeps, by what it is for.
      host_memory_bytes: host memory that training may take; None if it is not known.
      pinned_bytes: the pinned part of `host_bytes`, including masters and optimizer state that stream through the GPU.
      smallest_bytes: the smallest feasible budget for batches of `smallest_batch_size`.
      smallest_batch_size: the workload's own batch size, or 1 if that does not fit.
      largest_batch_size: the largest batch for which a plan that loads all layers fits into the budget; or, if no batch
        of `smallest_batch_size` does, for which any plan fits; 0 if none does.
      rows: for the workload's own batch size, if it fits, and for the largest one.
      problem: why the model does not fit, with the remedy; empty if it fits.
    """

    model: str
    machine: str
    budget_bytes: int
    host_bytes: Mapping[str, int]
    host_memory_bytes: int | None
    pinned_bytes: int
    smallest_bytes: int
    smallest_batch_size: int
    largest_batch_size: int
    rows: tuple[BatchForecast, ...]
    problem: str = ""

    @property
    def fits(self) -> bool:
        """Whether batches of any size fit into device and host memory."""
        return not self.problem

    def to_json(self) -> dict[str, Any]:
        """Returns the answer as `jaxferry.fit/1`."""
        return {"format": FORMAT, "fits": self.fits, **vars(self), "rows": [row.to_json() for row in self.rows]}


def find_fit(
    trace: Callable[[int], Traced],
    batch_size: int,
    *,
    model: str,
    machine: str,
    budget_bytes: int,
    host_bytes: Callable[[Traced, Collection[int]], Mapping[str, int]],
    host_memory_bytes: int | None = None,
    report: Callable[[str], None] = lambda part: None,
) -> Fit:
    """Answers whether a model trains on a machine, with which batches, and how fast.

    `host_bytes` are without saved activations, for a plan that streams updates of these groups through the GPU.
    """

    @functools.cache
    def traced(size: int) -> Traced:
        report(f"tracing batches of {size}")
        return trace(size)

    of_training = host_bytes(traced(batch_size), ())
    # What is left holds saved activations: batches need nothing else in host memory.
    left_bytes = None if host_memory_bytes is None else host_memory_bytes - sum(of_training.values())
    sizes = Sizes(traced, budget_bytes, left_bytes)

    def fits(each: Traced) -> bool:
        return each.smallest_bytes <= budget_bytes and sizes.fits_on_host(each)

    def kept(each: Traced) -> dict[str, int]:
        return {**of_training, **({"saved activations": each.saved_bytes} if each.saved_bytes else {})}

    own = sizes.of(batch_size)
    smallest = own if fits(own) or batch_size == 1 else sizes.of(1)
    wanted = {own.batch_size: own} if fits(own) else {}
    if fits(smallest):
        largest = sizes.largest(loading=smallest.loading_bytes <= budget_bytes)
        wanted[largest.batch_size] = largest
    rows = []
    for size, each in wanted.items():
        report(f"planning for batches of {size}")
        rows.append(forecast(each, budget_bytes))
    host = kept(max([smallest, *wanted.values()], key=lambda each: each.batch_size))
    pairs = [(wanted[row.batch_size], row.plan) for row in rows]
    streamed = [streamed_state_bytes(each.profile, plan) for each, plan in pairs]
    of_plans = [host_bytes(each, streamed_groups(each.profile, plan)) for each, plan in pairs]
    host |= {name: max(found[name] for found in (of_training, *of_plans)) for name in of_training}
    return Fit(
        model=model,
        machine=machine,
        budget_bytes=budget_bytes,
        host_bytes=host,
        host_memory_bytes=host_memory_bytes,
        pinned_bytes=pinned_bytes(host, max(streamed, default=0)),
        smallest_bytes=smallest.smallest_bytes,
        smallest_batch_size=smallest.batch_size,
        largest_batch_size=max(wanted, default=0),
        rows=tuple(rows),
        problem=_problem(smallest, budget_bytes, kept(smallest), host_memory_bytes),
    )


class Sizes:
    """The batch sizes that have been traced."""

    def __init__(self, trace: Callable[[int], Traced], budget_bytes: int, left_bytes: int | None = None) -> None:
        self._trace, self._budget_bytes, self._left_bytes = trace, budget_bytes, left_bytes
        self._known: dict[int, Traced] = {}
        self._need: Callable[[Traced], int] = operator.attrgetter("loading_bytes")

    def of(self, batch_size: int) -> Traced:
        """Returns the model for batches of a size."""
        if batch_size not in self._known:
            self._known[batch_size] = self._trace(batch_size)
        return self._known[batch_size]

    def largest(self, loading: bool) -> Traced:
        """Returns the largest size that fits, with all layers loaded or not; a size that fits so must be known."""
        self._need = operator.attrgetter("loading_bytes" if loading else "smallest_bytes")
        while len(self._known) < MOST_TRACES:
            size = self._next()
            if size is None:
                break
            self.of(size)
        return self._known[max(size for size, traced in self._known.items() if self._fits(traced))]

    def fits_on_host(self, traced: Traced) -> bool:
        """Returns whether saved activations fit into the host memory that training leaves; true without any."""
        saved_bytes = 0 if self._left_bytes is None else traced.saved_bytes
        return not saved_bytes or saved_bytes <= (self._left_bytes or 0)

    def _fits(self, traced: Traced) -> bool:
        return self._need(traced) <= self._budget_bytes and self.fits_on_host(traced)

    def _next(self) -> int | None:
        """Returns the size to trace next; None if the largest is known."""
        needs = sorted((size, self._need(traced)) for size, traced in self._known.items())
        fitting = [each for each in needs if self._fits(self._known[each[0]])]
        others = [each for each in needs if not self._fits(self._known[each[0]])]
        first, last = fitting[-1][0] + 1, others[0][0] - 1 if others else MOST_SAMPLES
        if first > last:
            return None
        if len(needs) > _MOST_GUESSES:
            return (first + last) // 2 if others else min(2 * first, last)
        # Where the line through the largest two sizes, or through one and none, meets the budget.
        none = 0, self._need(next(iter(self._known.values())).without_samples)
        (one, bytes_of_one), (two, bytes_of_two) = [none, *[*fitting[-2:], *others[:1]][-2:]][-2:]
        slope = (bytes_of_two - bytes_of_one) / (two - one)
        meets = int(one + (self._budget_bytes - bytes_of_one) / slope) if slope > 0 else 2 * two
        return min(max(meets, first), last)


def forecast(traced: Traced, budget_bytes: int) -> BatchForecast:
    """Plans by `auto` for a budget; raises `BudgetError` if no plan fits."""
    levels = traced.levels
    chosen, plan = plan_in_tiles(
        [level.profile for level in levels], budget_bytes, lambda index: _planned(levels[index], budget_bytes)
    )
    traced = levels[chosen]
    plan = plan.in_tiles([layer.tiles for layer in traced.profile.layers])
    simulation = simulate(traced.profile, plan)
    step_s = simulation.steady_step_s
    busy = {lane: use.busy_s / step_s if step_s > 0 else 0.0 for lane, use in simulation.lanes.items()}
    bottleneck = find_bottleneck(busy, plan.details, step_s)
    arrays = [leaf for leaf in jax.tree.leaves(traced.batch) if hasattr(leaf, "shape") and len(leaf.shape) >= 2]
    tokens = [int(np.prod(leaf.shape)) for leaf in arrays if jnp.issubdtype(leaf.dtype, jnp.integer)]
    return BatchForecast(
        batch_size=traced.batch_size,
        step_s=step_s,
        samples_per_s=traced.batch_size / step_s,
        tokens_per_s=max(tokens) / step_s if tokens else None,
        device_bytes=traced.device_bytes(plan, budget_bytes),
        busy_share={lane.value: share for lane, share in busy.items()},
        limit=bottleneck.limit,
        reason=bottleneck.reason,
        plan=plan,
    )


def _planned(traced: Traced, budget_bytes: int) -> Plan:
    """Returns the plan of `auto`, which leaves memory for what the allocator takes beyond buffers."""
    planner = FinestPlanner(traced.profile, "auto", Request(), MODULE)

    @functools.cache
    def plan_within(left_bytes: int) -> Plan:
        return with_gap(*planner.plan(left_bytes), left_bytes)

    def excess_bytes(plan: Plan) -> int:
        return sum(traced.device_bytes(plan, budget_bytes).values()) - budget_bytes

    def others() -> list[Plan]:
        return [planner_of(traced.profile, name, Request())(None) for name in SIMPLE_POLICIES]

    leanest = traced.leanest(budget_bytes)
    least_bytes = needed_bytes(traced.profile, leanest)
    if found := fastest_that_fits(plan_within, excess_bytes, budget_bytes, least_bytes, others):
        return found
    # Of plans with equally little memory, the one that `auto` prefers may need more beyond buffers.
    details = {**plan_within(budget_bytes).details, "binding": "memory"}
    leanest = dataclasses.replace(with_update_order(traced.profile, leanest), details=details)
    return predict(traced.profile, leanest)


def _problem(smallest: Traced, budget_bytes: int, host_bytes: Mapping[str, int], host_memory_bytes: int | None) -> str:
    problems = []
    if smallest.smallest_bytes > budget_bytes:
        needs, budget = format_apart(smallest.smallest_bytes, budget_bytes)
        problems.append(
            f"batches of {smallest.batch_size} need {needs} of device memory, and the budget is {budget}: take a "
            "larger device or shorter samples"
        )
    total = sum(host_bytes.values())
    if host_memory_bytes is not None and total > host_memory_bytes:
        needs, there = format_apart(total, host_memory_bytes)
        problems.append(
            f"training needs {needs} of host memory, and there are {there}: "
            "add memory, freeze parameters, or take an optimizer with less state"
        )
    return "; ".join(problems)
