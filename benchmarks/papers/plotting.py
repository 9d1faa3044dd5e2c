"""The common style of all figures here."""

import pathlib
from typing import Any

import matplotlib
import matplotlib.pyplot as plt

matplotlib.use("Agg")


def new_figure(rows: int, columns: int, **options: Any) -> tuple[Any, Any]:
    """Returns a figure and its frameless axes, always as a two-dimensional grid."""
    figure, axes = plt.subplots(rows, columns, squeeze=False, **options)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", color="#dddddd", linewidth=0.6)
        axis.set_axisbelow(True)
        axis.tick_params(labelsize=9)
    return figure, axes


def save(figure: Any, path: pathlib.Path, bottom: float = 0.0) -> None:
    """Lays out the figure, reserving the share `bottom` for a legend, and writes it."""
    figure.tight_layout(rect=(0, bottom, 1, 1))
    figure.savefig(path, dpi=130)
    plt.close(figure)
