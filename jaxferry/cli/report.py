"""`jaxferry report`: shows the results of `jaxferry bench`, or makes a page of a recorded run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from jaxferry.cli import COMMANDS
from jaxferry.cli.common import AsJson, print_json, print_report
from jaxferry.compare import Comparison
from jaxferry.errors import InputError
from jaxferry.recording import FORMAT as RECORDING_FORMAT
from jaxferry.recording import Recording
from jaxferry.records import load_record, read_json
from jaxferry.report.page import bottleneck, report_page
from jaxferry.report.plots import plot_format
from jaxferry.report.tables import bench_lines, bench_table
from jaxferry.report.timelines import plot_timelines


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("report", help=COMMANDS["report"])(report)


def report(
    results: Annotated[
        Path, typer.Argument(metavar="FILE.json", help="A file of `jaxferry bench -o` or `jaxferry train --record`.")
    ],
    plot: Annotated[
        Path | None, typer.Option(metavar="P.png", help="Draw the lanes of a bench over time: PNG, PDF or SVG.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="REPORT.html", help="Write the page of a recording.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Prints the table of a bench and draws its timelines, or makes one page of a recorded run."""
    document = read_json(results)
    if isinstance(document, Mapping) and document.get("format") == RECORDING_FORMAT:
        if plot is not None:
            raise InputError("--plot draws a bench; for a recording give -o REPORT.html")
        _report_recording(load_record(results, Recording.from_json), output, as_json)
        return
    if output is not None:
        raise InputError(f"-o makes a page of a recording (`jaxferry train --record`), and {results} is none")
    _report_bench(results, plot, as_json)


def _report_recording(recording: Recording, output: Path | None, as_json: bool) -> None:
    if output is not None:
        try:
            output.write_text(report_page(recording), encoding="utf-8")
        except OSError as error:
            raise InputError(f"cannot write {output}: {error.strerror or error}") from error
    if as_json:
        print_json(recording.to_json())
    else:
        print_report(bottleneck(recording))


def _report_bench(results: Path, plot: Path | None, as_json: bool) -> None:
    if plot is not None:
        plot_format(plot)
    compared = load_record(results, Comparison.from_json)
    if plot is not None:
        plot_timelines(compared, plot)
    if as_json:
        print_json(compared.to_json())
    else:
        print_report(bench_table(compared), *bench_lines(compared))
