"""`jaxferry plan`, `simulate`, `tune` and `weights`: a plan for a profile, its step, many plans, plans of a paper."""

import dataclasses
import decimal
import itertools
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from rich.table import Table
from typer import Argument, Option

from jaxferry.cli.common import (
    AsJson,
    Granularity,
    PlanOutput,
    ProfilePath,
    make_table,
    naming,
    plan_table,
    print_result,
    progress,
    read_budget,
    read_budget_on,
)
from jaxferry.cli.figures import Plot, save_figure, sweep_figure
from jaxferry.costs import PROFILE_FORMAT, Profile, shared_by
from jaxferry.errors import InputError
from jaxferry.modes import MODULE
from jaxferry.planner import (
    Auto,
    Compared,
    Exact,
    Request,
    SweepPoint,
    check_granularity,
    check_updates,
    compare_finest,
    copies_bytes,
    knee,
    make_policy,
    plan_finest,
    policies,
    profile_of_plan,
    read_objective,
    sweep_finest,
)
from jaxferry.records import check_share, load_record, write_json
from jaxferry.step import (
    CHAIN_STEPS,
    Plan,
    Simulation,
    chrome_trace,
    needed_bytes,
    predict,
    run,
    saved_bytes,
    schedule_chain,
)
from jaxferry.step import simulate as simulate_plan
from jaxferry.units import format_bytes, format_seconds, parse_bytes
from jaxferry.weights import POLICIES, Instance, Outcome, check_policy, export_plan, instance_from_profile, solve

_MAX_POINTS = 1000
_MOST_OF_PATH = 12  # tasks of the critical path that are printed
_MAX_ROWS = 60  # the table of a schedule of weights shows at most this many events; `--json` prints longer schedules
Number = TypeVar("Number", int, decimal.Decimal)


def plan(
    profile: ProfilePath,
    policy: Annotated[str, Option(help=f"One of {', '.join(policies())}.")] = "exact",
    objective: Annotated[str, Option(help="The time that exact minimizes: forward, step or steady.")] = "steady",
    reserve_factor: Annotated[
        float | None,
        Option(
            help="Share of all gradient bytes, in [0, 1], that may stay on the device; with 1 no gradient is GO. "
            "[default: 1; go-memferry: 0; exact: the faster of 0 and 1; auto: any]"
        ),
    ] = None,
    memory_budget: Annotated[
        str | None,
        Option(metavar="SIZE", help='Limit on device memory, such as "8GiB", or none. [default: what the machine has]'),
    ] = None,
    devices: Annotated[
        int | None,
        Option(min=1, help="Devices that share each batch, for a profile of one. [default: the profile's]"),
    ] = None,
    processes: Annotated[int, Option(min=1, help="Processes that these devices belong to, a machine for each.")] = 1,
    granularity: Granularity = MODULE,
    output: PlanOutput = None,
    compare_all: Annotated[bool, Option("--compare", help="Print all policies side by side.")] = False,
    as_json: AsJson = False,
) -> None:
    """Make a plan for a profile: the mode of each layer.

    With --compare, print the plans of all policies; -o then writes the plan of --policy.
    """
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
            gap = f"gap: steady step over {format_seconds(compared.lower_bound_s)}, a lower bound for all modes and "
            gap += "gradient places; exact also proves its gap to the best plan of GFGB, DHA and DFGB"
            result: tuple[Any, ...] = compared.to_json(), comparison_table(compared), gap
        else:
            known, made = plan_finest(known, policy, request, granularity)
            host_lines = host_memory_lines(known.machine, copies_bytes(known, made), saved_bytes(known, made))
            lines = _prediction_lines(made, needed_bytes(known, made))
            result = made.to_json(), plan_table(made), *lines, *host_lines
    if made is not None and output is not None:
        made.save(output)
    print_result(as_json, *result, note=budget.note)


