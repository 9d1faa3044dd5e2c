"""`jaxferry plan`: chooses the mode of each layer."""

import dataclasses
import decimal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.table import Table

from jaxferry.cli.common import (
    AsJson,
    Granularity,
    ProfilePath,
    make_table,
    naming,
    plan_table,
    print_json,
    print_report,
    progress,
    read_budget_on,
)
from jaxferry.cli.figures import plot_format, plot_sweep
from jaxferry.costs.records import Profile
from jaxferry.costs.sharing import shared_by
from jaxferry.errors import InputError
from jaxferry.modes import MODULE
from jaxferry.planner.auto import Auto
from jaxferry.planner.base import Request, read_objective
from jaxferry.planner.exact import Exact
from jaxferry.planner.granularity import check_granularity, compare_finest, plan_finest, profile_of_plan, sweep_finest
from jaxferry.planner.planning import Compared, SweepPoint, check_updates, copies_bytes, knee
from jaxferry.planner.registry import make_policy, policies
from jaxferry.records import check_share, write_json
from jaxferry.step.records import Plan
from jaxferry.step.schedule import needed_bytes, schedule_chain
from jaxferry.step.simulate.machine import run
from jaxferry.step.simulate.report import CHAIN_STEPS, Simulation
from jaxferry.step.simulate.report import simulate as simulate_plan
from jaxferry.step.simulate.trace import chrome_trace
from jaxferry.units import format_bytes, format_seconds, parse_bytes


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


_MAX_POINTS = 1000

Number = TypeVar("Number", int, decimal.Decimal)


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


def prediction_lines(plan: Plan, needed_bytes: int) -> list[str]:
    """Returns the plan's prediction, the least memory budget that accepts it, its gap and its binding constraint."""
    lines = []
    if plan.predicted is not None:
        predicted = plan.predicted
        lines.append(
            f"predicted: forward {format_seconds(predicted.forward_s)}, step {format_seconds(predicted.step_s)}, "
            f"steady step {format_seconds(predicted.steady_step_s)}, "
            f"peak device memory {format_bytes(predicted.peak_device_bytes)}"
        )
        if needed_bytes > predicted.peak_device_bytes:
            lines.append(
                f"needs a memory budget of {format_bytes(needed_bytes)} ({needed_bytes} bytes): so much may be held at "
                "once if transfers take longer than predicted"
            )
    if "gap" in plan.details:
        gap, objective = plan.details["gap"], plan.details["objective"]
        plans = "plans of GFGB, DHA and DFGB" if plan.policy == Exact.name else "all plans"
        lines.append(f"objective {objective}: {gap:.2%} above the proven lower bound for {plans}")
    if "binding" in plan.details:
        lines.append(f"binding constraint: {plan.details['binding']}")
    return lines


def host_memory_lines(machine: Mapping[str, Any], copies_bytes: int = 0, saved_bytes: int = 0) -> list[str]:
    """Returns the host memory that training needs, if the profile's machine states it.

    Args:
      machine: the facts of the machine.
      copies_bytes: what each of several processes needs beside that under a plan; see `planning.copies_bytes`.
      saved_bytes: activations that wait there for their backward; see `Profile.saved_bytes`.
    """
    parts = machine.get("host_bytes")
    if not isinstance(parts, Mapping) or not all(isinstance(size, int) for size in parts.values()):
        return []
    more = {"copies to read in place": copies_bytes, "saved activations": saved_bytes}
    parts = {**parts, **{name: size for name, size in more.items() if size}}
    kinds = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items())
    return [f"host memory {format_bytes(sum(parts.values()))}: {kinds}"]


