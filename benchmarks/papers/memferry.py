"""Reproduces Figures 9, 11, 12 and 13 of MemFerry by simulation with estimated profiles.

    python benchmarks/papers/memferry.py [--again]

Prints the tables, and writes `memferry.json` and three PNGs to `benchmarks/results/papers/`. Takes a few minutes;
`--again` draws the results in the JSON without planning anything.

Iteration times are those of the steady state, in which DeepSpeed's uploads overlap its updates and MemFerry's updates
run into the next forward; the JSON has the single step as well. The paper's text gives only some of the figures'
values, as ranges and averages. It does not give precision, batch sizes and lengths (except batch 8 in Figure 13 and 1
in Figure 11); `paper_models.py` states the assumptions.
"""

import itertools
import pathlib
import statistics
from collections.abc import Sequence

import deepspeed
import rich.console
import rich.progress
import rich.table
from figures import Row, arguments, legend, new_figure, save, write
from paper_models import ITEM, Model, known_models, transformer_xl

from jaxferry.costs import Profile, estimate_profile, find_machine
from jaxferry.modes import GradientPlace, Mode
from jaxferry.planner import Request, make_policy
from jaxferry.records import read_json
from jaxferry.step import Plan, simulate

SYSTEMS = {
    "zero-offload": ("DeepSpeed", "#b8352f"),
    "native-offload": ("Native-Offload", "#e08a1e"),
    "native-overlapped": ("native, overlapped updates (not in the paper)", "#999999"),
    "memferry": ("MemFerry", "#2f6fb7"),
    "go-memferry": ("GO-MemFerry", "#6a4c93"),
    "exact": ("exact (ours)", "#1b7f5c"),
}
A100_SIZES = (0.7, 1.0, 1.7, 2.4, 3.6, 4.3, 5.5, 6.7)
V100_SIZES = (0.7, 1.0, 1.4, 1.7, 2.0, 2.4, 2.8, 3.2, 3.6, 4.0, 4.4, 4.8, 5.2, 5.6)
A100_LENGTH, V100_LENGTH = 384, 1024
V100_BYTES = 32e9


def buffer_bytes(profile: Profile, plan: Plan) -> int:
    """Returns the device memory if nothing is freed within a step: parameter copies, gradients and activations.

    MemFerry works this way: its gradient buffers outlive their use (section V-A).
    """
    copied = {profile.group_of[index] for index, planned in enumerate(plan.layers) if planned.mode is not Mode.DHA}
    weights = sum(profile.layers[profile.groups[group][0]].param_bytes for group in copied)
    on_device = {
        profile.group_of[index] for index, planned in enumerate(plan.layers) if planned.gradient is GradientPlace.DEVICE
    }
    gradients = sum(profile.layers[profile.groups[group][0]].grad_bytes for group in on_device)
    return weights + gradients + sum(layer.activation_bytes for layer in profile.layers)


def measure(model: Model, machine: str) -> list[dict]:
    """Returns one row per system."""
    profile = estimate_profile(model.layers(), find_machine(machine))
    rows = []
    for name, (label, _) in SYSTEMS.items():
        # With its own choice of gradients, exact would compare with GO-MemFerry, not with MemFerry.
        reserve_factor = 1.0 if name == "exact" else None
        plan = make_policy(name).plan(profile, Request(reserve_factor))
        simulation = simulate(profile, plan)
        rows.append(
            {
                "machine": machine,
                "model": model.name,
                "billions": model.num_parameters / 1e9,
                "batch": model.batch,
                "length": model.length,
                "policy": name,
                "system": label,
                "forward_s": simulation.forward_s,
                "step_s": simulation.step_s,
                "steady_step_s": simulation.steady_step_s,
                "peak_device_bytes": simulation.peak_device_bytes,
                "buffer_bytes": buffer_bytes(profile, plan),
                "deepspeed_bytes": deepspeed.buffer_bytes(profile, ITEM),
            }
        )
    return rows


