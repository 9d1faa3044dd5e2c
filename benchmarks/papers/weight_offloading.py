"""Reproduces Table 1 and Figure 4 of "Weight Offloading Strategies for Training Large DNN Models" (Beaumont 2022).

    python benchmarks/papers/weight_offloading.py [--again | --missing]

Prints the tables, and writes `weight_offloading.json` and two PNGs to `benchmarks/results/papers/`. Takes some ten
minutes; `--again` draws the results in the JSON without solving anything, `--missing` solves what they lack.

The paper gives: GPT-2 and BERT of Megatron-LM, hidden size 3072; at batch size 16 about 20 MB of activations kept and 1
to 2 GB recomputed per layer; a 16 GB V100; 12 GB/s; and, in the table, the sums of the operations' times. It does not
give: the memory left for weights (`memory_bytes` below is our guess), the ratio of forward to backward time (1 to 3
here, as the backward recomputes the forward), and BERT's sizes (derived here from its L2L column).
"""

import dataclasses
import pathlib
from collections.abc import Iterable, Sequence

import rich.console
import rich.progress
import rich.table
from figures import Row, arguments, legend, new_figure, save, write

from jaxferry.errors import BudgetError
from jaxferry.records import read_json
from jaxferry.weights import Instance, bound, solve, transfer_bound_s

BANDWIDTH = 12000 * 2**20
HIDDEN = 3072
GPT2_BLOCK = (12 * HIDDEN**2 + 13 * HIDDEN) * 4
GPT2_EMBEDDING = (50257 + 1024) * HIDDEN * 4
DEVICE_BYTES = 16 * 10**9
KEPT_BYTES_AT_16 = 20 * 10**6
RECOMPUTED_BYTES_AT_16 = 2 * 10**9
BANDWIDTHS_GB = (0.5, 1, 2, 4, 8, 12)
TIME_LIMIT_S = 20.0


@dataclasses.dataclass(frozen=True)
class Published:
    """A row of Table 1, in milliseconds; `l2l` to `greedy_star` are durations."""

    network: str
    depth: int
    batch: int
    compute: int
    ilp: int
    greedy: int
    l2l: int
    greedy_star: int

    @property
    def title(self) -> str:
        return f"{self.network} {self.depth}, batch {self.batch}"


TABLE_1 = [
    Published("GPT-2", 74, 64, 47421, 47421, 47493, 52707, 47493),
    Published("GPT-2", 56, 64, 35553, 35553, 35625, 39542, 35625),
    Published("GPT-2", 38, 64, 23694, 23694, 23838, 26387, 23838),
    Published("GPT-2", 74, 32, 23697, 23697, 23769, 28983, 23769),
    Published("GPT-2", 56, 32, 17762, 17762, 17834, 21751, 17834),
    Published("GPT-2", 38, 32, 11840, 11840, 11948, 14533, 11948),
    Published("GPT-2", 74, 16, 11612, 11612, 11684, 16898, 11715),
    Published("GPT-2", 56, 16, 8697, 8697, 8769, 12686, 8800),
    Published("GPT-2", 38, 16, 5794, 5794, 5902, 8487, 5934),
    Published("Bert", 144, 64, 34486, 34486, 34499, 38379, 34499),
    Published("Bert", 96, 64, 22965, 22965, 22978, 25577, 22978),
    Published("Bert", 144, 32, 17443, 17443, 17483, 21336, 17483),
    Published("Bert", 96, 32, 11617, 11617, 11657, 14230, 11657),
    Published("Bert", 144, 16, 9090, 9090, 9183, 12983, 9215),
    Published("Bert", 96, 16, 6058, 6058, 6085, 8670, 6085),
]


def weights_of(row: Published) -> tuple[int, ...]:
    """Returns each layer's bytes: GPT-2 by formula; BERT from the L2L column, as equal layers and an embedding."""
    if row.network == "GPT-2":
        return (GPT2_EMBEDDING, *[GPT2_BLOCK] * (row.depth - 2), 0)
    column = {r.depth: (r.l2l - r.compute) / 1000 for r in TABLE_1 if r.network == "Bert"}
    block = round((column[144] - column[96]) / 48 * BANDWIDTH / 2)
    embedding = round(column[96] * BANDWIDTH / 2) - 94 * block
    return (embedding, *[block] * (row.depth - 2), 0)


def instance_of(row: Published, memory_bytes: float, bandwidth: float = BANDWIDTH) -> Instance:
    """Returns the row's instance: equal blocks, with a quarter of their time in the forward."""
    weights = weights_of(row)
    blocks = len(weights) - 2
    share_s = row.compute / 1000 / (4 * blocks)
    kept = KEPT_BYTES_AT_16 * row.batch // 16
    return Instance(
        weights=weights,
        activations=(0, 0, *[kept] * blocks, 0),
        forward_s=(0.0, *[share_s] * blocks, 0.0),
        backward_s=(0.0, *[3 * share_s] * blocks, 0.0),
        memory_bytes=memory_bytes,
        bandwidth_bytes_per_s=bandwidth,
    )


