"""How well a step overlaps: measured against predicted, and against the busiest lane, for every policy, on a CPU.

A GPT-2 is trained with an emulated link, whose two directions are made as fast as is needed for upload and download to
take as long as compute. XLA has one thread, the optimizer's host step the other. Two figures for each policy:

- measured / predicted: the time of a step in a run, over what the simulator says of the same tasks with the times that
  the profiler measured. Expected between 0.9 and 1.1.
- measured / bound: over the work of the busiest lane, which no schedule of these tasks can beat. Expected at most 1.15
  for the policies that overlap everything.

What the machine adds (memory bandwidth and cores that lanes share) cannot be told there from what the executor adds.
So the executor is also run dry: tasks wait for their profiled time and compute nothing, for 16 and 96 layers. Expected
within 3 % of what is predicted.

    python benchmarks/overlap.py [--dry] [--steps 8] [--rounds 3]
"""

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

# One core for XLA, one for the host's updates.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false"
os.environ["JAXFERRY_HOST_THREADS"] = "1"
os.environ["OPENBLAS_NUM_THREADS"] = "1"  # products in host memory are part of XLA's programs
sys.path.append(str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "examples" / "gpt2"))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import jax
import matplotlib
import measure
import numpy as np
from matplotlib import pyplot
from rich.console import Console
from rich.table import Table

import jaxferry
import model
from jaxferry.engine.lanes import Lanes, TaskList
from jaxferry.native.library import library
from jaxferry.planning import make_plan
from jaxferry.schedule import Lane, ProgramFacts, schedule_step
from jaxferry.simulate import machine
from profiles import transformer

POLICIES = ("zero-offload", "native-offload", "native-overlapped", "l2l", "memferry", "exact")
OVERLAPPING = ("native-overlapped", "exact")
CONFIG = model.Config(num_layers=8, num_heads=12, channels=768, max_length=64, vocab_size=4096)
BATCH, LENGTH = 1, 48
COLOURS = {Lane.GPU: "tab:green", Lane.H2D: "tab:blue", Lane.D2H: "tab:orange", Lane.HOST: "tab:red"}


def bound_s(schedule):
    """The work of the busiest lane in one step."""
    return max(sum(task.duration_s for task in schedule.tasks if task.lane is lane) for lane in Lane)


def ends_of_steps(run):
    """When the last program of each step has ended."""
    ends = [0.0] * run.schedule.steps
    for task, end in zip(run.schedule.tasks, run.ends_s, strict=True):
        if task.lane is Lane.GPU:
            ends[task.step] = max(ends[task.step], end)
    return ends


def row_of(policy, measured_s, schedule, **more):
    predicted_s, least_s = machine.steady_step_s(schedule), bound_s(schedule)
    return {
        "policy": policy,
        "measured_s": measured_s,
        "predicted_s": predicted_s,
        "bound_s": least_s,
        "measured_over_predicted": measured_s / predicted_s,
        "measured_over_bound": measured_s / least_s,
        **more,
    }


def dry_step_s(schedule, num_steps):
    """Seconds a step of a chain whose tasks sleep."""
    tasks, lanes, works = TaskList(schedule), Lanes(), []

    def action(index):
        time.sleep(schedule.tasks[index].duration_s)
        return True

    for _ in range(num_steps):
        works.append(lanes.make(tasks, action, works[-1] if works else None))
        lanes.submit(works[-1])
        works[-1].wait((Lane.GPU, Lane.D2H))
    works[-1].wait()
    last = max(i for i, task in enumerate(schedule.tasks) if task.lane is Lane.GPU)
    return (works[-1].ends_s[last] - works[2].ends_s[last]) / (num_steps - 3)


def scaled(profile, factor):
    layers = []
    for layer in profile.layers:
        times = {key: value * factor for key, value in vars(layer).items() if key.endswith("_s")}
        layers.append(type(layer)(**{**vars(layer), **times}))
    return type(profile)(profile.machine, tuple(layers))


def dry_rows(num_layers, step_s, num_steps=8):
    """The executor alone, for one size of model."""
    profile = transformer(num_layers)
    facts = ProgramFacts((True,) * num_layers, (False,) * num_layers)
    rows = []
    for policy in POLICIES:
        plan = make_plan(profile, policy)
        factor = step_s / machine.steady_step_s(schedule_step(profile, plan, facts))
        schedule = schedule_step(scaled(profile, factor), plan, facts)
        rows.append(row_of(policy, dry_step_s(schedule, num_steps), schedule, num_layers=num_layers))
    return rows


class Trained:
    """One policy's run."""

    def __init__(self, loss_fn, params, batch, policy, profile):
        self.policy, self.batch = policy, batch
        self.step = jaxferry.train_step(loss_fn, jaxferry.adamw(1e-4), policy=policy, profile=profile)
        self.state = self.step.init(params)
        self.schedule = self.step.prepare(batch).schedule
        self.step.compile_updates(self.state, batch)
        self.seconds, self.losses, self.run = [], [], None

    def take(self, num_steps):
        """Takes some steps and notes how long one is in between."""
        for _ in range(num_steps):
            self.state, metrics = self.step(self.state, self.batch)
            self.losses.append(float(metrics["loss"]))
        self.state.block_until_ready()
        self.run = self.step.recorded()
        ends = ends_of_steps(self.run)
        self.seconds += list(np.diff(ends[-num_steps:])[1:])


