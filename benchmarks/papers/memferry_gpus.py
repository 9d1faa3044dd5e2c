"""Reproduces Figures 14(a) and 14(b) of MemFerry: data-parallel training on 1 to 8 GPUs, by simulation.

    python benchmarks/papers/memferry_gpus.py

Writes `memferry_gpus.json` and a PNG. The paper uses PyTorch's DataParallel: each GPU holds the model, and they
exchange parameters and gradients over PCIe. Here each device has its part of the batch, loads its part of every layer
over its own link and gathers the others' parts (`estimate_profile` with `num_devices`), on A100 with PCIe 3 for links
and exchange. A program that reads a layer in host memory (DHA) copies and gathers it in the same way, but in the
program, so it takes the GPU's time; one that writes its gradient there (GO) sums it over the devices first.
"""

import rich.progress
from figures import Row, arguments, legend, new_figure, save, write
from paper_models import transformer_xl

from jaxferry.costs import estimate_profile, find_machine
from jaxferry.planner import make_plan

MACHINE = "a100-pcie3"
LENGTH = 384
DEVICES = (1, 2, 4, 8)
BATCHES = (8, 16, 32, 64, 128)
LATE = "zero-offload, uploads after updates"
SYSTEMS = {
    LATE: ("DeepSpeed, uploads after all updates (its source)", "#e3a9a5"),
    "zero-offload": ("DeepSpeed, uploads overlap updates", "#b8352f"),
    "native-offload": ("Native-Offload", "#e08a1e"),
    "memferry": ("MemFerry", "#2f6fb7"),
    "go-memferry": ("GO-MemFerry", "#6a4c93"),
}


def seconds(billions: float, batch: int, num_devices: int) -> dict[str, float]:
    """The iteration time of each system in the steady state."""
    layers = transformer_xl(billions, batch, LENGTH).layers()
    profile = estimate_profile(layers, find_machine(MACHINE), num_devices=num_devices)
    predicted = {name: make_plan(profile, name).predicted for name in SYSTEMS if name != LATE}
    found = {name: each.steady_step_s for name, each in predicted.items()}
    return {LATE: predicted["zero-offload"].step_s} | found


def rows_of(devices: dict[int, dict[str, float]], batches: dict[int, dict[str, float]]) -> list[Row]:
    """Returns the rows of the README's table."""
    first, last = devices[1], devices[DEVICES[-1]]
    most = batches[BATCHES[-1]]
    shared = "each device loads an eighth and gathers; DataParallel sends the whole model to each GPU"
    both = "uploads overlap updates; wait for all"
    host = "the host's updates set the pace; Native-Offload differs by DHA only"
    late = "uploads overlap updates; wait for all. A GO backward waits here until its gradient is summed and written"

    def over_baselines(found: dict[str, float], name: str) -> str:
        return f"{found['zero-offload'] / found[name]:.2f}x; {found[LATE] / found[name]:.2f}x"

    always = sum(
        each["memferry"] <= min(each["zero-offload"], each["native-offload"]) * 1.0001 for each in batches.values()
    )
    return [
        Row(
            "MemFerry, Fig. 14(a)",
            "4.3B: MemFerry's iteration, 1 and 8 GPUs",
            "5.41 s, 4.12 s",
            f"{first['memferry']:.2f} s, {last['memferry']:.2f} s",
            shared,
        ),
        Row(
            "MemFerry, Fig. 14(a)",
            "8 GPUs: MemFerry over DeepSpeed",
            "1.28x",
            over_baselines(last, "memferry"),
            both,
        ),
        Row(
            "MemFerry, Fig. 14(a)",
            "8 GPUs: MemFerry over Native-Offload",
            "1.19x",
            f"{last['native-offload'] / last['memferry']:.2f}x",
            host,
        ),
        Row(
            "MemFerry, Fig. 14(b)",
            "6.7B, 8 GPUs, batch 128: MemFerry over DeepSpeed",
            "1.21x",
            over_baselines(most, "memferry"),
            both,
        ),
        Row(
            "MemFerry, Fig. 14(b)",
            "likewise: GO-MemFerry over DeepSpeed",
            "1.16x",
            over_baselines(most, "go-memferry"),
            late,
        ),
        Row(
            "MemFerry, Fig. 14(b)",
            "MemFerry outperforms all baselines",
            "always",
            f"{always} of {len(batches)} batches",
            "GO-MemFerry is slower than DeepSpeed with overlapped uploads from batch 32 on",
        ),
    ]


def draw(devices: dict[int, dict[str, float]], batches: dict[int, dict[str, float]], path) -> None:
    figure, axes = new_figure(1, 2, figsize=(13, 4.8))
    panels = (
        (devices, "GPUs", "(a) 4.3B, global batch 8"),
        (batches, "global batch", "(b) 6.7B on 8 GPUs"),
    )
    for axis, (series, what, title) in zip(axes.flat, panels, strict=True):
        for offset, (name, (label, colour)) in enumerate(SYSTEMS.items()):
            places = [place + 0.17 * (offset - 2) for place in range(len(series))]
            axis.bar(places, [each[name] for each in series.values()], 0.155, color=colour, label=label)
        axis.set_xticks(range(len(series)), series)
        axis.set_xlabel(what)
        axis.set_ylabel("iteration time, s")
        axis.set_title(title)
    figure.suptitle("MemFerry, Figure 14, simulated: Transformer-XL, A100, PCIe 3, data parallel with split loads")
    legend(figure, axes.flat[0], 4)
    save(figure, path, bottom=0.06)


def main() -> None:
    output = arguments(__doc__).output
    with rich.progress.Progress() as progress:
        devices = {n: seconds(4.3, 8, n) for n in progress.track(DEVICES, description="14(a)")}
        batches = {batch: seconds(6.7, batch, 8) for batch in progress.track(BATCHES, description="14(b)")}
    draw(devices, batches, output / "memferry_figure_14.png")
    write(
        output,
        "memferry_gpus",
        {"machine": MACHINE, "figure_14a": devices, "figure_14b": batches},
        rows_of(devices, batches),
    )


if __name__ == "__main__":
    main()
