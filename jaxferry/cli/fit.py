"""`jaxferry fit`: says whether a model trains on a machine, with which batches and how fast, and what limits it.

own batch --trace--> smallest budget --secant--> another size --trace--> ... --> largest batch --auto--> forecast

The device memory of the leanest plan is close to linear in the batch size, so a few traces find the largest batch: its
size was traced, and the next one, which does not fit. Larger batches may fit if layers are read in host memory. They
do not count: products of many rows read a layer again and again, so such steps take longer for each sample.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any

import jax
from rich.table import Table
from typer import Argument, Option

from jaxferry.cli.common import (
    AsJson,
    PlanOutput,
    make_table,
    plan_counts,
    plan_table,
    print_result,
    progress,
    read_budget_on,
)
from jaxferry.cli.traced import BatchForecast, HostBytes, HostLayout, Traced, forecast, trace
from jaxferry.cli.workload import (
    FORMS,
    ComputeDtype,
    FixedGranularity,
    GradientBuffers,
    MemoryBudget,
    OffloadActivations,
    Optimizer,
    Tiles,
    UserModel,
    find_function,
    make_optimizer,
    read_dtype,
    read_number_or_word,
    read_offloading,
    read_remat,
    read_tiles,
    read_workload,
    user_code,
)
from jaxferry.costs import MACHINES, find_machine
from jaxferry.errors import InputError, call_users
from jaxferry.modes import BLOCK, Remat
from jaxferry.optimizer import pinned_advice, pinned_bytes, pinned_problem
from jaxferry.partition import AUTO, OFF, check_tiles
from jaxferry.records import write_json
from jaxferry.step import saved_bytes, streamed_state_bytes
from jaxferry.training import (
    TrainedShapes,
    accelerator_dtype,
    buffered_groups,
    check_gradient_buffers,
)
from jaxferry.units import format_apart, format_bytes, format_seconds, parse_bytes

_WORKLOAD = "WORKLOAD"
MOST_TRACES = 30  # traces of a search; linear memory needs three, nearly linear memory a few more
_MOST_GUESSES = 6  # traces at sizes where a line meets the budget; the search then halves
MOST_SAMPLES = (1 << 24) - 1  # larger batches are not tried


def fit(
    workload: Annotated[
        str, Argument(metavar=_WORKLOAD, help=f"A function that returns (loss_fn, params, batch): {FORMS}.")
    ],
    machine: Annotated[
        str, Option(metavar="NAME|FILE", help=f"The machine: one of {', '.join(MACHINES)}, or a JSON file.")
    ],
    batch_size: Annotated[
        int | None, Option("--batch", min=1, help="Samples a batch. [default: the workload's own]")
    ] = None,
    length: Annotated[
        int | None, Option("--seq", min=1, help="Tokens a sample, for functions with a parameter `length`.")
    ] = None,
    host_memory: Annotated[
        str | None,
        Option(metavar="SIZE", help='Host memory, such as "64GiB". [default: the machine\'s, if known]'),
    ] = None,
    memory_budget: MemoryBudget = None,
    optimizer: Optimizer = "adamw",
    compute_dtype: ComputeDtype = None,
    granularity: FixedGranularity = BLOCK,
    remat: Annotated[
        str, Option(help=f"As of profile; {AUTO} is {Remat.FULL.value} with --offload-activations.")
    ] = AUTO,
    tiles: Tiles = OFF,
    offload_activations: OffloadActivations = None,
    gradient_buffers: GradientBuffers = AUTO,
    scratch: Annotated[
        str | None,
        Option(metavar="SPEED", help='A disk of so many bytes a second ("3GB") keeps what host memory does not hold.'),
    ] = None,
    output: PlanOutput = None,
    as_json: AsJson = False,
) -> None:
    """Say whether a model trains on a machine, with which batches, and how fast.

    Predicts by a roofline model; runs nothing on a device. Parameters and batch may be shapes.
    """
    figures = find_machine(machine)
    budget = read_budget_on(figures.to_json(), memory_budget)
    if budget.num_bytes is None:
        raise InputError("--memory-budget must be a size such as 8GiB, got 'none': fit answers for a size of memory")
    host_memory_bytes = None if figures.host_memory_bytes is None else int(figures.host_memory_bytes)
    if host_memory is not None:
        host_memory_bytes = parse_bytes(host_memory, "--host-memory")
    update, dtype = make_optimizer(optimizer), read_dtype(compute_dtype)
    kept, in_tiles = read_remat(remat), check_tiles(read_tiles(tiles))
    offloads = read_offloading(offload_activations)
    num_buffers = check_gradient_buffers(read_number_or_word(gradient_buffers))
    if (disk_bytes_per_s := None if scratch is None else parse_bytes(scratch, "--scratch")) == 0:
        raise InputError(f"--scratch must be positive, got {scratch}")
    with user_code(workload, _WORKLOAD), progress("fit") as report:
        sizes = _Workload(workload, batch_size, length)
        params = sizes.own.shapes()
        dtype = dtype or accelerator_dtype(params)
        trained = TrainedShapes(params, update, dtype)
        of_update = trained.update_bytes()

        def traced(size: int) -> Traced:
            report(f"tracing batches of {size}")
            user, batch = sizes.of(size)
            of_model = user.loss_fn, params, batch, figures, dtype, granularity, offloads
            return trace(size, *of_model, remat=kept, tiles=in_tiles, update=of_update)

        def bytes_of(own: Traced, streamed: Collection[int], num: int | None) -> dict[str, int]:
            parts = own.variants.base
            buffered = buffered_groups(parts, num)
            return trained.host_bytes(parts.layers, own.widened, streamed, buffered)

        found = find_fit(
            traced,
            sizes.batch_size,
            model=workload,
            machine=figures.name,
            budget_bytes=budget.num_bytes,
            host_bytes=bytes_of,
            host_memory_bytes=host_memory_bytes,
            gradient_buffers=num_buffers,
            disk_bytes_per_s=disk_bytes_per_s,
            report=report,
        )
    if output is not None:
        if not found.rows:
            raise InputError(f"there is no plan to write to {output}: {found.problem}")
        write_json(output, found.rows[-1].plan.to_json())
    parts: list[Any] = _lines(found)
    if found.rows:
        reasons = (
            f"batches of {row.batch_size} are limited by the {row.bottleneck.noun}: {row.bottleneck.reason}"
            for row in found.rows
        )
        parts = [*parts, _table(found), *reasons, plan_table(found.rows[-1].plan)]
    print_result(as_json, found.to_json(), *parts, note=budget.note)


class _Workload:
    """The workload for batches of any size.

    A function with a parameter `batch_size` is called with it. Otherwise arrays of the batch change their leading
    axis, if it has the most frequent length.
    """

    def __init__(self, name: str, batch_size: int | None, length: int | None) -> None:
        self._name, self._function = name, find_function(name)
        self._parameters = inspect.signature(self._function).parameters
        if length is not None and "length" not in self._parameters:
            raise InputError(f"--seq needs a workload whose function has a parameter `length`, {name} has none")
        self._options = {} if length is None else {"length": length}
        self.own = self._call(batch_size)
        self._batch = self.own.batch_shapes()
        counts = Counter(leaf.shape[0] for leaf in jax.tree.leaves(self._batch) if leaf.shape)
        if not counts:
            raise InputError(f"{_WORKLOAD} {name} returns a batch without an axis of samples: give arrays of rows")
        self._own_size = max(counts, key=lambda size: counts[size])
        if not self._own_size:
            raise InputError(f"{_WORKLOAD} {name} returns a batch of 0 rows: give arrays of one row or more")
        self.batch_size = self._own_size if batch_size is None else batch_size

    def of(self, size: int) -> tuple[UserModel, Any]:
        """Returns the model, and the shapes of a batch of this size."""
        if "batch_size" in self._parameters:
            user = self._call(size)
            return user, user.batch_shapes()
        leaves, tree = jax.tree.flatten(self._batch)
        shapes = [(size, *x.shape[1:]) if x.shape[:1] == (self._own_size,) else x.shape for x in leaves]
        resized = [jax.ShapeDtypeStruct(shape, x.dtype) for shape, x in zip(shapes, leaves, strict=True)]
        return self.own, jax.tree.unflatten(tree, resized)

    def _call(self, size: int | None) -> UserModel:
        sized = {"batch_size": size} if size is not None and "batch_size" in self._parameters else {}
        return read_workload(self._name, call_users(self._function, **sized, **self._options), _WORKLOAD)


def _lines(fit: Fit) -> list[str]:
    most = "at least" if fit.largest_batch_size == MOST_SAMPLES else "up to"
    answer = f"fits, with batches of {most} {fit.largest_batch_size}" if fit.fits else f"does not fit: {fit.problem}"
    kinds = ", ".join(f"{name} {format_bytes(size)}" for name, size in fit.host_bytes.items())
    size = "an unknown size: --host-memory" if fit.host_memory_bytes is None else format_bytes(fit.host_memory_bytes)
    few = fit.gradient_buffers
    buffers = "" if few is None else f"; gradients of {few} programs at a time (--gradient-buffers {few})"
    on_disk = f"; {format_bytes(fit.disk_bytes)} on disk (--scratch)" if fit.disk_bytes else ""
    least = f"batches of {fit.smallest_batch_size} need at least {format_bytes(fit.smallest_bytes)}"
    pinned = pinned_problem(fit.pinned_bytes) or pinned_advice(fit.pinned_bytes)
    return [
        f"{fit.model} on {fit.machine}: {answer}",
        f"host memory {format_bytes(sum(fit.host_bytes.values()))} (of {size}): {kinds}{buffers}{on_disk}",
        f"of which pinned {format_bytes(fit.pinned_bytes)}{f': {pinned}' if pinned else ''}",
        f"device memory budget {format_bytes(fit.budget_bytes)}: {least}",
    ]


def _table(fit: Fit) -> Table:
    sizes = [f"{row.batch_size}{' (largest)' * (row.batch_size == fit.largest_batch_size)}" for row in fit.rows]
    columns = []
    for row in fit.rows:
        tokens = {} if row.tokens_per_s is None else {"tokens a second": f"{row.tokens_per_s:,.0f}"}
        memory = {f"  {kind}": format_bytes(size) for kind, size in row.device_bytes.items()}
        speed = {"seconds a step": format_seconds(row.step_s), "samples a second": f"{row.samples_per_s:,.2f}"} | tokens
        modes = ", ".join(f"{count} {mode}" for mode, count in plan_counts(row.plan).items())
        kept = ", ".join(f"{count} {level}" for level, count in Counter(row.plan.remats).items())
        chosen = {"limited by": row.bottleneck.limit, "layers": modes, "remat": kept}
        chosen["recomputed operations"] = f"{row.recomputed_share:.1%}"
        if row.plan.offloads_activations:
            chosen["activations in host memory"] = str(sum(each.activations != "device" for each in row.plan.layers))
        columns.append({**speed, "device memory": format_bytes(sum(row.device_bytes.values())), **memory, **chosen})
    rows = [[name, *(column.get(name, "-") for column in columns)] for name in columns[0]]
    return make_table(["batch size", *sizes], rows, title="predicted")


@dataclasses.dataclass(frozen=True)
class Fit:
    """Whether and how a model trains on a machine, as predicted.

    Attributes:
      host_bytes: host memory that training keeps, by what it is for.
      host_memory_bytes: host memory that training may take; None if it is not known.
      pinned_bytes: the pinned part of `host_bytes`, including masters and optimizer state that stream through the GPU.
      smallest_bytes: the smallest feasible budget for batches of `smallest_batch_size`.
      smallest_batch_size: the workload's own batch size, or 1 if that does not fit.
      largest_batch_size: the largest batch for which a plan that loads all layers fits into the budget; or, if no batch
        of `smallest_batch_size` does, for which any plan fits; 0 if none does.
      rows: for the workload's own batch size, if it fits, and for the largest one.
      problem: why the model does not fit, with the remedy; empty if it fits.
      gradient_buffers: the most programs whose gradients `host_bytes` hold; None for all.
      disk_bytes: masters and optimizer state on a disk.
    """

    model: str
    machine: str
    budget_bytes: int
    host_bytes: Mapping[str, int]
    host_memory_bytes: int | None
    pinned_bytes: int
    smallest_bytes: int
    smallest_batch_size: int
    largest_batch_size: int
    rows: tuple[BatchForecast, ...]
    problem: str = ""
    gradient_buffers: int | None = None
    disk_bytes: int = 0

    @property
    def fits(self) -> bool:
        """Whether batches of any size fit into device and host memory."""
        return not self.problem

    def to_json(self) -> dict[str, Any]:
        """Returns the answer as `jaxferry.fit/1`."""
        rows = [row.to_json() for row in self.rows]
        return {"format": "jaxferry.fit/1", "fits": self.fits, **vars(self), "rows": rows}


def find_fit(
    trace: Callable[[int], Traced],
    batch_size: int,
    *,
    model: str,
    machine: str,
    budget_bytes: int,
    host_bytes: HostBytes,
    host_memory_bytes: int | None = None,
    gradient_buffers: int | str = AUTO,
    disk_bytes_per_s: int | None = None,
    report: Callable[[str], None] = lambda part: None,
) -> Fit:
    """Answers whether a model trains on a machine, with which batches, and how fast.

    For `host_bytes`, `gradient_buffers` and `disk_bytes_per_s` see `HostLayout`.
    """
    sizes = Sizes(trace, budget_bytes)
    own = sizes.of(batch_size)
    layout = HostLayout(own, host_bytes, host_memory_bytes, gradient_buffers, disk_bytes_per_s)
    of_training = layout.needed
    if host_memory_bytes is not None:
        sizes.limit(host_memory_bytes - sum(of_training.values()))
        own = sizes.of(batch_size)

    def fits(each: Traced) -> bool:
        return each.smallest_bytes <= budget_bytes and sizes.fits_on_host(each)

    def kept(num_bytes: int) -> dict[str, int]:
        return of_training | ({"saved activations": num_bytes} if num_bytes else {})

    smallest = own if fits(own) or batch_size == 1 else sizes.of(1)
    wanted = {own.batch_size: own} if fits(own) else {}
    if fits(smallest):
        largest = sizes.largest(loading=smallest.loading_bytes <= budget_bytes)
        wanted[largest.batch_size] = largest
    rows = []
    for size, each in wanted.items():
        report(f"planning for batches of {size}")
        rows.append(forecast(layout.planned(each), budget_bytes))
    pairs = [(wanted[row.batch_size], row.plan) for row in rows]
    saved = [saved_bytes(each.profile, plan) for each, plan in pairs]
    host = kept(max([smallest.saved_bytes, *(each.saved_bytes for each in wanted.values()), *saved]))
    streamed = [streamed_state_bytes(each.profile, plan) for each, plan in pairs]
    of_plans = [of_training, *(layout.of_plan(*pair) for pair in pairs)]
    most = {name: max(found[name] for found in of_plans) for name in of_training}
    return Fit(
        model=model,
        machine=machine,
        budget_bytes=budget_bytes,
        host_bytes=host | most,
        host_memory_bytes=host_memory_bytes,
        gradient_buffers=layout.num_buffers,
        disk_bytes=sum(map(sum, layout.on_disk.values())),
        pinned_bytes=pinned_bytes(host | most, max(streamed, default=0)),
        smallest_bytes=smallest.smallest_bytes,
        smallest_batch_size=smallest.batch_size,
        largest_batch_size=max(wanted, default=0),
        rows=tuple(rows),
        problem=_problem(
            smallest, budget_bytes, kept(smallest.saved_bytes) | most, host_memory_bytes, bool(layout.on_disk)
        ),
    )


def _problem(
    smallest: Traced,
    budget_bytes: int,
    host_bytes: Mapping[str, int],
    host_memory_bytes: int | None,
    is_on_disk: bool,
) -> str:
    problems = []
    if smallest.smallest_bytes > budget_bytes:
        needs, budget = format_apart(smallest.smallest_bytes, budget_bytes)
        problems.append(
            f"batches of {smallest.batch_size} need {needs} of device memory, and the budget is {budget}: take a "
            "larger device or shorter samples"
        )
    total = sum(host_bytes.values())
    if host_memory_bytes is not None and total > host_memory_bytes:
        needs, there = format_apart(total, host_memory_bytes)
        disk = "" if is_on_disk else "keep optimizer state on a disk (--scratch), "
        problems.append(
            f"training needs {needs} of host memory, and there are {there}: "
            f"add memory, freeze parameters, {disk}or take an optimizer with less"
        )
    return "; ".join(problems)


class Sizes:
    """The batch sizes that have been traced; saved activations may take `left_bytes` of host memory, None for any."""

    def __init__(self, trace: Callable[[int], Traced], budget_bytes: int) -> None:
        self._trace, self._budget_bytes = trace, budget_bytes
        self.left_bytes: int | None = None
        self._known: dict[int, Traced] = {}
        self._is_loading = True

    def of(self, batch_size: int) -> Traced:
        """Returns the model for batches of a size."""
        if batch_size not in self._known:
            self._known[batch_size] = self._limited(self._trace(batch_size))
        return self._known[batch_size]

    def limit(self, left_bytes: int) -> None:
        """Lets saved activations take no more host memory than this."""
        self.left_bytes = left_bytes
        self._known = {size: self._limited(each) for size, each in self._known.items()}

    def _limited(self, traced: Traced) -> Traced:
        if self.left_bytes is None:
            return traced
        left_bytes = max(self.left_bytes, 0)
        return traced.changed(lambda profile: profile.offloading_at_most(left_bytes))

    def largest(self, loading: bool) -> Traced:
        """Returns the largest size that fits, with all layers loaded or not; a size that fits so must be known."""
        self._is_loading = loading
        while len(self._known) < MOST_TRACES and (size := self._next()) is not None:
            self.of(size)
        return self._known[max(size for size, traced in self._known.items() if self._fits(traced))]

    def fits_on_host(self, traced: Traced) -> bool:
        """Returns whether saved activations fit into the host memory that training leaves; true without any."""
        num_bytes = 0 if self.left_bytes is None else traced.saved_bytes
        return not num_bytes or num_bytes <= (self.left_bytes or 0)

    def _need(self, traced: Traced) -> int:
        return traced.loading_bytes if self._is_loading else traced.smallest_bytes

    def _fits(self, traced: Traced) -> bool:
        return self._need(traced) <= self._budget_bytes and self.fits_on_host(traced)

    def _next(self) -> int | None:
        """Returns the size to trace next; None if the largest is known."""
        needs = sorted((size, self._need(traced)) for size, traced in self._known.items())
        fitting = [each for each in needs if self._fits(self._known[each[0]])]
        others = [each for each in needs if not self._fits(self._known[each[0]])]
        first, last = fitting[-1][0] + 1, others[0][0] - 1 if others else MOST_SAMPLES
        if first > last:
            return None
        if len(needs) > _MOST_GUESSES:
            return (first + last) // 2 if others else min(2 * first, last)
        # Where the line through the largest two sizes, or through one and none, meets the budget.
        none = 0, self._need(next(iter(self._known.values())).without_samples)
        (one, bytes_of_one), (two, bytes_of_two) = [none, *[*fitting[-2:], *others[:1]][-2:]][-2:]
        slope = (bytes_of_two - bytes_of_one) / (two - one)
        meets = int(one + (self._budget_bytes - bytes_of_one) / slope) if slope > 0 else 2 * two
        return min(max(meets, first), last)
