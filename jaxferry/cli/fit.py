"""`jaxferry fit`: says whether a model trains on a machine, with which batches and how fast, and what limits it."""

import inspect
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer

from jaxferry.cli import COMMANDS
from jaxferry.cli.common import AsJson, print_json, print_report, progress, read_budget_on
from jaxferry.cli.fitting.records import Fit
from jaxferry.cli.fitting.search import find_fit
from jaxferry.cli.fitting.traced import Traced, trace
from jaxferry.cli.model import UserModel, make_optimizer, read_dtype, read_workload
from jaxferry.cli.reports.fit import fit_lines, fit_table, reason_lines
from jaxferry.cli.reports.tables import plan_table
from jaxferry.cli.step_options import (
    ComputeDtype,
    FixedGranularity,
    MemoryBudget,
    OffloadActivations,
    Optimizer,
    check_fixed_granularity,
)
from jaxferry.cli.user_code import FORMS, find_function, user_code
from jaxferry.costs.machines import MACHINES, Machine, find_machine
from jaxferry.errors import InputError
from jaxferry.modes import BLOCK
from jaxferry.records import write_json
from jaxferry.training.model import host_bytes
from jaxferry.units import parse_bytes

_WORKLOAD = "WORKLOAD"


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("fit", help=COMMANDS["fit"])(fit)


def fit(
    workload: Annotated[
        str, typer.Argument(metavar=_WORKLOAD, help=f"A function that returns (loss_fn, params, batch): {FORMS}.")
    ],
    machine: Annotated[
        str, typer.Option(metavar="NAME|FILE", help=f"The machine: one of {', '.join(MACHINES)}, or a JSON file.")
    ],
    batch_size: Annotated[
        int | None, typer.Option("--batch", min=1, help="Samples a batch. [default: the workload's own]")
    ] = None,
    length: Annotated[
        int | None, typer.Option("--seq", min=1, help="Tokens a sample, for functions with a parameter `length`.")
    ] = None,
    host_memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help='Host memory, such as "64GiB". [default: the machine\'s, if known]'),
    ] = None,
    memory_budget: MemoryBudget = None,
    optimizer: Optimizer = "adamw",
    compute_dtype: ComputeDtype = None,
    granularity: FixedGranularity = BLOCK,
    offload_activations: OffloadActivations = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="PLAN.json", help="Write the plan for the largest batch.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Predicts by a roofline model; runs nothing on a device. Parameters and batch may be shapes."""
    check_fixed_granularity(granularity)
    figures = find_machine(machine)
    budget = read_budget_on(figures.to_json(), memory_budget)
    if budget.num_bytes is None:
        raise InputError("--memory-budget must be a size such as 8GiB, got 'none': fit answers for a size of memory")
    update, dtype = make_optimizer(optimizer), read_dtype(compute_dtype)
    with user_code(workload, _WORKLOAD), progress("fit") as report:
        sizes = _Sizes(workload, batch_size, length)
        params = sizes.own.shapes()
        dtype = dtype or _default_dtype(params)

        def traced(size: int) -> Traced:
            user, batch = sizes.of(size)
            return trace(size, user.loss_fn, params, batch, figures, dtype, granularity, offload_activations)

        report("optimizer")
        found = find_fit(
            traced,
            sizes.batch_size,
            model=workload,
            machine=figures.name,
            budget_bytes=budget.num_bytes,
            host_bytes=lambda own: host_bytes(params, update, dtype, own.variants.base.layers, own.widened),
            host_memory_bytes=_host_memory_bytes(figures, host_memory),
            report=report,
        )
    if output is not None:
        _write_plan(found, output)
    budget.tell(as_json)
    _tell(found, as_json)


def _host_memory_bytes(machine: Machine, given: str | None) -> int | None:
    """The given host memory, or the machine's; None if neither is known."""
    if given is not None:
        return parse_bytes(given, "--host-memory")
    return None if machine.host_memory_bytes is None else int(machine.host_memory_bytes)


def _write_plan(found: Fit, output: Path) -> None:
    if not found.rows:
        raise InputError(f"there is no plan to write to {output}: {found.problem}")
    write_json(output, found.rows[-1].plan.to_json())


def _tell(found: Fit, as_json: bool) -> None:
    if as_json:
        print_json(found.to_json())
    elif found.rows:
        print_report(*fit_lines(found), fit_table(found), *reason_lines(found), plan_table(found.rows[-1].plan))
    else:
        print_report(*fit_lines(found))


def _default_dtype(params: Any) -> Any:
    """The dtype of the parameters on an accelerator: as in `train_step`."""
    is_single = all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(params))
    return jnp.dtype(jnp.bfloat16) if is_single else None


class _Sizes:
    """The workload for batches of any size.

    A function with a parameter `batch_size` is called with it. Otherwise the leading axis changes, of all arrays of the
    batch in which it has the most frequent length.
    """

    def __init__(self, name: str, batch_size: int | None, length: int | None) -> None:
        self._name, self._function = name, find_function(name, _WORKLOAD)
        self._takes = inspect.signature(self._function).parameters
        if length is not None and "length" not in self._takes:
            raise InputError(f"--seq needs a workload whose function has a parameter `length`, {name} has none")
        self._options = {} if length is None else {"length": length}
        self.own = self._call(batch_size)
        self._batch = _shapes(self.own)
        self._rows = _rows(self._batch)
        if self._rows is None:
            raise InputError(f"{_WORKLOAD} {name} returns a batch without an axis of samples: give arrays of rows")
        self.batch_size = self._rows if batch_size is None else batch_size

    def of(self, size: int) -> tuple[UserModel, Any]:
        """The model, and the shapes of a batch of this size."""
        if "batch_size" in self._takes:
            user = self._call(size)
            return user, _shapes(user)
        return self.own, _with_rows(self._batch, self._rows, size)

    def _call(self, size: int | None) -> UserModel:
        given = {"batch_size": size} if size is not None and "batch_size" in self._takes else {}
        return read_workload(self._name, self._function(**given, **self._options), _WORKLOAD)


def _shapes(user: UserModel) -> Any:
    if not callable(user.batch):
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf)), user.batch)
    return jax.eval_shape(lambda: user.batch_of(0))


def _rows(batch: Any) -> int | None:
    counts = Counter(leaf.shape[0] for leaf in jax.tree.leaves(batch) if leaf.shape)
    return max(counts, key=lambda rows: counts[rows]) if counts else None


def _with_rows(batch: Any, rows: int | None, size: int) -> Any:
    def resized(leaf: Any) -> Any:
        is_rows = bool(leaf.shape) and leaf.shape[0] == rows
        return jax.ShapeDtypeStruct((size, *leaf.shape[1:]), leaf.dtype) if is_rows else leaf

    return jax.tree.map(resized, batch)
