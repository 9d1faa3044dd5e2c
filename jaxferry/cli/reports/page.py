"""Recorded runs and benches as one self-contained HTML page: no scripts, no network; for screens and print."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from jaxferry.cli.compare import Comparison
from jaxferry.cli.recording import Recording
from jaxferry.cli.reports.bench_tables import bench_cells, bench_lines
from jaxferry.cli.reports.sections import COLOURS, sections, table

_CSS = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 1100px; margin: 2em auto;
  padding: 0 1em; }
h1 { font-size: 1.5em; overflow-wrap: anywhere; } h2 { font-size: 1.25em; margin-top: 2em; } h3 { font-size: 1.05em; }
h2, h3 { break-after: avoid; }
table { border-collapse: collapse; display: block; overflow-x: auto; }
td, th { padding: .2em .8em; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap; }
td { vertical-align: top; }
td:first-child, th:first-child { text-align: left; padding-left: 0; }
td.text, th:last-child { text-align: left; } td.text { white-space: normal; min-width: 22em; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2em 1em; } dd { margin: 0; } dt { color: #555; }
.figure { overflow-x: auto; }
svg { width: 100%; min-width: 720px; height: auto; font-size: 12px; display: block; } svg line { stroke: #888; }
polyline { fill: none; stroke: #333; stroke-width: 1.5; }
.entry { white-space: nowrap; margin-right: 1em; }
.key { display: inline-block; width: .9em; height: .9em; margin-right: .3em; }
@media (max-width: 640px) {
  svg { min-width: 560px; font-size: 15px; } td, th { padding: .2em .4em; }
  .wide { display: block; font-size: 12.5px; } .wide thead, .wide tbody { display: block; }
  .wide tr { display: grid; grid-template-columns: 1.4fr repeat(4, 1.4fr); border-bottom: 1px solid #ddd; }
  .wide td, .wide th { border: none; white-space: normal; overflow-wrap: anywhere; min-width: 0; }
  .wide td.text, .wide th:last-child { grid-column: 1 / -1; min-width: 0; padding-left: 0; color: #555; }
}
@media print {
  @page { margin: 12mm; }
  body { margin: 0; max-width: none; font-size: 10pt; print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  table { display: table; font-size: 8.5pt; } td, th { padding: .15em .5em; } td.text { min-width: 0; }
  svg { min-width: 0; } tr, .figure { break-inside: avoid; } section > p { break-inside: avoid; break-after: avoid; }
}
""" + "".join(
    f"rect.{name}, polygon.{name} {{ fill: {it}; }} polyline.{name} {{ stroke: {it}; }} "
    f".key.{name} {{ background: {it}; }}\n"
    for name, it in COLOURS.items()
)


def report_page(recording: Recording) -> str:
    """Returns the page of a recording, as HTML."""
    return _page(_title(recording), "".join(_sections(sections(recording), "h2")))


def bench_page(compared: Comparison) -> str:
    """Returns the page of a bench: the policies side by side, then each one's recording."""
    title, parts = (
        "bench",
        [table(*bench_cells(compared)), *(f"<p>{escape(line)}</p>" for line in bench_lines(compared))],
    )
    for row in compared.rows:
        if row.recording is not None:
            title = f"bench: {_title(row.recording)}"
            parts += [f"<h2>{escape(row.policy)}</h2>", *_sections(sections(row.recording), "h3")]
    return _page(title, "".join(parts))


def _title(recording: Recording) -> str:
    return f"{recording.model} on {recording.machine.get('name', 'an unknown machine')}"


def _sections(parts: Iterable[tuple[str, str]], heading: str) -> list[str]:
    return [
        f"<section>{f'<{heading}>{escape(name)}</{heading}>' if name else ''}{html}</section>" for name, html in parts
    ]


def _page(title: str, body: str) -> str:
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    head += f"<title>{escape(title)}</title><style>{_CSS}</style>"
    return f'<!doctype html><html lang="en"><head>{head}</head><body><h1>{escape(title)}</h1>{body}</body></html>\n'
