"""`jaxferry report`: shows the results of `jaxferry bench`, or makes a page of a recorded run."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Annotated

import typer

from jaxferry.cli import svg
from jaxferry.cli.common import AsJson, print_json, print_report
from jaxferry.cli.compare import BENCH_FORMAT, Comparison, bench_cells, bench_lines, bench_table
from jaxferry.cli.figures import plot_format, plot_timelines
from jaxferry.cli.reasons import layer_reasons
from jaxferry.cli.recording import FORMAT as RECORDING_FORMAT
from jaxferry.cli.recording import RecordedTask, Recording
from jaxferry.errors import InputError
from jaxferry.records import load_record, read_json
from jaxferry.step.bottleneck import Bottleneck, find_bottleneck
from jaxferry.step.schedule import Kind, Lane, repeat, schedule_step
from jaxferry.step.simulate.machine import run, steady_step_s
from jaxferry.step.simulate.memory_kinds import ACTIVATIONS, GRADIENTS, PARAMETERS, STATE, TEMPORARIES
from jaxferry.step.simulate.report import link_bytes
from jaxferry.units import format_bytes, format_seconds


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


COLOURS = {
    "forward": "#2a9d5c",
    "backward": "#1c6b8c",
    "load": "#4a7fd4",
    "offload": "#e08a1e",
    "activations": "#8a62b3",
    "update": "#c8443c",
    "parameters": "#4a7fd4",
    "gradients": "#e08a1e",
    "temporaries": "#9aa0a6",
    "state": "#c8443c",
}
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


_KINDS = {
    PARAMETERS: "parameters",
    STATE: "state",
    ACTIVATIONS: "activations",
    GRADIENTS: "gradients",
    TEMPORARIES: "temporaries",
}
"""Kinds of device memory, with the classes of their colours."""

_LINKS = {Lane.H2D: "to the device", Lane.D2H: "from the device", Lane.GPU: "by programs, in host memory"}
_LINK_COLOURS = {Lane.H2D: "load", Lane.D2H: "offload", Lane.GPU: "forward"}
_BINS = 120


def sections(recording: Recording) -> list[tuple[str, str]]:
    """Returns the heading and the HTML of each section; the first has no heading."""
    summary = Summary(recording)
    return [
        ("", _overview(summary)),
        ("Time by stage and micro-batch", _stages(recording)),
        ("Lanes of one step", _lanes(summary)),
        ("Bytes on the host link, by step", _links(recording)),
        ("Speed of the links over time", _speeds(recording)),
        ("Sizes of transfers", _sizes(recording)),
        ("Device memory over the step, as counted", _memory(recording)),
        ("Host memory", _host_memory(recording)),
        ("Plan", _plan(recording)),
    ]


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], wide: bool = False) -> str:
    """Returns a table; the last column of a `wide` one is text that wraps."""
    head = "".join(f"<th>{escape(head)}</th>" for head in heads)
    body = ""
    for row in rows:
        cells = [f"<td>{escape(cell)}</td>" for cell in row]
        if wide:
            cells[-1] = f'<td class="text">{escape(row[-1])}</td>'
        body += f"<tr>{''.join(cells)}</tr>"
    kind = ' class="wide"' if wide else ""
    return f"<table{kind}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def bottleneck_sentence(recording: Recording) -> str:
    """Names what limits the recorded steps."""
    found = Summary(recording).bottleneck
    return f"The bottleneck is the {found.noun}: {found.reason}."


def _overview(summary: Summary) -> str:
    recording = summary.recording
    numbers = sorted({task.step for task in recording.tasks})
    facts = ", ".join(_fact(key, value) for key, value in recording.machine.items() if isinstance(value, str | int))
    policy = f"policy {recording.plan.policy}, reserve factor {recording.plan.reserve_factor:g}"
    about = f"Steps {numbers[0]} to {numbers[-1]}, as recorded; {policy}."
    measured = format_seconds(summary.measured_s)
    times = f"a step takes {measured} (median; {_range(summary.step_s)})"
    if summary.predicted_s is None:
        times += "; none is predicted, as the plan was made without times (a policy, or profile measure, has them)"
    else:
        times += f"; predicted {format_seconds(summary.predicted_s)}"
    budget = "no memory budget"
    if recording.memory_budget_bytes is not None:
        budget = f"memory budget {format_bytes(recording.memory_budget_bytes)}"
    rows = [["model", recording.model], ["machine", facts], ["step", times], ["device memory", budget]]
    sentence = f"<p><strong>{escape(bottleneck_sentence(recording))}</strong></p>"
    return f"<p>{escape(about)}</p>{sentence}{_facts(rows)}"


def _facts(rows: Iterable[Sequence[str]]) -> str:
    return f"<dl>{''.join(f'<dt>{escape(name)}</dt><dd>{escape(told)}</dd>' for name, told in rows)}</dl>"


def _range(seconds: Sequence[float]) -> str:
    return f"{format_seconds(min(seconds))} to {format_seconds(max(seconds))} over {len(seconds)}"


def _keys(names: Iterable[tuple[str, str]]) -> str:
    """A legend of (CSS class, text)."""
    shown = (f'<span class="entry"><span class="key {kind}"></span>{escape(told)}</span>' for kind, told in names)
    return f'<p class="keys">{" ".join(shown)}</p>'


def _stages(recording: Recording) -> str:
    seconds = seconds_by_stage(recording)
    batches = sorted({batch for _, batch in seconds})
    names = {batch: _batch_name(recording, batch) for batch in batches}
    shown = [stage for stage in STAGES if any((stage, batch) in seconds for batch in batches)]
    rows = []
    for batch in batches:
        done, spans = 0.0, []
        for stage in shown:
            took = seconds.get((stage, batch), 0.0)
            told = f"{stage}: {format_seconds(took)}"
            spans.append((done, done + took, stage, told))
            done += took
        rows.append((f"batch {batch}", spans))
    longest = max((spans[-1][1] for _, spans in rows), default=0.0)
    told = "Seconds of work; lanes work at once, so a step is shorter than the sum."
    if recording.accumulate > 1:
        told += " The update follows the last micro-batch, whose backward is the one at the gradient boundary."
    cells = [[stage, *(format_seconds(seconds.get((stage, batch), 0.0)) for batch in batches)] for stage in shown]
    legend = _keys((stage, stage) for stage in shown)
    return f"<p>{told}</p>{table(['work', *names.values()], cells)}{legend}{svg.lanes(rows, 0.0, longest)}"


def _batch_name(recording: Recording, batch: int) -> str:
    is_last = recording.accumulate > 1 and batch == recording.accumulate - 1
    return f"micro-batch {batch}{' (gradient boundary)' * is_last}"


def _lanes(summary: Summary) -> str:
    shown = window(summary.recording.tasks)
    rows = _rows("measured", shown)
    length = shown.end_s - shown.begin_s
    told = f"Measured: {format_seconds(summary.measured_s)} a step. "
    if summary.predicted_s is not None:
        below = window(summary.predicted)
        rows += _rows("predicted", below)
        length = max(length, below.end_s - below.begin_s)
        told += f"Predicted, by the machine model and the profile's times: {format_seconds(summary.predicted_s)}. "
    told += "From the end of one step's last program to the end of the next one's, tasks of the neighbours included."
    stages = {kind for _, spans in rows for _, _, kind, _ in spans}
    legend = _keys((stage, stage) for stage in STAGES if stage in stages)
    return f"<p>{told}</p>{legend}{svg.lanes(rows, 0.0, length)}"


def _rows(title: str, of: Window) -> list[tuple[str, list[svg.Span]]]:
    rows: list[tuple[str, list[svg.Span]]] = [(title, [])]
    for lane in Lane:
        rows.append((lane.value, [_span(task, of.begin_s) for task in of.tasks if task.lane is lane]))
    return rows


def _span(task: RecordedTask, begin: float) -> svg.Span:
    told = f"{task.name}: {format_seconds(task.end_s - task.start_s)}"
    told += f", {format_bytes(task.num_bytes)}" if task.num_bytes else ""
    return task.start_s - begin, task.end_s - begin, STAGE_OF[task.kind], told


def _links(recording: Recording) -> str:
    moved = bytes_by_link(recording)
    stages = [stage for stage in STAGES if any(each == stage for _, each in moved)]
    rows = []
    for lane, where in _LINKS.items():
        achieved = speed(recording, lane)
        shown = "-" if achieved is None else f"{achieved / 1e9:,.3g} GB/s"
        rows.append([where, *(format_bytes(moved.get((lane, stage), 0.0)) for stage in stages), shown])
    return table(["", *stages, "while busy"], rows)


def _speeds(recording: Recording) -> str:
    end = max(task.end_s for task in recording.tasks)
    width = end / _BINS or 1.0
    moved = {lane: bytes_over_time(recording, lane, _BINS) for lane in _LINKS}
    most = max(itertools.chain(*moved.values()), default=0.0) / width
    unit, scale = ("GB/s", 1e9) if most >= 1e8 else ("MB/s", 1e6)
    series = [
        (_LINK_COLOURS[lane], [(number * width, each / width / scale) for number, each in enumerate(by_time)])
        for lane, by_time in moved.items()
        if any(by_time)
    ]
    legend = _keys((_LINK_COLOURS[lane], where) for lane, where in _LINKS.items())
    return legend + svg.lines(series, 0.0, end, unit)


def _sizes(recording: Recording) -> str:
    charts = []
    for lane in (Lane.H2D, Lane.D2H):
        sizes = [task.num_bytes for task in recording.tasks if task.num_bytes and task.lane is lane]
        if sizes:
            powers = collections.Counter(math.floor(math.log2(size)) for size in sizes)
            values = [(format_bytes(2**n), float(powers[n])) for n in range(min(powers), max(powers) + 1)]
            told = f"{len(sizes)} transfers {_LINKS[lane]}, median {format_bytes(statistics.median(sizes))}"
            charts.append(f"<p>{told}</p>{svg.bars(values, '', _LINK_COLOURS[lane])}")
    about = "<p>Number of transfers from each size on, up to twice the size.</p>"
    return about + "".join(charts) if charts else "<p>There are no transfers.</p>"


def _memory(recording: Recording) -> str:
    shown = window(recording.tasks)
    series, told = [], []
    for kind, colour in _KINDS.items():
        if kind in recording.device_bytes:
            points = [(time - shown.begin_s, held / 2**20) for time, held in recording.device_bytes[kind]]
            series.append((colour, points))
            most = max(held for _, held in recording.device_bytes[kind])
            told.append((colour, f"{kind}, at most {format_bytes(most)}"))
    return _keys(told) + svg.areas(series, 0.0, shown.end_s - shown.begin_s, "MiB")


def _host_memory(recording: Recording) -> str:
    total = sum(recording.host_bytes.values())
    rows = [[kind, format_bytes(size)] for kind, size in recording.host_bytes.items()]
    return table(["kept for", "size"], [*rows, ["total", format_bytes(total)]])


def _plan(recording: Recording) -> str:
    reasons = layer_reasons(recording.profile, recording.plan, recording.memory_budget_bytes)
    rows = [
        [each.name, each.mode.value, each.gradient.value, each.remat.value, each.update.value, reason]
        for each, reason in zip(recording.plan.layers, reasons, strict=True)
    ]
    heads = ["layer", "mode", "gradient", "remat", "update", "reason"]
    return _details(recording.plan.details) + table(heads, rows, wide=True)


def _details(details: Mapping[str, object]) -> str:
    told = ", ".join(_fact(name, value) for name, value in details.items())
    return f"<p>{escape(told)}</p>" if told else ""


def _fact(name: str, value: object) -> str:
    """A fact in words; the suffix of its name tells its unit."""
    if name == "name":
        return str(value)
    for suffix, shown in (("_s", format_seconds), ("_bytes", format_bytes)):
        if name.endswith(suffix) and isinstance(value, int | float):
            return f"{name.removesuffix(suffix).replace('_', ' ')} {shown(value)}"
    return f"{name.replace('_', ' ')} {value}"


STAGES = {
    "forward": (Kind.FORWARD, Kind.INTER_FORWARD),
    "backward": (Kind.BACKWARD, Kind.INTER_BACKWARD),
    "load": (Kind.LOAD, Kind.RELOAD, Kind.REFRESH, Kind.READ),
    "offload": (Kind.OFFLOAD, Kind.WRITE),
    "activations": (Kind.SAVE, Kind.FETCH),
    "update": (Kind.UPDATE,),
    "state": (Kind.STATE_UP, Kind.STATE_DOWN),
}
"""Kinds of tasks by what they are for; also the classes of their colours. Predictions alone have reads and writes."""

STAGE_OF = {kind: stage for stage, kinds in STAGES.items() for kind in kinds}
_PREDICTED_STEPS = 4


@dataclasses.dataclass(frozen=True)
class Window:
    """The tasks that run in one step, those of its neighbours included.

    Attributes:
      begin_s: the end of the last program of the step before; the first task's start if no step surrounds it.
      end_s: the end of its own last program; the last task's end if no step follows.
      tasks: what runs meanwhile.
    """

    begin_s: float
    end_s: float
    tasks: tuple[RecordedTask, ...]


class Summary:
    """A recording, and the prediction for the same plan under the machine model.

    Args:
      recording: at least one step.
    """

    def __init__(self, recording: Recording) -> None:
        self.recording = recording

    @functools.cached_property
    def step_s(self) -> tuple[float, ...]:
        """Seconds from each step's last program to the next one's; of a single step, of its programs."""
        ends = [end for _, end in _program_spans(self.recording.tasks)]
        if len(ends) > 1:
            return tuple(after - before for before, after in itertools.pairwise(ends))
        [(begin, end)] = _program_spans(self.recording.tasks)
        return (end - begin,)

    @property
    def measured_s(self) -> float:
        """The median step."""
        return statistics.median(self.step_s)

    @functools.cached_property
    def predicted(self) -> tuple[RecordedTask, ...]:
        """The tasks of some predicted steps; none if the profile has no times."""
        profile, plan = self.recording.profile, self.recording.plan
        if not profile.has_times:
            return ()
        of = run(repeat(schedule_step(profile, plan), _PREDICTED_STEPS))
        return tuple(
            RecordedTask(
                name=task.name,
                kind=task.kind,
                layer=profile.layers[task.segment].name,
                lane=task.lane,
                step=task.step,
                micro_batch=0,
                num_bytes=link_bytes(profile.layers[task.segment], task),
                start_s=start_s,
                end_s=end_s,
            )
            for task, start_s, end_s in zip(of.schedule.tasks, of.starts_s, of.ends_s, strict=True)
        )

    @functools.cached_property
    def predicted_s(self) -> float | None:
        """The predicted seconds a step in the steady state; None if the profile has no times."""
        profile, plan = self.recording.profile, self.recording.plan
        return steady_step_s(schedule_step(profile, plan)) if profile.has_times else None

    @functools.cached_property
    def busy_share(self) -> dict[Lane, float]:
        """The share of the recorded time in which each lane works."""
        tasks = self.recording.tasks
        span_s = max(task.end_s for task in tasks) - min(task.start_s for task in tasks)
        busy_s = dict.fromkeys(Lane, 0.0)
        for task in tasks:
            busy_s[task.lane] += task.end_s - task.start_s
        return {lane: min(seconds / span_s, 1.0) if span_s > 0 else 0.0 for lane, seconds in busy_s.items()}

    @functools.cached_property
    def bottleneck(self) -> Bottleneck:
        """What limits the recorded steps."""
        return find_bottleneck(self.busy_share, self.recording.plan.details, self.predicted_s or self.measured_s)


def window(tasks: Sequence[RecordedTask]) -> Window:
    """The last step that has one before and one after it; of fewer than three steps, the last one by itself."""
    spans, last = _program_spans(tasks), max(task.step for task in tasks)
    if len(spans) >= 3:
        begin_s, end_s = spans[-3][1], spans[-2][1]
        inside = tuple(task for task in tasks if task.start_s < end_s and task.end_s > begin_s)
    else:
        inside = tuple(task for task in tasks if task.step == last)
        begin_s, end_s = min(task.start_s for task in inside), max(task.end_s for task in inside)
    return Window(begin_s, end_s, inside)


def _program_spans(tasks: Sequence[RecordedTask]) -> list[tuple[float, float]]:
    """Start of the first and end of the last program of each step, in order."""
    spans: dict[int, tuple[float, float]] = {}
    for task in tasks:
        if task.lane is Lane.GPU:
            start_s, end_s = spans.get(task.step, (task.start_s, task.end_s))
            spans[task.step] = min(start_s, task.start_s), max(end_s, task.end_s)
    return [spans[step] for step in sorted(spans)]


def seconds_by_stage(recording: Recording) -> dict[tuple[str, int], float]:
    """Mean seconds of work a step, by stage and micro-batch."""
    found: dict[tuple[str, int], float] = collections.defaultdict(float)
    steps: dict[int, set[int]] = collections.defaultdict(set)
    for task in recording.tasks:
        found[STAGE_OF[task.kind], task.micro_batch] += task.end_s - task.start_s
        steps[task.micro_batch].add(task.step)
    return {key: seconds / len(steps[key[1]]) for key, seconds in found.items()}


def bytes_by_link(recording: Recording) -> dict[tuple[Lane, str], float]:
    """Mean bytes a step over the host link, by lane and stage."""
    found: dict[tuple[Lane, str], float] = collections.defaultdict(float)
    num_steps = len({task.step for task in recording.tasks})
    for task in recording.tasks:
        if task.num_bytes:
            found[task.lane, STAGE_OF[task.kind]] += task.num_bytes / num_steps
    return dict(found)


def bytes_over_time(recording: Recording, lane: Lane, num_bins: int) -> list[float]:
    """The bytes that a lane's tasks move in each of equal parts of the recorded time; a task moves them evenly."""
    end = max(task.end_s for task in recording.tasks)
    moved = [0.0] * num_bins
    for task in (task for task in recording.tasks if task.lane is lane and task.num_bytes):
        _spread(moved, task, end)
    return moved


def _spread(moved: list[float], task: RecordedTask, end: float) -> None:
    """Adds a transfer's bytes to the bins of time that it covers, evenly."""
    width = end / len(moved) or 1.0
    first, last = (min(max(int(time / width), 0), len(moved) - 1) for time in (task.start_s, task.end_s))
    for number in range(first, last + 1):
        covered = min(task.end_s, (number + 1) * width) - max(task.start_s, number * width)
        share = covered / (task.end_s - task.start_s) if task.end_s > task.start_s else 1.0 / (last - first + 1)
        moved[number] += task.num_bytes * max(share, 0.0)


def speed(recording: Recording, lane: Lane) -> float | None:
    """Bytes a second while tasks of a lane move any; None if none of them takes time."""
    tasks = [task for task in recording.tasks if task.lane is lane and task.num_bytes]
    seconds = sum(task.end_s - task.start_s for task in tasks)
    return sum(task.num_bytes for task in tasks) / seconds if seconds > 0 else None
