"""Figures for people, by matplotlib, which is needed only here."""

import importlib
import os
import pathlib
from typing import Any

from jaxferry.errors import InputError
from jaxferry.planning import SweepPoint

_FORMATS = ("png", "pdf", "svg")


def plot_format(path: str | os.PathLike[str]) -> str:
    """The format that a figure's file name asks for.

    Raises:
      InputError: if it is none that is supported.
    """
    ending = pathlib.PurePath(path).suffix.lower().removeprefix(".")
    if ending not in _FORMATS:
        raise InputError(f"a plot's name must end in {', '.join('.' + x for x in _FORMATS)}, got {os.fspath(path)!r}")
    return ending


def plot_sweep(points: list[SweepPoint], best: SweepPoint | None, path: str | os.PathLike[str]) -> None:
    """Writes step time against device memory as a figure, one line for each reserve factor.

    Raises:
      InputError: if matplotlib is missing, the format is not supported, or the file cannot be written.
    """
    kind = plot_format(path)
    figure, axes = _figure()
    for factor in dict.fromkeys(point.reserve_factor for point in points):
        places = sorted(_place(point) for point in points if point.reserve_factor == factor and point.plan is not None)
        if places:
            axes.plot(*zip(*places, strict=True), marker="o", label=f"reserve factor {factor:g}")
    if best is not None:
        memory, time = _place(best)
        axes.annotate("knee", (memory, time), textcoords="offset points", xytext=(8, 8))
    axes.set_xlabel("peak device memory / GiB")
    axes.set_ylabel("steady step / s")
    axes.set_title("step time against device memory")
    axes.legend(fontsize="small")
    try:
        figure.savefig(path, dpi=120, bbox_inches="tight", format=kind)
    except OSError as error:
        raise InputError(f"cannot write {os.fspath(path)}: {error.strerror or error}") from error


def _place(point: SweepPoint) -> tuple[float, float]:
    assert point.plan is not None and point.plan.predicted is not None
    return point.plan.predicted.peak_device_bytes / 2**30, point.plan.predicted.steady_step_s


def _figure() -> tuple[Any, Any]:
    try:
        figures = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise InputError("--plot needs matplotlib: pip install matplotlib") from error
    figure = figures.Figure(figsize=(7, 4.5))
    return figure, figure.add_subplot()
