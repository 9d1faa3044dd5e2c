"""Figures, drawn by matplotlib, which is imported only here."""

import importlib
import os
import pathlib
from typing import Any

from jaxferry.errors import InputError
from jaxferry.planning import SweepPoint

_FORMATS = ("png", "pdf", "svg")


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
    """Writes a figure of step time against device memory, with one line per reserve factor.

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

    Raises:
      InputError: if matplotlib is missing.
    """
    figure, axes, colours = _figure()
    factors = list(dict.fromkeys(point.reserve_factor for point in points))
    for number, factor in enumerate(factors):
        places = sorted(_place(point) for point in points if point.reserve_factor == factor and point.plan is not None)
        if places:
            # Later lines are thinner, so that earlier lines at the same points stay visible.
            share = number / max(len(factors) - 1, 1)
            look = {"color": colours(share), "markersize": 11 - 7 * share, "linewidth": 4 - 3 * share}
            axes.plot(*zip(*places, strict=True), marker="o", label=f"{factor:g}", **look)
    if best is not None:
        axes.plot(*_place(best), linestyle="none", marker="*", color="black", markersize=14, label="knee", zorder=3)
    axes.margins(0.08)
    axes.set_xlabel("peak device memory / GiB")
    axes.set_ylabel("steady step / s")
    axes.set_title("step time against device memory")
    axes.legend(title="reserve factor", fontsize="small", loc="upper left", bbox_to_anchor=(1.02, 1), borderaxespad=0)
    return figure


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