def simulate(
    profile: ProfilePath,
    plan: Annotated[Path, Argument(metavar="PLAN.json", help="A plan for this profile, or for its blocks.")],
    trace: Annotated[Path | None, Option(metavar="TRACE.json", help="Write a Chrome trace, for Perfetto.")] = None,
    steps: Annotated[int, Option(min=1, help="Steps in the trace.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Run a plan on the machine model: its times, its memory and its critical path."""
    known, made = Profile.load(profile), Plan.load(plan)
    known = profile_of_plan(known, made)
    with naming(plan, profile):
        made.check_profile(known)
        check_updates(known, made)
    with progress("simulating"):
        simulation = simulate_plan(known, made)
        if trace is not None:
            write_json(trace, chrome_trace(run(schedule_chain(known, made, steps))))
    print_result(as_json, simulation.to_json(), _lane_table(simulation), *_simulation_lines(simulation))


def tune(
    profile: ProfilePath,
    reserve_factor: Annotated[
        str, Option(metavar="START:STOP:STEP", help="Reserve factors, or a single one.")
    ] = "0:1:0.1",
    memory_budget: Annotated[
        str | None,
        Option(
            metavar="START:STOP:STEP",
            help='Budgets such as "2GiB:16GiB:2GiB", a single one, or none. [default: what the machine has]',
        ),
    ] = None,
    policy: Annotated[str | None, Option(help="The policy. [default: auto with given budgets, else exact]")] = None,
    granularity: Granularity = MODULE,
    plot: Plot = None,
    output: Annotated[Path | None, Option("-o", "--output", metavar="PLAN.json", help="Write the knee's plan.")] = None,
    as_json: AsJson = False,
) -> None:
    """Sweep reserve factors and memory budgets; find the knee.

    Prints step time against device memory. The knee is where more memory stops paying.
    """
    factors = [check_share(float(factor), "reserve factor") for factor in read_range(reserve_factor, _decimal)]
    budgets = None
    if memory_budget not in (None, "none"):
        budgets = read_range(memory_budget, lambda size: parse_bytes(size, "budget"))
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
    assert best is not None and best.plan is not None and best.plan.predicted is not None
    if plot is not None:
        save_figure(sweep_figure(points, best), plot)
    if output is not None:
        best.plan.save(output)
    predicted = best.plan.predicted
    size, time = format_bytes(predicted.peak_device_bytes), format_seconds(predicted.steady_step_s)
    knee_line = f"knee: reserve factor {best.reserve_factor:g}, {time} per step in {size} of device memory"
    document = {"policy": chosen, "points": [point.to_json() for point in points], "knee": best.to_json()}
    print_result(as_json, document, _sweep_table(points, best), knee_line, note=default.note)


def read_range(text: str, read: Callable[[str], Number]) -> list[Number]:
    """Reads "start:stop:step", both ends included, or a single value; raises `InputError` for anything else."""
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
        value = decimal.Decimal("nan")
    if not value.is_finite():
        raise InputError(f"reserve factor must be a number in [0, 1], got {text!r}")
    return value


def _prediction_lines(plan: Plan, needed_bytes: int) -> list[str]:
    """Returns the plan's prediction, the least memory budget that accepts it, its gap and its binding constraint."""
    lines = []
    if (predicted := plan.predicted) is not None:
        lines.append(f"predicted: {_times(predicted)}, peak device memory {format_bytes(predicted.peak_device_bytes)}")
        if needed_bytes > predicted.peak_device_bytes:
            lines.append(
                f"needs a memory budget of {format_bytes(needed_bytes)} ({needed_bytes} bytes), which the step holds "
                "if transfers take longer than predicted"
            )
    if "gap" in plan.details:
        gap, objective = plan.details["gap"], plan.details["objective"]
        plans = "plans of GFGB, DHA and DFGB" if plan.policy == Exact.name else "all plans"
        lines.append(f"objective {objective}: {gap:.2%} above the proven lower bound for {plans}")
    if "binding" in plan.details:
        lines.append(f"binding constraint: {plan.details['binding']}")
    return lines


def _times(predicted: Any) -> str:
    times = (predicted.forward_s, predicted.step_s, predicted.steady_step_s)
    return "forward {}, step {}, steady step {}".format(*map(format_seconds, times))


def host_memory_lines(machine: Mapping[str, Any], copies_bytes: int = 0, waiting_bytes: int = 0) -> list[str]:
    """Returns the host memory that training needs, if the profile's machine states it."""
    parts = machine.get("host_bytes")
    if not isinstance(parts, Mapping) or not all(isinstance(size, int) for size in parts.values()):
        return []
    more = {"copies to read in place": copies_bytes, "saved activations": waiting_bytes}
    parts = {**parts, **{name: size for name, size in more.items() if size}}
    kinds = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items())
    return [f"host memory {format_bytes(sum(parts.values()))}: {kinds}"]


def comparison_table(compared: Compared) -> Table:
    """Returns all policies side by side."""
    heads = ["policy", "reserve factor", "forward", "step", "steady step", "peak device", "link bytes", "gap"]
    rows, num_heads = [], len(heads)
    for row in compared.rows:
        made, places = row.plan, ["-", "-"]
        if made is None or made.predicted is None:
            rows.append(
                [row.policy, "-", "-", "-", "-", f"needs {format_bytes(row.smallest_bytes)}", "-", "-", *places]
            )
            continue
        counts = [sum(made.updates_on_device), sum(made.updates_streamed)]
        if any(counts):
            places, num_heads = [f"{count} of {len(made.layers)}" for count in counts], len(heads) + 2
        predicted = made.predicted
        times = map(format_seconds, (predicted.forward_s, predicted.step_s, predicted.steady_step_s))
        sizes = map(format_bytes, (predicted.peak_device_bytes, row.link_bytes))
        rows.append([row.policy, f"{made.reserve_factor:g}", *times, *sizes, f"{row.gap:.2%}", *places])
    heads = [*heads, "updates on device", "streamed"][:num_heads]
    return make_table(heads, [row[:num_heads] for row in rows], title="policies")


def _sweep_table(points: list[SweepPoint], best: SweepPoint | None) -> Table:
    rows = []
    for point in points:
        budget = "-" if point.memory_budget_bytes is None else format_bytes(point.memory_budget_bytes)
        cells = ["does not fit", "-", "-"]
        if point.plan is not None and point.plan.predicted is not None:
            predicted = point.plan.predicted
            times = [format_seconds(predicted.steady_step_s), format_seconds(predicted.step_s)]
            cells = [*times, format_bytes(predicted.peak_device_bytes)]
        rows.append([f"{point.reserve_factor:g}", budget, *cells, "knee" if point is best else ""])
    heads = ["reserve factor", "budget", "steady step", "step", "peak device", ""]
    return make_table(heads, rows, title="sweep")


def _lane_table(simulation: Simulation) -> Table:
    rows = []
    for lane, use in simulation.lanes.items():
        total_s = use.busy_s + use.idle_s
        share = use.busy_s / total_s if total_s > 0 else 0.0
        rows.append([lane.value, format_seconds(use.busy_s), format_seconds(use.idle_s), f"{share:.0%}"])
    return make_table(["lane", "busy", "idle", "used"], rows, title="lanes, one step")


def _simulation_lines(simulation: Simulation) -> list[str]:
    path, half = list(simulation.critical_path), _MOST_OF_PATH // 2
    if len(path) > _MOST_OF_PATH:
        path = [*path[:half], f"... {len(path) - _MOST_OF_PATH} more ...", *path[-half:]]
    one_step = max(num_bytes for _, num_bytes in simulation.device_bytes)
    streamed = simulation.streamed_state_bytes
    where = "of masters and optimizer state in pinned host memory, streamed through the GPU"
    return [
        _times(simulation),
        f"peak device memory {format_bytes(simulation.peak_device_bytes)} over a chain of {CHAIN_STEPS} steps, where "
        f"loads start during the previous step; {format_bytes(one_step)} in a single step",
        f"host link {format_bytes(simulation.link_bytes)} per step",
        *([f"{format_bytes(streamed)} {where}"] if streamed else []),
        f"critical path: {' > '.join(path)}",
    ]


def weights(
    instance_file: Annotated[
        Path,
        Argument(
            metavar="INSTANCE.json",
            help="Weights, activations, times, memory and bandwidth; or a profile with --memory-budget.",
            show_default=False,
        ),
    ],
    policy: Annotated[str, Option(help=f"One of {', '.join(POLICIES)}.")] = "greedy",
    memory_budget: Annotated[
        str | None, Option(metavar="SIZE", help="Device memory, such as 8GiB; overrides the instance's own.")
    ] = None,
    output: PlanOutput = None,
    as_json: AsJson = False,
) -> None:
    """Choose the weights to offload under a memory limit (Weight Offloading Strategies).

    Schedules the transfers too. With a profile, -o writes a plan of GFGB and RELOAD modes. The algorithms come from
    "Weight Offloading Strategies for Training Large DNN Models" (Beaumont et al., 2022). `bound` is a lower bound on
    the duration of any schedule.
    """
    check_policy(policy)
    budget = read_budget(memory_budget)
    instance, profile = _load_instance(instance_file, budget)
    if output is not None and profile is None:
        raise InputError(f"-o needs a profile instead of {instance_file}: a plan names its layers")
    with progress(f"{policy} for {instance.num_layers} layers"), naming(instance_file):
        outcome = solve(instance, policy)
    if output is not None and profile is not None:
        predict(profile, export_plan(profile, policy, outcome.choices)).save(output)
    print_result(as_json, outcome.to_json(), *_weights_tables(instance, outcome))


def _load_instance(path: Path, budget: int | None) -> tuple[Instance, Profile | None]:
    def read(document: Any) -> tuple[Instance, Profile | None]:
        if not isinstance(document, dict) or document.get("format") != PROFILE_FORMAT:
            if isinstance(document, dict) and budget is not None:
                document = document | {"memory_bytes": budget}
            return Instance.from_json(document), None
        if budget is None:
            raise InputError("a profile does not contain the size of device memory: give --memory-budget")
        profile = Profile.from_json(document)
        return instance_from_profile(profile, budget), profile

    return load_record(path, read)


def _weights_tables(instance: Instance, outcome: Outcome) -> list[Any]:
    summary = Table(show_header=False, box=None, pad_edge=False)
    memory, smallest = format_bytes(instance.memory_bytes), format_bytes(instance.smallest_memory_bytes)
    summary.add_row("policy", outcome.policy)
    summary.add_row("duration", format_seconds(outcome.duration_s))
    summary.add_row("compute", format_seconds(outcome.compute_s))
    summary.add_row("overhead", "-" if outcome.overhead is None else f"{100 * outcome.overhead:.2f} %")
    summary.add_row("memory", f"{memory}, at least {smallest} for any schedule")
    summary.add_row("absent from forward to backward", _ranges(c.layer for c in outcome.choices if c.before_backward))
    summary.add_row(
        "absent from backward to forward", _ranges(c.layer for c in outcome.choices if not c.before_backward)
    )
    events = () if outcome.schedule is None else outcome.schedule.events
    if outcome.schedule is not None:
        for kind, plural in (("prefetch", "prefetches"), ("offload", "offloads")):
            own = [event for event in events if event.kind == kind]
            moved = sum(instance.weights[event.layer] for event in own)
            busy_s = sum(event.end_s - event.start_s for event in own)
            share = busy_s / outcome.duration_s if outcome.duration_s else 0.0
            time = f"{format_seconds(busy_s)} ({100 * share:.0f} % of the time)"
            summary.add_row(plural, f"{len(own)}, {format_bytes(moved)}, {time}")
    if outcome.note:
        summary.add_row("note", outcome.note)
    if len(events) > _MAX_ROWS:
        return [summary, f"\nschedule: {len(events)} events, printed by --json"]
    table = Table("start", "end", "what", "layer", box=None, pad_edge=False)
    for event in events:
        table.add_row(format_seconds(event.start_s), format_seconds(event.end_s), event.kind, str(event.layer))
    return [summary, "", table] if events else [summary]


def _ranges(layers: Iterable[int]) -> str:
    """Formats layer numbers in ascending order, such as `0-3, 7`."""
    runs = itertools.groupby(enumerate(sorted(layers)), key=lambda pair: pair[1] - pair[0])
    ends = [[layer for _, layer in run] for _, run in runs]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in ends) or "none"
