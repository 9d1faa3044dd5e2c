"""Figures by matplotlib, which is imported when one is drawn."""

from __future__ import annotations

import collections
import importlib
import io
import os
import pathlib
import re
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from typer import Option

from jaxferry.cli.recording import STAGE_OF, STAGES, Recording, Window, window
from jaxferry.errors import InputError
from jaxferry.planner import SweepPoint, pareto_front
from jaxferry.records import naming_target
from jaxferry.step import ACTIVATIONS, GRADIENTS, PARAMETERS, STATE, TEMPORARIES, Lane, used_lanes
from jaxferry.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from jaxferry.cli.compare import Comparison


COLOURS = {
    "forward": "#2a9d5c",
    "backward": "#1c6b8c",
    "load": "#4a7fd4",
    "offload": "#e08a1e",
    "activations": "#8a62b3",
    "update": "#c8443c",
    "state": "#8c564b",
    "contention": "#d3d6d9",
    "temporaries": "#9aa0a6",
}
"""Colours of stages of work and of kinds of memory."""

KINDS = {
    PARAMETERS: COLOURS["load"],
    STATE: COLOURS["state"],
    ACTIVATIONS: COLOURS["activations"],
    GRADIENTS: COLOURS["offload"],
    TEMPORARIES: COLOURS["temporaries"],
}
"""Kinds of device memory with their colours."""

LINKS = {
    Lane.H2D: ("to the device", COLOURS["load"]),
    Lane.D2H: ("from the device", COLOURS["offload"]),
    Lane.GPU: ("by programs, in host memory", COLOURS["forward"]),
}
"""Directions of the host link, with their colours."""

_BINS = 120
_COLOURS_OF_LANES = {
    Lane.GPU: COLOURS["forward"],
    Lane.H2D: COLOURS["load"],
    Lane.D2H: COLOURS["offload"],
    Lane.HOST: COLOURS["update"],
    Lane.DISK: COLOURS["state"],
}
_FORMATS = ("png", "pdf", "svg")
_LEAST_WIDTH = 4e-4  # the width of the thinnest bar, as a share of its axes
_LEGEND_WIDTH = 125  # letters in a row of a legend
_TITLE = "title: "  # what the ids of artists with a title start with
Span = tuple[float, float, str, str]
"""Start and end of a bar in seconds, its colour, and the text that a browser shows under the pointer."""


def new_figure(width: float, height: float) -> Any:
    """Returns an empty `matplotlib.figure.Figure`; sizes are in inches."""
    return importlib.import_module("matplotlib.figure").Figure(figsize=(width, height), layout="constrained")


def plot_format(path: str | os.PathLike[str]) -> str:
    """Returns the format that the name of a figure's file implies; raises InputError if the format is not supported."""
    ending = pathlib.PurePath(path).suffix.lower().removeprefix(".")
    if ending not in _FORMATS:
        raise InputError(f"a plot's name must end in {', '.join('.' + x for x in _FORMATS)}, got {os.fspath(path)!r}")
    return ending


def _checked(path: pathlib.Path | None) -> pathlib.Path | None:
    if path is not None:
        plot_format(path)
    return path


Plot = Annotated[
    pathlib.Path | None, Option(metavar="P.png", callback=_checked, help="Draw a plot: PNG, PDF or SVG, by its name.")
]


def save_figure(figure: Any, path: str | os.PathLike[str]) -> None:
    """Writes a figure in the format of the file's name; raises `InputError` if that or the file is refused."""
    with naming_target(path):
        figure.savefig(path, dpi=120, format=plot_format(path))