def link_for(profile):
    """Bytes a second of each direction at which the transfers of a step take as long as its programs."""
    compute_s = sum(layer.forward_s + layer.backward_s for layer in profile.layers)
    sent = sum(layer.param_bytes for layer in profile.layers)
    received = sum(layer.grad_bytes for layer in profile.layers)
    return sent / compute_s, received / compute_s


def measured_profile(loss_fn, params, batch):
    return jaxferry.train_step(loss_fn, jaxferry.adamw(1e-4), profile="measure").measure(params, batch)


def trained_rows(num_steps, num_rounds):
    """Trains with every policy, in turn; rows and runs."""
    emulator = library("cpu")
    loss_fn = model.make_loss(CONFIG)
    params = jax.jit(model.make_init(CONFIG))(jax.random.key(0))
    batch = {"tokens": jax.random.randint(jax.random.key(1), (BATCH, LENGTH + 1), 0, CONFIG.vocab_size)}
    up, down = link_for(measured_profile(loss_fn, params, batch))
    emulator.set_bandwidth("load", up)
    emulator.set_bandwidth("store", down)
    profile = measured_profile(loss_fn, params, batch)
    trained = [Trained(loss_fn, params, batch, policy, profile) for policy in POLICIES]
    for number in range(num_rounds + 1):
        for one in trained:
            one.take(num_steps)
            if number == 0:
                one.seconds.clear()  # warm-up
    losses = {tuple(one.losses) for one in trained if one.policy in ("zero-offload", "native-offload", "l2l")}
    assert len(losses) == 1, "policies that only move data differ in their losses"
    link = {"load_bytes_per_s": up, "store_bytes_per_s": down}
    rows = [row_of(one.policy, statistics.median(one.seconds), one.schedule, step_s=one.seconds) for one in trained]
    return rows, [one.run for one in trained], profile, link


def draw(runs, rows, path):
    """Measured beside predicted timelines of two steps in the middle of a run."""
    matplotlib.use("agg")
    figure, axes = pyplot.subplots(len(rows), 2, figsize=(16, 2.1 * len(rows)), sharex="row", squeeze=False)
    for (left, right), row, run in zip(axes, rows, runs, strict=True):
        predicted = machine.run(run.schedule)
        for axis, shown, title in ((left, run, "measured"), (right, predicted, "predicted")):
            ends = ends_of_steps(shown)
            first, last = ends[-4], ends[-2]
            for place, lane in enumerate(Lane):
                bars = [
                    (start - first, end - start)
                    for task, start, end in zip(shown.schedule.tasks, shown.starts_s, shown.ends_s, strict=True)
                    if task.lane is lane and end > first and start < last
                ]
                axis.broken_barh(bars, (-place - 0.4, 0.8), color=COLOURS[lane], edgecolor="white", linewidth=0.3)
            axis.set_yticks([-place for place in range(len(Lane))], [lane.value for lane in Lane])
            axis.set_title(f"{row['policy']}: {title}", fontsize=10)
            axis.set_xlim(0, max(2.2 * row["measured_s"], 2.2 * row["predicted_s"]))
            axis.axvline(ends[-3] - first, color="black", linewidth=0.6, linestyle=":")
    for axis in axes[-1]:
        axis.set_xlabel("seconds from the end of a step's last program")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def print_rows(rows, title):
    table = Table(
        "policy", "measured [s]", "predicted [s]", "bound [s]", "measured / predicted", "/ bound", title=title
    )
    for row in rows:
        numbers = (f"{row[key]:.3f}" for key in ("measured_s", "predicted_s", "bound_s"))
        ratios = (f"{row[key]:.3f}" for key in ("measured_over_predicted", "measured_over_bound"))
        table.add_row(row["policy"], *numbers, *ratios)
    Console().print(table)


def recording_share(rows, profile):
    """The share of a step that reading the clock for every task takes."""
    start_s = time.perf_counter()
    for _ in range(100_000):
        time.perf_counter()
    reading_s = (time.perf_counter() - start_s) / 100_000
    num_tasks = 5 * len(profile.layers)
    return 2 * num_tasks * reading_s / min(row["measured_s"] for row in rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="only the executor's own logic; writes nothing")
    parser.add_argument("--steps", type=int, default=8, help="steps of each policy in a row")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    dry = {}
    for num_layers, step_s in ((16, 1.0), (96, 2.0)):
        dry[num_layers] = dry_rows(num_layers, step_s)
        print_rows(dry[num_layers], f"dry: {num_layers} layers")
    if arguments.dry:
        return
    rows, runs, profile, link = trained_rows(arguments.steps, arguments.rounds)
    print_rows(rows, "trained, over an emulated link")
    share = recording_share(rows, profile)
    print(f"recording takes {share:.2e} of a step")
    draw(runs, rows, measure.RESULTS / "overlap.png")
    work_s = {lane.value: 0.0 for lane in Lane}
    for task in runs[POLICIES.index("native-overlapped")].schedule.tasks:
        work_s[task.lane.value] += task.duration_s / runs[0].schedule.steps
    measure.write(
        "overlap",
        {
            "benchmark": "overlap",
            "machine": measure.machine(),
            "model": {"name": f"GPT-2 {CONFIG}", "batch": BATCH, "sequence": LENGTH},
            "expected": {"measured_over_predicted": [0.9, 1.1], "measured_over_bound": 1.15, "dry": 0.03},
            "link": link,
            "work_s": work_s,
            "recording_share": share,
            "rows": rows,
            "dry": dry,
        },
    )


if __name__ == "__main__":
    main()
