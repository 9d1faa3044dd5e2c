"""Prepares a training step for one batch structure: partition, plan, lower, fit, compile.

loss_fn, batch --partition--> segments --policy--> Plan --fit--> Plan within the budget --lower--> StepProgram
"""

from __future__ import annotations

import dataclasses
import functools
import json
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.extend import core

from jaxferry.choice import (
    choose_plan,
    known_machine,
    leanest_plan,
    needs_times,
    planning_profile,
    with_updates_on_device,
)
from jaxferry.engine import (
    DeviceUpdateCompiler,
    Evaluator,
    Norms,
    Peak,
    Placement,
    PrefetchSlot,
    Process,
    Programs,
    Recorder,
    RematVariants,
    Resources,
    Rules,
    RunnableStep,
    StepProgram,
    StepRunner,
    TaskList,
    Transport,
    beside_rows,
    fit,
    loads_ahead,
    lower,
    make_lanes,
    make_transport,
    peak_bytes,
    summed_groups,
    with_sums,
)
from jaxferry.engine.all_processes import check_same
from jaxferry.engine.facts import with_sum_bytes
from jaxferry.errors import BudgetError, InputError
from jaxferry.measure.profile import measure_profile
from jaxferry.merging import merge_rule
from jaxferry.model import Model
from jaxferry.modes import Mode, Remat, UpdatePlace
from jaxferry.options import MEASURE, Options
from jaxferry.partition import (
    AUTO,
    ForwardPartition,
    Layer,
    Partition,
    partition,
    partition_forward,
    traced_jaxpr,
    with_flags,
)
from jaxferry.partition.graph import Graph
from jaxferry.plan.records import Plan, Updates
from jaxferry.planning import with_update_order
from jaxferry.profiling.machines import Machine
from jaxferry.profiling.progress import progress_bar
from jaxferry.profiling.records import Profile
from jaxferry.recent import Recent
from jaxferry.schedule import Schedule
from jaxferry.simulate.report import simulate_schedule
from jaxferry.structure import split_flags, structure_of


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A step prepared for batches of one structure: see `TrainStep.prepare`.

    Attributes:
      program: the step program that runs.
      profile: what it was planned with, and the facts of its programs.
      peak: the most device memory that a step needs.
      is_changed: whether the memory budget has changed the modes of the policy's or the user's plan.
      num_executables: number of programs compiled for the device.
      runner: runs the step program.
    """

    program: StepProgram
    profile: Profile
    peak: Peak
    is_changed: bool
    num_executables: int
    runner: StepRunner = dataclasses.field(repr=False)

    @property
    def partition(self) -> Partition:
        """The segments."""
        return self.program.partition

    @property
    def plan(self) -> Plan:
        """The plan that runs: the policy's, as changed by the memory budget and the options."""
        return self.program.plan

    @property
    def schedule(self) -> Schedule:
        """The tasks of a step as they run. Durations are known only with a profile."""
        return self.program.schedule

    @property
    def modes(self) -> tuple[Mode, ...]:
        """The mode of each segment."""
        return self.plan.modes

    @property
    def remat(self) -> tuple[Any, ...]:
        """What each segment keeps between forward and backward: `"none"`, `"full"`, or a policy."""
        return tuple("none" if segment.remat == AUTO else segment.remat for segment in self.partition.segments)


class _Cut:
    """What the steps of one loss function, structure and choice of groups share.

    Args:
      parts: the partition.
      jaxpr, key: where `_CUTS` holds it.

    Attributes:
      parts: as given.
      programs: compiled programs by content. They live as long as the loss function does, as those of `jax.jit`, unless
        a step drops them for those of newer structures.
    """

    def __init__(self, parts: Partition, jaxpr: core.ClosedJaxpr, key: Any) -> None:
        self.parts = parts
        self._jaxpr, self._key = weakref.ref(jaxpr), key
        self.programs: dict[Any, Any] = {}
        self._variants: dict[str, RematVariants] = {}

    def variants(self, remat: Any) -> RematVariants:
        """The rematerialized variants for the checked argument of `train_step`; only those of a name are shared."""
        if not isinstance(remat, str):
            return RematVariants(self.parts, remat)
        if remat not in self._variants:
            self._variants[remat] = RematVariants(self.parts, remat)
        return self._variants[remat]

    def forget(self) -> None:
        """Makes later steps cut and compile anew."""
        cuts = {} if (jaxpr := self._jaxpr()) is None else _CUTS.get(jaxpr, {})
        if cuts.get(self._key) is self:
            del cuts[self._key]


