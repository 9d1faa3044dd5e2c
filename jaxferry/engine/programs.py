"""The compiled programs of a partition: forward and backward for each distinct segment, or its evaluation.

The shadow model determines which programs exist: where each reads parameters and writes gradients. The last segment's
forward and backward follow each other, so they are one program, `loss`, which stores nothing in between. Donating a
dropped layer's buffers to its backward, for the gradients, does not pay: XLA first copies the weights elsewhere, which
costs the same memory and more time than it saves.

With the facts that programs add to a profile, lowering a plan for it gives the tasks that the engine runs. Variants of
a partition recompute more segments. Programs have the same numbers in all variants, so a program that is compiled for
one serves the others:

    remat (none, products, full, policy, auto) --base--> only segments that the argument names recompute
                                               --of(remats)--> these segments recompute as well
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import warnings
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp

from jaxferry.costs import NO_RECOMPUTATION, LayerProfile, Profile
from jaxferry.engine.lowering import LeavingValues, aval_of, last_readers, offloaded_values
from jaxferry.engine.memory import LiveValues
from jaxferry.engine.program_functions import ProgramTracer
from jaxferry.modes import Remat
from jaxferry.native import check_donated, library, targets
from jaxferry.partition import (
    AUTO,
    Derivative,
    ForwardPartition,
    Partition,
    Segment,
    differentiate,
    evaluate,
    remat_of,
    with_remat,
    with_tiles,
)
from jaxferry.processes import check_same
from jaxferry.step import ProgramKey, ProgramKind, places
from jaxferry.transport import Placement, begin_shared, finished, in_background

Compiled = Callable[..., Any]


class Programs:
    """The programs that the executor runs, compiled in parallel if the machine has the cores.

    Attributes:
      derivatives: for each program number, the values that its backward reads and keeps; empty for evaluations.
      is_scaled: whether the loss is scaled before its backward, by an additional argument of the loss program.
      prelude: `batch leaves -> prelude values, [flag]`, or None; compiled beside the first programs.
      temporary_bytes: device memory that each program needs beside its arguments and results.
    """

    def __init__(
        self,
        partition: ForwardPartition,
        derivatives: dict[int, Derivative],
        placement: Placement,
        native: bool = False,
        is_scaled: bool = False,
        held: dict[Hashable, Compiled] | None = None,
    ) -> None:
        self._held = {} if held is None else held
        self.is_scaled, self._has_others = is_scaled, placement.num_processes > 1
        self._platform: str = placement.platform
        self._devices: Any = placement.device.addressable_devices
        self.derivatives = derivatives
        self.prelude = make_prelude(partition, placement)
        self.temporary_bytes: dict[ProgramKey, int] = {}
        self._native = native
        self._tracer = ProgramTracer(partition, derivatives, placement, native, is_scaled)
        self._prelude: Future[None] | None = None
        self._compiled: dict[ProgramKey, Any] = {}
        self._lowered: dict[ProgramKey, Any] = {}

    def run_prelude(self, leaves: Sequence[Any], is_awaited: bool) -> tuple[list[Any], list[jax.Array]]:
        """Runs what depends on the batch alone, before the first layer; with `is_awaited`, its errors surface here.

        Returns its values, and a flag that is ready once it has ended, or fails with it; none without a prelude.
        """
        if self._prelude is not None and not self._prelude.done():
            concurrent.futures.wait([self._prelude])  # the call finds what it has compiled
        made: tuple[list[Any], list[jax.Array]] = ([], []) if self.prelude is None else self.prelude(leaves)
        return jax.block_until_ready(made) if is_awaited else made

    def lowered(self, key: ProgramKey) -> Any:
        """Returns the program of a key before XLA compiles it (`jax.stages.Lowered`)."""
        if key not in self._lowered:
            lowered = self._lowered[key] = lower_traced(self.traced(key))
            if self._native:
                check_donated(lowered, f"the {key.kind.value} of program {key.program}")
        return self._lowered[key]

    def traced(self, key: ProgramKey) -> Any:
        """Returns the program of a key before it is lowered for a platform (`jax.stages.Traced`)."""
        return self._tracer.trace(key)

    def keep(self, keys: Iterable[ProgramKey]) -> None:
        """Drops all programs except these, and holds these for later steps."""
        kept = set(keys)
        self._lowered = {}
        self._compiled = {key: program for key, program in self._compiled.items() if key in kept}
        contents = {key: self._tracer.content(key) for key in self._compiled}
        self._held |= {content: self._compiled[key] for key, content in contents.items() if content is not None}

    def require(self, keys: Iterable[ProgramKey], meanwhile: Callable[[], object] | None = None) -> None:
        """Compiles the programs that are not compiled yet; if there are any, calls `meanwhile` beside that."""
        missing = {key: self._tracer.content(key) for key in keys if key not in self._compiled}
        if self._has_others:
            check_same("their programs", "".join(self.lowered(key).as_text() for key in missing))
        begun = begin_shared(missing, self.lowered)
        if begun:
            self._begin_prelude()
        if begun and meanwhile is not None:
            meanwhile()
        made = finished(begun)
        self._compiled |= made
        for key, program in made.items():
            stats = program.memory_analysis()
            own = 0 if stats is None else stats.temp_size_in_bytes
            # An exchange may run before a program that reads host memory, and ends before it.
            self.temporary_bytes[key] = max(own, self._tracer.exchanged_bytes(key))
        if made and self._native and self._platform != "cpu":
            for product in targets.PRODUCTS:
                for device in self._devices:
                    library(self._platform).plan_product(device.local_hardware_id, *product)

    def _begin_prelude(self) -> None:
        """Lets a thread compile the prelude; what fails there fails in `run_prelude`."""
        prelude: Any = self.prelude
        if prelude is not None and self._prelude is None:
            self._prelude = in_background(lambda: prelude.trace(self._tracer.batch()).lower().compile())

    def temporary_bytes_of(self, keys: Iterable[ProgramKey]) -> Mapping[ProgramKey, int]:
        """Compiles these programs and returns `temporary_bytes`."""
        self.require(keys)
        return self.temporary_bytes

    def bytes_of(self, key: ProgramKey) -> int:
        """The device memory that a compiled program needs by itself: arguments, results and temporaries."""
        stats = self._compiled[key].memory_analysis()
        if stats is None:
            return 0
        return int(stats.argument_size_in_bytes + stats.output_size_in_bytes + stats.temp_size_in_bytes)

    def __getitem__(self, key: ProgramKey) -> Compiled:
        """Returns the compiled program.

        `weights` are the parameters of each group, or its vectors in host memory if the key reads those:

            evaluation (weights, inputs, nondiff_inputs) -> outputs, nondiff_outputs
            forward   (weights, inputs, nondiff_inputs) -> outputs, nondiff_outputs, saved, is_finite
            loss      ([destinations,] weights, inputs, nondiff_inputs [, scale])
                      -> gradients, (outputs, nondiff_outputs, is_finite, input cotangents), squared norms
            backward  ([destinations,] weights, inputs, nondiff_inputs, outputs, saved, cotangents)
                      -> gradients, input cotangents, squared norms

        Gradients and norms are lists, one element for each group. Small gradients are joined (`Layer.join_small`),
        unless some are rows of lookups. A program that writes host memory takes the vectors to write as
        `destinations`, and returns them instead of gradients. The weights of a group that a backward does not read are
        an empty list. A norm is None unless all gradients of the group were whole on the device.

        A program that stores takes `destinations` too, and returns them with the gradients that it copies there, as a
        pair in place of gradients. One that arrives has a last argument, the vectors that the load of its weights
        reads. It is donated the weights, and returns these and everything else.
        """
        program: Compiled = self._compiled[key]
        return program

    def gradients_of(self, key: ProgramKey) -> Any:
        """The shapes of the gradients that a compiled program returns, by group."""
        made = self._compiled[key].out_info
        return made[1][0] if key.arrives else made[0]

    @property
    def num_executables(self) -> int:
        """The number of programs that XLA compiled for a step."""
        return len(self._compiled) + (self.prelude is not None)


def derivatives_of(
    partition: Partition, remat: Any = None, known: Mapping[int, Derivative] | None = None
) -> dict[int, Derivative]:
    """Differentiates each distinct segment that is not `known`; `remat` as in `differentiate`, the same for all."""
    missing = _first_by_program(s for s in partition.segments if known is None or s.program not in known)
    return {program: differentiate(partition.graph, segment, remat) for program, segment in missing.items()}


def _first_by_program(segments: Iterable[Segment]) -> dict[int, Segment]:
    """The first segment of each program: what is made of it is that of all of them."""
    found: dict[int, Segment] = {}
    for segment in segments:
        found.setdefault(segment.program, segment)
    return found


def lower_traced(traced: Any, platform: str | None = None) -> Any:
    """Lowers a traced program for a platform (`"cuda"`), by default that of its arguments."""
    with warnings.catch_warnings():
        # XLA chooses which donated buffers fit a result; the others are freed after the call.
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        return traced.lower() if platform is None else traced.lower(lowering_platforms=(platform,))


def make_prelude(partition: ForwardPartition, placement: Placement) -> Compiled | None:
    """Returns the jitted prelude, or None if there is nothing to run."""
    if not partition.prelude_outputs:
        return None
    graph = partition.graph

    def prelude(leaves: Sequence[Any]) -> tuple[list[Any], list[jax.Array]]:
        values = {**dict(zip(graph.batch, leaves, strict=True)), **graph.constants}
        evaluate(partition.prelude, values)
        return [values[value] for value in partition.prelude_outputs], [jnp.array(True)]

    shardings: Any = placement.device
    if placement.num_devices > 1:
        shardings = ([placement.of(graph, graph.avals[value]) for value in partition.prelude_outputs], placement.device)
    return jax.jit(prelude, out_shardings=shardings)


def with_program_facts(
    profile: Profile,
    partition: Partition,
    derivatives: Mapping[int, Derivative],
    offload_activations: bool | str = False,
    staging_bytes: int = 0,
) -> Profile:
    """Returns the profile with the facts of its layers' programs that are known before compilation.

    Temporaries depend on the compiler: a measured profile has them, beside its times. With `AUTO`, plans choose which
    activations wait in host memory. `staging_bytes` is device memory that transfers need besides the moved bytes.
    """
    fields = [_flags(partition, derivatives, number) for number in range(len(partition.uses))]
    order, first = places(partition), [uses[0] for uses in partition.uses_of]
    # Values and residuals that wait in host memory.
    moved = offloaded_values(partition, derivatives) if offload_activations is True else {}
    if offload_activations == AUTO:
        levels, leaving = {Remat.NONE: derivatives}, LeavingValues(partition)
        levels |= {each: derivatives_of(partition, each.value) for each in Remat if each is not Remat.NONE}
        for number, uses in enumerate(partition.uses_of):
            fields[uses[0]]["offloadable_bytes"] = _offloadable_bytes(partition, levels, leaving, number)
    for value, (last_forward, backward) in moved.items():
        num_bytes = partition.graph.device_bytes(aval_of(partition, derivatives, value))
        fields[first[order[last_forward][1]]]["save_bytes"] += num_bytes
        fields[first[order[backward][1]]]["fetch_bytes"] += num_bytes
    # The memory in use while each program runs, besides parameters, gradients, kept activations and temporaries.
    kept = [0]
    for number in first:
        kept.append(kept[-1] + profile.layers[number].activation_bytes)
    values, frees = LiveValues(partition, derivatives), last_readers(partition, derivatives)
    for place, (kind, number) in enumerate(order):
        workspace = max(values.enter(kind, number) + staging_bytes - kept[number + 1], 0)
        if kind is not ProgramKind.BACKWARD:
            fields[first[number]]["forward_workspace_bytes"] = workspace
        if kind is not ProgramKind.FORWARD:
            fields[first[number]]["backward_workspace_bytes"] = workspace
        values.leave(kind, number, frees.get(place, []))
    return profile.with_layers(fields)


def _offloadable_bytes(
    partition: Partition, levels: Mapping[Remat, Mapping[int, Derivative]], leaving: LeavingValues, number: int
) -> dict[Remat, int]:
    """By what a segment keeps, the bytes of it that may wait in host memory; `levels` are derivatives by program."""
    graph, segment, found = partition.graph, partition.segments[number], dict[Remat, int]()
    for remat in Remat if segment.runs_back else ():
        derivative = levels[remat][segment.program]
        values = leaving.of(derivative, number)
        avals = (graph.avals[value] if isinstance(value, int) else derivative.saved[value[1]] for value in values)
        found[remat] = graph.device_bytes(*avals)
    return found


def with_sum_bytes(profile: Profile, partition: Partition, groups: Collection[int]) -> Profile:
    """Returns the profile for a step in which only sums over micro-batches of these groups leave the device.

    A sum that is wider than the gradient takes as much longer.
    """
    layers = []
    for layer, use in zip(profile.layers, partition.uses, strict=True):
        trained = partition.layers[use.group].trained
        is_wider = use.group in groups and trained.wide is not trained and layer.has_gradient
        sum_bytes = -(-trained.wide.num_bytes // partition.graph.num_shares(trained.is_whole)) if is_wider else 0
        offload_s = layer.offload_s * (sum_bytes or layer.grad_bytes) / max(layer.offload_bytes, 1)
        layers.append({} if sum_bytes == layer.sum_bytes else {"sum_bytes": sum_bytes, "offload_s": offload_s})
    return profile.with_layers(layers)


def without_times(partition: Partition) -> Profile:
    """A profile of sizes only; all times are 0."""
    fields: dict[str, Any] = {f.name: 0.0 for f in dataclasses.fields(LayerProfile) if f.name.endswith("_s")}
    fields |= {"state_read_s": None, "state_write_s": None}  # no state is in a scratch file
    layers, again = [], {key: 0 if key.endswith("_bytes") else 0.0 for key in NO_RECOMPUTATION}
    for use in partition.uses:
        layer = partition.layers[use.group]
        grad_bytes = -(-layer.trained.num_bytes // partition.graph.num_shares(layer.is_whole))
        fields |= {"param_bytes": layer.num_bytes, "grad_bytes": grad_bytes, "block": layer.block}
        fields |= again if use.place == 0 else dict.fromkeys(again)
        layers.append(LayerProfile(name=use.name, parameters=layer.name, shares_program=use.place > 0, **fields))
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
        "offloadable_bytes": {},
        "save_bytes": 0,
        "fetch_bytes": 0,
        "tiles": segment.num_tiles,
    }


class RematVariants:
    """The variants of a partition that differ in recomputation.

    In `base` only segments that `train_step`'s argument names recompute. `derivatives` has, by program number, those of
    all variants made so far. `may_keep` has for each use what the plan may let its segment keep: at the segment's first
    use also what frees memory. The last segment's forward and backward are one program, which holds nothing in between.
    """

    def __init__(self, partition: Partition, remat: Any, tiles: Any = 1) -> None:
        self._choices = remat_of(partition, remat)
        self._partition = with_tiles(partition, tiles, self._choices)
        self.derivatives: dict[int, Derivative] = {}
        self.base = self.of([Remat.NONE] * len(partition.uses))
        pairs = zip(self.base.segments[:-1], partition.uses_of[:-1], strict=True)
        chosen = {uses[0]: segment for segment, uses in pairs if segment.remat == AUTO}
        levels = {program: self._levels(each) for program, each in _first_by_program(chosen.values()).items()}
        found = [levels[chosen[n].program] if n in chosen else (Remat.NONE,) for n in range(len(partition.uses))]
        self.may_keep = tuple(found)

    def _levels(self, segment: Segment) -> tuple[Remat, ...]:
        """What a plan may let a segment keep; large products if that is more than its inputs, and far less than all."""
        derivative, found = self.derivatives[segment.program], [Remat.NONE]
        if derivative.saved or derivative.outputs_read:
            products = differentiate(self.base.graph, segment, Remat.PRODUCTS.value)
            found += [Remat.PRODUCTS] * bool(products.saved and products.is_worth_it(derivative)) + [Remat.FULL]
        return tuple(found)

    @property
    def largest_first(self) -> list[int]:
        """The uses at which segments may recompute, largest residuals first."""
        numbers = [number for number, levels in enumerate(self.may_keep) if Remat.FULL in levels]
        segments = {n: self.base.segments[self.base.uses[n].segment] for n in numbers}
        saved = {n: self.derivatives[segment.program].saved for n, segment in segments.items()}
        held = {n: self.base.graph.device_bytes(*avals) for n, avals in saved.items()}
        return sorted(numbers, key=lambda number: (-held[number], number))

    @property
    def recomputing(self) -> dict[Remat, Partition]:
        """The variants in which all segments that may keep less do so, by what they keep."""
        levels = [remat for remat in Remat if any(remat in own for own in self.may_keep) and remat is not Remat.NONE]
        return {each: self.of([each if each in own else Remat.NONE for own in self.may_keep]) for each in levels}

    def of(self, remats: Sequence[Remat]) -> Partition:
        """Returns the variant in which some uses' segments recompute as well; the first use of each segment counts."""
        firsts = [remats[uses[0]] for uses in self._partition.uses_of]
        pairs = zip(firsts, self._choices, strict=True)
        chosen = [choice if remat is Remat.NONE else remat.value for remat, choice in pairs]
        made = with_remat(self._partition, chosen)
        self.derivatives |= derivatives_of(made, known=self.derivatives)
        return made
