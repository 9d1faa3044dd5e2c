"""Builds the partition of a function, step by step."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax

from jaxferry.errors import InputError, PartitionError
from jaxferry.modes import BLOCK, MODULE
from jaxferry.partition import cuts
from jaxferry.partition.cuts import Dataflow, analyse
from jaxferry.partition.derivatives import joint_graph
from jaxferry.partition.graph import Graph
from jaxferry.partition.groups import Group, group_leaves, module_paths, modules_of
from jaxferry.partition.layout import Layer, make_layer
from jaxferry.partition.packed import stored_struct
from jaxferry.partition.segments import (
    ForwardPartition,
    Partition,
    Segment,
    build_segments,
    depending_on,
    with_views,
)
from jaxferry.partition.tracing import (
    Canonical,
    Traced,
    abstract_params,
    bytes_of,
    check_outputs,
    copying_parameters,
    ending_with_loss,
    trace,
)


def partition(
    loss_fn: Callable[..., Any],
    params: Any,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    compute_dtype: Any = None,
    layers: Sequence[Layer] | None = None,
    frozen: Collection[int] = (),
    merge: Callable[[Partition], Sequence[cuts.Merge]] | None = None,
    num_devices: int = 1,
    num_processes: int = 1,
    granularity: str = BLOCK,
) -> Partition:
    """Cuts a loss function into segments without computing anything.

    Args:
      loss_fn: `loss_fn(params, *args, **kwargs)` returns a scalar, or `(scalar, aux)`.
      params: the tree of parameters: arrays or `jax.ShapeDtypeStruct`s of a real floating-point dtype.
      args: further arguments, usually one batch; arrays or shape structs.
      kwargs: keyword arguments, likewise; for instance a PRNG key for dropout.
      compute_dtype: the dtype in which the loss function receives its parameters; None keeps their dtypes.
      layers: the layers of an earlier partition of the same parameters, which are kept where possible; None finds them.
      frozen: indices of the leaves of `params` that are not trained; values that depend on them alone have no
        derivative.
      merge: returns the layers of the partition to merge, which lie side by side; None merges no more than necessary.
      num_devices: the number of devices that share a batch.
      num_processes: the number of processes that they belong to.
      granularity: whether a layer has all parameters between two cuts (`BLOCK`), or those of one module (`MODULE`).
        Programs are the same.

    Raises:
      InputError: if a trained parameter is not real floating point, if there is no parameter, or if the loss depends
        on frozen parameters alone.
      PartitionError: if the loss is not a real scalar or reads no parameter.
    """
    traced = trace(loss_fn, params, args, kwargs, compute_dtype, layers, frozen, num_devices, num_processes)
    loss, aux_tree = check_outputs(traced.graph)
    parts = _cut_into_segments(traced, layers, granularity=granularity)
    if parts.segments and loss not in parts.segments[-1].outputs:
        # Auxiliary outputs read parameters after the loss.
        traced, loss = ending_with_loss(traced, loss)
        parts = _cut_into_segments(traced, layers, granularity=granularity)
    if not any(loss in {*segment.outputs, *segment.nondiff_outputs} for segment in parts.segments):
        raise PartitionError("the loss depends on no parameter: does loss_fn use its first argument?")
    if not any(loss in segment.outputs for segment in parts.segments):
        raise InputError("the loss depends on frozen parameters alone: let the optimizer, or trainable=, train others")
    made = Partition(**vars(parts), loss=loss, aux=traced.graph.outputs[1:], aux_tree=aux_tree)
    merges = () if merge is None else tuple(merge(made))
    return _merged(traced, made, merges, granularity) if merges else made


def partition_forward(
    function: Callable[..., Any],
    params: Any,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    compute_dtype: Any = None,
    layers: Sequence[Layer] | None = None,
    frozen: Collection[int] = (),
    num_devices: int = 1,
    num_processes: int = 1,
) -> ForwardPartition:
    """Cuts any function of parameters into segments for a run without derivatives; arguments as for `partition`.

    Raises:
      InputError: if a parameter is not real floating point, or if there is no parameter.
      PartitionError: if the function reads no parameter.
    """
    traced = trace(
        copying_parameters(function), params, args, kwargs, compute_dtype, layers, frozen, num_devices, num_processes
    )
    parts = _cut_into_segments(traced, layers, is_differentiated=False)
    if not parts.segments:
        raise PartitionError("the function reads no parameter: does it use its first argument?")
    return parts


def _merged(traced: Traced, parts: Partition, merges: Sequence[cuts.Merge], granularity: str) -> Partition:
    """The partition with some of its blocks merged."""
    new_name = {name: "+".join(merge.layers) for merge in merges for name in merge.layers}
    again = _cut_into_segments(traced, None, groups=_blocks(parts.layers, new_name), granularity=granularity)
    return dataclasses.replace(parts, **vars(again) | {"merges": (*parts.merges, *merges)})


def _cut_into_segments(
    traced: Traced,
    layers: Sequence[Layer] | None,
    is_differentiated: bool = True,
    groups: Sequence[Group] | None = None,
    granularity: str = BLOCK,
) -> ForwardPartition:
    """Finds layers, or uses the given ones or those of the given groups, and cuts between their blocks.

    A block that looks rows up is one layer whatever the granularity, since its gradient leaves as rows.
    """
    graph, stored = traced.graph, traced.stored
    may_join = layers is None and groups is None
    if layers is not None:
        groups = _blocks(layers, {})
    elif groups is None:
        groups = group_leaves([leaf.keys for leaf in stored], tables=_tables(graph))
    first_group = [0] * len(stored)
    for number, group in enumerate(groups):
        for leaf in group.leaves:
            first_group[leaf] = number
    flow, stretches, group_of_leaf, joins = _cut(graph, first_group, may_join)
    trained = [value for leaf, value in enumerate(graph.parameters) if leaf not in traced.frozen]
    derived = depending_on(graph, trained)
    names = [groups[group].name for group in first_group]
    # In the order of first use, unread ones last.
    order = list(dict.fromkeys([*(stretch.group for stretch in stretches), *group_of_leaf]))
    blocks = {group: _block(group, group_of_leaf, names) for group in order}
    looked_up = _tables(graph) if granularity == MODULE else frozenset[int]()
    taken = {block.name for block in blocks.values()}
    ranks = [len(graph.avals[value].shape) for value in graph.parameters]
    finer = {
        group: _as_given(block, layers)
        or (
            (block,)
            if granularity == BLOCK or not looked_up.isdisjoint(block.leaves)
            else modules_of(block, [leaf.keys for leaf in stored], ranks, taken - {block.name})
        )
        for group, block in blocks.items()
    }
    made = tuple(_layer(blocks[group], each, traced) for group in order for each in finer[group])
    if layers is not None and set(layers) == set(made):
        # The order of first use may differ between functions; the state keeps its own order.
        made = tuple(layers)
    number_of = {layer.leaves[0].index: number for number, layer in enumerate(made)}
    layers_of_group = {group: [number_of[each.leaves[0]] for each in parts] for group, parts in finer.items()}
    # Among equally cheap cuts, prefer those that let more segments share a program.
    early = cuts.find_cuts(graph, flow, group_of_leaf, is_early=True)
    choices = [stretches] if early == stretches else [stretches, early]
    built = [build_segments(graph, flow, derived, cut, made, layers_of_group) for cut in choices]
    shared = [_share_programs(graph, segments, is_differentiated) for segments in built]
    segments = min(shared, key=lambda segments: len({segment.program for segment in segments}))
    prelude = with_views(flow, flow.prelude)
    read = {value for segment in segments for value in segment.nondiff_inputs}
    read |= {atom for atom in graph.outputs if isinstance(atom, int)}
    return ForwardPartition(
        layers=made,
        segments=tuple(segments),
        graph=graph,
        prelude=prelude,
        prelude_outputs=tuple(value for equation in prelude for value in equation.outputs if value in read),
        notes=traced.notes,
        merges=_merges(joins, first_group, names),
    )


def layers_by_path(params: Any, compute_dtype: Any = None, frozen: Collection[int] = ()) -> tuple[Layer, ...]:
    """Returns the layers that module paths alone suggest, before the loss function is traced.

    Raises:
      InputError: as in `partition`.
    """
    parts = module_paths(params)
    paths = ["/".join(path) for path in parts]
    abstract, master_dtypes = abstract_params(params, paths, compute_dtype, frozen)
    avals = [stored_struct(aval) if leaf in frozen else aval for leaf, aval in enumerate(jax.tree.leaves(abstract))]
    return tuple(make_layer(g.name, g.leaves, paths, avals, master_dtypes, frozen) for g in group_leaves(parts))


def _tables(graph: Graph) -> frozenset[int]:
    """Returns the leaves that are lookup tables: matrices that a gather reads."""
    flow = analyse(graph, {leaf: leaf for leaf in range(len(graph.parameters))})
    found: set[int] = set()
    for equation in flow.main:
        operand = equation.inputs[0] if equation.primitive.name == "gather" else None
        if isinstance(operand, int):
            found |= flow.leaves.get(operand, frozenset())
    return frozenset(leaf for leaf in found if graph.avals[graph.parameters[leaf]].ndim == 2)


def _cut(
    graph: Graph, group_of_leaf: list[int], may_join: bool
) -> tuple[Dataflow, list[cuts.Stretch], list[int], list[tuple[set[int], str, bool]]]:
    """Analyses and cuts; joins groups until every equation reads one group and, with `may_join`, every cut pays off.

    The last result lists the joins: the original groups, the reason, and whether the join was forced.
    """
    first, joins = group_of_leaf, list[tuple[set[int], str, bool]]()

    def note(groups: set[int], reason: str, is_forced: bool) -> None:
        joins.append(({old for old, new in zip(first, group_of_leaf, strict=True) if new in groups}, reason, is_forced))

    while True:
        flow = analyse(graph, dict(enumerate(group_of_leaf)))
        merged, shared = cuts.merge_shared_readers(flow, group_of_leaf)
        for groups, reason in shared:
            note(groups, reason, is_forced=True)
        if not shared:
            stretches = cuts.find_cuts(graph, flow, group_of_leaf)
            expensive = cuts.expensive_cut(stretches, _group_bytes(graph, group_of_leaf)) if may_join else None
            if expensive is None:
                return flow, stretches, group_of_leaf, joins
            note(*expensive, is_forced=False)
            merged = [min(expensive[0]) if group in expensive[0] else group for group in group_of_leaf]
        group_of_leaf = merged


def _merges(
    joins: Sequence[tuple[set[int], str, bool]], group_of_leaf: Sequence[int], names: Sequence[str]
) -> tuple[cuts.Merge, ...]:
    """Returns the joins with layer names in place of group numbers."""
    return tuple(
        cuts.Merge(
            tuple(dict.fromkeys(n for n, g in zip(names, group_of_leaf, strict=True) if g in groups)), reason, is_forced
        )
        for groups, reason, is_forced in joins
    )


def _group_bytes(graph: Graph, group_of_leaf: Sequence[int]) -> list[int]:
    sizes = [0] * len(group_of_leaf)
    for leaf, group in enumerate(group_of_leaf):
        sizes[group] += graph.num_bytes(graph.parameters[leaf])
    return sizes


def _blocks(layers: Sequence[Layer], new_name: Mapping[str, str]) -> list[Group]:
    """The leaves of each block of these layers, some of which have a new name."""
    leaves: dict[str, list[int]] = {}
    for layer in layers:
        name = layer.block or layer.name
        leaves.setdefault(new_name.get(name, name), []).extend(leaf.index for leaf in layer.leaves)
    return [Group(name, tuple(sorted(indices))) for name, indices in leaves.items()]


def _block(group: int, group_of_leaf: Sequence[int], names: Sequence[str]) -> Group:
    """The leaves of a group; `names` holds the name of each leaf's group before groups were joined."""
    leaves = [leaf for leaf, other in enumerate(group_of_leaf) if other == group]
    return Group("+".join(dict.fromkeys(names[leaf] for leaf in leaves)), tuple(leaves))


