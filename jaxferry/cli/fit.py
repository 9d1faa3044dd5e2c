"""`jaxferry fit`: says whether a model trains on a machine, with which batches and how fast, and what limits it."""

from __future__ import annotations

import inspect
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from rich.table import Table
from typer import Argument, Option

from jaxferry.cli.common import AsJson, make_table, plan_counts, plan_table, print_result, progress, read_budget_on
from jaxferry.cli.fitting import MOST_SAMPLES, Fit, find_fit
from jaxferry.cli.profile import Traced, trace
from jaxferry.cli.workload import (
    FORMS,
    ComputeDtype,
    FixedGranularity,
    MemoryBudget,
    OffloadActivations,
    Optimizer,
    Tiles,
    UserModel,
    check_fixed_granularity,
    find_function,
    make_optimizer,
    read_dtype,
    read_remat,
    read_tiles,
    read_workload,
    user_code,
)
from jaxferry.costs import MACHINES, find_machine
from jaxferry.errors import InputError, call_users
from jaxferry.modes import BLOCK, Remat
from jaxferry.optimizer import pinned_advice, pinned_problem
from jaxferry.partition import AUTO, OFF, check_tiles
from jaxferry.records import write_json
from jaxferry.step import Bottleneck
from jaxferry.training import accelerator_dtype, host_bytes
from jaxferry.units import format_bytes, format_seconds, parse_bytes

_WORKLOAD = "WORKLOAD"


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
    offload_activations: OffloadActivations = False,
    output: Annotated[
        Path | None, Option("-o", "--output", metavar="PLAN.json", help="Write the plan for the largest batch.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say whether a model trains on a machine, with which batches, and how fast.

    Predicts by a roofline model; runs nothing on a device. Parameters and batch may be shapes.
    """
    check_fixed_granularity(granularity)
    figures = find_machine(machine)
    budget = read_budget_on(figures.to_json(), memory_budget)
    if budget.num_bytes is None:
        raise InputError("--memory-budget must be a size such as 8GiB, got 'none': fit answers for a size of memory")
    host_memory_bytes = None if figures.host_memory_bytes is None else int(figures.host_memory_bytes)
    if host_memory is not None:
        host_memory_bytes = parse_bytes(host_memory, "--host-memory")
    update, dtype = make_optimizer(optimizer), read_dtype(compute_dtype)
    kept, in_tiles = read_remat(remat), check_tiles(read_tiles(tiles))
    with user_code(workload, _WORKLOAD), progress("fit") as report:
        sizes = _Workload(workload, batch_size, length)
        params = sizes.own.shapes()
        dtype = dtype or accelerator_dtype(params)

        def traced(size: int) -> Traced:
            user, batch = sizes.of(size)
            options: dict[str, Any] = {"granularity": granularity, "offload_activations": offload_activations}
            return trace(size, user.loss_fn, params, batch, figures, dtype, **options, remat=kept, tiles=in_tiles)

        report("optimizer")
        found = find_fit(
            traced,
            sizes.batch_size,
            model=workload,
            machine=figures.name,
            budget_bytes=budget.num_bytes,
            host_bytes=lambda own: host_bytes(params, update, dtype, own.variants.base.layers, own.widened),
            host_memory_bytes=host_memory_bytes,
            report=report,
        )
    if output is not None:
        if not found.rows:
            raise InputError(f"there is no plan to write to {output}: {found.problem}")
        write_json(output, found.rows[-1].plan.to_json())
    parts: list[Any] = _lines(found)
    if found.rows:
        reasons = (
            f"batches of {row.batch_size} are limited by the {Bottleneck(row.limit, row.reason).noun}: {row.reason}"
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
        self._name, self._function = name, find_function(name, _WORKLOAD)
        self._parameters = inspect.signature(self._function).parameters
        if length is not None and "length" not in self._parameters:
            raise InputError(f"--seq needs a workload whose function has a parameter `length`, {name} has none")
        self._options = {} if length is None else {"length": length}
        self.own = self._call(batch_size)
        self._batch = _batch_shapes(self.own)
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
            return user, _batch_shapes(user)
        leaves, tree = jax.tree.flatten(self._batch)
        shapes = [(size, *x.shape[1:]) if x.shape[:1] == (self._own_size,) else x.shape for x in leaves]
        resized = [jax.ShapeDtypeStruct(shape, x.dtype) for shape, x in zip(shapes, leaves, strict=True)]
        return self.own, jax.tree.unflatten(tree, resized)

    def _call(self, size: int | None) -> UserModel:
        sized = {"batch_size": size} if size is not None and "batch_size" in self._parameters else {}
        return read_workload(self._name, call_users(self._function, **sized, **self._options), _WORKLOAD)


def _batch_shapes(user: UserModel) -> Any:
    if callable(user.batch):
        return jax.eval_shape(lambda: user.batch_of(0))
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf)), user.batch)


def _lines(fit: Fit) -> list[str]:
    most = "at least" if fit.largest_batch_size == MOST_SAMPLES else "up to"
    answer = f"fits, with batches of {most} {fit.largest_batch_size}" if fit.fits else f"does not fit: {fit.problem}"
    kinds = ", ".join(f"{name} {format_bytes(size)}" for name, size in fit.host_bytes.items())
    size = "an unknown size: --host-memory" if fit.host_memory_bytes is None else format_bytes(fit.host_memory_bytes)
    least = f"batches of {fit.smallest_batch_size} need at least {format_bytes(fit.smallest_bytes)}"
    pinned = pinned_problem(fit.pinned_bytes) or pinned_advice(fit.pinned_bytes)
    return [
        f"{fit.model} on {fit.machine}: {answer}",
        f"host memory {format_bytes(sum(fit.host_bytes.values()))} (of {size}): {kinds}",
        f"of which pinned {format_bytes(fit.pinned_bytes)}{f': {pinned}' if pinned else ''}",
        f"device memory budget {format_bytes(fit.budget_bytes)}: {least}",
    ]


def _table(fit: Fit) -> Table:
    sizes = [f"{row.batch_size}{' (largest)' * (row.batch_size == fit.largest_batch_size)}" for row in fit.rows]
    table = make_table("batch size", *sizes, title="predicted")
    columns = []
    for row in fit.rows:
        tokens = {} if row.tokens_per_s is None else {"tokens a second": f"{row.tokens_per_s:,.0f}"}
        memory = {f"  {kind}": format_bytes(size) for kind, size in row.device_bytes.items()}
        speed = {"seconds a step": format_seconds(row.step_s), "samples a second": f"{row.samples_per_s:,.2f}"} | tokens
        modes = ", ".join(f"{count} {mode}" for mode, count in plan_counts(row.plan).items())
        chosen = {"limited by": row.limit, "layers": modes, "recomputing": str(sum(row.plan.recomputes))}
        columns.append({**speed, "device memory": format_bytes(sum(row.device_bytes.values())), **memory, **chosen})
    for name in columns[0]:
        table.add_row(name, *(column.get(name, "-") for column in columns))
    return table
