"""`jaxferry plan`: which layer runs in which mode."""

from pathlib import Path
from typing import Annotated

import typer

from jaxferry.cli.common import AsJson, ProfilePath, print_json, print_report, progress, read_budget
from jaxferry.plan.base import Request, read_objective
from jaxferry.plan.registry import make_policy, policies
from jaxferry.planning import compare, make_plan
from jaxferry.profiling.records import Profile
from jaxferry.report.tables import comparison_table, plan_table, prediction_lines


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("plan", help=f"Make a plan for a profile. Policies: {', '.join(policies())}.")(plan)


def plan(
    profile: ProfilePath,
    policy: Annotated[str, typer.Option(help="How to plan.")] = "exact",
    objective: Annotated[str, typer.Option(help="What exact makes least: forward, step or steady.")] = "steady",
    reserve_factor: Annotated[
        float | None, typer.Option(help="Share of all gradient bytes, in [0, 1], that may stay on the device.")
    ] = None,
    memory_budget: Annotated[
        str | None, typer.Option(metavar="SIZE", help='Device memory to fit into, such as "8GiB".')
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", metavar="PLAN.json", help="Write the plan.")] = None,
    compare_all: Annotated[bool, typer.Option("--compare", help="Print all policies side by side.")] = False,
    as_json: AsJson = False,
) -> None:
    """Makes a plan, or all of them, and prints it."""
    make_policy(policy)
    known = Profile.load(profile)
    goal, budget = read_objective(objective), read_budget(memory_budget)
    if compare_all:
        with progress("planning") as report:
            rows = compare(known, Request(reserve_factor, budget, goal, report))
        chosen = next(row.plan for row in rows if row.policy == policy)
        if output is not None and chosen is not None:
            chosen.save(output)
        if as_json:
            print_json({"policies": [row.to_json() for row in rows]})
        else:
            print_report(comparison_table(rows))
        return
    with progress("planning") as report:
        made = make_plan(
            known,
            policy,
            objective=goal,
            reserve_factor=reserve_factor,
            memory_budget_bytes=budget,
            progress=report,
        )
    if output is not None:
        made.save(output)
    if as_json:
        print_json(made.to_json())
    else:
        print_report(plan_table(made), *prediction_lines(made))
