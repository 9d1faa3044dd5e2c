"""`jaxferry weights`: chooses the weights to drop between their uses and schedules their transfers."""

import itertools
import pathlib
from collections.abc import Iterable
from typing import Annotated, Any

import rich.table
from typer import Argument, Option

from jaxferry.cli.common import AsJson, naming, print_result, progress, read_budget
from jaxferry.costs import PROFILE_FORMAT, Profile
from jaxferry.errors import InputError
from jaxferry.records import load_record, write_json
from jaxferry.step import predict
from jaxferry.units import format_bytes, format_seconds
from jaxferry.weights import POLICIES, Instance, Outcome, check_policy, export_plan, instance_from_profile, solve

_MAX_ROWS = 60  # the table of a schedule shows at most this many events; `--json` prints longer schedules


def weights(
    instance_file: Annotated[
        pathlib.Path,
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
    output: Annotated[
        pathlib.Path | None,
        Option("--output", "-o", metavar="PLAN.json", help="Write a plan of GFGB and RELOAD modes; needs a profile."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Choose the weights to offload under a memory limit (Weight Offloading Strategies).

    Schedules the transfers too. The algorithms come from "Weight Offloading Strategies for Training Large DNN Models"
    (Beaumont et al., 2022). `bound` is a lower bound on the duration of any schedule.
    """
    check_policy(policy)
    budget = read_budget(memory_budget)
    instance, profile = _load(instance_file, budget)
    if output is not None and profile is None:
        raise InputError(f"-o needs a profile instead of {instance_file}: a plan names its layers")
    with progress(f"{policy} for {instance.num_layers} layers"), naming(instance_file):
        outcome = solve(instance, policy)
    if output is not None and profile is not None:
        write_json(output, predict(profile, export_plan(profile, policy, outcome.choices)).to_json())
    print_result(as_json, outcome.to_json(), *_tables(instance, outcome))


def _load(path: pathlib.Path, budget: int | None) -> tuple[Instance, Profile | None]:
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


def _tables(instance: Instance, outcome: Outcome) -> list[Any]:
    summary = rich.table.Table(show_header=False, box=None, pad_edge=False)
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
    if outcome.schedule is not None:
        for kind in ("prefetch", "offload"):
            summary.add_row({"prefetch": "prefetches", "offload": "offloads"}[kind], _traffic(instance, outcome, kind))
    if outcome.note:
        summary.add_row("note", outcome.note)
    events = () if outcome.schedule is None else outcome.schedule.events
    if len(events) > _MAX_ROWS:
        return [summary, f"\nschedule: {len(events)} events, printed by --json"]
    table = rich.table.Table("start", "end", "what", "layer", box=None, pad_edge=False)
    for event in events:
        table.add_row(format_seconds(event.start_s), format_seconds(event.end_s), event.kind, str(event.layer))
    return [summary, "", table] if events else [summary]


def _traffic(instance: Instance, outcome: Outcome, kind: str) -> str:
    events = [event for event in outcome.schedule.events if event.kind == kind] if outcome.schedule else []
    moved = sum(instance.weights[event.layer] for event in events)
    busy_s = sum(event.end_s - event.start_s for event in events)
    share = busy_s / outcome.duration_s if outcome.duration_s else 0.0
    return f"{len(events)}, {format_bytes(moved)}, {format_seconds(busy_s)} ({100 * share:.0f} % of the time)"


def _ranges(layers: Iterable[int]) -> str:
    """Formats layer numbers in ascending order, such as `0-3, 7`."""
    runs = itertools.groupby(enumerate(sorted(layers)), key=lambda pair: pair[1] - pair[0])
    ends = [[layer for _, layer in run] for _, run in runs]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in ends) or "none"
