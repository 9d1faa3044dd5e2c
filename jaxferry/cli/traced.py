"""A model traced for batches of one size: its device memory, its forecast by `auto`, and its layout in host memory."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxferry.costs import (
    ADAMW,
    OF_BATCH,
    LayerCosts,
    Machine,
    Profile,
    UpdateBytes,
    backward_variant,
    estimate_profile,
    forward_variant,
    partition_costs,
)
from jaxferry.engine import (
    RematVariants,
    footprints,
    loads_ahead,
    lower,
    peak_bytes,
    unsplit_by_step,
    widened_groups,
    with_program_facts,
)
from jaxferry.errors import InputError
from jaxferry.modes import BLOCK, MODULE, ActivationPlace, GradientPlace, Remat
from jaxferry.partition import AUTO, partition, refused_by_jax
from jaxferry.planner import (
    SIMPLE_POLICIES,
    FinestPlanner,
    Request,
    coded_plan,
    fastest_that_fits,
    levels_of_tiles,
    merges_of_small,
    numbers_to_try,
    plan_in_tiles,
    planner_of,
    tiles_of,
    with_gap,
    with_update_order,
)
from jaxferry.settings import for_planned_gpu
from jaxferry.step import (
    DHA,
    RELOAD,
    Bottleneck,
    Plan,
    ProgramKey,
    ProgramKind,
    Source,
    StepProgram,
    find_bottleneck,
    needed_bytes,
    predict,
    saved_bytes,
    simulate,
    streamed_groups,
    updated_on_device,
)
from jaxferry.training import (
    ALL,
    MASTERS,
    STATE,
    Bytes,
    few_buffers,
    fewest_on_disk,
    left_in_memory,
    with_state_on_disk,
)


@dataclasses.dataclass(frozen=True)
class Traced:
    """A model for batches of one size.

    Attributes:
      costs: those of its layers.
      flops: the operations of a step that does none of them twice.
      in_tiles: the model in more and more tiles, where a plan may choose among them.
    """

    batch_size: int
    batch: Any
    variants: RematVariants
    profile: Profile
    offload_activations: bool | str = False
    costs: tuple[LayerCosts, ...] = ()
    flops: float = 0.0
    in_tiles: tuple[Traced, ...] = ()

    @property
    def widened(self) -> dict[int, int]:
        """The groups whose gradients the host sums in more bits, as in `StepProgram`."""
        return widened_groups(self.variants.base, self.variants.derivatives)

    @functools.cached_property
    def loading_bytes(self) -> int:
        """The device memory of the leanest plan that loads all layers: RELOAD, gradients GO, with recomputation."""
        return min(each._own_loading_bytes for each in self._first_and_last)

    @functools.cached_property
    def smallest_bytes(self) -> int:
        """The device memory of the leanest plan, which may read all layers in host memory: DHA."""
        return min(self.loading_bytes, *(each._bytes_of(each._leanest(DHA)) for each in self._first_and_last))

    def changed(self, change: Callable[[Profile], Profile]) -> Traced:
        """The model with a changed profile, in all numbers of tiles."""
        in_tiles = tuple(each.changed(change) for each in self.in_tiles)
        return dataclasses.replace(self, profile=change(self.profile), in_tiles=in_tiles)

    def recomputed_share(self, plan: Plan) -> float:
        """Returns the share of a step's operations that are done a second time."""
        pairs = zip(self.costs, plan.remats, strict=True)
        more = sum(costs.recomputation[remat].flops for costs, remat in pairs if remat in costs.recomputation)
        total = sum(costs.forward_flops + costs.backward_flops for costs in self.costs) + more
        return 1 - self.flops / total if total else 0.0

    def leanest(self, budget_bytes: int) -> Plan:
        """Returns the leanest plan in this number of tiles, which loads all layers if that fits into the budget."""
        return self._leanest(RELOAD if self._own_loading_bytes <= budget_bytes else DHA)

    @property
    def _first_and_last(self) -> tuple[Traced, ...]:
        """The model in one tile, and in the most tiles if their number is open."""
        return (self, *self.in_tiles[-1:])

    @functools.cached_property
    def _own_loading_bytes(self) -> int:
        return self._bytes_of(self._leanest(RELOAD))

    @functools.cached_property
    def saved_bytes(self) -> int:
        """Host memory in which activations wait whatever the plan; a plan that chooses takes what is there."""
        return saved_bytes(self.profile, self._leanest(DHA))

    @functools.cached_property
    def without_samples(self) -> Traced:
        """The model with what takes memory for any batch: parameters and their gradients."""
        none: dict[str, Any] = {"row_gradient_bytes": 0, "temporary_bytes": {}, "offloadable_bytes": {}}
        sizes = ({key: None if getattr(each, key) is None else 0 for key in OF_BATCH} for each in self.profile.layers)
        profile = self.profile.with_layers(none | own for own in sizes)
        return Traced(0, None, self.variants, profile, self.offload_activations)

    def _leanest(self, mode: int) -> Plan:
        layers = self.profile.layers
        modes, on_host = np.full(len(layers), mode, dtype=np.int8), np.ones(len(layers), dtype=bool)
        kept = ([remat if remat in layer.levels else Remat.NONE for layer in layers] for remat in Remat)
        plans = [coded_plan("auto", 0.0, self.profile, modes, on_host, remats=remats) for remats in kept]
        if mode == RELOAD and any(layer.offloadable_bytes for layer in layers):
            # All activations that may leave are in host memory; the gradients of these layers are on the device.
            waits: dict[str, Any] = {"gradient": GradientPlace.DEVICE, "activations": ActivationPlace.HOST}
            for plan in plans[:]:
                pairs = zip(plan.layers, layers, strict=True)
                own = (dataclasses.replace(own, **waits) if layer.offloadable_bytes else own for own, layer in pairs)
                plans.append(dataclasses.replace(plan, layers=tuple(own)))
        return min(plans, key=lambda plan: needed_bytes(self.profile, plan))

    def _bytes_of(self, plan: Plan) -> int:
        """Returns the device memory of a plan's step, including what XLA's allocator takes if there is a batch."""
        counted = needed_bytes(self.profile, plan)
        if self.batch is None:
            return counted
        program = self._lowered(plan)
        return counted + unsplit_by_step(program, self._temporary_bytes(program))

    def _lowered(self, plan: Plan) -> StepProgram:
        parts = self.variants.of(plan.remats)
        return lower(parts, self.variants.derivatives, plan, self.profile, self.offload_activations is True)

    def device_bytes(self, plan: Plan, budget_bytes: int) -> dict[str, int]:
        """Returns device memory by kind, in the program of a plan's step that needs the most."""
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
            remat = program.plan.remats[first]
            by_dha, is_go = Source.HOST in key.reads, key.writes_host
            is_forward = key.kind is ProgramKind.FORWARD
            name = forward_variant(by_dha, remat) if is_forward else backward_variant(by_dha, is_go, remat)
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
    offload_activations: bool | str = False,
    *,
    remat: str = AUTO,
    tiles: Any = 1,
    devices: int = 1,
    processes: int = 1,
    update: UpdateBytes = ADAMW,
) -> Traced:
    """Traces a loss function and estimates its profile; raises InputError if several devices cannot share the batch."""
    remat = Remat.FULL.value if offload_activations is True and remat == AUTO else remat
    merge = functools.partial(merges_of_small, machine=machine) if granularity == BLOCK else None
    settings: dict[str, Any] = {"compute_dtype": compute_dtype, "merge": merge, "granularity": granularity}
    settings |= {"num_devices": devices, "num_processes": processes}
    with refused_by_jax(loss_fn, params, (batch,), {}, compute_dtype):
        parts = for_planned_gpu(lambda: partition(loss_fn, params, (batch,), **settings))
        if devices > 1 and not parts.graph.batch_size:
            raise InputError(f"the first axis of the model's batch must be a multiple of {devices} devices")

        def traced(tiles: Any) -> Traced:
            variants = RematVariants(parts, remat, tiles)
            costs = partition_costs(variants.base, remat, temporaries=True)
            profile = estimate_profile(costs, machine, None, devices, processes, update)
            profile = with_program_facts(profile, variants.base, variants.derivatives, offload_activations)
            plain = costs if remat in (AUTO, Remat.NONE) else partition_costs(variants.base, Remat.NONE.value)
            flops = sum(each.forward_flops + each.backward_flops for each in plain)
            return Traced(batch_size, batch, variants, profile, offload_activations, costs, flops)

        if tiles != AUTO:
            return traced(tiles)
        found = {number: traced(number) for number in numbers_to_try(parts)}
        levels = levels_of_tiles({number: each.profile for number, each in found.items()})
        tilings = [tiles_of(parts, level.layers) for level in levels[1:]]
        return dataclasses.replace(found[1], in_tiles=tuple(map(traced, tilings)))


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


