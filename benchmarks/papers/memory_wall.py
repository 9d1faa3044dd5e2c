"""Reproduces Figures 3, 4 and 5 and Table 2 of Breaking the Memory Wall from real steps over an emulated link.

    python benchmarks/papers/memory_wall.py [--again]

Trains a small GPT-2 on this CPU with two micro-batches an update, under `zero-offload` and under `auto`, and records
when each task of the last steps ran. Writes `memory_wall.json` with both recordings' tasks of one iteration, and three
PNGs; `--again` draws the existing results. The paper trains Llama 2 13B on one H100 with PCIe 5, so the emulated link
loads all 16-bit parameters in 0.35 of the compute time of a micro-batch (26 GB at 55 GB/s to 1.34 s), and the emulated
host updates all parameters in 2.2 times that time (13B at 4.5 billion a second). `benchmarks/overlap.py` tells what the
emulation does: all work is really done, and then waits for its emulated time.

F1, B1, F2 and B2 are the forwards and backwards of the micro-batches; B2 ends when the last gradient is on the host, or
the next forward begins; U lasts from there to the next forward.
"""

import dataclasses
import pathlib
import statistics
import sys

import rich.console

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))

import slow_host  # sets the environment before jax is imported

import jaxferry  # isort: skip
import overlap
from figures import RESULTS, Row, arguments, new_figure, save, write

from jaxferry.cli.recording import RecordedTask, Recording, make_recording
from jaxferry.records import read_json
from jaxferry.step import Kind, Lane

LINK, HOST = 0.35, 2.2
STEPS, RECORDED, ITERATION = 10, 8, 2
POLICIES = ("zero-offload", "auto")
LANES = (Lane.GPU, Lane.H2D, Lane.D2H, Lane.HOST)
COLOURS = {
    Kind.FORWARD: "#2f6fb7",
    Kind.BACKWARD: "#1b4f8a",
    Kind.LOAD: "#e08a1e",
    Kind.RELOAD: "#e08a1e",
    Kind.REFRESH: "#e08a1e",
    Kind.OFFLOAD: "#6a4c93",
    Kind.UPDATE: "#1b7f5c",
}
STAGES = ("F1", "B1", "F2", "B2", "U")
PAPER_S = {"F1": 0.31, "B1": 1.03, "F2": 0.31, "B2": 11.2, "U": 4.6}
BINS = 400


def record(of: overlap.Model, policy: str, profile) -> Recording:
    """The recording of the last steps under a policy."""
    options = {"policy": policy, "profile": profile, "accumulate": 2, "record_steps": RECORDED}
    step = jaxferry.train_step(of.loss_fn, jaxferry.adamw(1e-4), **options)
    state = step.init(of.params)
    for _ in range(STEPS):
        state, _ = step(state, of.batch)
    return make_recording(step, state, step.prepare(of.batch), model=f"GPT-2 {overlap.CONFIG}")


def span(tasks: list[RecordedTask], kind: Kind, step: int) -> tuple[float, float]:
    """Start of the first and end of the last task of a kind in a step."""
    these = [task for task in tasks if task.kind is kind and task.step == step]
    return min(task.start_s for task in these), max(task.end_s for task in these)


def iteration(tasks: list[RecordedTask]) -> dict[str, tuple[float, float]]:
    """When each stage of an iteration in the middle runs."""
    first = min(task.step for task in tasks if task.micro_batch == 0) + 2 * ITERATION - 2
    following = span(tasks, Kind.FORWARD, first + 2)[0]
    found = {}
    for number in (0, 1):
        found[f"F{number + 1}"] = span(tasks, Kind.FORWARD, first + number)
        found[f"B{number + 1}"] = span(tasks, Kind.BACKWARD, first + number)
    flushed = max((t.end_s for t in tasks if t.kind is Kind.OFFLOAD and t.step == first + 1), default=0.0)
    found["B2"] = found["B2"][0], min(max(found["B2"][1], flushed), following)
    return found | {"U": (found["B2"][1], following)}


def lengths(stages: dict[str, tuple[float, float]]) -> dict[str, float]:
    """Seconds of each stage."""
    return {name: end - start for name, (start, end) in stages.items()}