def guessed_memory(row: Published) -> float:
    """Returns 16 GB minus one layer's recomputed activations, which grow with the batch size."""
    return DEVICE_BYTES - RECOMPUTED_BYTES_AT_16 * row.batch / 16


def idle_ms(row: Published, policy: str, memory_bytes: float, bandwidth: float = BANDWIDTH) -> float:
    """Returns the milliseconds beyond the computation."""
    instance = instance_of(row, memory_bytes, bandwidth)
    return 1000 * (solve(instance, policy).duration_s - instance.compute_s)


def table_1(progress: rich.progress.Progress) -> list[dict]:
    """Solves each row with the guessed memory, and with all memories up to 16 GB in steps of 0.2 GB."""
    rows = []
    for row in progress.track(TABLE_1, description="Table 1"):
        memory = max(guessed_memory(row), instance_of(row, 0).smallest_memory_bytes)
        found = {name: idle_ms(row, name, memory) for name in ("bound", "greedy", "greedy-no-discount", "greedy-best")}
        swept = list(_sweep(row))
        published = (row.greedy - row.compute, row.greedy_star - row.compute)
        rows.append(
            dataclasses.asdict(row)
            | {"memory_bytes": memory, "l2l_ms": row.compute + idle_ms(row, "l2l", memory)}
            | {f"{name}_idle_ms": value for name, value in found.items()}
            | {"sweep": swept, "memories_that_agree": _agreeing(swept, published)}
        )
    return rows


def _sweep(row: Published) -> Iterable[dict[str, float]]:
    for tenths in range(160, 0, -2):
        memory = tenths * 10**8
        try:
            greedy = idle_ms(row, "greedy", memory)
        except BudgetError:
            return
        yield {
            "memory_bytes": memory,
            "greedy": greedy,
            "greedy-no-discount": idle_ms(row, "greedy-no-discount", memory),
        }


def _agreeing(swept: Sequence[dict[str, float]], published: tuple[int, int]) -> list[float]:
    """Returns memories with which both greedy columns match the published ones within 2 ms (rounding on both sides)."""
    names = ("greedy", "greedy-no-discount")
    return [
        entry["memory_bytes"]
        for entry in swept
        if all(abs(entry[name] - value) <= 2 for name, value in zip(names, published, strict=True))
    ]


def print_table_1(rows: Sequence[dict], console: rich.console.Console) -> None:
    table = rich.table.Table(title="Table 1: idle ms of a cycle; L2L in ms", box=None, padding=(0, 2, 0, 0))
    for heading in ("row", "L2L paper", "ours", "ILP paper", "ours", "Greedy paper", "ours"):
        table.add_column(heading, justify="right")
    for heading in ("Greedy* paper", "ours", "greedy-best", "M, GB", "both columns agree at M ="):
        table.add_column(heading, justify="right")
    for row in rows:
        published = [row[key] - row["compute"] for key in ("ilp", "greedy", "greedy_star")]
        ours = [row[f"{name}_idle_ms"] for name in ("bound", "greedy", "greedy-no-discount", "greedy-best")]
        agreeing = [f"{memory / 1e9:.1f}" for memory in row["memories_that_agree"]]
        table.add_row(
            f"{row['network']} {row['depth']} b{row['batch']}",
            *(str(row["l2l"]), f"{row['l2l_ms']:.0f}", str(published[0]), f"{ours[0]:.0f}"),
            *(str(published[1]), f"{ours[1]:.0f}", str(published[2]), f"{ours[2]:.0f}", f"{abs(ours[3]):.0f}"),
            f"{row['memory_bytes'] / 1e9:.1f}",
            ", ".join(agreeing[:3]) + (", ..." if len(agreeing) > 3 else "") or "none",
        )
    console.print(table)


def figure_4(progress: rich.progress.Progress) -> list[dict]:
    """Returns the throughput relative to no idle time, for batch sizes 32 and 64 and six bandwidths."""
    points = []
    chosen = [row for row in TABLE_1 if row.batch in (32, 64)]
    for row in progress.track(chosen, description="Figure 4"):
        memory = max(guessed_memory(row), instance_of(row, 0).smallest_memory_bytes)
        for gigabytes in BANDWIDTHS_GB:
            instance = instance_of(row, memory, gigabytes * 1e9)
            durations = {
                name: solve(instance, name).duration_s
                for name in ("greedy", "greedy-no-discount", "greedy-best", "l2l")
            }
            points.append({"row": row.title, "gb_per_s": gigabytes, "compute_s": instance.compute_s} | durations)
    return points


