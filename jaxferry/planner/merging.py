"""Decides which neighbouring layers become one, so that issuing a step takes no longer than the step itself.

On an accelerator one thread issues the programs and copies of every segment. Where that takes longer than the busiest
lane works, small neighbours become one segment: fewer programs, fewer copies, the same results up to rounding.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Iterator, Sequence

from jaxferry.costs import LayerProfile, Machine, estimate_profile, partition_costs
from jaxferry.partition import Layer, Merge, Partition, Segment
from jaxferry.units import format_seconds

_LEAST_SEGMENTS = 8

MergeRule = Callable[[Partition], tuple[Merge, ...]]


def merges_of_small(parts: Partition, machine: Machine) -> tuple[Merge, ...]:
    """The neighbours to merge on a machine, by a roofline model of their costs.

    None are merged if the busiest lane of a step works at least as long as issuing it takes. Otherwise layers are
    merged from the first on until each takes as long on its busiest lane as to issue. Merging stops at an eighth of all
    parameters, since a layer's transfers hide behind the work of the others. Layers that several segments read, and
    lookup tables, stay alone.

    Args:
      parts: the segments, of one group each.
      machine: the machine's figures.
    """
    costs = estimate_profile(partition_costs(parts, None), machine).layers
    if machine.issue_s * len(costs) <= max(sum(times) for times in zip(*map(_lanes_s, costs), strict=True)):
        return ()
    reason = f"together they take no longer than the {format_seconds(machine.issue_s)} that issuing a segment takes"
    return tuple(
        Merge(tuple(parts.layers[group].name for group in groups), reason, is_forced=False)
        for groups in _runs_of_small(parts, costs, machine.issue_s)
        if len(groups) > 1
    )


def merge_rule(names: Sequence[str], machine: Machine | None) -> MergeRule | None:
    """What decides the merges of a training step: the names of its plan or profile, else the machine; None for none."""
    if names:
        return functools.partial(merges_of_names, names=names)
    return None if machine is None else functools.partial(merges_of_small, machine=machine)


def _lanes_s(costs: LayerProfile) -> tuple[float, ...]:
    """The seconds that each lane works for a layer."""
    computing_s = costs.forward_s + costs.backward_s + costs.inter_forward_s + costs.inter_backward_s
    return costs.load_s, computing_s, costs.offload_s, costs.update_s


def _runs_of_small(parts: Partition, costs: Sequence[LayerProfile], issue_s: float) -> Iterator[list[int]]:
    """Consecutive groups, each run no longer than it takes to reach the time of issuing."""
    uses = collections.Counter(use.group for use in parts.uses)
    uses.update(segment.groups[0] for segment in parts.segments if _looks_up(segment))
    most_bytes = sum(layer.num_bytes for layer in parts.layers) / _LEAST_SEGMENTS
    run: list[int] = []
    run_s = run_bytes = 0.0
    for segment, of_segment in zip(parts.segments, costs, strict=True):
        [group] = segment.groups
        size, is_alone = parts.layers[group].num_bytes, uses[group] > 1
        if run and (is_alone or run_s >= issue_s or run_bytes + size > most_bytes):
            yield run
            run, run_s, run_bytes = [], 0.0, 0
        run, run_s, run_bytes = [*run, group], run_s + max(_lanes_s(of_segment)), run_bytes + size
        if is_alone:
            yield run
            run, run_s, run_bytes = [], 0.0, 0
    if run:
        yield run


def _looks_up(segment: Segment) -> bool:
    """Whether a gather reads one of the segment's parameters. Its gradient is rows, which cross the link alone."""
    return any(e.primitive.name == "gather" and e.inputs[0] in segment.weights for e in segment.equations)


def merges_of_names(parts: Partition, names: Sequence[str]) -> tuple[Merge, ...]:
    """The neighbours that the names of a plan's or profile's layers ask for: `a+b` is the merge of `a` and `b`."""
    known = {layer.name for layer in parts.layers}
    wanted = [name for name in dict.fromkeys(names) if name not in known]
    merges = (_merge_named(parts.layers, name) for name in wanted)
    return tuple(merge for merge in merges if merge is not None)


def _merge_named(layers: Sequence[Layer], name: str) -> Merge | None:
    for first, layer in enumerate(layers):
        joined = layer.name
        for last in range(first + 1, len(layers)):
            if not name.startswith(f"{joined}+"):
                break
            joined = f"{joined}+{layers[last].name}"
            if joined == name:
                merged = tuple(other.name for other in layers[first : last + 1])
                return Merge(merged, "the plan or profile names them so", is_forced=False)
    return None