def draw_stages(found: dict[str, dict], path: pathlib.Path) -> None:
    """Figure 3: lanes of an iteration."""
    figure, axes = new_figure(len(POLICIES), 1, figsize=(14, 6.4))
    for axis, policy in zip(axes.flat, POLICIES, strict=True):
        stages, tasks = found[policy]["stages"], found[policy]["tasks"]
        begin, end = stages["F1"][0], stages["U"][1]
        for task in tasks:
            row = LANES.index(task.lane)
            if task.end_s > begin and task.start_s < end and task.kind in COLOURS:
                bar = [(task.start_s - begin, task.end_s - task.start_s)]
                axis.broken_barh(bar, (row - 0.4, 0.8), color=COLOURS[task.kind], linewidth=0)
        for name, (start, stop) in stages.items():
            axis.axvline(start - begin, color="#888888", linewidth=0.8, linestyle=":")
            if stop - start > 0.02 * (end - begin):
                axis.text((start + stop) / 2 - begin, -0.75, name, ha="center", fontsize=9)
        axis.set_yticks(range(len(LANES)), [lane.value for lane in LANES])
        axis.set_ylim(len(LANES) - 0.5, -1.1)
        axis.set_xlim(0, end - begin)
        axis.set_title(f"{policy}: {end - begin:.2f} s an update", fontsize=11)
    axes[-1][0].set_xlabel("seconds; forwards and backwards blue, loads orange, gradients purple, updates green")
    figure.suptitle("Breaking the Memory Wall, Figure 3: stages of an iteration, recorded over an emulated link")
    save(figure, path)


def draw_memory(found: dict[str, dict], path: pathlib.Path) -> None:
    """Figure 4: device memory, and both directions of the link."""
    figure, axes = new_figure(3, len(POLICIES), figsize=(14, 8), sharey="row")
    for column, policy in enumerate(POLICIES):
        stages, recording = found[policy]["stages"], found[policy]["recording"]
        begin, end = stages["F1"][0], stages["U"][1]
        moments, total = memory_over_time(recording)
        axes[0][column].step(moments - begin, total / 2**20, where="post", color="#333333")
        last = max(task.end_s for task in recording.tasks)
        centres = [(number + 0.5) * last / BINS - begin for number in range(BINS)]
        for row, (lane, name) in enumerate(((Lane.D2H, "D2H"), (Lane.H2D, "H2D")), start=1):
            rates = [moved / (last / BINS) / 1e6 for moved in recording.bytes_over_time(lane, BINS)]
            axes[row][column].fill_between(centres, rates, step="mid", color="#6a4c93" if row == 1 else "#e08a1e")
            axes[row][0].set_ylabel(f"{name}, MB/s")
        for axis in axes[:, column]:
            axis.set_xlim(0, end - begin)
            for start, _ in stages.values():
                axis.axvline(start - begin, color="#888888", linewidth=0.8, linestyle=":")
        axes[0][column].set_title(f"{policy}; dotted: F1, B1, F2, B2, U begin", fontsize=10)
        axes[2][column].set_xlabel("seconds")
    axes[0][0].set_ylabel("device memory, MiB")
    figure.suptitle("Breaking the Memory Wall, Figure 4: device memory and link, recorded over an emulated link")
    save(figure, path)


def memory_over_time(recording: Recording):
    """Device memory of all kinds: moments and bytes from then on."""
    import numpy as np

    moments = np.unique([moment for changes in recording.device_bytes.values() for moment, _ in changes])
    total = np.zeros(len(moments))
    for changes in recording.device_bytes.values():
        times, sizes = (np.array(column) for column in zip(*changes, strict=True))
        total += sizes[np.searchsorted(times, moments, side="right") - 1]
    return moments, total


def draw_sizes(found: dict[str, dict], path: pathlib.Path) -> None:
    """Figures 5(a) and 5(b): sizes of what crosses the link."""
    figure, axes = new_figure(1, 2, figsize=(14, 4.6), sharey=True)
    for axis, lane in zip(axes.flat, (Lane.D2H, Lane.H2D), strict=True):
        for policy, marker, colour in zip(POLICIES, ("o", "x"), ("#b8352f", "#1b7f5c"), strict=True):
            stages = found[policy]["stages"]
            begin, end = stages["F1"][0], stages["U"][1]
            moves = [t for t in found[policy]["tasks"] if t.lane is lane and t.num_bytes and begin <= t.start_s < end]
            times = [(task.start_s - begin) / (end - begin) for task in moves]
            axis.plot(times, [task.num_bytes / 2**20 for task in moves], marker, color=colour, label=policy)
        axis.set_yscale("log")
        axis.set_title(f"({'a' if lane is Lane.D2H else 'b'}) {lane.value}")
        axis.set_xlabel("share of the iteration")
    axes[0][0].set_ylabel("MiB a transfer")
    axes[0][0].legend(frameon=False)
    figure.suptitle("Breaking the Memory Wall, Figure 5: sizes of transfers, recorded over an emulated link")
    save(figure, path)


