"""`jaxferry plan`: chooses the mode of each layer."""

import dataclasses
from pathlib import Path
from typing import Annotated

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
from jaxferry.cli.reports.tables import (
    comparison_lines,
    comparison_table,
    host_memory_lines,
    plan_table,
    prediction_lines,
)
from jaxferry.costs.records import Profile
from jaxferry.costs.sharing import shared_by
from jaxferry.errors import InputError
from jaxferry.modes import MODULE
from jaxferry.planner.base import Request, read_objective
from jaxferry.planner.granularity import check_granularity, compare_finest, plan_finest
from jaxferry.planner.planning import Compared, copies_bytes
from jaxferry.planner.registry import make_policy, policies
from jaxferry.step.records import Plan
from jaxferry.step.schedule import needed_bytes


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("plan", help=COMMANDS["plan"])(plan)


def plan(
    profile: ProfilePath,
    policy: Annotated[str, typer.Option(help=f"One of {', '.join(policies())}.")] = "exact",
    objective: Annotated[str, typer.Option(help="The time that exact minimizes: forward, step or steady.")] = "steady",
    reserve_factor: Annotated[
        float | None,
        typer.Option(
            help="Share of all gradient bytes, in [0, 1], that may stay on the device; with 1 no gradient is GO. "
            "[default: 1; go-memferry: 0; exact: the faster of 0 and 1; auto: any]"
        ),
    ] = None,
    memory_budget: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help='Limit on device memory, such as "8GiB", or none. [default: what the machine has]'
        ),
    ] = None,
    devices: Annotated[
        int | None,
        typer.Option(min=1, help="Devices that share each batch, of the profile of one. [default: the profile's]"),
    ] = None,
    processes: Annotated[int, typer.Option(min=1, help="Processes, a machine each, that these devices belong to.")] = 1,
    granularity: Granularity = MODULE,
    output: Annotated[Path | None, typer.Option("-o", "--output", metavar="PLAN.json", help="Write the plan.")] = None,
    compare_all: Annotated[bool, typer.Option("--compare", help="Print all policies side by side.")] = False,
    as_json: AsJson = False,
) -> None:
    """Makes and prints one plan, or those of all policies."""
    make_policy(policy)
    check_granularity(granularity)
    known = Profile.load(profile)
    if devices is None and processes > 1:
        raise InputError("--processes needs --devices, the number of devices of all processes")
    if devices is not None:
        known = shared_by(known, devices, processes)
    budget = read_budget_on(known.machine, memory_budget)
    request = Request(reserve_factor, budget.num_bytes, read_objective(objective))
    with progress("planning") as report, naming(profile):
        request = dataclasses.replace(request, progress=report)
        if compare_all:
            compared = compare_finest(known, request, granularity)
            made = None if output is None else compared.plan_of(policy)
        else:
            known, made = plan_finest(known, policy, request, granularity)
    if made is not None and output is not None:
        made.save(output)
    budget.tell(as_json)
    if compare_all:
        _print_comparison(compared, as_json)
    elif made is not None:
        _print_plan(made, known, as_json)


def _print_comparison(compared: Compared, as_json: bool) -> None:
    if as_json:
        print_json(compared.to_json())
    else:
        print_report(comparison_table(compared), *comparison_lines(compared))


def _print_plan(made: Plan, profile: Profile, as_json: bool) -> None:
    if as_json:
        print_json(made.to_json())
    else:
        lines = prediction_lines(made, needed_bytes(profile, made))
        host_lines = host_memory_lines(profile.machine, copies_bytes(profile, made), profile.saved_bytes)
        print_report(plan_table(made), *lines, *host_lines)
