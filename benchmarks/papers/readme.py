"""Writes the table of README.md from the rows that the other scripts have written.

python benchmarks/papers/readme.py
"""

import dataclasses
import pathlib
import re

from figures import RESULTS, Row, read_rows

SCRIPTS = (
    "memferry_layers",
    "memferry",
    "memferry_tuning",
    "memferry_gpus",
    "weight_offloading",
    "memory_wall",
    "memory_wall_gpus",
)
PATH = pathlib.Path(__file__).with_name("README.md")
NO_DATA = (
    Row(
        "MemFerry, Fig. 1, 2, 4 to 8",
        "diagrams",
        "",
        "no data",
        "schedules 2, 4, 6: `jaxferry/step/schedule.py`; 7: `memferry`",
    ),
    Row("MemFerry, Fig. 3(a)", "diagram", "", "no data"),
    Row("Weight Offloading, Fig. 1 to 3", "a model and proofs", "", "no data"),
    Row("Breaking the Memory Wall, Fig. 1, 2", "diagrams", "", "no data"),
    Row("Breaking the Memory Wall, Table 1", "sizes of published models", "", "no experiment"),
)


def order(row: Row) -> tuple[int, int, str]:
    """By paper, figures by number before tables."""
    papers = ("MemFerry", "Weight Offloading", "Breaking the Memory Wall")
    paper = next(number for number, name in enumerate(papers) if row.item.startswith(name))
    number = re.search(r"\d+", row.item)
    return paper, int(number[0]) + 100 * ("Table" in row.item) if number else 0, row.item


def table_of(rows: list[Row]) -> str:
    """The rows as Markdown, sorted by figure."""
    lines = ["| figure or table | what | paper | ours | why they differ |", "|---|---|---|---|---|"]
    lines += ["| " + " | ".join(dataclasses.astuple(row)) + " |" for row in sorted(rows, key=order)]
    return "\n".join(lines)


def all_rows() -> list[Row]:
    """The rows that the scripts have written, and those of figures without data."""
    written = [name for name in SCRIPTS if (RESULTS / f"{name}.json").exists()]
    return [*NO_DATA, *(row for name in written for row in read_rows(name))]


def main() -> None:
    begin, end = "<!-- table: written by readme.py -->", "<!-- end of the table -->"
    before, _, rest = PATH.read_text().partition(begin)
    _, _, after = rest.partition(end)
    PATH.write_text(f"{before}{begin}\n\n{table_of(all_rows())}\n\n{end}{after}")


if __name__ == "__main__":
    main()