def rows_of(found: dict[str, dict]) -> list[Row]:
    """Returns the rows of the README's table."""
    zero, auto = (lengths(found[policy]["stages"]) for policy in POLICIES)
    spans = [found[policy]["stages"] for policy in POLICIES]
    total_s = {id(each): of["U"][1] - of["F1"][0] for each, of in zip((zero, auto), spans, strict=True)}

    def share(seconds: dict[str, float], *names: str) -> str:
        return f"{sum(seconds[name] for name in names) / total_s[id(seconds)]:.0%}"

    def both(*names: str) -> str:
        return f"zero-offload {share(zero, *names)}, auto {share(auto, *names)}"

    slowness = [found[policy]["slowness"] for policy in POLICIES]
    gain = total_s[id(zero)] / total_s[id(auto)]
    busy = (
        f"ours only; meanwhile a plain gradient took {slowness[0]:.2f} and {slowness[1]:.2f} times that of the profile"
    )
    paper = "Breaking the Memory Wall"
    flush = "we flush to pinned memory while the backward runs; DeepSpeed 0.13 blocks and converts"
    forwards = f"{flush}; auto's F1 waits for updates of the step before, which run into it"
    rate = "13B on an H100; only ratios of link, host and compute are the same here"
    unit = zero["F1"]
    ratios = ", ".join(f"{name} {zero[name] / unit:.1f}" for name in ("F1", "B1", "B2", "U"))
    own = ", ".join(f"{name} {PAPER_S[name] / PAPER_S['F1']:.1f}" for name in ("F1", "B1", "B2", "U"))
    return [
        Row(f"{paper}, Fig. 3", "both forwards' share of an iteration", "below 4 %", both("F1", "F2"), forwards),
        Row(f"{paper}, Fig. 3, 4", "last backward's share (B2)", "60.9 %", both("B2"), flush),
        Row(f"{paper}, Fig. 3", "update's share (U)", "26 %", both("U"), "auto runs updates into the next forwards"),
        Row(f"{paper}, Fig. 3", "auto over zero-offload", "", f"{gain:.2f}x", busy),
        Row(
            f"{paper}, Fig. 4",
            "device memory falls to the parameters in the update",
            "yes",
            _falls(found),
            "each layer is freed after its backward",
        ),
        Row(
            f"{paper}, Fig. 4(b), (c)",
            "throughput of the link in B2, of its peak",
            "D2H 15 % (8 of 55 GB/s)",
            _throughput(found),
            flush,
        ),
        Row(
            f"{paper}, Fig. 5(a), (b)",
            "no transfers in forwards; small and large tensors mixed",
            "yes",
            _sizes(found),
            "parameters stay between the micro-batches, and all loads end before F1",
        ),
        Row(
            f"{paper}, Fig. 5(c)",
            "throughput of the link during parts of the update",
            "down to 45 %",
            _beside_updates(),
            "copies by a CPU core beside our update on the others, which scales in its one pass; DeepSpeed's has three",
        ),
        Row(f"{paper}, Table 2", "1 GPU, recorded: seconds over those of F", own, ratios, rate),
    ]


def _beside_updates() -> str:
    """The speed of copies beside the fused update, by `benchmarks/contention.py`."""
    [speeds] = [
        row["speeds"] for row in read_json(RESULTS.parent / "contention.json")["rows"] if "fused" in row["update"]
    ]
    down, up, update = speeds["D2H"]["host"], speeds["H2D"]["host"], min(speeds["host"].values())
    return f"D2H {down:.0%}, H2D {up:.0%}; the update meanwhile at least {update:.0%}"


def _falls(found: dict[str, dict]) -> str:
    moments, total = memory_over_time(found["zero-offload"]["recording"])
    stages = found["zero-offload"]["stages"]

    def most(name: str) -> float:
        start, end = stages[name]
        inside = (moments >= start) & (moments <= end)
        return float(total[inside].max(initial=0.0)) / 2**20

    least = float(total[(moments >= stages["U"][0]) & (moments <= stages["U"][1])].min(initial=1e18)) / 2**20
    return f"zero-offload: {most('B2'):.0f} MiB in B2, at least {least:.0f} in U"


