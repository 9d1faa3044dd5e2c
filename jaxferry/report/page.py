"""A recording as one self-contained HTML page: no scripts, no network; for screens and print."""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from jaxferry.recording import RecordedTask, Recording
from jaxferry.report import svg
from jaxferry.schedule import Kind, Lane
from jaxferry.units import format_bytes, format_seconds

_STAGES = {
    "forward": (Kind.FORWARD, Kind.INTER_FORWARD),
    "backward": (Kind.BACKWARD, Kind.INTER_BACKWARD),
    "load": (Kind.LOAD, Kind.RELOAD, Kind.REFRESH),
    "offload": (Kind.OFFLOAD,),
    "activations": (Kind.SAVE, Kind.FETCH),
    "update": (Kind.UPDATE,),
    "state": (Kind.STATE_UP, Kind.STATE_DOWN),
}
"""Kinds of tasks by what they are for; also the classes of their colours."""
_STAGE_OF = {kind: stage for stage, kinds in _STAGES.items() for kind in kinds}
_LINKS = {Lane.H2D: "to the device", Lane.D2H: "from the device", Lane.GPU: "by programs, in host memory"}
_LIMITS = {
    Lane.GPU: "the GPU: its programs",
    Lane.H2D: "the link to the device: its loads",
    Lane.D2H: "the link from the device: its offloads",
    Lane.HOST: "the host: its updates",
}
_BINS = 120

_COLOURS = {
    "forward": "#2a9d5c",
    "backward": "#1c6b8c",
    "load": "#4a7fd4",
    "offload": "#e08a1e",
    "activations": "#8a62b3",
    "update": "#c8443c",
    "state": "#b59410",
}
_CSS = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 1000px; margin: 2em auto;
  padding: 0 1em; }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin-top: 2em; }
