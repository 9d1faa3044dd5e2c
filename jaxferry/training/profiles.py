"""Where the times and sizes come from that a step is planned with; those of several devices are measured on one.

    the share of one device --its programs, on one device--> times of the work
    all devices --contention.py--> times of loads, offloads and exchanges

Each process measures on a device of its own, and all take the slowest one's times.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxferry.costs import (
    Contention,
    Devices,
    LayerCosts,
    LayerProfile,
    Profile,
    Report,
    partition_costs,
    progress_bar,
    scaled_profile,
    scaling,
)
from jaxferry.engine import Programs, RematVariants, summed_groups, widened_groups, with_program_facts, with_sum_bytes
from jaxferry.errors import InputError, described, is_internal
from jaxferry.modes import GradientPlace, Mode
from jaxferry.optimizer import HostOptimizer, num_bytes_on_each, unit_on_devices
from jaxferry.partition import Graph, Partition
from jaxferry.processes import check_same, is_raw_key, slowest
from jaxferry.step import LayerPlan, Plan, program_keys
from jaxferry.training.choice import needs_times, planning_profile, with_updates_on_device
from jaxferry.training.contention import TRANSFER_BYTES, measure_contention, measure_links
from jaxferry.training.cuts import Cut, Cutter, split_flags
from jaxferry.training.measured_profile import (
    default_cache,
    facts_of,
    measure_profile,
    measure_share,
    silent,
    temporary_bytes_of,
)
from jaxferry.training.microbenchmarks import program_variants
from jaxferry.training.model import Model
from jaxferry.training.options import MEASURE, Planning
from jaxferry.training.profile_cache import MeasurementCache
from jaxferry.training.timers import ACCELERATOR_BYTES, PRODUCTS_BYTES
from jaxferry.transport import Placement, make_placement, make_transport
from jaxferry.units import format_apart


@dataclasses.dataclass(frozen=True)
class Share:
    """What one device of several does, as a step of its own."""

    partition: Partition
    recomputing: Partition
    programs: Programs
    optimizer: HostOptimizer
    placement: Placement


class NotMeasurable(InputError):
    """The work of one device cannot be measured alone; of several processes, all say so."""


def measure_shares(
    share: Callable[[], Share],
    partition: Partition,
    recomputing: Partition,
    programs: Programs,
    placement: Placement,
    transport: str,
    *,
    remat: str = "none",
    offload_activations: bool = False,
    progress: Report | None = None,
) -> Profile:
    """Measures the profile of a partition on several devices; each process must call this.

    Raises:
      NotMeasurable: if one device cannot run alone, as where the loss function names the mesh, or its share of the
        batch is cut into other layers.
    """
    alone, own = _measured_alone(share, partition, placement, progress)
    layers = _alike(alone, placement)
    variants = program_variants(partition, recomputing, programs.derivatives)
    keys = list(dict.fromkeys(key for named in variants for key in named.values()))
    # Several processes compile together, so none may know more than the others.
    cache = default_cache(placement) if placement.num_processes == 1 else MeasurementCache(None, {})
    temporaries = temporary_bytes_of(keys, programs, cache, progress or silent)
    links = measure_links(placement)
    devices = Devices(links, placement.num_devices, placement.num_processes)
    made = []
    for one, use in zip(layers, partition.uses, strict=True):
        known = variants[use.segment] if use.place == 0 else {}
        layer = devices.exchanging(one, (one.param_bytes, one.grad_bytes), {}, partition.layers[use.group].is_whole)
        sizes = {name: temporaries[key] for name, key in known.items()}
        made.append(dataclasses.replace(layer, temporary_bytes=sizes))
    facts = {**facts_of(placement, transport, remat), "links": links.to_json()}
    # What the links of all devices and each process's updates take of each other's time, at most.
    found = measure_contention(own.optimizer, own.placement, own.partition.layers, cache, placement)
    most = np.reshape(slowest(found.matrix.ravel().tolist()), found.matrix.shape)
    profile = Profile(
        facts,
        tuple(made),
        num_devices=placement.num_devices,
        num_processes=placement.num_processes,
        contention=Contention.of_matrix(most),
    )
    staging_bytes = make_transport(transport, placement, partition.layers).staging_bytes
    return with_program_facts(profile, partition, programs.derivatives, offload_activations, staging_bytes)


def _measured_alone(
    share: Callable[[], Share], partition: Partition, placement: Placement, progress: Report | None
) -> tuple[tuple[LayerProfile, ...], Share]:
    """What this process's own device measures, if all processes can, and its work."""
    layers, problem = tuple[LayerProfile, ...](), ""
    try:
        own = share()
        if [use.name for use in partition.uses] != [use.name for use in own.partition.uses]:
            raise InputError("the share of the batch that one device has is cut into other layers than the whole batch")
        layers = measure_share(
            own.partition, own.programs, own.optimizer, own.placement, recomputing=own.recomputing, progress=progress
        )
    except ValueError as error:  # JAX's own, too
        problem = str(error).splitlines()[0]
    if placement.num_processes > 1:
        check_same("whether the work of one device can be measured", str(not problem))
    if problem:
        raise NotMeasurable(
            "the work of one device of the mesh cannot be measured alone, so give a profile, or "
            f'profile="estimate": {problem}'
        )
    return layers, own