def _throughput(found: dict[str, dict]) -> str:
    """Bytes that leave while the last backward runs, and until its gradients are on the host, over the link's peak."""
    stages, recording = found["zero-offload"]["stages"], found["zero-offload"]["recording"]
    begin, end = stages["B2"]
    moves = [t for t in found["zero-offload"]["tasks"] if t.lane is Lane.D2H and t.num_bytes and begin < t.end_s <= end]
    moved = sum(task.num_bytes for task in moves)
    profile = recording.profile
    peak = sum(layer.grad_bytes for layer in profile.layers) / sum(layer.offload_s for layer in profile.layers)
    return f"zero-offload D2H {moved / (end - begin) / peak:.0%}"


def _sizes(found: dict[str, dict]) -> str:
    stages, tasks = found["zero-offload"]["stages"], found["zero-offload"]["tasks"]
    inside = [t for t in tasks if t.num_bytes and stages["F1"][0] <= t.start_s < stages["U"][1]]
    sizes = [task.num_bytes for task in inside if task.lane in (Lane.D2H, Lane.H2D)]
    during = sum(
        stages[name][0] <= t.start_s < stages[name][1]
        for t in inside
        for name in ("F1", "F2")
        if t.lane is not Lane.GPU
    )
    return f"{during} of {len(sizes)} start in forwards; {min(sizes) / 1024:.0f} KiB to {max(sizes) / 2**20:.1f} MiB"


def inside(recording: Recording, stages: dict[str, tuple[float, float]]) -> Recording:
    """The recording of one iteration: tasks that overlap it, and device memory in it, with times from its start."""
    begin, end = stages["F1"][0], stages["U"][1]
    tasks = tuple(
        dataclasses.replace(task, start_s=max(task.start_s - begin, 0.0), end_s=task.end_s - begin)
        for task in recording.tasks
        if task.end_s > begin and task.start_s < end
    )
    memory = {}
    for kind, changes in recording.device_bytes.items():
        before = [held for moment, held in changes if moment <= begin]
        later = ((moment - begin, held) for moment, held in changes if begin < moment < end)
        memory[kind] = ((0.0, before[-1] if before else 0), *later)
    return dataclasses.replace(recording, tasks=tasks, device_bytes=memory)


def recorded() -> dict[str, dict]:
    """Trains, and keeps one iteration of each policy."""
    of = overlap.Model()
    speeds = slow_host.set_speeds(of, LINK, HOST)
    rich.console.Console().print({part: f"{speed / 1e6:.0f} MB/s" for part, speed in speeds.items()})
    profile, plain_s = of.profile(num_profiles=1)
    found = {}
    for policy in POLICIES:
        before_s = of.plain_s()
        recording = record(of, policy, profile)
        slowness = statistics.median(before_s + of.plain_s()) / plain_s
        stages = iteration(list(recording.tasks))
        begin = stages["F1"][0]
        stages = {name: (start - begin, end - begin) for name, (start, end) in stages.items()}
        found[policy] = {"recording": inside(recording, iteration(list(recording.tasks))), "stages": stages}
        found[policy] |= {"slowness": slowness}
    return found


def main() -> None:
    given = arguments(__doc__, again="draw the existing results")
    if given.again:
        known = read_json(given.output / "memory_wall.json")["policies"]
        read = {policy: Recording.from_json(each["recording"]) for policy, each in known.items()}
        found = {policy: {**each, "recording": read[policy]} for policy, each in known.items()}
    else:
        found = recorded()
    for each in found.values():
        each["tasks"] = list(each["recording"].tasks)
    draw_stages(found, given.output / "memory_wall_figure_3.png")
    draw_memory(found, given.output / "memory_wall_figure_4.png")
    draw_sizes(found, given.output / "memory_wall_figure_5.png")
    policies = {
        policy: {
            "stages": each["stages"],
            "slowness": each["slowness"],
            "stages_s": lengths(each["stages"]),
            "recording": each["recording"].to_json(),
        }
        for policy, each in found.items()
    }
    write(given.output, "memory_wall", {"link": LINK, "host": HOST, "policies": policies}, rows_of(found))


if __name__ == "__main__":
    main()
