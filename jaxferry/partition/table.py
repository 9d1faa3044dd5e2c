"""Shows the segments of a partition as a table."""

from __future__ import annotations

import rich.console
import rich.markup
import rich.table

from jaxferry.partition.segments import Partition
from jaxferry.units import format_bytes


def table(partition: Partition) -> rich.table.Table:
    """Returns a table with one row per segment (name, parameters, layer bytes, bytes alive at its end, program)."""
    rows = rich.table.Table(
        title=f"{len(partition.segments)} segments, {len(partition.layers)} layers, {partition.num_programs} programs",
        caption=rich.markup.escape("\n".join(partition.notes)) or None,
        caption_justify="left",
    )
    rows.add_column("segment")
    for column in ("parameters", "bytes", "alive at its end", "program"):
        rows.add_column(column, justify="right")
    for segment in partition.segments:
        layers = [partition.layers[group] for group in segment.groups]
        rows.add_row(
            segment.name,
            f"{sum(layer.num_parameters for layer in layers):,}",
            format_bytes(sum(layer.num_bytes for layer in layers)),
            format_bytes(segment.alive_bytes),
            str(segment.program),
        )
    return rows


def print_table(partition: Partition, console: rich.console.Console | None = None) -> None:
    """Prints `table(partition)` and the reasons for merged layers to the console (default: standard output)."""
    console = console or rich.console.Console()
    console.print(table(partition))
    for merge in partition.merges:
        console.print(merge.message, markup=False, highlight=False)