def pick(rows: Sequence[dict], policy: str, key: str) -> list[float]:
    """Returns one value per model, in order."""
    return [row[key] for row in rows if row["policy"] == policy]


def ratios(rows: Sequence[dict], key: str, of: str, over: str) -> list[float]:
    """Returns `over` divided by `of` for each model: above 1 where `of` needs less."""
    return [b / a for a, b in zip(pick(rows, of, key), pick(rows, over, key), strict=True)]


def largest(rows: Sequence[dict], policy: str) -> float:
    """Returns the largest model whose buffers fit into the V100, in billions of parameters, by interpolation."""
    mine = [row for row in rows if row["policy"] == policy]
    for small, big in itertools.pairwise(mine):
        if small["buffer_bytes"] <= V100_BYTES < big["buffer_bytes"]:
            share = (V100_BYTES - small["buffer_bytes"]) / (big["buffer_bytes"] - small["buffer_bytes"])
            return small["billions"] + share * (big["billions"] - small["billions"])
    return mine[-1]["billions"]


def gains(rows: Sequence[dict]) -> str:
    """Returns the range of MemFerry's gains over both baselines."""
    overs = ("zero-offload", "native-offload")
    found = [100 * (r - 1) for over in overs for r in ratios(rows, "steady_step_s", "memferry", over)]
    return f"{min(found):.1f} % to {max(found):.1f} %"


def fastest(rows: Sequence[dict]) -> str:
    """Returns of how many models MemFerry is the fastest, and DeepSpeed the slowest, of the paper's systems."""
    systems = ("zero-offload", "native-offload", "memferry", "go-memferry")
    by_model = list(zip(*(pick(rows, policy, "steady_step_s") for policy in systems), strict=True))
    first = sum(seconds[2] == min(seconds) for seconds in by_model)
    last = sum(seconds[0] == max(seconds[:3]) for seconds in by_model)
    return f"fastest in {first} of {len(by_model)}; DeepSpeed the slowest (GO aside) in {last}"


def savings(rows: Sequence[dict], of: str) -> str:
    """Returns the range of the memory that a system saves over `zero-offload`."""
    found = [100 * (1 - 1 / ratio) for ratio in ratios(rows, "buffer_bytes", of, "zero-offload")]
    return f"{min(found):.0f} % to {max(found):.0f} %"


def times(rows: Sequence[dict], over: str, of: str = "memferry") -> str:
    """Returns the mean gain in iteration time."""
    return f"{statistics.mean(ratios(rows, 'steady_step_s', of, over)):.2f}x"


def over_deepspeed(rows: Sequence[dict], of: str = "memferry") -> str:
    """Returns likewise over `zero-offload`, and over it with uploads after all updates (DeepSpeed's source)."""
    pairs = zip(pick(rows, of, "steady_step_s"), pick(rows, "zero-offload", "step_s"), strict=True)
    return f"{times(rows, 'zero-offload', of)}; {statistics.mean(b / a for a, b in pairs):.2f}x"


def saved(rows: Sequence[dict], of: str, over: str | None = None) -> str:
    """Returns the mean share of memory that a system saves over another, or over DeepSpeed with its own buffers."""
    others = pick(rows, of, "deepspeed_bytes") if over is None else pick(rows, over, "buffer_bytes")
    pairs = zip(pick(rows, of, "buffer_bytes"), others, strict=True)
    return f"{100 * statistics.mean(1 - mine / other for mine, other in pairs):.1f} %"


def memory(rows: Sequence[dict], of: str) -> str:
    """Returns what a system saves over `zero-offload`, and over DeepSpeed with its own buffers."""
    return f"{saved(rows, of, 'zero-offload')}; {saved(rows, of)} with DeepSpeed's buffers"


