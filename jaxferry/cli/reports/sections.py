"""The sections of a recording's page, as HTML."""

from __future__ import annotations

import collections
import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from jaxferry.cli.recording import RecordedTask, Recording
from jaxferry.cli.reports import svg
from jaxferry.cli.reports.reasons import layer_reasons
from jaxferry.cli.reports.summaries import (
    STAGE_OF,
    STAGES,
    Summary,
    Window,
    bytes_by_link,
    bytes_over_time,
    seconds_by_stage,
    speed,
    window,
)
from jaxferry.step.schedule import Lane
from jaxferry.step.simulate.memory_kinds import ACTIVATIONS, GRADIENTS, PARAMETERS, STATE, TEMPORARIES
from jaxferry.units import format_bytes, format_seconds

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