def _as_given(block: Group, layers: Sequence[Layer] | None) -> tuple[Group, ...]:
    """The given layers of a block; none if there are none, or they are of other blocks."""
    known = [layer for layer in layers or () if layer.block == block.name]
    found = [Group(layer.name, tuple(leaf.index for leaf in layer.leaves)) for layer in known]
    is_whole = sorted(leaf for each in found for leaf in each.leaves) == sorted(block.leaves)
    return tuple(found) if is_whole else ()


def _layer(block: Group, group: Group, traced: Traced) -> Layer:
    avals = [traced.graph.avals[value] for value in traced.graph.parameters]
    paths, origins = [leaf.path for leaf in traced.stored], [(leaf.source, leaf.part) for leaf in traced.stored]
    of_block = "" if group == block else block.name
    return make_layer(
        group.name, group.leaves, paths, avals, traced.master_dtypes, traced.frozen, origins, block=of_block
    )


def _share_programs(graph: Graph, segments: Sequence[Segment], is_differentiated: bool) -> list[Segment]:
    """Gives equal segments the same program number; without differentiation, derivative rules are ignored."""
    keys = [_program_key(graph, segment, is_differentiated) for segment in segments]
    numbers = {key: number for number, (key, _) in enumerate(dict.fromkeys(keys))}
    return [
        dataclasses.replace(segment, program=numbers[key], content=None if is_opaque else key)
        for segment, (key, is_opaque) in zip(segments, keys, strict=True)
    ]


def _program_key(graph: Graph, segment: Segment, is_differentiated: bool) -> tuple[str, bool]:
    """A digest of the segment's program, and whether parts of it could be compared only by identity."""
    inputs = (*segment.weights, *segment.inputs, *segment.nondiff_inputs)
    outputs = (*segment.outputs, *segment.nondiff_outputs)
    roles = [len(part) for part in (segment.weights, segment.inputs, segment.nondiff_inputs, segment.outputs)]
    roles += [*segment.trained, *itertools.chain.from_iterable((-1, *own) for own in segment.members)]
    canonical = Canonical(is_derived=not is_differentiated)
    content = canonical.equations(segment.equations, inputs, outputs, graph.avals)
    if canonical.is_opaque and is_differentiated:
        derived = joint_graph(graph, segment)
        canonical = Canonical(is_derived=True)
        content = canonical.equations(
            derived.equations, (*derived.parameters, *derived.batch, *derived.constants), derived.outputs, derived.avals
        )
        content = (content, [bytes_of(constant) for constant in derived.constants.values()])
    return canonical.digest((is_differentiated, roles, content)), canonical.is_opaque
