"""Where the times and sizes come from that a step is planned with; those of several devices are measured on one.

    the share of one device --its programs, on one device--> times of the work
    all devices --contention.py--> times of loads, offloads and exchanges

Each process measures on a device of its own, and all take the slowest one's times.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Sequence
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
from jaxferry.engine import Programs, RematVariants, widened_groups, with_program_facts
from jaxferry.errors import InputError, described, is_internal
from jaxferry.modes import GradientPlace, Mode
from jaxferry.optimizer import num_bytes_on_each, unit_on_devices
from jaxferry.partition import Graph, Partition
from jaxferry.planner import Auto
from jaxferry.processes import check_same, is_raw_key, largest
from jaxferry.settings import users_stacklevel
from jaxferry.step import LayerPlan, Plan, program_keys
from jaxferry.training.choice import Conditions, needs_times, planning_profile, with_updates_on_device
from jaxferry.training.contention import TRANSFER_BYTES, measure_contention, measure_links
from jaxferry.training.cuts import Call, Cut, Cutter
from jaxferry.training.measured_profile import (
    MeasuredLayers,
    Work,
    default_cache,
    facts_of,
    measure_profile,
    temporary_bytes_of,
)
from jaxferry.training.model import Model
from jaxferry.training.options import MEASURE, Planning
from jaxferry.training.profile_cache import MeasurementCache
from jaxferry.training.timers import ACCELERATOR_BYTES, PRODUCTS_BYTES
from jaxferry.transport import Placement, make_placement, make_transport
from jaxferry.units import format_apart


class NotMeasurable(InputError):
    """The work of one device cannot be measured alone; of several processes, all say so."""


def measure_shares(
    share: Callable[[], Work], work: Work, transport: str, remat: str, offload_activations: bool | str, progress: Report
) -> Profile:
    """Measures the profile of a partition on several devices; each process must call this.

    `share` makes the work of one device; the other arguments are those of `measure_profile`. Raises `NotMeasurable` if
    one device cannot run alone, as where the loss function names the mesh, or its share of the batch is cut into other
    layers.
    """
    partition, programs, placement = work.partition, work.programs, work.placement
    alone, own = _measured_alone(share, partition, placement, progress)
    layers = _alike(alone, placement)
    variants = work.variants
    keys = list(dict.fromkeys(key for named in variants for key in named.values()))
    # Several processes compile together, so none may know more than the others.
    cache = default_cache(placement) if placement.num_processes == 1 else MeasurementCache(None, {})
    temporaries = temporary_bytes_of(keys, programs, cache, progress)
    links = measure_links(placement)
    devices = Devices(links, placement.num_devices, placement.num_processes)
    made = []
    for one, use in zip(layers, partition.uses, strict=True):
        known = variants[use.segment] if use.place == 0 else {}
        layer = devices.exchanging(one, (one.param_bytes, one.grad_bytes), {}, partition.layers[use.group].is_whole)
        sizes = {name: temporaries[key] for name, key in known.items()}
        made.append(dataclasses.replace(layer, temporary_bytes=sizes))
    # What the links of all devices and each process's updates take of each other's time, at most.
    found = measure_contention(own.optimizer, own.placement, own.partition.layers, cache, placement)
    most = np.reshape(largest(found.matrix.ravel().tolist()), found.matrix.shape)
    profile = Profile(
        {**facts_of(placement, transport, remat), "links": links.to_json()},
        tuple(made),
        num_devices=placement.num_devices,
        num_processes=placement.num_processes,
        contention=Contention.of_matrix(most),
    )
    staging_bytes = make_transport(transport, placement, partition.layers).staging_bytes
    return with_program_facts(profile, partition, programs.derivatives, offload_activations, staging_bytes)


def _measured_alone(
    share: Callable[[], Work], partition: Partition, placement: Placement, progress: Report
) -> tuple[tuple[LayerProfile, ...], Work]:
    """What this process's own device measures, if all processes can, and its work."""
    layers, problem = tuple[LayerProfile, ...](), ""
    try:
        own = share()
        if [use.name for use in partition.uses] != [use.name for use in own.partition.uses]:
            raise InputError("the share of the batch that one device has is cut into other layers than the whole batch")
        layers = MeasuredLayers(own, None).profiles(default_cache(own.placement), progress)
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
    seconds = iter(largest([own for times in known for own in times.values()]))
    times: list[dict[str, Any]] = [{name: next(seconds) for name in own} for own in known]
    return [dataclasses.replace(layer, **own) for layer, own in zip(layers, times, strict=True)]


def share_of_one(
    model: Model,
    loss_fn: Callable[..., Any],
    planning: Planning,
    placement: Placement,
    partition: Partition,
    call: Call,
) -> Work:
    """What the first device of this process does; raises InputError if the loss function cannot be traced for them."""
    alone = make_placement(placement.device.mesh.local_devices[0])
    own = model.on(alone)
    cutter = Cutter(own, loss_fn, planning, alone)
    cutter.known_layers = partition.layers
    variants = _cut(cutter, partition.graph, call).variants(planning.remat, planning.tiles)
    is_scaled = model.numerics.loss_scale is not None
    programs = Programs(variants.base, variants.derivatives, alone, own.is_native, is_scaled)
    return Work(variants.base, variants.recomputing, programs, own.optimizer, alone)


