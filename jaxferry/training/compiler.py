"""Prepares a training step for one batch structure: partition, plan, lower, fit, compile.

loss_fn, batch --partition--> segments --policy--> Plan --fit--> Plan within the budget --lower--> StepProgram
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from jaxferry.costs import Profile, partition_costs
from jaxferry.engine import (
    Evaluator,
    Owner,
    PrefetchSlot,
    Programs,
    Recorder,
    RematVariants,
    Resources,
    TrainState,
    make_lanes,
)
from jaxferry.errors import InputError
from jaxferry.modes import FASTER, MODULE, Remat
from jaxferry.partition import AUTO, Layer, Partition, with_tiles
from jaxferry.planner import first_that_fits
from jaxferry.processes import check_same
from jaxferry.settings import ThreadPool, check_may_trace, users_stacklevel
from jaxferry.step import Plan, StepProgram
from jaxferry.training.choice import best_granularity, tilings, with_state_on_disk
from jaxferry.training.cuts import Call, Cut, Cutter, structure_of
from jaxferry.training.host_usage import buffered_groups
from jaxferry.training.measured_profile import Work
from jaxferry.training.model import Model
from jaxferry.training.options import Options
from jaxferry.training.profiles import OfBatches, Profiler, share_of_one
from jaxferry.training.step import Prepared, StepCompiler
from jaxferry.transport import Placement, Transport, can_view, make_transport

Value = TypeVar("Value")


class Recent(Generic[Value]):
    """The values of the keys that were used last."""

    def __init__(self, most: int, drop: Callable[[Value], object]) -> None:
        self._most, self._drop = most, drop
        self._values: collections.OrderedDict[Hashable, Value] = collections.OrderedDict()

    def __iter__(self) -> Iterator[Value]:
        return iter(list(self._values.values()))

    def get(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """Returns the value of a key, made if it is not kept."""
        if key in self._values:
            self._values.move_to_end(key)
            return self._values[key]
        # Made before anything is dropped: it may fail.
        made = self._values[key] = make()
        if len(self._values) > self._most:
            self._drop(self._values.popitem(last=False)[1])
        return made

    def clear(self) -> None:
        """Forgets all values."""
        self._values.clear()


class Shared:
    """What all steps of a training step share; thread `memory` makes what a first step needs in host memory."""

    def __init__(self, placement: Placement, record_steps: int) -> None:
        self.placement, self.prefetch, self.owner = placement, PrefetchSlot(), Owner()
        self.recorder = Recorder(record_steps) if record_steps else None
        self.lanes = make_lanes(placement.is_cpu)
        self.memory = ThreadPool(1, "jaxferry memory")
        self._has_warned = False

    def warn_once(self, parts: Partition) -> None:
        """Warns of a partition's peculiarities, once."""
        remarks = list(parts.notes)
        remarks += [f"{merge.message}; that is most of the model" for merge in parts.coarse_merges]
        if parts.unread_leaves:
            unread = ", ".join(map(repr, parts.unread_leaves))
            remarks.append(f"the loss never reads {unread}: trained with a zero gradient")
        for remark in () if self._has_warned else remarks:
            warnings.warn(remark, stacklevel=users_stacklevel())
        self._has_warned = self._has_warned or bool(remarks)


