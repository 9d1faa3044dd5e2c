"""Tables and lines of a bench; apart from other tables, so that planning starts without it."""

from rich.table import Table

from jaxferry.cli.compare import Comparison, plan_counts, ratio
from jaxferry.cli.dry_run import DryRun
from jaxferry.cli.reports.tables import make_table
from jaxferry.units import format_bytes, format_seconds


def bench_table(compared: Comparison) -> Table:
    """Returns the measured step of each policy beside its prediction and its bounds."""
    heads, rows = bench_cells(compared)
    table = make_table(*heads, title="policies, trained")
    for row in rows:
        table.add_row(*row)
    return table


def bench_cells(compared: Comparison) -> tuple[list[str], list[list[str]]]:
    """Returns the heads and the rows of `bench_table`."""
    rows = []
    for row in compared.rows:
        ratios = [ratio(row.measured_s, by) for by in (row.predicted_s, row.own_bound_s, compared.bound_s)]
        shown = ["-" if value is None else f"{value:.3f}" for value in ratios]
        measured, predicted, own = map(format_seconds, (row.measured_s, row.predicted_s, row.own_bound_s))
        size = format_bytes(row.peak_device_bytes)
        rows.append([row.policy, measured, predicted, shown[0], own, shown[1], shown[2], size])
    heads = ["measured", "predicted", "/ predicted", "own bound", "/ own bound", "/ bound", "peak device"]
    return ["policy", *heads], rows


def dry_run_table(dry: DryRun) -> Table:
    """Returns the step that each policy would run."""
    heads = ("forward", "step", "steady step", "own bound", "peak device", "modes")
    table = make_table("policy", *heads, title="policies, not trained")
    for row in dry.rows:
        if row.plan is None or row.plan.predicted is None:
            table.add_row(row.policy, "-", "-", "-", "-", f"needs {format_bytes(row.smallest_bytes)}", "-")
            continue
        predicted = row.plan.predicted
        times_s = (predicted.forward_s, predicted.step_s, predicted.steady_step_s, row.own_bound_s)
        modes = ", ".join(f"{count} {mode}" for mode, count in plan_counts(row.plan).items())
        modes += " (changed to fit)" if row.is_changed else ""
        table.add_row(row.policy, *map(format_seconds, times_s), format_bytes(row.peak_device_bytes), modes)
    return table


def bench_lines(compared: Comparison | DryRun) -> list[str]:
    """Explains the bounds."""
    works = ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in compared.work_s.items())
    impossible = _below_bounds(compared) if isinstance(compared, Comparison) else []
    return [
        f"work per step: {works}; the longest is the bound",
        "own bound: the busiest lane under the policy's own plan, which may load twice or read host memory in place",
        *impossible,
    ]


def _below_bounds(compared: Comparison) -> list[str]:
    """Says what a measured step below a bound means; bounds are made of the profile's times."""
    shares = {
        row.policy: (ratio(row.measured_s, row.own_bound_s), ratio(row.measured_s, compared.bound_s))
        for row in compared.rows
    }
    impossible = [f"{policy} {own:.3f}" for policy, (own, _) in shares.items() if own is not None and own < 1]
    lighter = [policy for policy, (own, shared) in shares.items() if own is not None and own >= 1 > (shared or 1)]
    lines = []
    if impossible:
        lines.append(
            f"below the own bound: {', '.join(impossible)}. No step can be: the machine was busier while the profile "
            "was measured than during the bench; on an idle machine, measure again (JAXFERRY_CACHE_DIR=off)"
        )
    if lighter:
        lines.append(f"below the bound: {', '.join(lighter)}, whose plan does not move every layer both ways")
    return lines
