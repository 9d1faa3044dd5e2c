"""Draws lanes over time: measured beside predicted, one row per policy."""

import os

from jaxferry.cli.compare import Bars, Comparison
from jaxferry.cli.reports.plots import load_figure, plot_format
from jaxferry.errors import InputError
from jaxferry.step.schedule import Lane

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
