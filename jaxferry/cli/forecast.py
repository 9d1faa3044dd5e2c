"""The forecast of training with batches of one size: the plan of `auto`, its time, and its memory by kind."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxferry.cli.profile import Traced
from jaxferry.modes import MODULE
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
from jaxferry.step import Bottleneck, Plan, find_bottleneck, needed_bytes, predict, simulate


@dataclasses.dataclass(frozen=True)
class BatchForecast:
    """Training with batches of one size, as predicted.

    Attributes:
      tokens_per_s: integers of the batch's largest integer array a second; None without one of 2 axes.
      busy_share: the share of a step in which each lane works: `gpu`, `h2d`, `d2h`, `host`.
      recomputed_share: the share of a step's operations that are done a second time.
    """

    batch_size: int
    step_s: float
    samples_per_s: float
    tokens_per_s: float | None
    device_bytes: Mapping[str, int]
    busy_share: Mapping[str, float]
    recomputed_share: float
    bottleneck: Bottleneck
    plan: Plan

    def to_json(self) -> dict[str, Any]:
        """Returns the forecast as JSON values."""
        document = vars(self) | vars(self.bottleneck) | {"plan": self.plan.to_json()}
        return {key: value for key, value in document.items() if key != "bottleneck"}


def forecast(traced: Traced, budget_bytes: int) -> BatchForecast:
    """Plans by `auto` for a budget; raises `BudgetError` if no plan fits."""
    levels = (traced, *traced.in_tiles)
    chosen, plan = plan_in_tiles(
        [level.profile for level in levels], budget_bytes, lambda index: _planned(levels[index], budget_bytes)
    )
    traced = levels[chosen]
    plan = plan.in_tiles([layer.tiles for layer in traced.profile.layers])
    simulation = simulate(traced.profile, plan)
    step_s = simulation.steady_step_s
    busy = {lane: use.busy_s / step_s if step_s > 0 else 0.0 for lane, use in simulation.lanes.items()}
    arrays = [leaf for leaf in jax.tree.leaves(traced.batch) if hasattr(leaf, "shape") and len(leaf.shape) >= 2]
    tokens = [int(np.prod(leaf.shape)) for leaf in arrays if jnp.issubdtype(leaf.dtype, jnp.integer)]
    return BatchForecast(
        batch_size=traced.batch_size,
        step_s=step_s,
        samples_per_s=traced.batch_size / step_s,
        tokens_per_s=max(tokens) / step_s if tokens else None,
        device_bytes=traced.device_bytes(plan, budget_bytes),
        busy_share={lane.value: share for lane, share in busy.items()},
        recomputed_share=traced.recomputed_share(plan),
        bottleneck=find_bottleneck(busy, plan.details, step_s),
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
