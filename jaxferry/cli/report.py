"""`jaxferry report`: shows the results of `jaxferry bench`, or makes a page of a recorded run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from jaxferry.cli import COMMANDS
from jaxferry.cli.common import AsJson, print_json, print_report
from jaxferry.cli.compare import FORMAT as BENCH_FORMAT
from jaxferry.cli.compare import Comparison
from jaxferry.cli.recording import FORMAT as RECORDING_FORMAT
from jaxferry.cli.recording import Recording
from jaxferry.cli.reports.bench_tables import bench_lines, bench_table
from jaxferry.cli.reports.page import bench_page, report_page
from jaxferry.cli.reports.plots import plot_format
from jaxferry.cli.reports.sections import bottleneck_sentence
from jaxferry.cli.reports.timelines import plot_timelines
from jaxferry.errors import InputError
from jaxferry.records import load_record, read_json


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
        Path | None, typer.Option("--output", "-o", metavar="REPORT.html", help="Write all as one page.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Prints what limits a recorded run, or the table of a bench; makes one page of either."""
    document = read_json(results)
    found = document.get("format") if isinstance(document, Mapping) else None
    if found not in (BENCH_FORMAT, RECORDING_FORMAT):
        raise InputError(f'{results}: format must be "{BENCH_FORMAT}" or "{RECORDING_FORMAT}", got {found!r}')
    if found == RECORDING_FORMAT:
        if plot is not None:
            raise InputError("--plot draws a bench; for a recording give -o REPORT.html")
        _report_recording(load_record(results, Recording.from_json), output, as_json)
        return
    _report_bench(results, plot, output, as_json)


def _report_recording(recording: Recording, output: Path | None, as_json: bool) -> None:
    if output is not None:
        _write(output, report_page(recording))
    if as_json:
        print_json(recording.to_json())
    else:
        print_report(bottleneck_sentence(recording))


def _report_bench(results: Path, plot: Path | None, output: Path | None, as_json: bool) -> None:
    if plot is not None:
        plot_format(plot)
    compared = load_record(results, Comparison.from_json)
    if output is not None:
        _write(output, bench_page(compared))
    if plot is not None:
        plot_timelines(compared, plot)
    if as_json:
        print_json(compared.to_json())
    else:
        print_report(bench_table(compared), *bench_lines(compared))


def _write(output: Path, page: str) -> None:
    try:
        output.write_text(page, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {output}: {error.strerror or error}") from error
