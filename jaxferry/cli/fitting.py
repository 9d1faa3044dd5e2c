"""Searches the largest batch that fits into device memory, and plans for it.

own batch --trace--> smallest budget --secant--> another size --trace--> ... --> largest batch --auto--> forecast

The device memory of the leanest plan is close to linear in the batch size, from what parameters and gradients alone
need. So a few traces find the largest batch: its size was traced, and the next one, which does not fit. Larger batches
may fit if layers are read in host memory. That is no answer: products of many rows read a layer again and again, so
such steps are slower for each sample.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxferry.costs.estimate import estimate_profile
from jaxferry.costs.layer_records import backward_variant, forward_variant
from jaxferry.costs.machines import Machine
from jaxferry.costs.records import Profile
from jaxferry.costs.segment_costs import partition_costs
from jaxferry.engine import (
    ProgramKey,
    ProgramKind,
    RematVariants,
    Source,
    StepProgram,
    loads_ahead,
    lower,
    unsplit_by_step,
    widened_groups,
)
from jaxferry.engine.facts import with_program_facts
from jaxferry.engine.memory import footprints, peak_bytes
from jaxferry.modes import BLOCK, MODULE, Remat
from jaxferry.optimizer.host_memory import pinned_bytes
from jaxferry.partition import AUTO, partition
from jaxferry.planner.base import Request, make_plan
from jaxferry.planner.counted import SIMPLE_POLICIES, fastest_that_fits
from jaxferry.planner.granularity import FinestPlanner
from jaxferry.planner.merging import merges_of_small
from jaxferry.planner.order import with_update_order
from jaxferry.planner.planning import planner_of, with_gap
from jaxferry.settings import for_planned_gpu
from jaxferry.step.bottleneck import find_bottleneck
from jaxferry.step.holdings import DHA, RELOAD, streamed_state_bytes, updated_on_device
from jaxferry.step.records import Plan
from jaxferry.step.schedule import needed_bytes
from jaxferry.step.simulate.report import predict, simulate
from jaxferry.units import format_apart

MOST_TRACES = 30
"""Traces of a search; a memory that is linear in the batch size needs three, one that is nearly so a few more."""

_MOST_GUESSES = 6
"""Traces at sizes where a line meets the budget; the search then halves."""

_MOST_SAMPLES = 1 << 24


def find_fit(
    trace: Callable[[int], Traced],
    batch_size: int,
    *,
    model: str,
    machine: str,
    budget_bytes: int,
    host_bytes: Callable[[Traced], Mapping[str, int]],
    host_memory_bytes: int | None = None,
    report: Callable[[str], None] = lambda part: None,
) -> Fit:
    """Answers whether a model trains on a machine, with which batches, and how fast.

    Args:
      trace: traces the model for batches of a size.
      batch_size: the workload's own batch size, at least 1.
      model: its name.
      machine: its name.
      budget_bytes: device memory that training may take.
      host_bytes: returns the host memory that training keeps, by what it is for, with batches of any size.
      host_memory_bytes: host memory that training may take; None if it is not known.
      report: called with a short description as each part starts.
    """

    @functools.cache
    def traced(size: int) -> Traced:
        report(f"tracing batches of {size}")
        return trace(size)

    # For what waits in host memory for its backward; batches need nothing else there.
    of_training = host_bytes(traced(batch_size))
    left_bytes = None if host_memory_bytes is None else host_memory_bytes - sum(of_training.values())
    sizes = Sizes(traced, budget_bytes, left_bytes)

    def fits(each: Traced) -> bool:
        return each.smallest_bytes <= budget_bytes and sizes.fits_on_host(each)

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
    kept = with_saved(of_training, max([smallest, *wanted.values()], key=lambda each: each.batch_size))
    streamed = [streamed_state_bytes(wanted[row.batch_size].profile, row.plan) for row in rows]
    return Fit(
        model,
        machine,
        budget_bytes,
        kept,
        host_memory_bytes,
        pinned_bytes(kept, max(streamed, default=0)),
        smallest.smallest_bytes,
        smallest.batch_size,
        max(wanted, default=0),
        tuple(rows),
        _problem(smallest, budget_bytes, with_saved(of_training, smallest), host_memory_bytes),
    )


def with_saved(host_bytes: Mapping[str, int], traced: Traced) -> dict[str, int]:
    """Host memory by what it is for, with the activations of a batch that wait there."""
    return {**host_bytes, **({"saved activations": traced.saved_bytes} if traced.saved_bytes else {})}


class Sizes:
    """The batch sizes that have been traced."""

    def __init__(self, trace: Callable[[int], Traced], budget_bytes: int, left_bytes: int | None = None) -> None:
        self._trace, self._budget_bytes, self._left_bytes = trace, budget_bytes, left_bytes
        self._known: dict[int, Traced] = {}
        self._need: Callable[[Traced], int] = _loading_bytes

    def of(self, batch_size: int) -> Traced:
        """The model for batches of a size."""
        if batch_size not in self._known:
            self._known[batch_size] = self._trace(batch_size)
        return self._known[batch_size]

    def largest(self, loading: bool) -> Traced:
        """The largest size that fits, with all layers loaded or not; one that fits so must be known."""
        self._need = _loading_bytes if loading else _smallest_bytes
        while len(self._known) < MOST_TRACES:
            size = self._next()
            if size is None:
                break
            self.of(size)
        return self._known[max(size for size, traced in self._known.items() if self._fits(traced))]

    def fits_on_host(self, traced: Traced) -> bool:
        """Whether host memory has room for what waits there, beside what training keeps anyway."""
        # Batches without such values are not what does not fit.
        return not self._saved_bytes(traced) or self._saved_bytes(traced) <= (self._left_bytes or 0)

    def _saved_bytes(self, traced: Traced) -> int:
        return 0 if self._left_bytes is None else traced.saved_bytes

    def _fits(self, traced: Traced) -> bool:
        return self._need(traced) <= self._budget_bytes and self.fits_on_host(traced)

    def _next(self) -> int | None:
        """The size to trace next; None if the largest is known."""
        needs = sorted((size, self._need(traced)) for size, traced in self._known.items())
        fitting = [each for each in needs if self._fits(self._known[each[0]])]
        others = [each for each in needs if not self._fits(self._known[each[0]])]
        first, last = fitting[-1][0] + 1, (others[0][0] if others else _MOST_SAMPLES) - 1
        if first > last:
            return None
        if len(needs) > _MOST_GUESSES:
            return (first + last) // 2 if others else min(2 * first, last)
        return min(max(self._where_the_budget_ends([*fitting[-2:], *others[:1]][-2:]), first), last)

    def _where_the_budget_ends(self, needs: list[tuple[int, int]]) -> int:
        """The size at which the line through the largest two sizes, or through one and none, meets the budget."""
        first = next(iter(self._known.values()))
        (one, bytes_of_one), (two, bytes_of_two) = [(0, self._need(first.without_samples)), *needs][-2:]
        slope = (bytes_of_two - bytes_of_one) / (two - one)
        return int(one + (self._budget_bytes - bytes_of_one) / slope) if slope > 0 else 2 * two


def _loading_bytes(traced: Traced) -> int:
    return traced.loading_bytes


def _smallest_bytes(traced: Traced) -> int:
    return traced.smallest_bytes


def forecast(traced: Traced, budget_bytes: int) -> BatchForecast:
    """Plans by `auto` for a budget.

    Raises:
      BudgetError: if no plan fits.
    """
    plan, device_bytes = _planned(traced, budget_bytes)
    simulation = simulate(traced.profile, plan)
    step_s = simulation.steady_step_s
    busy = {lane: use.busy_s / step_s if step_s > 0 else 0.0 for lane, use in simulation.lanes.items()}
    bottleneck = find_bottleneck(busy, plan.details, step_s)
    tokens = _tokens(traced.batch)
    return BatchForecast(
        batch_size=traced.batch_size,
        step_s=step_s,
        samples_per_s=traced.batch_size / step_s,
        tokens_per_s=None if tokens is None else tokens / step_s,
        device_bytes=device_bytes,
        busy_share={lane.value: share for lane, share in busy.items()},
        limit=bottleneck.limit,
        reason=bottleneck.reason,
        plan=plan,
    )


def _planned(traced: Traced, budget_bytes: int) -> tuple[Plan, dict[str, int]]:
    """The plan of `auto` and its device memory, which leaves room for what the allocator takes beyond buffers."""
    planner = FinestPlanner(traced.profile, "auto", Request(), MODULE)

    @functools.cache
    def plan_within(left_bytes: int) -> Plan:
        return with_gap(*planner.plan(left_bytes), left_bytes)

    def excess_bytes(plan: Plan) -> int:
        return sum(traced.device_bytes(plan, budget_bytes).values()) - budget_bytes

    def others() -> list[Plan]:
        planners = [planner_of(traced.profile, name, Request()) for name in SIMPLE_POLICIES]
        return [planner(None) for planner in planners]

    found = fastest_that_fits(plan_within, excess_bytes, budget_bytes, traced.counted_bytes(budget_bytes), others)
    if found is None:
        # Of plans with equally little memory, the one that `auto` prefers may need more beyond buffers.
        leanest = with_update_order(traced.profile, traced.leanest(budget_bytes))
        details = {**plan_within(budget_bytes).details, "binding": "memory"}
        found = predict(traced.profile, dataclasses.replace(leanest, details=details))
    return found, traced.device_bytes(found, budget_bytes)


def _tokens(batch: Any) -> int | None:
    """The number of integers in the largest integer array whose rows have several."""
    leaves = [leaf for leaf in jax.tree.leaves(batch) if hasattr(leaf, "shape") and len(leaf.shape) >= 2]
    sizes = [int(np.prod(leaf.shape)) for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.integer)]
    return max(sizes, default=None)


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


_BATCH_BYTES = (
    "activation_bytes",
    "row_gradient_bytes",
    "forward_workspace_bytes",
    "backward_workspace_bytes",
    "save_bytes",
    "fetch_bytes",
)


@dataclasses.dataclass(frozen=True)
class Traced:
    """A model for batches of one size.

    Attributes:
      batch_size: the size.
      batch: shapes of the batch.
      variants: the segments.
      profile: their estimated costs.
      offload_activations: whether values that cross segments wait in host memory for their backward.
    """

    batch_size: int
    batch: Any
    variants: RematVariants
    profile: Profile
    offload_activations: bool = False

    @property
    def saved_bytes(self) -> int:
        """The host memory in which activations wait for their backward."""
        return self.profile.saved_bytes

    @property
    def widened(self) -> dict[int, int]:
        """The groups whose gradients the host sums in more bits, as for `StepProgram`."""
        return widened_groups(self.variants.base, self.variants.derivatives)

    @functools.cached_property
    def loading_bytes(self) -> int:
        """The device memory of the leanest plan that loads all layers: RELOAD, gradients GO, with recomputation."""
        return self._bytes_of(self._leanest(RELOAD))

    @functools.cached_property
    def smallest_bytes(self) -> int:
        """The device memory of the leanest plan, which may read all layers in host memory: DHA."""
        return min(self.loading_bytes, self._bytes_of(self._leanest(DHA)))

    def counted_bytes(self, budget_bytes: int) -> int:
        """The device memory of the leanest plan, without what the allocator takes beyond it."""
        return needed_bytes(self.profile, self.leanest(budget_bytes))

    def leanest(self, budget_bytes: int) -> Plan:
        """Returns the leanest plan, which loads all layers if that fits into the budget."""
        return self._leanest(RELOAD if self.loading_bytes <= budget_bytes else DHA)

    @functools.cached_property
    def without_samples(self) -> Traced:
        """The model with what takes memory for any batch: parameters and their gradients."""
        none: dict[str, Any] = dict.fromkeys(_BATCH_BYTES, 0) | {"temporary_bytes": {}}
        layers = tuple(
            dataclasses.replace(layer, **none, recompute_activation_bytes=0 if layer.can_recompute else None)
            for layer in self.profile.layers
        )
        profile = dataclasses.replace(self.profile, layers=layers)
        return Traced(0, None, self.variants, profile, self.offload_activations)

    def _leanest(self, mode: int) -> Plan:
        layers = self.profile.layers
        modes, on_host = np.full(len(layers), mode, dtype=np.int8), np.ones(len(layers), dtype=bool)
        can = np.array([layer.can_recompute for layer in layers])
        plans = [
            make_plan("auto", 0.0, self.profile, modes, on_host, recomputes=again)
            for again in (np.zeros_like(can), can)
        ]
        return min(plans, key=lambda plan: needed_bytes(self.profile, plan))

    def _bytes_of(self, plan: Plan) -> int:
        """The device memory of a plan's step; with what XLA's allocator takes beyond buffers, if there is a batch."""
        counted = needed_bytes(self.profile, plan)
        if self.batch is None:
            return counted
        program = self._lowered(plan)
        return counted + unsplit_by_step(program, self._temporary_bytes(program))

    def _lowered(self, plan: Plan) -> StepProgram:
        parts = self.variants.of(plan.recomputes)
        return lower(parts, self.variants.derivatives, plan, self.profile, self.offload_activations)

    def device_bytes(self, plan: Plan, budget_bytes: int) -> dict[str, int]:
        """Device memory by kind, in the program of a plan's step that needs the most."""
        program = self._lowered(plan)
        temporaries = self._temporary_bytes(program)
        ahead = loads_ahead(program, lambda loads: peak_bytes(program, temporaries, ahead=loads), budget_bytes)
        most = max(footprints(program, temporaries, ahead=ahead), key=lambda footprint: footprint.total)
        on_device = updated_on_device(self.profile, plan)
        first = [self.profile.layers[self.profile.groups[group][0]] for group in on_device]
        state = {"optimizer state": sum(layer.state_bytes for layer in first)} if first else {}
        return {
            **state,
            "parameters": most.copies + most.more_ahead,
            "gradients": most.gradients,
            "activations": most.values,
            "temporaries": most.temporaries,
            "allocator": unsplit_by_step(program, temporaries, ahead),
        }

    def _temporary_bytes(self, program: StepProgram) -> dict[ProgramKey, int]:
        found = {}
        for instruction in program.programs:
            key, first = instruction.key, program.partition.uses_of[instruction.segment][0]
            assert key is not None
            recomputes = program.plan.recomputes[first]
            by_dha, is_go = Source.HOST in key.reads, key.writes_host
            is_forward = key.kind is ProgramKind.FORWARD
            name = forward_variant(by_dha, recomputes) if is_forward else backward_variant(by_dha, is_go, recomputes)
            found[key] = self.profile.layers[first].temporary_bytes.get(name, 0)
        return found


