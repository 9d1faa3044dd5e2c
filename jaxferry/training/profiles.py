"""Where the times and sizes come from that a step is planned with."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

from jaxferry.costs import LayerCosts, Profile, partition_costs, progress_bar, scaled_profile, scaling
from jaxferry.engine import Programs, RematVariants, summed_groups, widened_groups, with_sum_bytes
from jaxferry.modes import GradientPlace, Mode
from jaxferry.optimizer import num_bytes_on_each, unit_on_devices
from jaxferry.partition import Partition
from jaxferry.step import LayerPlan, Plan, program_keys
from jaxferry.training.choice import needs_times, planning_profile, with_updates_on_device
from jaxferry.training.contention import TRANSFER_BYTES
from jaxferry.training.measured_profile import measure_profile
from jaxferry.training.model import Model
from jaxferry.training.options import MEASURE, Planning
from jaxferry.training.shares import NotMeasurable, Share, measure_shares
from jaxferry.training.timers import ACCELERATOR_BYTES, PRODUCTS_BYTES
from jaxferry.transport import Placement
from jaxferry.units import format_apart

LEAST_SCALE = 0.5
"""Batches with so small a share of a measured batch's operations, or so many times as many, are measured anew."""


class Profiler:
    """Makes the profiles of one model's steps.

    Args:
      model: the model.
      planning: how steps are planned.
      placement: where arrays live.
    """

    def __init__(self, model: Model, planning: Planning, placement: Placement) -> None:
        self._model, self._planning, self._placement = model, planning, placement
        self._known: list[tuple[Profile, tuple[LayerCosts, ...]]] = []

    def planned(
        self, variants: RematVariants, programs: Programs, share: Callable[[], Share], staging_bytes: int
    ) -> Profile:
        """The profile to plan and lower with: the user's own, measured, estimated, or of sizes only.

        Args:
          variants: the segments.
          programs: their programs.
          share: makes what one of several devices does.
          staging_bytes: device memory that the transport keeps.
        """
        given = self._planning.profile
        if given == MEASURE or (given is None and needs_times(self._planning.policy)):
            given = self._measured_once(variants, programs, share)
        return self._planning_profile(variants, given if isinstance(given, Profile) else None, staging_bytes)

    @property
    def source(self) -> str:
        """Where the profile comes from, in words."""
        given = self._planning.profile
        return str(given) if given is None or isinstance(given, str) else "given"

    def planned_by_estimate(self, variants: RematVariants) -> Profile:
        """Likewise without measurements, whatever the user gives."""
        return self._planning_profile(variants, None, 0)

    def _planning_profile(self, variants: RematVariants, given: Profile | None, staging_bytes: int) -> Profile:
        return planning_profile(
            variants,
            self._planning,
            given,
            self._placement.device_kind,
            self._needs_all_gradients(variants.base),
            self._updates_together(variants.base),
            staging_bytes,
            self._state_bytes(variants.base),
            self._placement.updates,
            self._model.numerics.accumulate,
        )

    def measured(self, variants: RematVariants, programs: Programs, share: Callable[[], Share]) -> Profile:
        """Measures what each layer costs on the device. Args as for `planned`."""
        state_bytes, kind = self._state_bytes(variants.base), self._placement.device_kind
        measured = self._measured(variants, programs, share)
        return with_updates_on_device(measured, variants.base, kind, state_bytes, self._placement.updates)

    def _needs_all_gradients(self, parts: Partition) -> bool:
        """Whether updates wait for all gradients under any plan."""
        is_by_layer = self._model.optimizer.is_by_layer(parts.layers)
        return self._model.numerics.rules.need_all_gradients or not is_by_layer

    def _updates_together(self, parts: Partition) -> bool:
        """Whether some groups have one update: then a policy has all groups on the device, or none."""
        return not self._model.optimizer.is_by_layer(parts.layers)

    def _state_bytes(self, parts: Partition) -> dict[str, int]:
        """Bytes of masters and optimizer state, on each device, of each group that the segments read.

        One update of several groups is shared out by parameters.
        """
        optimizer, groups = self._model.optimizer, parts.layers
        read = {use.group for use in parts.uses}
        found: dict[str, int] = {}
        for unit in optimizer.units_of(groups):
            sizes = {groups[group].name: groups[group].trained.num_parameters for group in unit.layers}
            total = max(sum(sizes.values()), 1)
            if read.issuperset(unit.layers):
                on_each = num_bytes_on_each(unit_on_devices(optimizer, unit, groups, self._placement), self._placement)
                found |= {name: -(-on_each * size // total) for name, size in sizes.items()}
        return found

    def _measured_once(self, variants: RematVariants, programs: Programs, share: Callable[[], Share]) -> Profile | None:
        """What the layers cost; None, with a warning, if that can only be estimated.

        Batches with half to twice the operations of a measured one take its times in proportion.
        """
        costs = partition_costs(variants.base)
        for profile, known in self._known:
            if LEAST_SCALE <= scaling(known, costs) <= 1 / LEAST_SCALE:
                return scaled_profile(profile, known, costs)
        try:
            if self._planning.profile != MEASURE:
                self._check_room(variants.base, programs)
            profile = self._measured(variants, programs, share)
        except NotMeasurable as error:
            if self._planning.profile == MEASURE:
                raise
            warnings.warn(f"planning with an estimated profile: {error}", stacklevel=8)
            return None
        self._known.append((profile, costs))
        return profile

    def _check_room(self, parts: Partition, programs: Programs) -> None:
        """Raises NotMeasurable if measurements on an accelerator take more device memory than the budget."""
        budget_bytes = self._planning.memory_budget_bytes
        if budget_bytes is None or self._placement.allocator is None:
            return
        layers = tuple(LayerPlan(use.name, Mode.GFGB, GradientPlace.DEVICE) for use in parts.uses)
        keys = list(dict.fromkeys(program_keys(parts, programs.derivatives, Plan("measured", 1.0, layers))))
        programs.require(keys)
        needed_bytes = ACCELERATOR_BYTES + PRODUCTS_BYTES + 2 * TRANSFER_BYTES + max(map(programs.bytes_of, keys))
        if needed_bytes > budget_bytes:
            needs, budget = format_apart(needed_bytes, budget_bytes)
            raise NotMeasurable(
                f"measuring takes {needs} of device memory, and memory_budget is {budget}: "
                'profile="estimate" asks for no measurement'
            )

    def _measured(self, variants: RematVariants, programs: Programs, share: Callable[[], Share]) -> Profile:
        planning, placement, transport = self._planning, self._placement, self._model.transport
        more: dict[str, Any] = {
            "remat": planning.remat if isinstance(planning.remat, str) else "per segment",
            "offload_activations": planning.offload_activations,
        }
        recomputing = variants.of(variants.may_recompute)
        with progress_bar("measuring") as progress:
            if placement.num_devices > 1:
                given = (variants.base, recomputing, programs, placement, transport)
                profile = measure_shares(share, *given, progress=progress, **more)
            else:
                alone = (variants.base, programs, self._model.optimizer, placement, transport)
                profile = measure_profile(*alone, recomputing=recomputing, progress=progress, **more)
        widened = widened_groups(variants.base, variants.derivatives)
        host_bytes = self._model.host_bytes(variants.base.layers, widened=widened)
        facts = {**profile.machine, "host_bytes": host_bytes, **self._placement.memory_facts()}
        groups = summed_groups(variants.base, variants.derivatives, self._model.numerics.accumulate)
        return dataclasses.replace(
            with_sum_bytes(profile, variants.base, groups),
            machine=facts,
            updates_after_all=self._needs_all_gradients(variants.base),
            updates_together=self._updates_together(variants.base),
        )