HostBytes = Callable[[Traced, Collection[int], int | None], dict[str, int]]
"""Bytes of host memory by what they are for, without saved activations: of a model whose updates of these groups stream
through the GPU, with so many gradient buffers."""


class HostLayout:
    """Chooses gradient buffers, and which masters and state are on a disk, so that host memory holds the rest.

    Updates stream through the GPU if host memory could hold all masters whole.

    Args:
      own: the model.
      host_bytes: what training takes.
      most_bytes: host memory that training may take; None if it is not known.
      gradient_buffers: as of `train_step`.
      disk_bytes_per_s: the speed of the disk; None without one.

    Attributes:
      num_buffers: the most programs whose gradients host memory holds; None for all.
      on_disk: by group, the bytes of masters and of optimizer state on the disk.
      needed: bytes of host memory by what they are for, if no update streams.
    """

    def __init__(
        self,
        own: Traced,
        host_bytes: HostBytes,
        most_bytes: int | None,
        gradient_buffers: int | str,
        disk_bytes_per_s: int | None,
    ) -> None:
        self._host_bytes, self._disk_bytes_per_s = host_bytes, disk_bytes_per_s

        def fits(found: Mapping[str, int]) -> bool:
            return most_bytes is None or sum(found.values()) <= most_bytes

        num = None if gradient_buffers == ALL else gradient_buffers
        self.num_buffers = few_buffers(lambda num: fits(host_bytes(own, (), num))) if isinstance(num, str) else num
        in_memory = host_bytes(own, (), self.num_buffers)
        self.on_disk: dict[int, Bytes] = {}
        if disk_bytes_per_s is not None:
            # Of each trained group, in proportion to its parameters.
            layers = own.variants.base.layers
            numbers = {group: each.trained.num_parameters for group, each in enumerate(layers) if each.trained.leaves}
            all_bytes, total = (in_memory[MASTERS], in_memory[STATE]), max(sum(numbers.values()), 1)
            sizes = {
                group: (all_bytes[0] * num // total, all_bytes[1] * num // total) for group, num in numbers.items()
            }
            num_bytes = {group: sum(own) for group, own in sizes.items()}
            chosen = fewest_on_disk(
                num_bytes, lambda groups: fits(left_in_memory(in_memory, [sizes[group] for group in groups]))
            )
            self.on_disk = {group: sizes[group] for group in chosen}
        self.needed = self._left(in_memory)
        self._streams = fits(host_bytes(own, range(len(own.profile.groups)), self.num_buffers))

    def planned(self, traced: Traced) -> Traced:
        """The model with what plans must know of the layout."""
        parts, seconds = traced.variants.base, 1 / (self._disk_bytes_per_s or 1)
        sizes = {parts.layers[group].name: sum(own) for group, own in self.on_disk.items()}

        def known(profile: Profile) -> Profile:
            profile = profile if self._streams else profile.without_streaming()
            profile = dataclasses.replace(profile, gradient_buffers=self.num_buffers)
            return with_state_on_disk(profile, parts, sizes, (seconds, seconds), may_update=False)

        return traced.changed(known)

    def of_plan(self, traced: Traced, plan: Plan) -> dict[str, int]:
        """The bytes of host memory by what they are for, with a plan's updates."""
        streamed = streamed_groups(traced.profile, plan) - self.on_disk.keys()
        return self._left(self._host_bytes(traced, streamed, self.num_buffers))

    def _left(self, needed: dict[str, int]) -> dict[str, int]:
        return left_in_memory(needed, list(self.on_disk.values()))