def add_bounds(points: Sequence[dict], progress: rich.progress.Progress) -> None:
    """Adds the missing bounds: from transfers alone, and of the MILP, as far as it is proven after `TIME_LIMIT_S`."""
    rows = {row.title: row for row in TABLE_1}
    for point in progress.track(points, description="bounds"):
        row = rows[point["row"]]
        memory = max(guessed_memory(row), instance_of(row, 0).smallest_memory_bytes)
        instance = instance_of(row, memory, point["gb_per_s"] * 1e9)
        point["transfer_bound"] = transfer_bound_s(instance)
        if "bound_note" not in point:
            found = bound(instance, time_limit_s=TIME_LIMIT_S)
            point["bound"], point["bound_note"] = found.duration_s, found.note


SERIES = {
    "bound": ("lower bound (MILP)", "#555555", "--"),
    "transfer_bound": ("lower bound (transfers alone)", "#999999", ":"),
    "greedy-best": ("greedy-best (ours)", "#1b7f5c", "-"),
    "greedy": ("Greedy", "#2f6fb7", "-"),
    "greedy-no-discount": ("Greedy* (no discount)", "#e08a1e", "-"),
    "l2l": ("L2L", "#b8352f", "-"),
}


def _share(point: dict, name: str) -> float:
    return 100 * point["compute_s"] / point[name]


def print_figure_4(points: Sequence[dict], console: rich.console.Console) -> None:
    table = rich.table.Table(title="Figure 4: throughput, % of that without idle time", box=None, padding=(0, 2, 0, 0))
    for heading in ("row", "GB/s", *(label for label, _, _ in SERIES.values())):
        table.add_column(heading, justify="right")
    for point in points:
        shares = [f"{_share(point, name):.1f}" if name in point else "-" for name in SERIES]
        table.add_row(point["row"], f"{point['gb_per_s']:g}", *shares)
    console.print(table)
    console.print(f"{_stopped(points)} of {len(points)} MILPs reached {TIME_LIMIT_S:g} s: proven, perhaps not tight.")


def _stopped(points: Sequence[dict]) -> int:
    return sum(bool(point["bound_note"]) for point in points)


def plot_figure_4(points: Sequence[dict], path: pathlib.Path) -> None:
    titles = list(dict.fromkeys(point["row"] for point in points))
    figure, axes = new_figure(2, 5, sharex=True, sharey=True, figsize=(15, 6.4))
    for axis, title in zip(axes.flat, titles, strict=True):
        mine = [point for point in points if point["row"] == title]
        for name, (label, colour, style) in SERIES.items():
            known = [point for point in mine if name in point]
            shares = [_share(point, name) for point in known]
            axis.plot(
                [point["gb_per_s"] for point in known],
                shares,
                style,
                color=colour,
                label=label,
                marker="o",
                markersize=3.5,
            )
        stopped = [point for point in mine if point["bound_note"]]
        values = [_share(point, "bound") for point in stopped]
        axis.plot([point["gb_per_s"] for point in stopped], values, "x", color=SERIES["bound"][1], markersize=8)
        axis.set_title(title, fontsize=10)
        axis.set_xscale("log", base=2)
        axis.set_xticks(BANDWIDTHS_GB, [f"{value:g}" for value in BANDWIDTHS_GB])
        axis.set_ylim(0, 105)
    for axis in axes[-1]:
        axis.set_xlabel("bandwidth, GB/s")
    for axis in axes[:, 0]:
        axis.set_ylabel("throughput, % of no idle")
    figure.suptitle(
        "Bandwidth (after Figure 4 of Weight Offloading Strategies); times of Table 1, memory guessed.\n"
        f"All {len(points)} MILPs; {_stopped(points)} of them stopped after {TIME_LIMIT_S:g} s (crosses): "
        "proven, perhaps not tight.",
        fontsize=11,
    )
    legend(figure, axes.flat[0], 6)
    save(figure, path, bottom=0.07)


COLUMNS = (("l2l", "l2l"), ("bound", "ilp"), ("greedy", "greedy"), ("greedy-no-discount", "greedy_star"))
"""The columns of Table 1: our policies' names and the fields of `Row`."""


