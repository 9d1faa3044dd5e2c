"""`jaxferry simulate`: predicts a plan's step time and device memory."""

from pathlib import Path
from typing import Annotated

import typer

from jaxferry.cli import COMMANDS
from jaxferry.cli.common import AsJson, ProfilePath, naming, print_json, print_report, progress
from jaxferry.cli.reports.simulation import simulation_lines, simulation_table
from jaxferry.costs.records import Profile
from jaxferry.planner.granularity import profile_of_plan
from jaxferry.planner.planning import check_updates
from jaxferry.records import write_json
from jaxferry.step.records import Plan
from jaxferry.step.schedule import schedule_chain
from jaxferry.step.simulate.machine import run
from jaxferry.step.simulate.report import simulate as simulate_plan
from jaxferry.step.simulate.trace import chrome_trace


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("simulate", help=COMMANDS["simulate"])(simulate)


def simulate(
    profile: ProfilePath,
    plan: Annotated[Path, typer.Argument(metavar="PLAN.json", help="A plan for this profile, or for its blocks.")],
    trace: Annotated[
        Path | None, typer.Option(metavar="TRACE.json", help="Write a Chrome trace, for Perfetto.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps in the trace.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Runs a plan on the machine model and prints its times and memory."""
    known = Profile.load(profile)
    given = Plan.load(plan)
    known = profile_of_plan(known, given)
    with naming(plan, profile):
        given.check_profile(known)
        check_updates(known, given)
    with progress("simulating"):
        simulation = simulate_plan(known, given)
        if trace is not None:
            write_json(trace, chrome_trace(run(schedule_chain(known, given, steps))))
    if as_json:
        print_json(simulation.to_json())
    else:
        print_report(simulation_table(simulation), *simulation_lines(simulation))