def comparison_table(compared: Compared) -> Table:
    """Returns all policies side by side."""
    heads = ["reserve factor", "forward", "step", "steady step", "peak device", "link bytes", "gap"]
    places = any(row.plan is not None and _updates_on_gpu(row.plan) for row in compared.rows)
    heads += ["updates on device", "streamed"] if places else []
    table = make_table("policy", *heads, title="policies")
    for row in compared.rows:
        if row.plan is None or row.plan.predicted is None:
            need = f"needs {format_bytes(row.smallest_bytes)}"
            table.add_row(row.policy, "-", "-", "-", "-", need, "-", "-", *["-"] * 2 * places)
            continue
        predicted = row.plan.predicted
        table.add_row(
            row.policy,
            f"{row.plan.reserve_factor:g}",
            format_seconds(predicted.forward_s),
            format_seconds(predicted.step_s),
            format_seconds(predicted.steady_step_s),
            format_bytes(predicted.peak_device_bytes),
            format_bytes(row.link_bytes),
            f"{row.gap:.2%}",
            *(_updates_on_gpu(row.plan) or ["-", "-"] if places else ()),
        )
    return table


def _updates_on_gpu(plan: Plan) -> list[str]:
    """How many layers are updated on the device, and of how many the update streams through it; empty if none is."""
    counts = sum(plan.updates_on_device), sum(plan.updates_streamed)
    return [f"{count} of {len(plan.layers)}" for count in counts] if any(counts) else []


def comparison_lines(compared: Compared) -> list[str]:
    """Explains the column of gaps."""
    return [
        f"gap: steady step over {format_seconds(compared.lower_bound_s)}, a lower bound for all modes and gradient "
        "places; exact also proves its gap to the best plan of GFGB, DHA and DFGB"
    ]


def sweep_table(points: list[SweepPoint], best: SweepPoint | None) -> Table:
    """Returns step time against device memory, with the knee marked."""
    table = make_table("reserve factor", "budget", "steady step", "step", "peak device", "", title="sweep")
    for point in points:
        budget = "-" if point.memory_budget_bytes is None else format_bytes(point.memory_budget_bytes)
        cells = ["does not fit", "-", "-"]
        if point.plan is not None and point.plan.predicted is not None:
            predicted = point.plan.predicted
            times = [format_seconds(predicted.steady_step_s), format_seconds(predicted.step_s)]
            cells = [*times, format_bytes(predicted.peak_device_bytes)]
        table.add_row(f"{point.reserve_factor:g}", budget, *cells, "knee" if point is best else "")
    return table


def simulation_table(simulation: Simulation) -> Table:
    """Returns the use of the lanes in one step."""
    table = Table("lane", title="lanes, one step")
    for column in ("busy", "idle", "used"):
        table.add_column(column, justify="right")
    for lane, use in simulation.lanes.items():
        total_s = use.busy_s + use.idle_s
        share = use.busy_s / total_s if total_s > 0 else 0.0
        table.add_row(lane.value, format_seconds(use.busy_s), format_seconds(use.idle_s), f"{share:.0%}")
    return table


def simulation_lines(simulation: Simulation) -> list[str]:
    """Returns times, memory and the critical path."""
    shown = list(simulation.critical_path)
    if len(shown) > 12:
        shown = [*shown[:6], f"... {len(shown) - 12} more ...", *shown[-6:]]
    one_step = max(held for _, held in simulation.device_bytes)
    return [
        f"forward {format_seconds(simulation.forward_s)}, step {format_seconds(simulation.step_s)}, "
        f"steady step {format_seconds(simulation.steady_step_s)}",
        f"peak device memory {format_bytes(simulation.peak_device_bytes)} over a chain of {CHAIN_STEPS} steps, where "
        f"loads start during the previous step; {format_bytes(one_step)} in a single step",
        f"host link {format_bytes(simulation.link_bytes)} per step",
        *_streaming_lines(simulation),
        f"critical path: {' > '.join(shown)}",
    ]


def _streaming_lines(simulation: Simulation) -> list[str]:
    num_bytes = simulation.streamed_state_bytes
    where = "of masters and optimizer state in pinned host memory, streamed through the GPU"
    return [f"{format_bytes(num_bytes)} {where}"] if num_bytes else []
