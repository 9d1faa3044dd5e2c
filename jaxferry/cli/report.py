"""`jaxferry report`: shows the results of `jaxferry bench`."""

from pathlib import Path
from typing import Annotated

import typer

from jaxferry.cli import COMMANDS
from jaxferry.cli.common import AsJson, print_json, print_report
from jaxferry.compare import Comparison
from jaxferry.records import load_record
from jaxferry.report.plots import plot_format
from jaxferry.report.tables import bench_lines, bench_table
from jaxferry.report.timelines import plot_timelines


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("report", help=COMMANDS["report"])(report)


def report(
    bench: Annotated[Path, typer.Argument(metavar="BENCH.json", help="A file written by `jaxferry bench -o`.")],
    plot: Annotated[
        Path | None, typer.Option(metavar="P.png", help="Draw the lanes over time: PNG, PDF or SVG.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Prints the table and draws the timelines."""
    if plot is not None:
        plot_format(plot)
    compared = load_record(bench, Comparison.from_json)
    if plot is not None:
        plot_timelines(compared, plot)
    if as_json:
        print_json(compared.to_json())
    else:
        print_report(bench_table(compared), *bench_lines(compared))