def trace(
    batch_size: int,
    loss_fn: Callable[..., Any],
    params: Any,
    batch: Any,
    machine: Machine,
    compute_dtype: Any,
    granularity: str = BLOCK,
    offload_activations: bool = False,
) -> Traced:
    """Traces a loss function and estimates its profile.

    Args:
      batch_size: samples of the batch.
      loss_fn: `loss_fn(params, batch)`.
      params: shapes of the parameters.
      batch: shapes of the batch.
      machine: the machine.
      compute_dtype: dtype of the parameters on the device; None for their own.
      granularity: how fine layers are: `"block"` or `"module"`.
      offload_activations: whether values that cross segments wait in host memory for their backward; all segments then
        recompute (`remat="full"`).
    """
    remat = Remat.FULL.value if offload_activations else AUTO
    merge = functools.partial(merges_of_small, machine=machine) if granularity == BLOCK else None
    settings: dict[str, Any] = {"compute_dtype": compute_dtype, "merge": merge, "granularity": granularity}
    parts = for_planned_gpu(lambda: partition(loss_fn, params, (batch,), **settings))
    variants = RematVariants(parts, remat)
    profile = estimate_profile(partition_costs(parts, remat, temporaries=True), machine)
    profile = with_program_facts(profile, variants.base, variants.derivatives, offload_activations)
    return Traced(batch_size, batch, variants, profile, offload_activations)


