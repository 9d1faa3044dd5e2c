"""Figures, drawn by matplotlib, which is imported only here."""

from __future__ import annotations

import importlib
import os
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxferry.errors import InputError
from jaxferry.planner.planning import SweepPoint, pareto_front
from jaxferry.step.schedule import Lane

if TYPE_CHECKING:
    from jaxferry.cli.compare import Bars, Comparison

_FORMATS = ("png", "pdf", "svg")
_MOST_NAMED = 6
"""Reserve factors in a figure's legend."""


def plot_format(path: str | os.PathLike[str]) -> str:
    """Returns the format that a figure's file name implies.

    Raises:
      InputError: if the format is not supported.
    """
    ending = pathlib.PurePath(path).suffix.lower().removeprefix(".")
    if ending not in _FORMATS:
        raise InputError(f"a plot's name must end in {', '.join('.' + x for x in _FORMATS)}, got {os.fspath(path)!r}")
    return ending


def plot_sweep(points: list[SweepPoint], best: SweepPoint | None, path: str | os.PathLike[str]) -> None:
    """Writes a figure of step time against device memory: all points, their Pareto front, and the knee.

    Raises:
      InputError: if matplotlib is missing, the format is not supported, or the file cannot be written.
    """
    kind = plot_format(path)
    figure = sweep_figure(points, best)
    try:
        figure.savefig(path, dpi=120, bbox_inches="tight", format=kind)
    except OSError as error:
        raise InputError(f"cannot write {os.fspath(path)}: {error.strerror or error}") from error


def sweep_figure(points: list[SweepPoint], best: SweepPoint | None) -> Any:
    """Draws the figure of `plot_sweep`; the legend stands beside the axes so that it covers no point.

    The front is a staircase: the fastest step within each size of device memory.

    Raises:
      InputError: if matplotlib is missing.
    """
    figure, axes, colours = _figure()
    places = {factor: _places_of(points, factor) for factor in sorted({point.reserve_factor for point in points})}
    front = [_place(point) for point in pareto_front(points)]
    end = max((place[0] for known in places.values() for place in known), default=0.0)
    stairs = [*front, *((end, front[-1][1]) for _ in front[:1])]
    axes.step(*zip(*stairs, strict=True), where="post", color="black", linewidth=1, label="Pareto front", zorder=1)
    named = _evenly(list(places), _MOST_NAMED)
    for number, (factor, known) in enumerate(places.items()):
        # Later dots are smaller, so that earlier dots at the same place stay visible.
        share = number / max(len(places) - 1, 1)
        look = {"color": colours(share), "markersize": 11 - 7 * share, "linestyle": "none", "marker": "o"}
        label = f"reserve factor {factor:g}" if factor in named else None
        for place in known:
            is_beaten = place not in front
            axes.plot(*place, alpha=0.3 if is_beaten else 1, zorder=2 if is_beaten else 3, **look)
        if label is not None and known:
            axes.plot([], [], label=label, **look)
    if best is not None:
        look = {"linestyle": "none", "marker": "*", "color": "crimson", "markersize": 9}
        axes.plot(*_place(best), label="knee", zorder=4, **look)
    axes.margins(0.08)
    axes.set_xlabel("peak device memory / GiB")
    axes.set_ylabel("steady step / s")
    axes.set_title("step time against device memory")
    axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.02, 1), borderaxespad=0)
    return figure


def _places_of(points: Sequence[SweepPoint], factor: float) -> list[tuple[float, float]]:
    """The distinct places of a reserve factor's points."""
    return sorted({_place(point) for point in points if point.reserve_factor == factor and point.plan is not None})


def _evenly(values: Sequence[float], most: int) -> list[float]:
    """At most this many of the values, evenly chosen, with the first and the last."""
    if len(values) <= most:
        return list(values)
    return [values[round(number * (len(values) - 1) / (most - 1))] for number in range(most)]


def _place(point: SweepPoint) -> tuple[float, float]:
    assert point.plan is not None and point.plan.predicted is not None
    return point.plan.predicted.peak_device_bytes / 2**30, point.plan.predicted.steady_step_s


def load_figure(size: tuple[float, float]) -> Any:
    """Returns an empty figure; `size` is in inches.

    Raises:
      InputError: if matplotlib is missing.
    """
    try:
        return importlib.import_module("matplotlib.figure").Figure(figsize=size)
    except ImportError as error:
        raise InputError("--plot needs matplotlib: pip install matplotlib") from error


def _figure() -> tuple[Any, Any, Any]:
    """Returns a figure, its axes, and a colour map over [0, 1]."""
    figure = load_figure((7, 4.5))
    return figure, figure.add_subplot(), importlib.import_module("matplotlib").colormaps["viridis"]


_COLOURS = {Lane.GPU: "tab:green", Lane.H2D: "tab:blue", Lane.D2H: "tab:orange", Lane.HOST: "tab:red"}


def plot_timelines(compared: Comparison, path: str | os.PathLike[str]) -> None:
    """Writes a figure of two steps of each policy.

    Raises:
      InputError: if matplotlib is missing, the format is not supported, or the file cannot be written.
    """
    kind = plot_format(path)
    rows = compared.rows
    figure = load_figure((16, 0.8 + 2.1 * len(rows)))
    axes = figure.subplots(len(rows), 2, sharex="row", squeeze=False)
    for (left, right), row in zip(axes, rows, strict=True):
        longest_s = max((end for bars in (row.measured, row.predicted) for lane in bars.values() for _, end in lane))
        for axis, bars, what in ((left, row.measured, "measured"), (right, row.predicted, "predicted")):
            _draw(axis, bars)
            axis.set_title(f"{row.policy}: {what}", fontsize=10)
            axis.set_xlim(0, 1.02 * longest_s)
    for axis in axes[-1]:
        axis.set_xlabel("seconds from the end of a step's last program")
    figure.tight_layout()
    try:
        figure.savefig(path, dpi=110, format=kind)
    except OSError as error:
        raise InputError(f"cannot write {os.fspath(path)}: {error.strerror or error}") from error


def _draw(axis: object, bars: Bars) -> None:
    for place, lane in enumerate(Lane):
        spans = [(start, end - start) for start, end in bars.get(lane, ())]
        axis.broken_barh(  # type: ignore[attr-defined]
            spans, (-place - 0.4, 0.8), color=_COLOURS[lane], edgecolor="white", linewidth=0.3
        )
    axis.set_yticks([-place for place in range(len(Lane))], [lane.value for lane in Lane])  # type: ignore[attr-defined]