def to_svg(figure: Any) -> str:
    """Returns a figure as an SVG element of an HTML page; bars of `draw_lanes` have their texts as titles."""
    file = io.StringIO()
    # Text stays text, and ids, which are hashes, are the same for the same figure.
    settings = {"svg.fonttype": "none", "svg.hashsalt": "jaxferry"}
    with importlib.import_module("matplotlib").rc_context(settings):
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    drawn = re.sub(r'^.*?<svg [^>]*?(viewBox="[^"]*")[^>]*>', r'<svg \1 role="img">', file.getvalue(), flags=re.DOTALL)
    drawn = re.sub(rf"""<g id=(["']){_TITLE}(.*?)\1>""", r'<g class="bar"><title>\2</title>', drawn)
    return re.sub(r'<g id="[^"]*">', "<g>", drawn)  # matplotlib counts groups from 1 in each figure


def lanes_figure(charts: Mapping[str, Mapping[str, Sequence[Span]]], end_s: float) -> Any:
    """Draws a chart of lanes over the time from 0 to `end_s` for each title, below each other."""
    figure = new_figure(9.6, sum(0.35 + 0.27 * len(lanes) + 0.2 * bool(title) for title, lanes in charts.items()) + 0.4)
    heights = [len(lanes) for lanes in charts.values()]
    axes = figure.subplots(len(charts), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for each, (title, lanes) in zip(axes, charts.items(), strict=True):
        draw_lanes(each, lanes, end_s)
        each.set_title(title, loc="left", fontsize=9)
    spans = [span for lanes in charts.values() for lane in lanes.values() for span in lane]
    used = {colour for _, _, colour, _ in spans}
    _add_legend(figure, [(name, colour) for name, colour in COLOURS.items() if colour in used])
    return figure


def draw_lanes(axes: Any, lanes: Mapping[str, Sequence[Span]], end_s: float) -> None:
    """Draws a row of bars for each lane."""
    least_s = _LEAST_WIDTH * end_s
    for number, spans in enumerate(lanes.values()):
        cut = [(max(start, 0.0), min(end, end_s)) for start, end, _, _ in spans]
        widths, starts = [max(end - start, least_s) for start, end in cut], [start for start, _ in cut]
        bars = axes.barh(number, widths, left=starts, color=[colour for _, _, colour, _ in spans])
        for bar, (_, _, _, text) in zip(bars, spans, strict=True):
            bar.set_gid(f"{_TITLE}{text}")
    axes.set_yticks(range(len(lanes)), lanes)
    axes.set(xlim=(0, end_s or 1.0), ylim=(len(lanes) - 0.4, -0.6))
    axes.tick_params(left=False)
    _show_seconds(axes)


def stages_figure(recording: Recording) -> Any:
    """Draws the seconds of work of each micro-batch, by stage."""
    seconds, rows = recording.seconds_by_stage(), dict[str, list[Span]]()
    for batch in sorted({task.micro_batch for task in recording.tasks}):
        end = 0.0
        spans = rows.setdefault(f"batch {batch}", [])
        for stage in STAGES:
            if took := seconds.get((stage, batch), 0.0):
                spans.append((end, end + took, COLOURS[stage], f"{stage}: {format_seconds(took)}"))
                end += took
    return lanes_figure({"": rows}, max((spans[-1][1] for spans in rows.values() if spans), default=0.0))


def steps_figure(recording: Recording) -> Any:
    """Draws the lanes of one step, measured above predicted."""
    windows = {"measured": window(recording.tasks)}
    if recording.predicted:
        windows["predicted"] = window(recording.predicted)
    charts = {title: _lanes(shown) for title, shown in windows.items()}
    return lanes_figure(charts, max(shown.end_s - shown.begin_s for shown in windows.values()))


def _lanes(shown: Window) -> dict[str, list[Span]]:
    lanes: dict[str, list[Span]] = {lane.value: [] for lane in used_lanes(task.lane for task in shown.tasks)}
    for task in shown.tasks:
        text = f"{task.name}: {format_seconds(task.end_s - task.start_s)}"
        text += f", {format_bytes(task.num_bytes)}" if task.num_bytes else ""
        start_s, end_s = task.start_s - shown.begin_s, task.end_s - shown.begin_s
        lanes[task.lane.value].append((start_s, end_s, COLOURS[STAGE_OF[task.kind]], text))
    return lanes


def speeds_figure(recording: Recording) -> Any:
    """Draws the speed of each direction of the host link over the recorded time."""
    end_s = max(task.end_s for task in recording.tasks)
    width = end_s / _BINS or 1.0
    moved = {lane: recording.bytes_over_time(lane, _BINS) / width for lane in LINKS}
    unit, scale = ("GB/s", 1e9) if max(each.max() for each in moved.values()) >= 1e8 else ("MB/s", 1e6)
    figure, axes = _over_time(end_s, unit)
    used = [lane for lane, each in moved.items() if each.any()]
    for lane in used:
        axes.stairs(moved[lane] / scale, width * np.arange(_BINS + 1), color=LINKS[lane][1], baseline=None)
    axes.set_ylim(bottom=0)
    _add_legend(figure, [LINKS[lane] for lane in used])
    return figure


def memory_figure(recording: Recording) -> Any:
    """Draws the device memory over one step, kinds on top of each other."""
    shown = window(recording.tasks)
    end_s = shown.end_s - shown.begin_s
    figure, axes = _over_time(end_s, "MiB")
    changes = {kind: np.array(recording.device_bytes[kind]).T for kind in KINDS if recording.device_bytes.get(kind)}
    inner = {time_s - shown.begin_s for times_s, _ in changes.values() for time_s in times_s}
    moments = sorted({0.0, end_s} | {time_s for time_s in inner if 0 < time_s < end_s})
    values = []
    for times_s, sizes in changes.values():
        # The value at each moment; 0 before the first change.
        last = np.searchsorted(times_s - shown.begin_s, moments, side="right")
        values.append(np.array([0.0, *sizes])[last] / 2**20)
    if values:
        axes.stackplot(moments, values, colors=[KINDS[kind] for kind in changes], step="post")
    axes.set_ylim(bottom=0)
    most = {kind: format_bytes(sizes.max()) for kind, (_, sizes) in changes.items()}
    _add_legend(figure, [(f"{kind}, at most {size}", KINDS[kind]) for kind, size in most.items()])
    return figure


def sizes_figure(recording: Recording) -> Any:
    """Draws how many transfers have which size, in powers of 2, for each direction; None without transfers."""
    sizes = {
        lane: [task.num_bytes for task in recording.tasks if task.lane is lane and task.num_bytes]
        for lane in (Lane.H2D, Lane.D2H)
    }
    sizes = {lane: each for lane, each in sizes.items() if each}
    if not sizes:
        return None
    figure = new_figure(9.6, 1.9 * len(sizes))
    for axes, (lane, each) in zip(figure.subplots(len(sizes), squeeze=False)[:, 0], sizes.items(), strict=True):
        where, colour = LINKS[lane]
        counts = collections.Counter(size.bit_length() for size in each)
        powers = range(min(counts), max(counts) + 1)
        bars = axes.bar(powers, [counts[power] for power in powers], width=0.9, color=colour)
        for bar, power in zip(bars, powers, strict=True):
            bar.set_gid(f"{_TITLE}{format_bytes(2 ** (power - 1))}: {counts[power]}")
        title = f"{len(each)} transfers {where}, median {format_bytes(statistics.median(each))}"
        axes.set_title(title, loc="left", fontsize=9)
        axes.xaxis.set_major_locator(_ticker("MaxNLocator", 12, integer=True))
        axes.xaxis.set_major_formatter(lambda power, _: format_bytes(2 ** max(round(power) - 1, 0)))
        axes.yaxis.set_major_locator(_ticker("MaxNLocator", 4, integer=True))
    return figure


def sweep_figure(points: list[SweepPoint], best: SweepPoint) -> Any:
    """Draws step time against device memory: all points, the staircase of their Pareto front, and the knee."""
    figure = new_figure(9, 4.5)
    axes = figure.add_subplot()
    made = [point for point in points if point.plan is not None]
    spots, front = list(map(_coordinates, made)), list(map(_coordinates, pareto_front(points)))
    stairs = [*front, (max(size for size, _ in spots), front[-1][1])]
    [line] = axes.step(*zip(*stairs, strict=True), where="post", color="black", linewidth=1, zorder=1)
    factors = np.array([point.reserve_factor for point in made])
    # Dots of higher factors are smaller, so that others at the same place stay visible.
    order = np.searchsorted(np.unique(factors), factors) / max(len(np.unique(factors)) - 1, 1)
    look = {"s": (11 - 7 * order) ** 2, "alpha": [1.0 if spot in front else 0.3 for spot in spots]}
    dots = axes.scatter(*zip(*spots, strict=True), c=factors, cmap="viridis", zorder=2, **look)
    [star] = axes.plot(*_coordinates(best), "*", color="crimson", markersize=9, zorder=4)
    handles, labels = dots.legend_elements(fmt="reserve factor {x:g}", alpha=1.0)
    axes.margins(0.08)
    axes.set(xlabel="peak device memory / GiB", ylabel="steady step / s", title="step time against device memory")
    outside = {"loc": "upper left", "bbox_to_anchor": (1.02, 1), "borderaxespad": 0, "fontsize": "small"}
    axes.legend([line, *handles, star], ["Pareto front", *labels, "knee"], **outside)
    return figure


def plot_timelines(compared: Comparison, path: str | os.PathLike[str]) -> None:
    """Writes a figure of two steps of each policy, measured beside predicted; errors are those of `save_figure`."""
    rows = compared.rows
    figure = new_figure(16, 0.8 + 2.1 * len(rows))
    for pair, row in zip(figure.subplots(len(rows), 2, squeeze=False), rows, strict=True):
        charts = {"measured": row.measured, "predicted": row.predicted}
        end_s = max((end for bars in charts.values() for lane in bars.values() for _, end in lane), default=1.0)
        for axes, (title, bars) in zip(pair, charts.items(), strict=True):
            spans = {
                lane.value: [(start, end, _COLOURS_OF_LANES[lane], "") for start, end in bars.get(lane, ())]
                for lane in used_lanes(bars)
            }
            draw_lanes(axes, spans, end_s)
            axes.set_title(f"{row.policy}: {title}", fontsize=10)
    figure.supxlabel("from the end of a step's last program", fontsize=10)
    save_figure(figure, path)


def _over_time(end_s: float, unit: str) -> tuple[Any, Any]:
    """Returns an empty figure and its axes, over the time from 0 to `end_s`."""
    figure = new_figure(9.6, 2.3)
    axes = figure.add_subplot()
    axes.set(xlim=(0, end_s or 1.0), ylabel=unit)
    _show_seconds(axes)
    return figure, axes


def _show_seconds(axes: Any) -> None:
    axes.xaxis.set_major_locator(_ticker("MaxNLocator", 6))
    axes.xaxis.set_major_formatter(lambda seconds, _: format_seconds(seconds))


def _ticker(name: str, *arguments: Any, **options: Any) -> Any:
    return getattr(importlib.import_module("matplotlib.ticker"), name)(*arguments, **options)


def _add_legend(figure: Any, entries: Sequence[tuple[str, str]]) -> None:
    """Adds a legend of names and colours above the axes."""
    patch = importlib.import_module("matplotlib.patches").Patch
    handles = [patch(color=colour, label=name) for name, colour in entries]
    columns = max(_LEGEND_WIDTH // (4 + max((len(name) for name, _ in entries), default=0)), 1)
    figure.legend(handles=handles, loc="outside upper left", ncols=columns, fontsize=9, frameon=False, handlelength=1)


def _coordinates(point: SweepPoint) -> tuple[float, float]:
    assert point.plan is not None and point.plan.predicted is not None
    return point.plan.predicted.peak_device_bytes / 2**30, point.plan.predicted.steady_step_s