FORMAT = "jaxferry.fit/1"


@dataclasses.dataclass(frozen=True)
class BatchForecast:
    """Training with batches of one size, as predicted.

    Attributes:
      batch_size: samples a batch.
      step_s: seconds a step in the steady state.
      samples_per_s: samples a second.
      tokens_per_s: integers of the batch's largest integer array a second; None if no such array has rows of several.
      device_bytes: device memory by kind at the step's peak.
      busy_share: the share of a step in which each lane works: `gpu`, `h2d`, `d2h`, `host`.
      limit: what limits the speed: `GPU`, `link`, `host` or `device memory`.
      reason: the same in a sentence.
      plan: the plan, with its prediction.
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
        """The forecast as JSON values."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        mappings = {"device_bytes": dict(self.device_bytes), "busy_share": dict(self.busy_share)}
        return {**fields, **mappings, "plan": self.plan.to_json()}


@dataclasses.dataclass(frozen=True)
class Fit:
    """Whether and how a model trains on a machine, as predicted.

    Attributes:
      model: its name.
      machine: the machine's name.
      budget_bytes: device memory that training may take.
      host_bytes: host memory that training keeps, by what it is for.
      host_memory_bytes: host memory that training may take; None if it is not known.
      smallest_bytes: the smallest feasible budget for batches of `smallest_batch_size`.
      smallest_batch_size: the workload's own batch size, or 1 if that does not fit.
      largest_batch_size: the largest batch for which a plan that loads all layers fits into the budget; or, if no batch
        of `smallest_batch_size` does, for which any plan fits; 0 if none does.
      pinned_bytes: the part of it that is pinned, with masters and optimizer state that stream through the GPU.
      rows: for the workload's own batch size, if it fits, and for the largest one.
      problem: why it does not fit, with the remedy; empty if it fits.
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
        """The answer as `jaxferry.fit/1`."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        rows = [row.to_json() for row in self.rows]
        return {"format": FORMAT, "fits": self.fits, **fields, "host_bytes": dict(self.host_bytes), "rows": rows}
