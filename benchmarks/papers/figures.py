"""What all scripts here share: the style of figures, JSON with the rows of the README's table, and machines' facts."""

import argparse
import dataclasses
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import rich.console
import rich.table

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2]))

from benchmarks.machine import facts
from jaxferry.records import read_json, write_json

matplotlib.use("Agg")

RESULTS = pathlib.Path(__file__).resolve().parents[1] / "results" / "papers"


@dataclasses.dataclass(frozen=True)
class Row:
    """A line of the README's table.

    Attributes:
      item: figure or table of a paper.
      what: the statement.
      paper: its value there; "" where the text gives none.
      ours: the value here.
      why: why they differ; "" where they agree.
    """

    item: str
    what: str
    paper: str
    ours: str
    why: str = ""


def arguments(doc: str | None, **options: str) -> argparse.Namespace:
    """Reads `--output`, and flags given by name with their help."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--output", type=pathlib.Path, default=RESULTS, help="folder of the results")
    for name, text in options.items():
        parser.add_argument(f"--{name}", action="store_true", help=text)
    return parser.parse_args()


def write(output: pathlib.Path, name: str, document: dict[str, Any], rows: Sequence[Row]) -> None:
    """Prints the rows, and writes them to `name.json` with the document."""
    table = rich.table.Table("item", "what", "paper", "ours", "why", box=None, padding=(0, 2, 0, 0))
    for row in rows:
        table.add_row(*dataclasses.astuple(row))
    rich.console.Console(width=170, highlight=False).print(table)
    output.mkdir(parents=True, exist_ok=True)
    as_json = [dataclasses.asdict(row) for row in rows]
    write_json(output / f"{name}.json", {"computed_on": facts("none"), "rows": as_json, **document})


def read_rows(name: str) -> list[Row]:
    """The rows that a script has written."""
    return [Row(**row) for row in read_json(RESULTS / f"{name}.json")["rows"]]


def new_figure(rows: int, columns: int, **options: Any) -> tuple[Any, Any]:
    """Returns a figure and its frameless axes, always as a two-dimensional grid."""
    figure, axes = plt.subplots(rows, columns, squeeze=False, **options)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", color="#dddddd", linewidth=0.6)
        axis.set_axisbelow(True)
        axis.tick_params(labelsize=9)
    return figure, axes


def legend(figure: Any, axis: Any, columns: int, size: float = 9) -> None:
    """Adds the legend of an axis below the figure."""
    figure.legend(*axis.get_legend_handles_labels(), loc="lower center", ncols=columns, frameon=False, fontsize=size)


def save(figure: Any, path: pathlib.Path, bottom: float = 0.0, top: float = 1.0) -> None:
    """Lays out the figure, reserving a share for a legend and for a title, and writes it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout(rect=(0, bottom, 1, top))
    figure.savefig(path, dpi=130)
    plt.close(figure)
