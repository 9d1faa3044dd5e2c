"""What the programs of a partition add to a profile, and the variants whose segments recompute.

With these facts, lowering a plan for a profile gives the tasks that the engine runs.

    remat (none, full, policy, auto) --base--> only segments that the argument names recompute
                                     --of(flags)--> these segments recompute as well

Programs have the same numbers in all variants, so a program that is compiled for one serves the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jaxferry.costs import LayerProfile, Profile
from jaxferry.engine.lowering import last_readers, offloaded_values
from jaxferry.engine.memory import LiveValues
from jaxferry.engine.programs import derivatives_of
from jaxferry.partition import AUTO, Derivative, Partition, remat_of, with_remat, with_tiles
from jaxferry.step import ProgramKind, places


def with_program_facts(
    profile: Profile,
    partition: Partition,
    derivatives: Mapping[int, Derivative],
    offload_activations: bool = False,
    staging_bytes: int = 0,
) -> Profile:
    """Returns the profile with the facts of its layers' programs that are known before compilation.

    Temporaries depend on the compiler: a measured profile has them, beside its times. `staging_bytes` is device memory
    that transfers need besides the moved bytes.
    """
    fields = [_flags(partition, derivatives, number) for number in range(len(partition.uses))]
    if offload_activations:
        _add_moves(fields, partition, derivatives)
    _add_workspace(fields, profile, partition, derivatives, staging_bytes)
    pairs = zip(profile.layers, fields, strict=True)
    return dataclasses.replace(profile, layers=tuple(dataclasses.replace(layer, **own) for layer, own in pairs))


def with_sum_bytes(profile: Profile, partition: Partition, groups: Collection[int]) -> Profile:
    """Returns the profile for a step in which only sums over micro-batches of these groups leave the device.

    A sum that is wider than the gradient takes as much longer.
    """
    layers = []
    for layer, use in zip(profile.layers, partition.uses, strict=True):
        trained = partition.layers[use.group].trained
        is_wider = use.group in groups and trained.wide is not trained
        sum_bytes = -(-trained.wide.num_bytes // partition.graph.num_shares(trained.is_whole)) if is_wider else 0
        sums = dataclasses.replace(layer, sum_bytes=sum_bytes)
        if sums.sum_bytes != layer.sum_bytes:
            sums = dataclasses.replace(
                sums, offload_s=layer.offload_s * sums.offload_bytes / max(layer.offload_bytes, 1)
            )
        layers.append(sums)
    return dataclasses.replace(profile, layers=tuple(layers))


def without_times(partition: Partition) -> Profile:
    """A profile of sizes only; all times are 0."""
    fields: dict[str, Any] = {f.name: 0.0 for f in dataclasses.fields(LayerProfile) if f.name.endswith("_s")}
    fields["recompute_activation_bytes"] = 0
    layers = []
    for use in partition.uses:
        layer = partition.layers[use.group]
        grad_bytes = -(-layer.trained.num_bytes // partition.graph.num_shares(layer.is_whole))
        fields |= {"param_bytes": layer.num_bytes, "grad_bytes": grad_bytes, "block": layer.block}
        made = LayerProfile(name=use.name, parameters=layer.name, shares_program=use.place > 0, **fields)
        layers.append(made if use.place == 0 else made.without_recomputation())
    graph = partition.graph
    return Profile({}, tuple(layers), num_devices=graph.num_devices, num_processes=graph.num_processes)


def _flags(partition: Partition, derivatives: Mapping[int, Derivative], number: int) -> dict[str, Any]:
    use = partition.uses[number]
    segment = partition.segments[use.segment]
    derivative = derivatives[segment.program]
    return {
        "backward_reads": derivative.reads_groups[use.place],
        "gradient_rows": derivative.has_rows,
        "row_gradient_bytes": derivative.row_gradient_bytes,
        "has_backward": segment.runs_back,
        "has_gradient": use.is_trained,
        "fused_backward": use.segment == len(partition.segments) - 1,
        "shares_program": use.place > 0,
        "save_bytes": 0,
        "fetch_bytes": 0,
        "tiles": segment.num_tiles,
    }


def _add_moves(fields: list[dict[str, Any]], partition: Partition, derivatives: Mapping[int, Derivative]) -> None:
    """Adds the bytes of the values that wait in host memory."""
    order, first = places(partition), [uses[0] for uses in partition.uses_of]
    for value, (last_forward, backward) in offloaded_values(partition, derivatives).items():
        fields[first[order[last_forward][1]]]["save_bytes"] += partition.graph.held_bytes(value)
        fields[first[order[backward][1]]]["fetch_bytes"] += partition.graph.held_bytes(value)


def _add_workspace(
    fields: list[dict[str, Any]],
    profile: Profile,
    partition: Partition,
    derivatives: Mapping[int, Derivative],
    staging_bytes: int,
) -> None:
    """Adds the memory in use while each program runs, besides parameters, gradients, kept activations, temporaries."""
    kept, first = [0], [uses[0] for uses in partition.uses_of]
    for number in first:
        kept.append(kept[-1] + profile.layers[number].activation_bytes)
    values, frees = LiveValues(partition, derivatives), last_readers(partition, derivatives)
    for place, (kind, number) in enumerate(places(partition)):
        workspace = max(values.enter(kind, number) + staging_bytes - kept[number + 1], 0)
        if kind is not ProgramKind.BACKWARD:
            fields[first[number]]["forward_workspace_bytes"] = workspace
        if kind is not ProgramKind.FORWARD:
            fields[first[number]]["backward_workspace_bytes"] = workspace
        values.leave(kind, number, frees.get(place, []))


class RematVariants:
    """The variants of a partition that differ in recomputation.

    Attributes:
      base: the variant in which only segments that `train_step`'s argument names recompute.
      derivatives: by program number, for all variants made so far.
      may_recompute: for each use, whether the plan may choose recomputation of its segment there, which is at the
        segment's first use, and this frees memory. The last segment's forward and backward are one program, which holds
        nothing in between.
    """

    def __init__(self, partition: Partition, remat: Any, tiles: Any = 1) -> None:
        self._choices = remat_of(partition, remat)
        self._partition = with_tiles(partition, tiles, self._choices)
        self.derivatives: dict[int, Derivative] = {}
        self.base = self.of([False] * len(partition.uses))
        kept = [self.derivatives[segment.program] for segment in self.base.segments]
        frees = [bool(derivative.saved or derivative.outputs_read) for derivative in kept[:-1]] + [False]
        can_recompute = [choice == AUTO and can for choice, can in zip(self._choices, frees, strict=True)]
        self.may_recompute = tuple(use.place == 0 and can_recompute[use.segment] for use in partition.uses)

    @property
    def largest_first(self) -> list[int]:
        """The uses at which segments may recompute, largest residuals first."""
        numbers = [number for number, may in enumerate(self.may_recompute) if may]
        segments = {n: self.base.segments[self.base.uses[n].segment] for n in numbers}
        saved = {n: self.derivatives[segment.program].saved for n, segment in segments.items()}
        held = {n: self.base.graph.device_bytes(*avals) for n, avals in saved.items()}
        return sorted(numbers, key=lambda number: (-held[number], number))

    def of(self, recomputes: Sequence[bool]) -> Partition:
        """Returns the variant in which some uses' segments recompute as well; the first use of each segment counts."""
        firsts = [recomputes[uses[0]] for uses in self._partition.uses_of]
        chosen = ["full" if again else choice for again, choice in zip(firsts, self._choices, strict=True)]
        made = with_remat(self._partition, chosen)
        self.derivatives |= derivatives_of(made, known=self.derivatives)
        return made