table { border-collapse: collapse; display: block; overflow-x: auto; }
td, th { padding: .2em .8em; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap; }
td:first-child, th:first-child { text-align: left; }
svg { width: 100%; height: auto; font-size: 12px; } svg line { stroke: #888; }
polyline { fill: none; stroke: #333; stroke-width: 1.5; }
.key { display: inline-block; width: .9em; height: .9em; margin: 0 .3em 0 1em; }
@media print { body { margin: 0; max-width: none; print-color-adjust: exact; } section { break-inside: avoid; } }
""" + "".join(
    f"rect.{name} {{ fill: {it}; }} polyline.{name} {{ stroke: {it}; }} .key.{name} {{ background: {it}; }}\n"
    for name, it in _COLOURS.items()
)


def report_page(recording: Recording) -> str:
    """Returns the page of a recording, as HTML."""
    machine = recording.machine.get("name", "an unknown machine")
    title = f"{recording.model} on {machine}"
    numbers = sorted({task.step for task in recording.tasks})
    about = f"Steps {numbers[0]} to {numbers[-1]}, as recorded; policy {recording.plan.policy}."
    sections = [
        ("", f"<p>{escape(about)}</p><p>{escape(bottleneck(recording))}</p>"),
        ("Time by stage and micro-batch", _stages(recording)),
        ("Lanes of the last step", _lanes(recording)),
        ("Bytes on the host link, by step", _links(recording)),
        ("Speed of the links", _speeds(recording)),
        ("Sizes of transfers", _sizes(recording)),
        ("Device memory, as counted", _memory(recording)),
        ("Plan", _plan(recording)),
    ]
    body = "".join(f"<section>{f'<h2>{escape(name)}</h2>' if name else ''}{html}</section>" for name, html in sections)
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    head += f"<style>{_CSS}</style>"
    return f'<!doctype html><html lang="en"><head>{head}</head><body><h1>{escape(title)}</h1>{body}</body></html>\n'


def bottleneck(recording: Recording) -> str:
    """Names the lane that works for the largest share of the recorded time, in a sentence."""
    begin, end = min(task.start_s for task in recording.tasks), max(task.end_s for task in recording.tasks)
    busy: dict[Lane, float] = collections.defaultdict(float)
    for task in recording.tasks:
        busy[task.lane] += task.end_s - task.start_s
    lane = max(busy, key=lambda each: busy[each])
    share = busy[lane] / (end - begin) if end > begin else 0.0
    return f"The bottleneck is {_LIMITS[lane]} take {min(share, 1.0):.0%} of the time."


def seconds_by_stage(recording: Recording) -> dict[tuple[str, int], float]:
    """Mean seconds of work a step, by stage and micro-batch."""
    found: dict[tuple[str, int], float] = collections.defaultdict(float)
    steps: dict[int, set[int]] = collections.defaultdict(set)
    for task in recording.tasks:
        found[_STAGE_OF[task.kind], task.micro_batch] += task.end_s - task.start_s
        steps[task.micro_batch].add(task.step)
    return {key: seconds / len(steps[key[1]]) for key, seconds in found.items()}


def bytes_by_link(recording: Recording) -> dict[tuple[Lane, str], float]:
    """Mean bytes a step over the host link, by lane and stage."""
    found: dict[tuple[Lane, str], float] = collections.defaultdict(float)
    num_steps = len({task.step for task in recording.tasks})
    for task in recording.tasks:
        if task.num_bytes:
            found[task.lane, _STAGE_OF[task.kind]] += task.num_bytes / num_steps
    return dict(found)


def _stages(recording: Recording) -> str:
    seconds = seconds_by_stage(recording)
    batches = sorted({batch for _, batch in seconds})
    rows = [
        [stage, *(format_seconds(seconds.get((stage, batch), 0.0)) for batch in batches)]
        for stage in _STAGES
        if any((stage, batch) in seconds for batch in batches)
    ]
    return _table(["work", *(f"micro-batch {batch}" for batch in batches)], rows)


def _lanes(recording: Recording) -> str:
    last = max(task.step for task in recording.tasks)
    tasks = [task for task in recording.tasks if task.step == last]
    begin = min(task.start_s for task in tasks if task.lane is Lane.GPU)
    end = max(task.end_s for task in tasks)
    rows = []
    for lane in Lane:
        spans = [_span(task, begin) for task in tasks if task.lane is lane and task.end_s >= begin]
        rows.append((lane.value, spans))
    keys = "".join(f'<span class="key {stage}"></span>{stage}' for stage in _STAGES)
    return f"<p>{keys}</p>{svg.lanes(rows, 0.0, (end - begin) * 1e3, 'ms')}"


def _span(task: RecordedTask, begin: float) -> svg.Span:
    told = f"{task.name}: {format_seconds(task.end_s - task.start_s)}"
    told += f", {format_bytes(task.num_bytes)}" if task.num_bytes else ""
    return (task.start_s - begin) * 1e3, (task.end_s - begin) * 1e3, _STAGE_OF[task.kind], told


def _links(recording: Recording) -> str:
    moved = bytes_by_link(recording)
    stages = [stage for stage in _STAGES if any(each == stage for _, each in moved)]
    rows = [
        [where, *(format_bytes(moved.get((lane, stage), 0.0)) for stage in stages)] for lane, where in _LINKS.items()
    ]
    return _table(["", *stages], rows)


def _speeds(recording: Recording) -> str:
    end = max(task.end_s for task in recording.tasks)
    series = []
    for lane, kind in ((Lane.H2D, "load"), (Lane.D2H, "offload")):
        moved = [0.0] * _BINS
        for task in (task for task in recording.tasks if task.lane is lane):
            _spread(moved, task, end)
        width = end / _BINS or 1.0
        series.append((kind, [(1e3 * number * width, each / width / 1e9) for number, each in enumerate(moved)]))
    return "<p>Blue: to the device; orange: from the device.</p>" + svg.steps(series, 1e3 * end, "GB/s", "ms")


def _spread(moved: list[float], task: RecordedTask, end: float) -> None:
    """Adds a transfer's bytes to the bins of time that it covers, evenly."""
    width = end / len(moved) or 1.0
    first, last = (min(max(int(time / width), 0), len(moved) - 1) for time in (task.start_s, task.end_s))
    for number in range(first, last + 1):
        covered = min(task.end_s, (number + 1) * width) - max(task.start_s, number * width)
        share = covered / (task.end_s - task.start_s) if task.end_s > task.start_s else 1.0
        moved[number] += task.num_bytes * max(share, 0.0)


def _sizes(recording: Recording) -> str:
    powers = collections.Counter(
        math.floor(math.log2(task.num_bytes))
        for task in recording.tasks
        if task.num_bytes and task.lane in (Lane.H2D, Lane.D2H)
    )
    if not powers:
        return "<p>There are no transfers.</p>"
    values = [(format_bytes(2**power), float(powers[power])) for power in range(min(powers), max(powers) + 1)]
    return "<p>Transfers from this size on, up to twice the size.</p>" + svg.bars(values, "", "load")


def _memory(recording: Recording) -> str:
    points = [(1e3 * time, held / 2**20) for time, held in recording.device_bytes]
    return svg.steps([("memory", points)], 1e3 * max(task.end_s for task in recording.tasks), "MiB", "ms")


def _plan(recording: Recording) -> str:
    rows = [[each.name, each.mode.value, each.gradient.value, each.remat.value] for each in recording.plan.layers]
    details = _details(recording.plan.details)
    return details + _table(["layer", "mode", "gradient", "remat"], rows)


def _details(details: Mapping[str, object]) -> str:
    told = ", ".join(f"{name} {value}" for name, value in details.items())
    return f"<p>{escape(told)}</p>" if told else ""


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["".join(f"<th>{escape(head)}</th>" for head in heads)]
    lines += ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"
