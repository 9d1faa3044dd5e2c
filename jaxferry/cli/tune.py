"""`jaxferry tune`: sweeps reserve factors and memory budgets; shows step time against device memory."""

import decimal
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from jaxferry.cli import COMMANDS
from jaxferry.cli.common import (
    AsJson,
    Granularity,
    ProfilePath,
    naming,
    print_json,
    print_report,
    progress,
    read_budget_on,
)
from jaxferry.cli.reports.plots import plot_format, plot_sweep
from jaxferry.cli.reports.tables import sweep_table
from jaxferry.costs.records import Profile
from jaxferry.errors import InputError
from jaxferry.modes import MODULE
from jaxferry.planner.auto import Auto
from jaxferry.planner.base import Request
from jaxferry.planner.granularity import check_granularity, sweep_finest
from jaxferry.planner.planning import knee
from jaxferry.planner.registry import make_policy
from jaxferry.records import check_share
from jaxferry.units import format_bytes, format_seconds, parse_bytes

_MAX_POINTS = 1000

Number = TypeVar("Number", int, decimal.Decimal)


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("tune", help=COMMANDS["tune"])(tune)


def tune(
    profile: ProfilePath,
    reserve_factor: Annotated[
        str, typer.Option(metavar="START:STOP:STEP", help="Reserve factors, or a single one.")
    ] = "0:1:0.1",
    memory_budget: Annotated[
        str | None,
        typer.Option(
            metavar="START:STOP:STEP",
            help='Budgets such as "2GiB:16GiB:2GiB", a single one, or none. [default: what the machine has]',
        ),
    ] = None,
    policy: Annotated[
        str | None, typer.Option(help="The policy; default: auto with given budgets, else exact.")
    ] = None,
    granularity: Granularity = MODULE,
    plot: Annotated[
        Path | None, typer.Option(metavar="P.png", help="Write a plot: PNG, PDF or SVG, by the file's extension.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="PLAN.json", help="Write the knee's plan.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Sweeps, prints step time against device memory, and marks the knee."""
    factors = [check_share(float(factor), "reserve factor") for factor in read_range(reserve_factor, _decimal)]
    budgets = _read_budgets(memory_budget)
    if plot is not None:
        plot_format(plot)
    chosen = policy or ("exact" if budgets is None else Auto.name)
    make_policy(chosen)
    check_granularity(granularity)
    known = Profile.load(profile)
    default = read_budget_on(known.machine, memory_budget if budgets is None else "none")
    if default.num_bytes is not None:
        budgets = [default.num_bytes]
    with progress("tuning") as report, naming(profile):
        points = sweep_finest(known, chosen, factors, budgets, Request(progress=report), granularity)
    best = knee(points)
    if plot is not None:
        plot_sweep(points, best, plot)
    assert best is not None and best.plan is not None and best.plan.predicted is not None
    if output is not None:
        best.plan.save(output)
    default.tell(as_json)
    if as_json:
        document = [point.to_json() for point in points]
        print_json({"policy": chosen, "points": document, "knee": best.to_json()})
        return
    predicted = best.plan.predicted
    size, time = format_bytes(predicted.peak_device_bytes), format_seconds(predicted.steady_step_s)
    knee_line = f"knee: reserve factor {best.reserve_factor:g}, {time} per step in {size} of device memory"
    print_report(sweep_table(points, best), knee_line)


def _read_budgets(text: str | None) -> list[int] | None:
    """The given budgets in bytes; None without any."""
    if text is None or text == "none":
        return None
    return read_range(text, lambda size: parse_bytes(size, "budget"))


def read_range(text: str, read: Callable[[str], Number]) -> list[Number]:
    """Reads "start:stop:step", both ends included, or a single value.

    Raises:
      InputError: if it is neither, if the step is not positive, or if the range has too many values.
    """
    parts = text.split(":")
    if len(parts) == 1:
        return [read(text)]
    if len(parts) != 3:
        raise InputError(f'a range must be "start:stop:step" or a single value, got {text!r}')
    start, stop, step = (read(part) for part in parts)
    if step <= 0 or stop < start:
        raise InputError(f"a range needs a step above 0 and a stop not below its start, got {text!r}")
    count = int((stop - start) / step) + 1
    if count > _MAX_POINTS:
        raise InputError(f"a range may have at most {_MAX_POINTS} values, {text!r} has {count}; raise its step")
    return [start + number * step for number in range(count)]


def _decimal(text: str) -> decimal.Decimal:
    try:
        value = decimal.Decimal(text)
    except decimal.InvalidOperation:
        raise InputError(f"reserve factor must be a number in [0, 1], got {text!r}") from None
    if not value.is_finite():
        raise InputError(f"reserve factor must be a number in [0, 1], got {text!r}")
    return value