def _cut(cutter: Cutter, graph: Graph, call: Call) -> Cut:
    """The loss function of one device's arguments, by the first rule of what it has a share of that can be traced.

    The rules: arguments that are not shaped like a parameter, as running statistics are; all; all but vectors of
    floating-point numbers.
    """
    parameters, errors = {graph.avals[value].shape for value in graph.parameters}, []

    def is_float(aval: Any) -> bool:
        return jnp.issubdtype(aval.dtype, jnp.floating)

    has_rows: tuple[Callable[[Any], bool], ...] = (
        lambda aval: not (is_float(aval) and aval.shape in parameters),
        lambda aval: True,
        lambda aval: len(aval.shape) > 1 or not is_float(aval),
    )
    for rule in has_rows:
        try:
            return cutter.cut(_share(graph, rule, call))
        except Exception as error:  # noqa: BLE001 - the user's function, with arrays of other shapes
            errors.append(error)
    if is_internal(errors[0]):
        raise errors[0]
    raise InputError(f"the loss function takes no share of its arguments: {described(errors[0])}") from errors[0]


def _share(graph: Graph, has_rows: Callable[[Any], bool], call: Call) -> Call:
    """The arguments of one device, as shapes."""
    leaves, tree = jax.tree.flatten((call.args, call.arrays))
    shares = []
    for value, leaf in zip(graph.batch, leaves, strict=True):
        aval = graph.avals[value]
        shape, axis = list(aval.shape), graph.split_axis(aval)
        if axis is not None and has_rows(aval) and not is_raw_key(aval.shape, aval.dtype):
            shape[axis] //= graph.num_devices
        struct = jax.ShapeDtypeStruct(tuple(shape), aval.dtype, weak_type=aval.weak_type)
        shares.append(struct if hasattr(leaf, "shape") else leaf)
    args, arrays = jax.tree.unflatten(tree, shares)
    return Call(args, arrays, call.flags)


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
        self, variants: RematVariants, programs: Programs, share: Callable[[], Work], staging_bytes: int
    ) -> Profile:
        """The profile to plan and lower with: the user's own, measured, estimated, or of sizes only."""
        source = self._planning.profile
        profile = source if isinstance(source, Profile) else None
        if source == MEASURE or (source is None and needs_times(self._planning.policy)):
            profile = self._measured_once(variants, programs, share)
        return planning_profile(variants, self._planning, profile, self._conditions(variants.base, staging_bytes))

    @property
    def source(self) -> str:
        """Where the profile comes from, in words."""
        profile = self._planning.profile
        return "given" if isinstance(profile, Profile) else str(profile)

    def planned_by_estimate(self, variants: RematVariants) -> Profile:
        """Likewise without measurements, whatever the user gives."""
        return planning_profile(variants, self._planning, None, self._conditions(variants.base))

    def estimated(self, variants: RematVariants) -> Profile:
        """The estimated profile, with temporaries, whatever the user gives."""
        planning = dataclasses.replace(
            self._planning, plan=None, policy=self._planning.chooser or Auto.name, profile=None
        )
        return planning_profile(variants, planning, None, self._conditions(variants.base), temporaries=True)

    def measured(self, variants: RematVariants, programs: Programs, share: Callable[[], Work]) -> Profile:
        """Measures what each layer costs on the device. Args as for `planned`."""
        measured, conditions = self._measured(variants, programs, share), self._conditions(variants.base)
        return with_updates_on_device(measured, variants.base, conditions, self._placement.updates)

    def _conditions(self, parts: Partition, staging_bytes: int = 0) -> Conditions:
        """The conditions of steps of these segments. One update of several groups is shared out by parameters."""
        optimizer, groups, placement = self._model.optimizer, parts.layers, self._placement
        read, is_by_layer = {use.group for use in parts.uses}, optimizer.is_by_layer(parts.layers)
        state_bytes: dict[str, int] = {}
        for unit in optimizer.units_of(groups):
            sizes = {groups[group].name: groups[group].trained.num_parameters for group in unit.layers}
            total = max(sum(sizes.values()), 1)
            if read.issuperset(unit.layers):
                on_each = num_bytes_on_each(unit_on_devices(optimizer, unit, groups, placement), placement)
                state_bytes |= {name: -(-on_each * size // total) for name, size in sizes.items()}
        return Conditions(
            placement.device_kind,
            updates_after_all=self._model.numerics.rules.need_all_gradients or not is_by_layer,
            updates_together=not is_by_layer,
            gradient_buffers=self._model.gradient_buffers,
            staging_bytes=staging_bytes,
            state_bytes=state_bytes,
            has_own_memory=placement.updates,
            accumulate=self._model.numerics.accumulate,
            update=self._model.update_bytes(groups),
        )

    def _measured_once(self, variants: RematVariants, programs: Programs, share: Callable[[], Work]) -> Profile | None:
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
            warnings.warn(f"planning with an estimated profile: {error}", stacklevel=users_stacklevel())
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

    def _measured(self, variants: RematVariants, programs: Programs, share: Callable[[], Work]) -> Profile:
        planning, placement, transport = self._planning, self._placement, self._model.transport
        remat = planning.remat if isinstance(planning.remat, str) else "per segment"
        work = Work(variants.base, variants.recomputing, programs, self._model.optimizer, placement)
        how: dict[str, Any] = {"remat": remat, "offload_activations": planning.offloads}
        with progress_bar("measuring") as report:
            if placement.num_devices > 1:
                profile = measure_shares(share, work, transport, **how, progress=report)
            else:
                profile = measure_profile(work, transport, **how, progress=report)
        conditions, widened = self._conditions(variants.base), widened_groups(variants.base, variants.derivatives)
        host_bytes = self._model.host_bytes(variants.base.layers, widened=widened)
        facts = {**profile.machine, "host_bytes": host_bytes, **placement.memory_facts()}
        return dataclasses.replace(conditions.applied(profile, variants), machine=facts)
