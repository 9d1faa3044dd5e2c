"""Tables and lines for human readers."""

import itertools
from collections.abc import Mapping
from typing import Any

import rich.markup
from rich.table import Table

from jaxferry.planner.exact import Exact
from jaxferry.planner.planning import Compared, SweepPoint
from jaxferry.step.records import Plan
from jaxferry.units import format_bytes, format_seconds


def plan_table(plan: Plan) -> Table:
    """Returns modes and gradient places, also remat and update if any layer has them; a row per run of equal layers."""
    shown = ["mode", "gradient"]
    shown += ["remat"] if any(plan.recomputes) else []
    shown += ["update"] if any(plan.updates_on_device) or any(plan.updates_streamed) else []
    table = make_table("layers", "", *shown, title=f"{plan.policy}, reserve factor {plan.reserve_factor:g}")
    for values, run in itertools.groupby(plan.layers, key=lambda layer: [getattr(layer, key).value for key in shown]):
        names = [layer.name for layer in run]
        span = names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"
        table.add_row(rich.markup.escape(span), str(len(names)), *values)
    return table


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


def make_table(first: str, *rest: str, title: str) -> Table:
    """Returns a table whose columns after the first are numbers."""
    table = Table(title=title)
    table.add_column(first)
    for name in rest:
        table.add_column(name, justify="right")
    return table
