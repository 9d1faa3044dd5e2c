"""Fits a plan into the memory budget, lowers it and compiles its programs.

Plan --fit--> Plan within the budget --lower--> StepProgram --compile--> Prepared
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jaxferry.costs import LayerProfile, Profile, Recomputation, recomputing
from jaxferry.engine import (
    DeviceUpdateCompiler,
    Norms,
    Programs,
    RematVariants,
    Resources,
    RunnableStep,
    StepRunner,
    TaskList,
    groups_to_keep,
    groups_to_reserve,
    loads_ahead,
    lower,
    peak_bytes,
    summed_groups,
    unsplit_by_step,
    widened_groups,
    with_sum_bytes,
)
from jaxferry.errors import InputError
from jaxferry.modes import Mode, Remat, UpdatePlace
from jaxferry.optimizer import HostOptimizer
from jaxferry.partition import AUTO, Partition
from jaxferry.planner import (
    L2L,
    SIMPLE_POLICIES,
    Auto,
    Peak,
    as_run,
    fastest_that_fits,
    first_that_fits,
    fit,
    with_update_order,
)
from jaxferry.processes import check_same
from jaxferry.step import (
    NO_JOINS,
    Plan,
    ProgramKey,
    Schedule,
    StepProgram,
    Updates,
    arrivals_of,
    groups_summed_on_host,
    saved_bytes,
    simulate_schedule,
    variants_of,
)
from jaxferry.training.choice import choose_plan, planner_within
from jaxferry.training.options import Options


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A step prepared for batches of one structure: see `TrainStep.prepare`.

    Attributes:
      program: the step program that runs.
      profile: what it was planned with, and the facts of its programs.
      peak: the most device memory that a step needs.
      is_changed: whether the memory budget has changed the modes of the policy's or the user's plan.
      num_executables: number of programs compiled for the device.
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
    def saved_bytes(self) -> int:
        """The host memory of this process in which activations wait for their backward (`offload_activations`)."""
        return saved_bytes(self.profile, self.plan)

    @property
    def modes(self) -> tuple[Mode, ...]:
        """The mode of each segment."""
        return self.plan.modes

    @property
    def remat(self) -> tuple[Any, ...]:
        """What each segment keeps between forward and backward: `"none"`, `"products"`, `"full"`, or a policy."""
        return tuple("none" if segment.remat == AUTO else segment.remat for segment in self.partition.segments)


class StepCompiler:
    """Fits, lowers and compiles plans for the segments of one structure.

    `begin` begins what a step program needs in host memory. It is called with the chosen program before that is
    compiled, and with the one that will run. None begins nothing.
    """

    def __init__(
        self,
        variants: RematVariants,
        programs: Programs,
        profile: Profile,
        resources: Resources,
        options: Options,
        begin: Callable[[StepProgram], None] | None,
        trains: bool,
        gradient_buffers: int | None = None,
    ) -> None:
        self._variants, self._programs, self._given = variants, programs, profile
        self._profile = _recomputable(profile)
        self._resources, self._planning, self._numerics = resources, options.planning, options.numerics
        self._begin, self._trains = begin or (lambda program: None), trains
        self._gradient_buffers = gradient_buffers
        # A recorder marks each copy beside the program that queues it.
        self._joins = resources.transport.joins if resources.recorder is None else NO_JOINS
        self._widened = widened_groups(variants.base, variants.derivatives, options.numerics.accumulate)
        self._device_updates = DeviceUpdateCompiler(
            resources.optimizer,
            variants.base.layers,
            resources.placement,
            resources.transport,
            options.numerics.accumulate > 1,
        )

    def compile_best(self, earlier: Sequence[Plan] = ()) -> Prepared:
        """Prepares the chosen plan, or the policy's leanest one if that does not fit into the memory budget.

        A profile without temporaries may make a policy choose a plan that does not fit, where its leanest one does.

        A policy chooses the first of the `earlier` plans of similar batches that fits as it is: the state then stays
        where it is from batch to batch, and the next step's loads need not wait until all updates have ended. Raises
        `BudgetError` if neither fits; it names the smaller of both needs.
        """

        def attempts() -> Iterator[Callable[[], Prepared]]:
            plan = self._kept(earlier) or self._chosen()
            yield lambda: self.compile(plan)
            if self._planning.lets_policy_choose:
                leanest = self._plans()(1)
                if leanest != plan:
                    yield lambda: self.compile(leanest)

        return first_that_fits(attempts())

    def _kept(self, earlier: Sequence[Plan]) -> Plan | None:
        """The first of these plans that fits as it is; None if there is none."""
        for plan in earlier:
            plan = as_run(self._profile, dataclasses.replace(plan, predicted=None, details={}))
            if self._peak(lowered := self._lower(plan)).fits(self._planning.memory_budget_bytes):
                self._begin(lowered)
                return plan
        return None

    def _chosen(self) -> Plan:
        """The given plan, or the policy's.

        A plan may need more than its profile says: what programs of updates on the device need is known once they are
        compiled, and what the device's allocator takes once the step is lowered. The policy then plans again, for a
        budget that is smaller by the excess, since to change the plan layer by layer would make the step slower.
        """
        planning, budget = self._planning, self._planning.memory_budget_bytes
        if budget is None or not planning.lets_policy_choose:
            plan = self._buffered(choose_plan(self._variants, planning, self._given))
            self._begin(self._lower(plan))
            return plan
        plan_within = self._plans()
        plan = plan_within(budget)
        self._begin(self._lower(plan))

        def others() -> list[Plan]:
            names = SIMPLE_POLICIES if planning.chooser == Auto.name else ()
            return [self._plans(name)(budget) for name in names]

        found = fastest_that_fits(plan_within, self._excess_bytes, budget, others=others)
        return plan if found is None else found

    def _plans(self, policy: str | None = None) -> Callable[[int | None], Plan]:
        """Returns a function that plans within a budget by a policy, or by the user's: see `planner_within`."""
        plan_within = planner_within(self._variants, self._planning, self._given, policy)
        return lambda budget_bytes: self._buffered(plan_within(budget_bytes))

    def _buffered(self, plan: Plan) -> Plan:
        """The plan with as many gradient buffers as there are, and the better order of updates with these."""
        is_free = self._planning.gradient_buffers == AUTO and plan.updates is Updates.AFTER_ALL
        num = None if is_free else self._gradient_buffers
        if num == plan.gradient_buffers:
            return plan
        plan = dataclasses.replace(plan, gradient_buffers=num, predicted=None)
        return with_update_order(self._given, plan)

    def _excess_bytes(self, plan: Plan) -> int:
        """What a plan needs beyond the memory budget, as the engine counts; 0 if it fits.

        Or if no other count is expected of the engine.
        """
        budget = self._planning.memory_budget_bytes
        if budget is None or (self._resources.placement.allocator is None and _all_on_host(plan)):
            return 0
        peak = self._peak(self._lower(plan))
        return 0 if peak.fits(budget) else max(peak.total - budget, 1)

    def compile(self, plan: Plan) -> Prepared:
        """Prepares the plan that fits into the memory budget."""
        parts = self._variants.base
        plan = plan.in_tiles([parts.segments[use.segment].num_tiles for use in parts.uses])
        if not _all_on_host(plan):
            _check_updates(self._lower(plan), self._resources.optimizer)
        program = self._fitted(plan)
        if program.plan != plan:
            # The budget has changed the plan, so the other order of updates may be faster now.
            ordered = with_update_order(self._profile_of(program.plan, program.summed), program.plan)
            program = self._lower(ordered, program.summed)
        if self._profile.has_times or program.plan != plan:
            # The times of a plan that the budget has changed are another's.
            profile = self._profile_of(program.plan, program.summed)
            predicted = simulate_schedule(profile, program.schedule).predicted if profile.has_times else None
            program = dataclasses.replace(program, plan=dataclasses.replace(program.plan, predicted=predicted))
        program = self._with_kept_copies(program)
        keys = self._keys(program)
        if self._resources.placement.num_processes > 1:
            plan_json = dataclasses.replace(program.plan, predicted=None).to_json()
            check_same("their plans", json.dumps([plan_json, sorted(program.summed), sorted(program.kept)]))
        self._programs.require(keys, self._begin_updates)
        self._programs.keep(keys)
        peak_ahead = functools.partial(self._peak, program)
        ahead = loads_ahead(program, peak_ahead, self._planning.memory_budget_bytes)
        if self._resources.transport.reserves:
            # Those of layers that the next step loads early stay.
            budget, peak = self._planning.memory_budget_bytes, lambda each: self._peak(each, ahead)
            program = dataclasses.replace(program, reserved=groups_to_reserve(program, ahead, peak, budget))
        self._begin(program)
        is_recorded = self._resources.recorder is not None
        self._resources.transport.compile(program.loaded, program.reserved, program.stored, is_recorded)
        runnable = self._runnable(program, ahead)
        runner = StepRunner(self._first(runnable), runnable)
        is_changed = program.plan.layers != plan.layers
        size = self._programs.num_executables
        profile = self._profile_of(program.plan, program.summed)
        return Prepared(program, profile, self._peak(program, ahead), is_changed, size, runner)

    def _with_kept_copies(self, program: StepProgram) -> StepProgram:
        """The program that keeps the copies that fit from one micro-batch to the next.

        Given plans load as they say, and so does L2L, which loads each layer twice by definition.
        """
        planning = self._planning
        if self._numerics.accumulate == 1 or planning.plan is not None or planning.policy == L2L.name:
            return program
        budget, unsplit_bytes = planning.memory_budget_bytes, self._peak(program).unsplit()
        kept = groups_to_keep(program, *self._counted(program), None if budget is None else budget - unsplit_bytes)
        keeping = dataclasses.replace(program, kept=kept)
        return keeping if self._peak(keeping).fits(budget) else program

    def _first(self, runnable: RunnableStep) -> RunnableStep:
        """The step that runs first: its updates start after all gradients have arrived.

        With updates on the device all their gradients then stay there. If these do not fit, the step runs as planned;
        so it does if host memory does not hold all gradients.
        """
        if runnable.rules.need_all_gradients or runnable.program.plan.gradient_buffers is not None:
            return runnable
        plan = dataclasses.replace(runnable.program.plan, updates=Updates.AFTER_ALL)
        program = self._lower(plan, runnable.program.summed)
        most = max(self._peak(runnable.program).total, self._planning.memory_budget_bytes or 0)
        if program.updated_on_device and not self._peak(program).fits(most):
            return runnable
        return dataclasses.replace(runnable, program=program, tasks=_tasks_of(program), loads_ahead=(), is_first=True)

    def _fitted(self, plan: Plan) -> StepProgram:
        """The program of the plan that fits into the memory budget."""
        budget, parts = self._planning.memory_budget_bytes, self._variants.base
        summed = self._summed_groups(plan)
        units = self._resources.optimizer.units_of(parts.layers)
        updates = [[n for n, use in enumerate(parts.uses) if use.group in unit.layers] for unit in units]

        def program_of(plan: Plan) -> StepProgram:
            return self._lower(plan, frozenset(summed))

        # Sums on the device only save transfers that are hidden anyway: give them up before loading a group twice.
        while summed and not self._peak(program_of(plan)).fits(budget):
            summed.pop()
        fitted = fit(
            plan,
            budget,
            lambda plan: self._peak(program_of(plan)),
            self._profile,
            self._variants.largest_first,
            updates,
            self._planning.takes_device_budget,
        )
        return program_of(fitted)

    def _summed_groups(self, plan: Plan | None = None) -> list[int]:
        """The groups whose sums over micro-batches can leave the device, under this or any plan."""
        return summed_groups(self._variants.base, self._variants.derivatives, self._numerics.accumulate, plan)

    def _profile_of(self, plan: Plan, summed: frozenset[int]) -> Profile:
        """The profile of a step that sums the gradients of these groups on the device; other gradients leave each."""
        apart = {*self._summed_groups(plan)} - summed
        if not apart:
            return self._profile
        return with_sum_bytes(self._profile, self._variants.base, {*self._summed_groups()} - apart)

    def _lower(self, plan: Plan, summed: frozenset[int] = frozenset()) -> StepProgram:
        parts, is_offloaded = self._variants.of(plan.remats), self._planning.offload_activations is True
        profile = self._profile_of(plan, summed)
        lowered = lower(parts, self._variants.derivatives, plan, profile, is_offloaded, self._joins)
        return dataclasses.replace(lowered, summed=summed, widened=self._widened)

    def _keys(self, program: StepProgram) -> list[Any]:
        """The programs that a step may run."""
        parts, transport, on_host = program.partition, self._resources.transport, set[int]()
        if not self._resources.placement.is_cpu:
            on_host = groups_summed_on_host(parts, program.derivatives, program.plan, transport.adds_on_host)
        return variants_of(parts, program.keys, program.widened, self._numerics.accumulate > 1, on_host)

    def _peak(self, program: StepProgram, ahead: Sequence[int] = ()) -> Peak:
        """The most device memory that a step needs."""
        kind, (temporary_bytes, other_bytes) = self._resources.placement.allocator, self._counted(program)
        joins_vectors = self._resources.transport.staging_bytes > 0

        def unsplit() -> int:
            return 0 if kind is None else unsplit_by_step(program, temporary_bytes, ahead, joins_vectors, kind)

        return peak_bytes(program, temporary_bytes, other_bytes, ahead, unsplit)

    def _counted(self, program: StepProgram) -> tuple[Mapping[ProgramKey, int], int]:
        """The temporaries of a step's programs, which it compiles for that, and the memory that is always in use."""
        self._programs.require(self._keys(program), self._begin_updates)
        groups = program.partition.layers
        num_shares = self._resources.placement.ownership.num_shares
        sums = sum(-(-groups[group].trained.wide.num_bytes // num_shares(groups[group])) for group in program.summed)
        updates = self._device_updates.compile(program, self._programs)
        other_bytes = self._resources.transport.staging_bytes + sums + updates.device_bytes
        known, found = self._programs.temporary_bytes, dict[ProgramKey, int]()
        for instruction in program.programs:
            key, own = instruction.key, program.partition.segments[instruction.segment].groups
            assert key is not None
            # A program that would add to host memory only writes there where the host adds.
            runs = key.alone_in([place for place, group in enumerate(own) if group in program.widened])
            found[key] = max(known[runs], found.get(key, 0))
        return found, other_bytes

    def _begin_updates(self) -> None:
        """Lets threads compile the host updates of a state, which its first step needs last."""
        groups = self._variants.base.layers
        if self._trains:
            arrivals = arrivals_of(self._variants.base, self._widened)
            self._resources.optimizer.updates.begin(self._resources.optimizer.units_of(groups), groups, arrivals)

    def _runnable(self, program: StepProgram, ahead: tuple[int, ...]) -> RunnableStep:
        graph, put = program.partition.graph, self._resources.placement.put
        constants = {n: put(graph, n, constant) for n, constant in graph.constants.items()}
        tasks, rules = _tasks_of(program), self._numerics.rules
        norms = Norms(self._resources.placement, on_host=rules.clips)
        used = program.partition.num_uses
        norms.compile([used[group] for group in {use.group for use in program.partition.uses if use.is_trained}])
        updates = self._device_updates.compile(program, self._programs)
        return RunnableStep(
            program, tasks, self._programs, self._resources, rules, norms, updates, constants, loads_ahead=ahead
        )


def _tasks_of(program: StepProgram) -> TaskList:
    groups = [instruction.group for instruction in program.instructions]
    return TaskList(program.schedule, program.trivial, groups)


def _recomputable(profile: Profile) -> Profile:
    """The profile with estimated recomputation costs for the programs that state none."""

    def missing(layer: LayerProfile) -> dict[str, Any]:
        seconds = {Remat.PRODUCTS: 0.0, Remat.FULL: layer.forward_s}
        costs = {remat: Recomputation(activation_bytes=layer.activation_bytes, flops=0, bytes=0) for remat in seconds}
        return recomputing(costs, {remat: own for remat, own in seconds.items() if remat not in layer.levels})

    return profile.with_layers({} if layer.shares_program else missing(layer) for layer in profile.layers)


def _all_on_host(plan: Plan) -> bool:
    """Whether a plan updates nothing on the device."""
    return all(layer.update is UpdatePlace.HOST for layer in plan.layers)


def _check_updates(program: StepProgram, optimizer: HostOptimizer) -> None:
    """Raises InputError if layers with one joint update are not all updated on the device, or none of them.

    Nor may such an update stream, since it needs all masters and optimizer state at once.
    """
    groups, on_device, streamed = program.partition.layers, program.updated_on_device, program.streamed
    for unit in optimizer.units_of(groups):
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