class Compiler:
    """Prepares and caches steps and evaluations of one model.

    The first step, or measurement, decides the parameter groups, `layers`; before, they are the model's, or those of an
    evaluation.
    """

    def __init__(self, model: Model, loss_fn: Callable[..., Any], options: Options, shared: Shared) -> None:
        self.model, self._loss_fn, self._options, self._shared = model, loss_fn, options, shared
        self._cutter = Cutter(model, loss_fn, options.planning, shared.placement)
        self._profiler = Profiler(model, options.planning, shared.placement)
        self._prepared: Recent[tuple[Prepared, Cut]] = Recent(options.cached_shapes, self._drop)
        self._evaluators: Recent[tuple[Evaluator, Cut | None]] = Recent(options.cached_shapes, self._drop)
        self._has_dropped = self._has_decided = False
        self._saved_bytes = 0
        self._num_tiles: Mapping[str, int] = {}
        self._transports: dict[tuple[Layer, ...], Transport] = {}
        self._plans = OfBatches[Plan]()

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The parameter groups."""
        return self._cutter.known_layers or self.model.layers

    @property
    def prepared(self) -> list[Prepared]:
        """All prepared steps."""
        return [prepared for prepared, _ in self._prepared]

    def prepare(self, call: Call, state: TrainState | None = None) -> Prepared:
        """The prepared step for arguments of this structure; prepares it on the first call."""

        def compiled() -> tuple[Prepared, Cut]:
            return self._compiled(call, state)

        def attempts() -> Iterator[Callable[[], tuple[Prepared, Cut]]]:
            """Smaller layers, which the first batch may still choose, need less memory."""
            yield compiled
            for change in () if self._has_decided else (self._cutter.keep_small_apart, self._cutter.take_modules):
                if change():
                    yield compiled

        def make() -> tuple[Prepared, Cut]:
            check_may_trace("the loss function for a batch of new shapes")
            # Copies in flight, and threads that compile, would disturb the measurement.
            self._shared.prefetch.take(None)
            self.model.optimizer.updates.settle()
            return first_that_fits(attempts())

        with self._cutter.refused_by_jax(call):
            self._decide_granularity(call)
            prepared, _ = self._prepared.get(structure_of(call), make)
        self._has_decided = True
        return prepared

    def _decide_granularity(self, call: Call) -> None:
        """Lets the first batch of a step decide how fine layers are, if that is left open."""
        if self._options.planning.granularity != FASTER or self._has_decided:
            return
        self._cutter.restart(MODULE)
        planning = self._options.planning
        tiles = 1 if planning.tiles == AUTO else planning.tiles
        variants = self._cutter.cut(call).variants(planning.remat, tiles)
        profile = self._profiler.planned_by_estimate(variants)
        self._cutter.restart(best_granularity(variants, planning, profile))

    def measure(self, call: Call) -> Profile:
        """Measures what each layer costs on the device."""
        with self._cutter.refused_by_jax(call):
            self._decide_granularity(call)
            self._shared.prefetch.clear()
            self.model.optimizer.updates.settle()
            cut = self._cut(call)
            tiles = self._tilings(cut)[0]
            variants, programs = self._variants(cut, tiles)
            self._has_decided = True
            return self._profiler.measured(variants, programs, self._share(variants.base, tiles, call))

    def evaluator(self, function: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Evaluator:
        """The evaluator of a function of the parameters."""
        if not callable(function):
            raise InputError(f"function must be a function of (params, ...), got {function!r}")
        call = Call.of(args, kwargs)

        def make() -> tuple[Evaluator, Cut | None]:
            check_may_trace("a function for arguments of new shapes")
            cut = self._cut(call) if function is self._loss_fn else None
            parts = self._cutter.forward(function, call) if cut is None else cut.parts
            tiles = self._options.planning.tiles
            parts = with_tiles(parts, self._num_tiles if tiles == AUTO else tiles)
            budget, transport = self._options.planning.memory_budget_bytes, self._transport_of(parts.layers)
            return Evaluator(parts, self._shared.placement, transport, self.model.is_native, budget), cut

        return self._evaluators.get((function, structure_of(call)), make)[0]

    def _compiled(self, call: Call, state: TrainState | None) -> tuple[Prepared, Cut]:
        """Prepares a step in the first tiles that fit."""
        cut = self._cut(call)
        graph = cut.parts.graph
        if graph.num_devices > 1 and not graph.batch_size:
            raise InputError(
                "a batch is split over the mesh along its first axis, whose size must be a multiple of "
                f"{graph.num_devices} devices: got {graph.num_rows or 'no arrays'}"
            )
        prepared = first_that_fits(
            functools.partial(self._compiled_in, tiles, cut, call, state) for tiles in self._tilings(cut)
        )
        self._num_tiles = {each.name: each.num_tiles for each in prepared.partition.segments}
        return prepared, cut

    def _tilings(self, cut: Cut) -> list[Any]:
        """The numbers of tiles to try for the segments, the best first."""
        planning = self._options.planning
        in_tiles = functools.partial(cut.variants, planning.remat)
        return tilings(cut.parts, in_tiles, planning, self._profiler.estimated)

    def _compiled_in(self, tiles: Any, cut: Cut, call: Call, state: TrainState | None) -> Prepared:
        graph = cut.parts.graph
        if self._shared.placement.num_processes > 1:
            check_same("the shapes of their batches", ", ".join(str(graph.avals[value]) for value in graph.batch))
            check_same("their optimizers", self.model.update_text)
            check_same("their profiles", self._profiler.source)
        variants, programs = self._variants(cut, tiles)
        transport = self._transport_of(variants.base.layers)
        share = self._share(variants.base, tiles, call)
        profile = self._profiler.planned(variants, programs, share, transport.staging_bytes)
        lets_choose, is_first = self._options.planning.lets_policy_choose, not self._has_decided
        if lets_choose and not self.model.holds_whole_masters(variants.base.layers, is_first):
            profile = profile.without_streaming()
        is_open = lets_choose and self._options.planning.offloads == AUTO
        if is_open and (left_bytes := self.model.left_bytes(is_first)) is not None:
            profile = profile.offloading_at_most(left_bytes)
        if sizes := self.model.disk.bytes_by_name(variants.base.layers):
            rates = self.model.disk.seconds_a_byte if profile.has_times else (0.0, 0.0)
            profile = with_state_on_disk(profile, variants.base, sizes, rates, may_update=not lets_choose)
        shared = self._shared
        resources = Resources(
            shared.placement, transport, shared.lanes, self.model.optimizer, shared.prefetch, shared.recorder
        )
        begin = self._begin_memory(state, transport, variants.base.layers)
        try:
            compiler = StepCompiler(
                variants,
                programs,
                profile,
                resources,
                self._options,
                begin,
                trains=state is not None,
                gradient_buffers=self.model.gradient_buffers,
            )
            costs = partition_costs(variants.base) if self._options.planning.lets_policy_choose else ()
            earlier = [plan for plan, _ in self._plans.near(costs)]
            prepared = compiler.compile_best(earlier)
            if costs and prepared.plan.layers not in [plan.layers for plan in earlier]:
                self._plans.add(prepared.plan, costs)
            self._check_host_memory(prepared, begin is not None)
        except BaseException:
            transport.make_ahead({})
            raise
        return prepared

    def _begin_memory(
        self, state: TrainState | None, transport: Transport, layers: tuple[Layer, ...]
    ) -> Callable[[StepProgram], None] | None:
        """Lets a thread make what a state's first step needs in pinned memory, which takes as long as several steps.

        The profile has been measured by now, which copies would have disturbed. Where the device is a CPU, all threads
        make this memory in the step. Returns what lets the thread make the vectors for the gradients of a step program,
        or None.
        """
        placement, submit = self._shared.placement, self._shared.memory.submit
        if state is None or placement.is_cpu or not can_view(placement):
            return None
        state.begin(layers, submit)
        # A state that never trains leaves nothing.
        weakref.finalize(state, transport.made_ahead.clear).atexit = False

        def begin(program: StepProgram) -> None:
            own = buffered_groups(program.partition, program.plan.gradient_buffers)
            stored = {group: is_written for group, is_written in program.stored.items() if group in own}
            transport.make_ahead(stored, program.summed, program.widened, submit)

        return begin

    def _check_host_memory(self, prepared: Prepared, is_begun: bool) -> None:
        """Checks that host memory can hold what a step keeps there beside the state, before it runs."""
        # Clients of accelerators keep pinned memory that programs have used.
        kept_bytes, program = 0 if self._shared.placement.is_cpu else self._saved_bytes, prepared.program
        if is_begun and (program.read_in_place or prepared.saved_bytes or program.widened):
            # They count as taken once they exist.
            self._shared.memory.submit(lambda: None).result()
        self.model.check_step(prepared, not self._has_decided, kept_bytes, is_begun)
        self._saved_bytes = max(self._saved_bytes, prepared.saved_bytes)

    def _share(self, partition: Partition, tiles: Any, call: Call) -> Callable[[], Work]:
        """Makes what one of several devices does of a step, for its measurement."""
        planning, placement = dataclasses.replace(self._options.planning, tiles=tiles), self._shared.placement
        return functools.partial(share_of_one, self.model, self._loss_fn, planning, placement, partition, call)

    def _drop(self, dropped: tuple[Any, Cut | None]) -> None:
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
                stacklevel=users_stacklevel(),
            )

    def _cut(self, call: Call) -> Cut:
        """The segments of the loss function for these arguments."""
        is_first = self._cutter.known_layers is None
        cut = self._cutter.cut(call)
        if is_first:
            # Evaluators made earlier have other groups. New ones use these, so the state is not rearranged.
            self._evaluators.clear()
        return cut

    def _variants(self, cut: Cut, tiles: Any) -> tuple[RematVariants, Programs]:
        """The segments with their rematerialized variants, and their uncompiled programs."""
        self._shared.warn_once(cut.parts)
        variants = cut.variants(self._options.planning.remat, tiles)
        if self._options.planning.offload_activations is True:
            _check_fixed_remat(variants.base, self._options.planning.plan)
        self.model.optimizer.check_parts(cut.parts.layers)
        is_scaled = self._options.numerics.loss_scale is not None
        placement, is_native = self._shared.placement, self.model.is_native
        return variants, Programs(variants.base, variants.derivatives, placement, is_native, is_scaled, cut.programs)

    def _transport_of(self, layers: tuple[Layer, ...]) -> Transport:
        """The transport of these groups, shared by all programs so that its memory is shared too."""
        if layers not in self._transports:
            self._transports[layers] = make_transport(
                self.model.transport,
                self._shared.placement,
                layers,
                self._options.numerics.accumulate > 1,
                pools=self.model.gradient_buffers is not None,
            )
        return self._transports[layers]


def _check_fixed_remat(parts: Partition, plan: Plan | None) -> None:
    """Raises InputError if a plan could decide what recomputes: that would change which values leave the device."""
    remats = [Remat.NONE] * len(parts.uses) if plan is None else plan.remats
    planned = [remats[uses[0]] for uses in parts.uses_of if uses[0] < len(remats)]
    for segment, remat in zip(parts.segments, planned, strict=False):
        if segment.remat == AUTO or (remat is not Remat.NONE and segment.remat != remat):
            raise InputError(
                f"offload_activations=True needs a remat= that no plan changes, such as 'full' or 'none', but whether "
                f"{segment.name!r} recomputes is left to the plan"
            )