_WAITS = "first value: uploads overlap updates (Fig. 2a); second: they wait for all updates, as in DeepSpeed's source"
_SMALL = "8 of 128 tokens assumed; uploads overlap updates in our baselines"
_LARGE = "batches and lengths assumed; uploads overlap updates in our baselines"
_HOST = "depends on the host's speed and the GPU's efficiency, which the text does not give"
_ORDER = "our DeepSpeed loads in the order of updates, Native-Offload the first layers first; GPT-2 hides all GO writes"
_GRADIENTS = "batches and lengths assumed; MemFerry's gradient buffers count until the end of its step"
_LARGEST = "length 1024 assumed; products by DHA need no copy here"
_DHA = "Native-Offload is 1 % faster: reads by DHA take the link's time here (without that MemFerry is 1.2x as fast)"
_BUFFERS = "second value: with DeepSpeed's bucket of 5e8 elements, its default; the paper's is not given"


def figures_9_and_12(known: Sequence[dict]) -> list[Row]:
    """Returns the text's statements about small and large models on the A100."""
    small = [row for row in known if row["model"] in ("BERT-base", "RoBERTa")]
    large = [row for row in known if row["model"] in ("BERT-large", "GPT-2-medium")]
    gpt = [row for row in known if row["model"] == "GPT-2-medium"]
    nine, twelve, go = "MemFerry, Fig. 9", "MemFerry, Fig. 12", "go-memferry"
    return [
        Row(nine, "small models: MemFerry over both baselines", "21.7 % to 68.7 %", gains(small), _SMALL),
        Row(nine, "large models: likewise", "7.1 % to 32.1 %", gains(large), _LARGE),
        Row(nine, "all four: likewise", "10 % to 40 %", gains(known), _LARGE),
        Row(nine, "MemFerry always fastest, DeepSpeed always slowest", "yes", fastest(known), _ORDER),
        Row(
            nine,
            "all four: over DeepSpeed; over overlapped updates alone",
            "",
            f"{over_deepspeed(known)}; {times(known, 'native-overlapped')}",
            "ours only",
        ),
        Row(twelve, "small models: memory saved by MemFerry", "40.1 %", memory(small, "memferry"), _BUFFERS),
        Row(twelve, "GPT-2: likewise", "1.4 %", memory(gpt, "memferry"), _BUFFERS),
        Row(twelve, "all four: likewise", "25.4 %", memory(known, "memferry"), _BUFFERS),
        Row(twelve, "all four: saved by GO-MemFerry", "41.6 %", memory(known, go), _BUFFERS),
        Row(twelve, "GO-MemFerry against MemFerry", "17.6 %", saved(known, go, "memferry"), _GRADIENTS),
    ]


def figures_11_and_13(v100: Sequence[dict], a100: Sequence[dict]) -> list[Row]:
    """Returns the text's statements about Transformer-XL on both GPUs."""

    def at(billions: float) -> list[dict]:
        return [row for row in a100 if row["model"] == f"{billions:g}B"]

    eleven, thirteen, go = "MemFerry, Fig. 11", "MemFerry, Fig. 13", "go-memferry"
    growth = largest(v100, go) / largest(v100, "zero-offload")
    seconds = pick(at(4.3), "memferry", "steady_step_s")[0]
    free = "a GO write costs more than the link's time there; ours only that"
    return [
        Row(
            eleven,
            "V100: MemFerry over the baseline",
            "1.12x",
            f"{times(v100, 'native-offload')} Native-Offload",
            _HOST,
        ),
        Row(eleven, "V100: GO-MemFerry over the baseline", "0.97x", times(v100, "native-offload", go), free),
        Row(
            eleven,
            "V100: largest model of DeepSpeed and MemFerry",
            "2.4B",
            f"{largest(v100, 'zero-offload'):.1f}B, {largest(v100, 'memferry'):.1f}B",
            _LARGEST,
        ),
        Row(eleven, "V100: GO-MemFerry's largest over DeepSpeed's", "1.52x", f"{growth:.2f}x", _LARGEST),
        Row(thirteen, "A100: MemFerry over DeepSpeed, mean", "1.32x", over_deepspeed(a100), _WAITS),
        Row(thirteen, "A100: at 1B", "1.37x", over_deepspeed(at(1.0)), _WAITS),
        Row(thirteen, "A100: at 6.7B", "1.26x", over_deepspeed(at(6.7)), _WAITS),
        Row(
            thirteen, "A100: MemFerry over overlapped updates alone", "", times(a100, "native-overlapped"), "ours only"
        ),
        Row(thirteen, "A100: our exact over DeepSpeed", "", over_deepspeed(a100, "exact"), "ours only"),
        Row(thirteen, "MemFerry always fastest", "yes", fastest(a100), _DHA),
        Row(thirteen, "memory saved by GO-MemFerry", "21.6 %", memory(a100, go), _BUFFERS),
        Row(thirteen, "likewise, by model size", "18 % to 22 %", savings(a100, go), "no buffers of DeepSpeed's here"),
        Row(
            thirteen,
            "MemFerry's iteration at 4.3B, one A100 (also Fig. 14)",
            "5.41 s",
            f"{seconds:.2f} s",
            "no framework overhead in a roofline; products at half of the TF32 peak",
        ),
    ]


