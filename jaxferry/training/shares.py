"""Measures what one device of several does: the same model on its share of the batch.

    the share of one device --its programs, on one device--> times of the work
    all devices --contention.py--> times of loads, offloads and exchanges

Each process measures on a device of its own, and all take the slowest one's times.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxferry.costs import Contention, Devices, LayerProfile, Profile, Report
from jaxferry.engine import Programs, with_program_facts
from jaxferry.errors import InputError, described, is_internal
from jaxferry.optimizer import HostOptimizer
from jaxferry.partition import Graph, Partition
from jaxferry.processes import check_same, is_raw_key, slowest
from jaxferry.training.contention import measure_contention, measure_links
from jaxferry.training.cuts import Cut, Cutter, split_flags
from jaxferry.training.measured_profile import default_cache, facts_of, measure_share, silent, temporary_bytes_of
from jaxferry.training.microbenchmarks import program_variants
from jaxferry.training.model import Model
from jaxferry.training.options import Planning
from jaxferry.training.profile_cache import MeasurementCache
from jaxferry.transport import Placement, make_placement, make_transport


@dataclasses.dataclass(frozen=True)
class Share:
    """What one device of several does, as a step of its own.

    Attributes:
      partition: the segments, for its share of the batch.
      recomputing: the same, with rematerialized variants where eligible.
      programs: their programs.
      optimizer: the optimizer of whole layers.
      placement: that one device.
    """

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

    Args:
      share: makes the work of one device.
      partition: the segments of all devices.
      recomputing: the same, with rematerialized variants where eligible.
      programs: their programs, which are compiled for their temporaries.
      placement: all devices.
      transport: that of the step.
      remat: as for `measure_profile`.
      offload_activations: likewise.
      progress: likewise.

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
    profile = Profile(
        facts,
        tuple(made),
        num_devices=placement.num_devices,
        num_processes=placement.num_processes,
        contention=_contention_of(own, placement, cache),
    )
    staging_bytes = make_transport(transport, placement, partition.layers).staging_bytes
    return with_program_facts(profile, partition, programs.derivatives, offload_activations, staging_bytes)


def _contention_of(own: Share, placement: Placement, cache: MeasurementCache) -> Contention:
    """What the links of all devices and each process's updates take of each other's time, at most."""
    found = measure_contention(own.optimizer, own.placement, own.partition.layers, cache, placement)
    most = np.reshape(slowest(found.matrix.ravel().tolist()), found.matrix.shape)
    return Contention.of_matrix(most)


def _measured_alone(
    share: Callable[[], Share], partition: Partition, placement: Placement, progress: Report | None
) -> tuple[tuple[LayerProfile, ...], Share]:
    """What this process's own device measures, if all processes can, and its work."""
    layers, problem = tuple[LayerProfile, ...](), ""
    try:
        own = share()
        if [use.name for use in partition.uses] != [use.name for use in own.partition.uses]:
            raise InputError("the share of the batch that one device has is cut into other layers than the whole batch")
        given = (own.partition, own.programs, own.optimizer, own.placement)
        layers = measure_share(*given, recomputing=own.recomputing, progress=progress)
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
    """What the first device of this process does.

    Args:
      model: the model on all devices.
      loss_fn: its loss function.
      planning: how its steps are planned.
      placement: all devices.
      partition: the segments of all devices, whose parameter groups are taken.
      args: the step's arguments, or shapes of them, in all processes.
      kwargs: likewise.

    Raises:
      InputError: if the loss function cannot be traced for them.
    """
    alone = make_placement(placement.device.mesh.local_devices[0])
    own = model.on(alone)
    cutter = Cutter(own, loss_fn, planning, alone)
    cutter.known_layers = partition.layers
    variants = _cut(cutter, partition.graph, args, kwargs).variants(planning.remat)
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
