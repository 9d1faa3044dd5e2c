"""The table and lines of a fit, for human readers."""

from rich.table import Table

from jaxferry.cli.compare import plan_counts
from jaxferry.cli.fitting.records import BatchForecast, Fit
from jaxferry.optimizer import host_memory
from jaxferry.step.bottleneck import Bottleneck
from jaxferry.units import format_bytes, format_seconds


def fit_lines(fit: Fit) -> list[str]:
    """Returns the answer, and the host and device memory that training needs."""
    answer = f"fits, with batches of up to {fit.largest_batch_size}" if fit.fits else f"does not fit: {fit.problem}"
    kinds = ", ".join(f"{name} {format_bytes(size)}" for name, size in fit.host_bytes.items())
    size = "an unknown size: --host-memory" if fit.host_memory_bytes is None else format_bytes(fit.host_memory_bytes)
    least = f"batches of {fit.smallest_batch_size} need at least {format_bytes(fit.smallest_bytes)}"
    pinned = host_memory.pinned_problem(fit.pinned_bytes) or host_memory.pinned_advice(fit.pinned_bytes)
    return [
        f"{fit.model} on {fit.machine}: {answer}",
        f"host memory {format_bytes(sum(fit.host_bytes.values()))} (of {size}): {kinds}",
        f"of which pinned {format_bytes(fit.pinned_bytes)}{f': {pinned}' if pinned else ''}",
        f"device memory budget {format_bytes(fit.budget_bytes)}: {least}",
    ]


def fit_table(fit: Fit) -> Table:
    """Returns speed and device memory, one column for each batch size."""
    table = Table("batch size", title="predicted")
    for row in fit.rows:
        is_largest = row.batch_size == fit.largest_batch_size
        table.add_column(f"{row.batch_size}{' (largest)' * is_largest}", justify="right")
    columns = [_cells(row) for row in fit.rows]
    for name in columns[0]:
        table.add_row(name, *(column.get(name, "-") for column in columns))
    return table


def reason_lines(fit: Fit) -> list[str]:
    """Returns what limits the speed for each batch size."""
    return [
        f"batches of {row.batch_size} are limited by the {Bottleneck(row.limit, row.reason).noun}: {row.reason}"
        for row in fit.rows
    ]


def _cells(row: BatchForecast) -> dict[str, str]:
    tokens = {} if row.tokens_per_s is None else {"tokens a second": f"{row.tokens_per_s:,.0f}"}
    return {
        "seconds a step": format_seconds(row.step_s),
        "samples a second": f"{row.samples_per_s:,.2f}",
        **tokens,
        "device memory": format_bytes(sum(row.device_bytes.values())),
        **{f"  {kind}": format_bytes(size) for kind, size in row.device_bytes.items()},
        "limited by": row.limit,
        "layers": ", ".join(f"{count} {mode}" for mode, count in plan_counts(row.plan).items()),
        "recomputing": str(sum(row.plan.recomputes)),
    }