def print_rows(title: str, rows: Sequence[dict], console: rich.console.Console) -> None:
    table = rich.table.Table(title=title, title_justify="left", box=None, padding=(0, 3, 0, 0))
    for heading in ("model", "system", "step, ms", "steady, ms", "x DeepSpeed", "peak, GB", "buffers, GB"):
        table.add_column(heading, justify="left" if heading in ("model", "system") else "right")
    base_s = 0.0
    for row in rows:
        base_s = row["steady_step_s"] if row["policy"] == "zero-offload" else base_s
        times = (
            f"{1e3 * row['step_s']:.1f}",
            f"{1e3 * row['steady_step_s']:.1f}",
            f"{base_s / row['steady_step_s']:.2f}",
        )
        sizes = (f"{row['peak_device_bytes'] / 1e9:.2f}", f"{row['buffer_bytes'] / 1e9:.2f}")
        table.add_row(row["model"] if row["policy"] == "zero-offload" else "", row["system"], *times, *sizes)
    console.print(table, "")


def plot_known(rows: Sequence[dict], path: pathlib.Path) -> None:
    """Draws Figures 9 and 12: bars relative to DeepSpeed, since the models differ widely in size."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    figure, axes = new_figure(1, 2, figsize=(13, 4.8))
    panels = (("steady_step_s", "iteration time"), ("buffer_bytes", "device memory, all buffers of a step"))
    for axis, (key, title) in zip(axes.flat, panels, strict=True):
        base = pick(rows, "zero-offload", key)
        width = 0.8 / len(SYSTEMS)
        for offset, (policy, (label, colour)) in enumerate(SYSTEMS.items()):
            heights = [value / b for value, b in zip(pick(rows, policy, key), base, strict=True)]
            places = [place + (offset - (len(SYSTEMS) - 1) / 2) * width for place in range(len(models))]
            axis.bar(places, heights, width * 0.92, color=colour, label=label)
        labels = [_absolute(model, key, value) for model, value in zip(models, base, strict=True)]
        axis.set_xticks(range(len(models)), labels)
        axis.set_ylabel("relative to DeepSpeed")
        axis.set_title(title)
    figure.suptitle(
        "MemFerry, Figures 9 (left) and 12 (right), simulated: A100, PCIe 3; the absolute value is DeepSpeed's"
    )
    legend(figure, axes.flat[0], 6)
    save(figure, path, bottom=0.07)


def _line(policy: str) -> dict:
    """Returns line styles that keep overlapping lines visible."""
    if policy == "exact":
        return {"linestyle": (0, (2, 3)), "linewidth": 2.2, "zorder": 4}
    if policy == "native-overlapped":
        return {"linestyle": "-.", "linewidth": 1.2, "zorder": 3}
    return {"marker": "o", "markersize": 4, "linewidth": 3.5 if policy == "memferry" else 1.6}


def _absolute(model: str, key: str, value: float) -> str:
    return f"{model}\n{1e3 * value:.0f} ms" if key == "steady_step_s" else f"{model}\n{value / 1e9:.1f} GB"


def plot_sizes(rows: Sequence[dict], path: pathlib.Path, title: str, limit_bytes: float | None = None) -> None:
    """Draws Figures 11 and 13: time and memory by model size; above `limit_bytes` a system runs out of memory."""
    figure, axes = new_figure(1, 2, figsize=(13, 4.8))
    for policy, (label, colour) in SYSTEMS.items():
        mine = [row for row in rows if row["policy"] == policy]
        fitting = [row for row in mine if limit_bytes is None or row["buffer_bytes"] <= limit_bytes]
        style = {"color": colour, "label": label} | _line(policy)
        sizes = [row["billions"] for row in fitting]
        axes[0][0].plot(sizes, [row["steady_step_s"] for row in fitting], **style)
        axes[0][1].plot([row["billions"] for row in mine], [row["buffer_bytes"] / 1e9 for row in mine], **style)
        if len(fitting) < len(mine):
            axes[0][0].plot(
                sizes[-1], fitting[-1]["steady_step_s"], "x", color=colour, markersize=10, markeredgewidth=2
            )
    if limit_bytes is not None:
        axes[0][1].axhline(limit_bytes / 1e9, color="black", linestyle=":", linewidth=1)
        axes[0][1].annotate(
            f"{limit_bytes / 1e9:.0f} GB", (0.01, limit_bytes / 1e9), xycoords=("axes fraction", "data"), va="bottom"
        )
    axes[0][0].set_ylabel("iteration time, s")
    axes[0][1].set_ylabel("device memory, all buffers of a step, GB")
    for axis in axes.flat:
        axis.set_xlabel("parameters, billions")
        axis.set_ylim(bottom=0)
    figure.suptitle(title)
    legend(figure, axes.flat[0], 6)
    save(figure, path, bottom=0.07)


def measured() -> dict[str, list[dict]]:
    """Plans and simulates all models; rows by figure."""
    jobs = {
        "figures_9_and_12": [(model, "a100-pcie3") for model in known_models()],
        "figure_11": [(transformer_xl(size, 1, V100_LENGTH), "v100-pcie3") for size in V100_SIZES],
        "figure_13": [(transformer_xl(size, 8, A100_LENGTH), "a100-pcie3") for size in A100_SIZES],
    }
    with rich.progress.Progress(console=rich.console.Console(stderr=True)) as progress:
        return {
            name: list(itertools.chain(*(measure(*job) for job in progress.track(each, description=name))))
            for name, each in jobs.items()
        }


def main() -> None:
    given = arguments(__doc__, again="draw the existing results")
    document = read_json(given.output / "memferry.json") if given.again else measured()
    known, v100, a100 = (document[name] for name in ("figures_9_and_12", "figure_11", "figure_13"))
    console = rich.console.Console(width=150, highlight=False)
    print_rows("Figures 9 and 12: A100, PCIe 3", known, console)
    print_rows("Figure 11: Transformer-XL, V100, PCIe 3, batch 1", v100, console)
    print_rows("Figure 13: Transformer-XL, A100, PCIe 3, batch 8", a100, console)
    figures = {"figures_9_and_12": known, "figure_11": v100, "figure_13": a100}
    write(given.output, "memferry", figures, [*figures_9_and_12(known), *figures_11_and_13(v100, a100)])
    plot_known(known, given.output / "memferry_figures_9_and_12.png")
    fig_11 = "MemFerry, Figure 11, simulated: Transformer-XL on a V100, batch 1; x: the last size that fits"
    plot_sizes(v100, given.output / "memferry_figure_11.png", fig_11, V100_BYTES)
    fig_13 = "MemFerry, Figure 13, simulated: Transformer-XL on an A100, batch 8"
    plot_sizes(a100, given.output / "memferry_figure_13.png", fig_13)


if __name__ == "__main__":
    main()