def _alike(layers: tuple[LayerProfile, ...], placement: Placement) -> list[LayerProfile]:
    """The layers with the times of the slowest process."""
    if placement.num_processes == 1:
        return list(layers)
    names = [field.name for field in dataclasses.fields(LayerProfile) if field.name.endswith("_s")]
    known = [{name: own for name in names if (own := getattr(layer, name)) is not None} for layer in layers]
    check_same(
        "the layers that they measure", str([(layer.name, *own) for layer, own in zip(layers, known, strict=True)])
    )
    seconds = iter(slowest([own for times in known for own in times.values()]))
    times: list[dict[str, Any]] = [{name: next(seconds) for name in own} for own in known]
    return [dataclasses.replace(layer, **own) for layer, own in zip(layers, times, strict=True)]


def share_of_one(
    model: Model,
    loss_fn: Callable[..., Any],
    planning: Planning,
    placement: Placement,
    partition: Partition,
    args: Any,
    kwargs: Mapping[str, Any],
) -> Share:
    """What the first device of this process does; raises InputError if the loss function cannot be traced for them."""
    alone = make_placement(placement.device.mesh.local_devices[0])
    own = model.on(alone)
    cutter = Cutter(own, loss_fn, planning, alone)
    cutter.known_layers = partition.layers
    variants = _cut(cutter, partition.graph, args, kwargs).variants(planning.remat, planning.tiles)
    is_scaled = model.numerics.loss_scale is not None
    programs = Programs(variants.base, variants.derivatives, alone, own.is_native, is_scaled)
    return Share(variants.base, variants.of(variants.may_recompute), programs, own.optimizer, alone)


def _cut(cutter: Cutter, graph: Graph, args: Any, kwargs: Mapping[str, Any]) -> Cut:
    """The loss function of one device's arguments, by the first rule of what it has a share of that can be traced."""
    errors = []
    for has_rows in (_is_no_state, _is_any, _is_no_vector):
        try:
            return cutter.cut(*_share(graph, has_rows, args, kwargs))
        except Exception as error:  # noqa: BLE001 - the user's function, with arrays of other shapes
            errors.append(error)
    if is_internal(errors[0]):
        raise errors[0]
    raise InputError(f"the loss function takes no share of its arguments: {described(errors[0])}") from errors[0]


Rule = Callable[[Graph, Any], bool]


def _is_no_state(graph: Graph, aval: Any) -> bool:
    """Whether an argument is not shaped as running statistics are, that is, like a parameter (`Graph.num_rows`)."""
    is_float = jnp.issubdtype(aval.dtype, jnp.floating)
    return not (is_float and aval.shape in {graph.avals[value].shape for value in graph.parameters})


def _is_any(graph: Graph, aval: Any) -> bool:
    return True


