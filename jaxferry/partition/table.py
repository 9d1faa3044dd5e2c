"""The segments of a partition as a table to read."""

from __future__ import annotations

import rich.console
import rich.markup
import rich.table

from jaxferry.partition.segments import Partition
from jaxferry.units import format_bytes


def table(partition: Partition) -> rich.table.Table:
    """One row a segment: name, parameters, bytes of its layer, bytes alive at its end, program; below, notes."""
    rows = rich.table.Table(
        title=f"{len(partition.segments)} segments, {len(partition.layers)} layers, {partition.num_programs} programs",
        caption=rich.markup.escape("\n".join(partition.notes)) or None,
        caption_justify="left",
    )
    rows.add_column("segment")
    for column in ("parameters", "bytes", "alive at its end", "program"):
        rows.add_column(column, justify="right")
    for segment in partition.segments:
        layer = partition.layers[segment.layer]
        rows.add_row(
            segment.name,
            f"{layer.num_parameters:,}",
            format_bytes(layer.num_bytes),
            format_bytes(segment.alive_bytes),
            str(segment.program),
        )
    return rows


def print_table(partition: Partition, console: rich.console.Console | None = None) -> None:
    """Prints `table(partition)`, and why layers were merged, to the console (standard output by default)."""
    console = console or rich.console.Console()
    console.print(table(partition))
    for merge in partition.merges:
        console.print(merge.message, markup=False, highlight=False)