def plot_table_1(rows: Sequence[dict], path: pathlib.Path) -> None:
    """Draws all columns: published, ours with the guessed memory, and the greedies' range over all memories."""
    figure, axes = new_figure(1, 1, figsize=(15, 6.2))
    axis = axes[0][0]
    for number, (name, key) in enumerate((*COLUMNS, ("greedy-best", None))):
        label, colour, _ = SERIES[name]
        places = [place + 0.17 * (number - 2) for place in range(len(rows))]
        if name.startswith("greedy-no") or name == "greedy":
            swept = [[entry[name] for entry in row["sweep"]] for row in rows]
            axis.vlines(places, list(map(min, swept)), list(map(max, swept)), color=colour, alpha=0.3, linewidth=7)
            axis.plot([], [], color=colour, alpha=0.3, linewidth=7, label=f"{label}, all memories")
        ours = [max(row[f"{name}_idle_ms"] if name != "l2l" else row["l2l_ms"] - row["compute"], 0.0) for row in rows]
        axis.plot(places, ours, "_", color=colour, markersize=10, markeredgewidth=2.5, label=f"{label}, memory guessed")
        if key is not None:
            published = [row[key] - row["compute"] for row in rows]
            look = {"color": colour, "markersize": 5, "markeredgecolor": "black"}
            title = "ILP" if name == "bound" else label
            axis.plot(places, published, "D", label=f"{title}, published", **look)
    axis.set_xticks(range(len(rows)), [f"{row['network']}\n{row['depth']}\nb{row['batch']}" for row in rows])
    axis.set_yscale("symlog", linthresh=10)
    axis.set_ylim(-1, 20000)
    axis.set_ylabel("idle time, ms a cycle (linear below 10)")
    agreeing = sum(bool(row["memories_that_agree"]) for row in rows)
    axis.set_title(
        "Table 1 of Weight Offloading Strategies: published idle times (diamonds), and ours with one guessed memory.\n"
        "Some memory, chosen for each row, reproduces both printed greedy columns within 2 ms in "
        f"{agreeing} of {len(rows)} rows.",
        fontsize=11,
    )
    legend(figure, axis, 4)
    save(figure, path, bottom=0.13)


def rows_of(table: Sequence[dict], points: Sequence[dict]) -> list[Row]:
    """Returns the rows of the README's table."""
    one, four = "Weight Offloading, Table 1", "Weight Offloading, Fig. 4"
    exact = sum(abs(row["l2l_ms"] - row["l2l"]) < 1 and row["network"] == "GPT-2" for row in table)
    idle = sum(row["bound_idle_ms"] < 1 for row in table)
    agreeing = sum(bool(row["memories_that_agree"]) for row in table)
    guessed = sum(
        all(abs(row[f"{name}_idle_ms"] - row[key] + row["compute"]) <= 2 for name, key in COLUMNS[2:]) for row in table
    )
    ours = max(abs(row["greedy-best_idle_ms"]) for row in table)
    worst = {name: max(point[name] / point["bound"] - 1 for point in points) for name in ("greedy", "greedy-best")}
    ratios = [point["greedy-no-discount"] / point["greedy"] for point in points]
    slower, faster = sum(ratio > 1 + 1e-9 for ratio in ratios), sum(ratio < 1 - 1e-9 for ratio in ratios)
    either = f"{slower} of {len(points)}; as fast in {len(points) - slower - faster}, faster in {faster}"
    memory = "GPU memory is not published; it moves the idle times by multiples of a block's transfer"
    derived = "BERT's sizes are derived from this column, so its six rows check nothing"
    chosen = f"{guessed} with the guessed memory; {agreeing} with a memory chosen per row"
    gaps = f"at most {worst['greedy']:.0%}; greedy-best {worst['greedy-best']:.0%}"
    proven = f"{len(points)} points, {_stopped(points)} of them by {TIME_LIMIT_S:g} s of search"
    return [
        Row(one, "L2L, GPT-2's nine rows", "", f"{exact} of 9 to 1 ms", derived),
        Row(one, "ILP: no idle time", "15 of 15", f"{idle} of 15", "the other: BERT's activations are guessed"),
        Row(one, "Greedy and Greedy*: the printed idle times within 2 ms", "15 rows", chosen, memory),
        Row(one, "largest idle time of greedy-best (ours)", "", f"{ours:.0f} ms", "leaves room for transfers"),
        Row(four, "proven lower bounds", "60 points", proven),
        Row(four, "the printed greedy above the bound", "close", gaps, "most on slow links"),
        Row(four, "Greedy* slower than Greedy", "always", either, "faster on slow links"),
    ]


def main() -> None:
    missing = "compute the missing bounds of the existing results, and draw"
    given = arguments(__doc__, again="draw the existing results", missing=missing)
    console = rich.console.Console(width=170)
    with rich.progress.Progress(console=rich.console.Console(stderr=True)) as progress:
        if given.again or given.missing:
            document = read_json(given.output / "weight_offloading.json")
            rows, points = document["table_1"], document["figure_4"]
        else:
            rows, points = table_1(progress), figure_4(progress)
        if not given.again:
            add_bounds(points, progress)
    print_table_1(rows, console)
    print_figure_4(points, console)
    write(given.output, "weight_offloading", {"table_1": rows, "figure_4": points}, rows_of(rows, points))
    plot_table_1(rows, given.output / "weight_offloading_table_1.png")
    plot_figure_4(points, given.output / "weight_offloading_figure_4.png")


if __name__ == "__main__":
    main()