def _is_no_vector(graph: Graph, aval: Any) -> bool:
    return len(aval.shape) > 1 or not jnp.issubdtype(aval.dtype, jnp.floating)


def _share(graph: Graph, has_rows: Rule, args: Any, kwargs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The arguments of one device, as shapes."""
    arrays, flags = split_flags(kwargs)
    leaves, tree = jax.tree.flatten((args, arrays))
    shares = [_shape(graph, has_rows, value, leaf) for value, leaf in zip(graph.batch, leaves, strict=True)]
    args, arrays = jax.tree.unflatten(tree, shares)
    return args, {**arrays, **flags}


def _shape(graph: Graph, has_rows: Rule, value: int, leaf: Any) -> Any:
    if not hasattr(leaf, "shape"):
        return leaf
    aval = graph.avals[value]
    shape, axis = list(aval.shape), graph.split_axis(aval)
    if axis is not None and has_rows(graph, aval) and not is_raw_key(aval.shape, aval.dtype):
        shape[axis] //= graph.num_devices
    return jax.ShapeDtypeStruct(tuple(shape), aval.dtype, weak_type=aval.weak_type)


LEAST_SCALE = 0.5
"""Batches with a smaller share of a known batch's operations, or more times as many, are measured and planned anew."""

Value = TypeVar("Value")


class OfBatches(Generic[Value]):
    """What is known of the batches so far, and holds for similar ones: those with half to twice the operations."""

    def __init__(self) -> None:
        self._known: list[tuple[Value, tuple[LayerCosts, ...]]] = []

    def add(self, value: Value, costs: tuple[LayerCosts, ...]) -> None:
        """Adds what holds for batches with about these costs."""
        self._known.append((value, costs))

    def near(self, costs: Sequence[LayerCosts]) -> list[tuple[Value, tuple[LayerCosts, ...]]]:
        """What holds for these costs, each with the costs that it was found for; the latest first."""
        return [each for each in reversed(self._known) if LEAST_SCALE <= scaling(each[1], costs) <= 1 / LEAST_SCALE]


class Profiler:
    """Makes the profiles of one model's steps."""

    def __init__(self, model: Model, planning: Planning, placement: Placement) -> None:
        self._model, self._planning, self._placement = model, planning, placement
        self._measurements = OfBatches[Profile]()

    def planned(
        self, variants: RematVariants, programs: Programs, share: Callable[[], Share], staging_bytes: int
    ) -> Profile:
        """The profile to plan and lower with: the user's own, measured, estimated, or of sizes only."""
        source = self._planning.profile
        profile = source if isinstance(source, Profile) else None
        if source == MEASURE or (source is None and needs_times(self._planning.policy)):
            profile = self._measured_once(variants, programs, share)
        return self._planning_profile(variants, profile, staging_bytes)

    @property
    def source(self) -> str:
        """Where the profile comes from, in words."""
        profile = self._planning.profile
        return "given" if isinstance(profile, Profile) else str(profile)

    def planned_by_estimate(self, variants: RematVariants) -> Profile:
        """Likewise without measurements, whatever the user gives."""
        return self._planning_profile(variants, None, 0)

    def _planning_profile(self, variants: RematVariants, profile: Profile | None, staging_bytes: int) -> Profile:
        return planning_profile(
            variants,
            self._planning,
            profile,
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
        if near := self._measurements.near(costs):
            return scaled_profile(*near[0], costs)
        try:
            if self._planning.profile != MEASURE:
                self._check_room(variants.base, programs)
            profile = self._measured(variants, programs, share)
        except NotMeasurable as error:
            if self._planning.profile == MEASURE:
                raise
            warnings.warn(f"planning with an estimated profile: {error}", stacklevel=10)
            return None
        self._measurements.add(profile, costs)
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
                profile = measure_shares(
                    share, variants.base, recomputing, programs, placement, transport, progress=progress, **more
                )
            else:
                optimizer = self._model.optimizer
                profile = measure_profile(
                    variants.base,
                    programs,
                    optimizer,
                    placement,
                    transport,
                    recomputing=recomputing,
                    progress=progress,
                    **more,
                )
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