_CUTS: weakref.WeakKeyDictionary[core.ClosedJaxpr, dict[Any, _Cut]] = weakref.WeakKeyDictionary()
"""By the jaxpr of a loss function, which lives as long as the function does."""


class Compiler:
    """Prepares and caches steps and evaluations of one model.

    Args:
      model: the model.
      loss_fn: its loss function.
      options: those of `train_step`.
      shared: what all steps of the training step share.

    Attributes:
      model: as given.
      layers: the parameter groups. The first batch decides them; until then they are the model's.
    """

    def __init__(self, model: Model, loss_fn: Callable[..., Any], options: Options, shared: Shared) -> None:
        self.model, self._loss_fn, self._options, self._shared = model, loss_fn, options, shared
        self._known_layers: tuple[Layer, ...] | None = None
        self._prepared: Recent[tuple[Prepared, _Cut]] = Recent(options.cached_shapes, self._drop)
        self._evaluators: Recent[tuple[Evaluator, _Cut | None]] = Recent(options.cached_shapes, self._drop)
        self._has_dropped, self._merges_small = False, options.merge_small
        self._transports: dict[tuple[Layer, ...], Transport] = {}

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The parameter groups."""
        return self._known_layers or self.model.layers

    @property
    def prepared(self) -> list[Prepared]:
        """All prepared steps."""
        return [prepared for prepared, _ in self._prepared]

    def prepare(self, args: Any, kwargs: Mapping[str, Any]) -> Prepared:
        """The prepared step for arguments of this structure; prepares it on the first call."""

        def make() -> tuple[Prepared, _Cut]:
            self._shared.prefetch.take(None)  # copies in flight would disturb the measurement
            is_first = self._known_layers is None
            try:
                return self._compiled(self._cut(args, kwargs))
            except BudgetError:
                if not (is_first and self._merges_small):
                    raise
                self._merges_small, self._known_layers = False, None
                return self._compiled(self._cut(args, kwargs))

        return self._prepared.get(structure_of(args, kwargs), make)[0]

    def measure(self, args: Any, kwargs: Mapping[str, Any]) -> Profile:
        """Measures what each layer costs on the device."""
        self._shared.prefetch.take(None)
        variants, programs = self._variants(self._cut(args, kwargs))
        placement, state_bytes = self._shared.placement, self._state_bytes(variants.base)
        measured = self._measured(variants, programs)
        return with_updates_on_device(measured, variants.base, placement.device_kind, state_bytes, placement.updates)

    def evaluator(self, function: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Evaluator:
        """The evaluator of a function of the parameters."""

        def make() -> tuple[Evaluator, _Cut | None]:
            cut = self._cut(args, kwargs) if function is self._loss_fn else None
            parts = self._forward_partition(function, args, kwargs) if cut is None else cut.parts
            budget, transport = self._options.memory_budget_bytes, self._transport_of(parts.layers)
            return Evaluator(parts, self._shared.placement, transport, self.model.is_native, budget), cut

        return self._evaluators.get((function, structure_of(args, kwargs)), make)[0]

    def _compiled(self, cut: _Cut) -> tuple[Prepared, _Cut]:
        _check_shared(cut.parts.graph)
        if self._shared.placement.num_processes > 1:
            check_same("the shapes of their batches", _shapes(cut.parts.graph))
        variants, programs = self._variants(cut)
        profile = self._profile(variants, programs)
        resources = self._shared.resources(self._transport_of(variants.base.layers), self.model)
        return _StepCompiler(variants, programs, profile, resources, self._options).compile_best(), cut

    def _drop(self, dropped: tuple[Any, _Cut | None]) -> None:
        """Frees what was compiled for a structure; warns the first time."""
        _, cut = dropped
        if cut is not None:
            cut.forget()
        if not self._has_dropped:
            self._has_dropped = True
            warnings.warn(
                f"more than {self._options.cached_shapes} shapes of batches (or functions of `apply`) so far: each is "
                "planned and compiled anew, and what was compiled for the oldest is freed; pad batches to a few fixed "
                "shapes, or raise cached_shapes=",
                stacklevel=7,
            )

    def _cut(self, args: Any, kwargs: Mapping[str, Any]) -> _Cut:
        """The partition for these arguments. The first one decides the groups; later ones keep them where possible."""
        arrays, flags = split_flags(kwargs)
        model, known = self.model, self._known_layers
        given = (with_flags(self._loss_fn, flags), model.params, args, arrays)
        dtype, frozen = model.compute_dtype, model.optimizer.frozen
        jaxpr = traced_jaxpr(*given, dtype, frozen)
        cuts = _CUTS.setdefault(jaxpr, {})
        names, machine = self._merging(known)
        rule = names or (machine and machine.name)
        num, num_processes = self._shared.placement.num_devices, self._shared.placement.num_processes
        key = (tuple(leaf.dtype for leaf in jax.tree.leaves(model.params)), known, frozen, rule, num, num_processes)
        if key not in cuts:
            merge = merge_rule(names, machine)
            settings = {"compute_dtype": dtype, "layers": known, "frozen": frozen, "merge": merge}
            parts = partition(*given, **settings, num_devices=num, num_processes=num_processes)
            cuts[key] = _Cut(parts, jaxpr, key)
        cut = cuts[key]
        if known is None:
            # Evaluators made earlier have other groups. New ones use these, so the state is not rearranged.
            self._known_layers = cut.parts.layers
            self._evaluators.clear()
        return cut

    def _merging(self, known: tuple[Layer, ...] | None) -> tuple[tuple[str, ...], Machine | None]:
        """What decides the merges of small layers: the names of a given plan or profile, or the machine."""
        placement, remat = self._shared.placement, self._options.remat
        if known is not None:
            return (), None
        # A mapping of `remat` names layers as they are.
        may_merge = self._merges_small and not placement.is_cpu and not isinstance(remat, Mapping)
        return self._options.given_names, known_machine(placement.device_kind) if may_merge else None

    def _forward_partition(
        self, function: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]
    ) -> ForwardPartition:
        arrays, flags = split_flags(kwargs)
        model = self.model
        return partition_forward(
            with_flags(function, flags),
            model.params,
            args,
            arrays,
            compute_dtype=model.compute_dtype,
            layers=self._known_layers,
            frozen=model.optimizer.frozen,
            num_devices=self._shared.placement.num_devices,
            num_processes=self._shared.placement.num_processes,
        )

    def _variants(self, cut: _Cut) -> tuple[RematVariants, Programs]:
        """The segments with their rematerialized variants, and their uncompiled programs."""
        self._shared.warn_once(cut.parts)
        variants = cut.variants(self._options.remat)
        if self._options.offload_activations:
            _check_fixed_remat(variants.base, self._options.plan)
        self.model.optimizer.check_parts(cut.parts.layers)
        is_scaled = self._options.loss_scale is not None
        placement, is_native = self._shared.placement, self.model.is_native
        return variants, Programs(variants.base, variants.derivatives, placement, is_native, is_scaled, cut.programs)

    def _transport_of(self, layers: tuple[Layer, ...]) -> Transport:
        """The transport of these groups, shared by all programs so that its memory is shared too."""
        if layers not in self._transports:
            self._transports[layers] = make_transport(
                self.model.transport, self._shared.placement, layers, self._options.accumulate > 1
            )
        return self._transports[layers]

    def _needs_all_gradients(self, parts: Partition) -> bool:
        """Whether updates wait for all gradients under any plan."""
        is_by_layer = self.model.optimizer.is_by_layer(parts.layers)
        return rules_of(self._options).need_all_gradients or not is_by_layer

    def _profile(self, variants: RematVariants, programs: Programs) -> Profile:
        """The profile to plan and lower with: the user's own, measured, estimated, or of sizes only."""
        options, given = self._options, self._options.profile
        is_alone = self._shared.placement.num_devices == 1
        if given == MEASURE or (given is None and needs_times(options.policy) and is_alone):
            given = self._measured(variants, programs)
        return planning_profile(
            variants,
            options,
            given if isinstance(given, Profile) else None,
            self._shared.placement.device_kind,
            self._needs_all_gradients(variants.base),
            self.model.optimizer.is_joint,
            self._transport_of(variants.base.layers).staging_bytes,
            self._state_bytes(variants.base),
            self._shared.placement.updates,
        )

    def _state_bytes(self, parts: Partition) -> dict[str, int] | None:
        """Bytes of masters and optimizer state of each group that the segments read.

        None if some groups are updated together and not all. One update of all is shared out by parameters.
        """
        optimizer, groups = self.model.optimizer, parts.layers
        if not optimizer.is_joint and not optimizer.is_by_layer(groups):
            return None
        read = {segment.group for segment in parts.segments}
        found: dict[str, int] = {}
        for unit in optimizer.units_of(groups):
            sizes = {groups[group].name: groups[group].trained.num_parameters for group in unit.layers}
            total = max(sum(sizes.values()), 1)
            if read.issuperset(unit.layers):
                found |= {name: -(-unit.num_bytes * size // total) for name, size in sizes.items()}
        return found

    def _measured(self, variants: RematVariants, programs: Programs) -> Profile:
        if self._shared.placement.num_devices > 1:
            raise InputError('profiles are measured on one device: with a mesh give a profile, or profile="estimate"')
        remat = self._options.remat
        with progress_bar("measuring") as progress:
            profile = measure_profile(
                variants.base,
                programs,
                self.model.optimizer,
                self._shared.placement,
                self.model.transport,
                recomputing=variants.of(variants.may_recompute),
                remat=remat if isinstance(remat, str) else "per segment",
                offload_activations=self._options.offload_activations,
                progress=progress,
            )
        facts = {**profile.machine, "host_bytes": self.model.host_bytes(), **self._shared.placement.memory_facts()}
        groups = summed_groups(variants.base, variants.derivatives, self._options.accumulate)
        return dataclasses.replace(
            with_sum_bytes(profile, variants.base, groups),
            machine=facts,
            updates_after_all=self._needs_all_gradients(variants.base),
            updates_together=self.model.optimizer.is_joint,
        )


class Shared:
    """What all steps of a training step share, independent of the model.

    Attributes:
      placement: where arrays live.
      prefetch: holds the prefetched copies.
      recorder: records when tasks start and end; None records nothing.
      process: the process that has the threads.
    """

    def __init__(self, placement: Placement, options: Options) -> None:
        self.placement, self.prefetch, self.process = placement, PrefetchSlot(), Process()
        self.recorder = Recorder(options.record_steps) if options.record_steps else None
        self._lanes = make_lanes(placement.is_cpu)
        self._has_warned = False

    def resources(self, transport: Transport, model: Model) -> Resources:
        """The resources of the steps of one structure."""
        return Resources(self.placement, transport, self._lanes, model.optimizer, self.prefetch, self.recorder)

    def warn_once(self, parts: Partition) -> None:
        """Warns of a partition's peculiarities, once."""
        remarks = list(parts.notes)
        remarks += [f"{merge.message}; that is most of the model" for merge in parts.coarse_merges]
        if parts.unread_leaves:
            unread = ", ".join(map(repr, parts.unread_leaves))
            remarks.append(f"the loss never reads {unread}: trained with a zero gradient")
        for remark in () if self._has_warned else remarks:
            warnings.warn(remark, stacklevel=6)
        self._has_warned = self._has_warned or bool(remarks)


class _StepCompiler:
    """Fits, lowers and compiles plans for the segments of one structure."""

    def __init__(
        self,
        variants: RematVariants,
        programs: Programs,
        profile: Profile,
        resources: Resources,
        options: Options,
    ) -> None:
        self._variants, self._programs, self._given = variants, programs, profile
        self._profile = _recomputable(profile)
        self._resources, self._options = resources, options
        self._device_updates = DeviceUpdateCompiler(
            resources.optimizer,
            variants.base.layers,
            resources.placement,
            resources.transport,
            options.accumulate > 1,
        )

    def compile_best(self) -> Prepared:
        """Prepares the chosen plan, or the leanest one if that does not fit into the memory budget.

        Raises:
          BudgetError: if neither fits; it names the smaller of both needs.
        """
        plan = choose_plan(self._variants, self._options, self._given)
        try:
            return self.compile(plan)
        except BudgetError as error:
            leanest = leanest_plan(self._variants, self._options, self._given)
            if leanest is None or leanest == plan:
                raise
            try:
                return self.compile(leanest)
            except BudgetError as other:
                raise min((error, other), key=lambda each: each.smallest_bytes) from None

    def compile(self, plan: Plan) -> Prepared:
        """Prepares the plan that fits into the memory budget."""
        self._check_updates(plan)
        program = self._fitted(plan)
        if program.plan != plan:
            # The budget has changed the plan, so the other order of updates may be faster now.
            ordered = with_update_order(self._profile_of(program.plan, program.summed), program.plan)
            program = self._lower(ordered, program.summed)
        if self._profile.has_times or program.plan != plan:
            program = self._predicted(program)
        keys = self._keys(program)
        if self._resources.placement.num_processes > 1:
            check_same("their plans", json.dumps(dataclasses.replace(program.plan, predicted=None).to_json()))
        self._programs.require(keys)
        self._programs.keep(keys)
        peak_ahead = functools.partial(self._peak, program)
        ahead = loads_ahead(program, peak_ahead, self._options.memory_budget_bytes)
        runnable = self._runnable(program, ahead)
        runner = StepRunner(self._first(runnable), runnable)
        is_changed = program.plan.layers != plan.layers
        size = self._programs.num_executables
        profile = self._profile_of(program.plan, program.summed)
        return Prepared(program, profile, peak_ahead(ahead), is_changed, size, runner)

    def _predicted(self, program: StepProgram) -> StepProgram:
        """The program whose plan predicts its own times; those of a plan that the budget has changed are another's."""
        profile = self._profile_of(program.plan, program.summed)
        predicted = simulate_schedule(profile, program.schedule).predicted if profile.has_times else None
        return dataclasses.replace(program, plan=dataclasses.replace(program.plan, predicted=predicted))

    def _first(self, runnable: RunnableStep) -> RunnableStep:
        """The step that runs first: its updates start after all gradients have arrived.

        With updates on the device all their gradients then stay there. If these do not fit, the step runs as planned.
        """
        if runnable.rules.need_all_gradients:
            return runnable
        plan = dataclasses.replace(runnable.program.plan, updates=Updates.AFTER_ALL)
        program = self._lower(plan, runnable.program.summed)
        most = max(self._peak(runnable.program).total, self._options.memory_budget_bytes or 0)
        if program.updated_on_device and self._peak(program).total > most:
            return runnable
        tasks = TaskList(program.schedule)
        return dataclasses.replace(runnable, program=program, tasks=tasks, loads_ahead=(), is_first=True)

    def _fitted(self, plan: Plan) -> StepProgram:
        """The program of the plan that fits into the memory budget."""
        budget, parts = self._options.memory_budget_bytes, self._variants.base
        summed = self._summed_groups(plan)

        def program_of(plan: Plan) -> StepProgram:
            return self._lower(plan, frozenset(summed))

        # Sums on the device only save transfers that are hidden anyway: give them up before loading a group twice.
        while summed and budget is not None and self._peak(program_of(plan)).total > budget:
            summed.pop()
        fitted = fit(
            plan,
            budget,
            lambda plan: self._peak(program_of(plan)),
            self._variants.largest_first,
            parts.layers,
            self._updates(),
        )
        return program_of(fitted)

    def _updates(self) -> list[list[int]]:
        """The segments of each update, those of the most bytes first."""
        parts = self._variants.base
        units = sorted(self._resources.optimizer.units_of(parts.layers), key=lambda unit: -unit.num_bytes)
        return [[n for n, segment in enumerate(parts.segments) if segment.group in unit.layers] for unit in units]

    def _summed_groups(self, plan: Plan | None = None) -> list[int]:
        """The groups whose sums over micro-batches can leave the device, under this or any plan."""
        return summed_groups(self._variants.base, self._variants.derivatives, self._options.accumulate, plan)

    def _profile_of(self, plan: Plan, summed: frozenset[int]) -> Profile:
        """The profile of a step that sums the gradients of these groups on the device; other gradients leave each."""
        apart = {*self._summed_groups(plan)} - summed
        if not apart:
            return self._profile
        return with_sum_bytes(self._profile, self._variants.base, {*self._summed_groups()} - apart)

    def _lower(self, plan: Plan, summed: frozenset[int] = frozenset()) -> StepProgram:
        parts, is_offloaded = self._variants.of(plan.recomputes), self._options.offload_activations
        profile = self._profile_of(plan, summed)
        return lower(parts, self._variants.derivatives, plan, profile, is_offloaded).with_sums_of(summed)

    def _keys(self, program: StepProgram) -> list[Any]:
        keys: Sequence[Any] = program.keys
        if self._options.accumulate > 1:
            keys = with_sums(program.partition, keys, self._resources.transport.is_widened)
        if self._resources.placement.is_cpu:
            return list(keys)
        return [*keys, *beside_rows(program.partition, program.derivatives, program.keys)]

    def _peak(self, program: StepProgram, ahead: Sequence[int] = ()) -> Peak:
        """The most device memory that a step needs; compiles programs to learn the size of their temporaries."""
        self._programs.require(self._keys(program))
        groups = program.partition.layers
        num = self._resources.placement.num_shares
        sums = sum(-(-groups[group].trained.wide.num_bytes // num) for group in program.summed)
        updates = self._device_updates.compile(program, self._programs)
        other_bytes = self._resources.transport.staging_bytes + sums + updates.device_bytes
        known = self._programs.temporary_bytes
        # A program that would add to host memory only writes there where the host adds.
        known = {key: known[key if key in known else key.alone] for key in program.keys}
        return peak_bytes(program, known, other_bytes, ahead)

    def _check_updates(self, plan: Plan) -> None:
        """Raises InputError if layers with one joint update are not all updated on the device, or none of them.

        Nor may such an update stream, since it needs all masters and optimizer state at once.
        """
        if all(layer.update is UpdatePlace.HOST for layer in plan.layers):
            return
        program = self._lower(plan)
        groups, on_device, streamed = self._variants.base.layers, program.updated_on_device, program.streamed
        for unit in self._resources.optimizer.units_of(groups):
            inside = on_device.intersection(unit.layers)
            if len(unit.layers) > 1 and (streams := inside & streamed.keys()):
                names = groups[min(streams)].name, groups[min({*unit.layers} - {min(streams)})].name
                raise InputError(
                    f"the optimizer updates {names[0]!r} and {names[1]!r} together, so this update cannot stream "
                    'through the GPU: plan update "host" or "resident"'
                )
            if inside and not on_device.issuperset(unit.layers):
                names = groups[min(inside)].name, groups[min(set(unit.layers) - inside)].name
                raise InputError(
                    f"the optimizer updates {names[0]!r} and {names[1]!r} together, but the plan updates only "
                    f"{names[0]!r} on the device"
                )

    def _runnable(self, program: StepProgram, ahead: tuple[int, ...]) -> RunnableStep:
        graph, put = program.partition.graph, self._resources.placement.put
        constants = {n: put(graph, n, constant) for n, constant in graph.constants.items()}
        tasks, rules = TaskList(program.schedule), rules_of(self._options)
        norms = Norms(self._resources.placement, on_host=rules.clips)
        updates = self._device_updates.compile(program, self._programs)
        given = (program, tasks, self._programs, self._resources, rules, norms, updates, constants)
        return RunnableStep(*given, ahead)


def _shapes(graph: Graph) -> str:
    return ", ".join(str(graph.avals[value]) for value in graph.batch)


def _check_shared(graph: Graph) -> None:
    """Raises InputError if the devices of a mesh cannot share a batch."""
    if graph.num_devices > 1 and not graph.batch_size:
        raise InputError(
            "a batch is split over the mesh along its first axis, whose size must be a multiple of "
            f"{graph.num_devices} devices: got {graph.num_rows or 'no arrays'}"
        )


def _check_fixed_remat(parts: Partition, plan: Plan | None) -> None:
    """Raises InputError if a plan could decide what recomputes: that would change which values leave the device."""
    planned = [False] * len(parts.segments) if plan is None else plan.recomputes
    for segment, again in zip(parts.segments, planned, strict=False):
        if segment.remat == AUTO or (again and segment.remat != Remat.FULL):
            raise InputError(
                f"offload_activations=True needs a remat= that no plan changes, such as 'full' or 'none', but whether "
                f"{segment.name!r} recomputes is left to the plan"
            )


def _recomputable(profile: Profile) -> Profile:
    """The profile with estimated recomputation costs for the layers that state none."""
    layers = tuple(
        layer
        if layer.can_recompute
        else dataclasses.replace(layer, recompute_s=layer.forward_s, recompute_activation_bytes=layer.activation_bytes)
        for layer in profile.layers
    )
    return dataclasses.replace(profile, layers=layers)


def rules_of(options: Options) -> Rules:
    """The update rules that the options of `train_step` ask for."""
    scale, clips, check = options.loss_scale, options.clip_norm is not None, options.check_gradients
    is_adapted = scale is not None and scale.is_dynamic
    # Where updates wait for the norm anyway, the check costs nothing.
    checks = clips or options.accumulate > 1 if check is None else check
    return Rules(clips, options.skip_nonfinite, is_adapted or checks, options.accumulate)
