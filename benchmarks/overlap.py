"""How well a step overlaps: measured against predicted, and against the busiest lane, for every policy, on a CPU.

A GPT-2 is trained over an emulated link to an emulated host: both directions and the memory that updates work in are as
fast as is needed for upload, download and host update to take SHARE of the time of compute each. All of it is done in
earnest, and then waits until its time is over: compute on one core, copies and updates on the other. Figures for each
policy:

- measured / predicted: the time of a step in a run, over what the simulator says of the same tasks with the times that
  the profiler measured. Expected between 0.9 and 1.1.
- measured / bound: over the longest of compute, upload, download and host update, each alone. Expected at most 1.15 for
  the best policy.
- measured / own bound: over the work of the busiest lane under the policy's plan (where layers that are read in host
  memory compute for longer, and others are loaded twice).

What the machine adds (memory bandwidth and cores that lanes share) cannot be told there from what the executor adds.
So the executor is also run dry: tasks wait for their profiled time and compute nothing, for 16 and 96 layers. Expected
within 3 % of what is predicted.

    python benchmarks/overlap.py [--dry] [--steps 8] [--rounds 3]
"""

import argparse
import os
import sys
import time
from pathlib import Path

# One core for XLA, one for the host's updates.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false"
os.environ["JAXFERRY_HOST_THREADS"] = "1"
os.environ["OPENBLAS_NUM_THREADS"] = "1"  # products in host memory are part of XLA's programs
os.environ["JAXFERRY_CACHE_DIR"] = "off"  # what was measured while the machine was busy is measured again
sys.path.append(str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "examples" / "gpt2"))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import jax
import measure
from rich.console import Console
from rich.table import Table

import jaxferry
import model
from jaxferry.choice import choose_update_order
from jaxferry.compare import compare_policies, works_s
from jaxferry.engine.lanes import Lanes, TaskList
from jaxferry.native.library import library
from jaxferry.planning import make_plan
from jaxferry.report.tables import bench_lines, bench_table
from jaxferry.report.timelines import plot_timelines
from jaxferry.schedule import Lane, ProgramFacts, schedule_step
from jaxferry.simulate import machine
from profiles import transformer

POLICIES = ("zero-offload", "native-offload", "native-overlapped", "l2l", "memferry", "exact", "auto")
CONFIG = model.Config(num_layers=24, num_heads=8, channels=512, max_length=128, vocab_size=2048)
BATCH, LENGTH = 2, 128
SHARE = 0.7
MOST_SETTINGS = 4


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
        known = {key: value for key, value in vars(layer).items() if key.endswith("_s") and value is not None}
        times = {key: value * factor for key, value in known.items()}
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
        slow = scaled(profile, factor)
        schedule = choose_update_order(schedule_step(slow, plan, facts))
        measured_s, predicted_s = dry_step_s(schedule, num_steps), machine.steady_step_s(schedule)
        rows.append(
            {
                "policy": policy,
                "measured_s": measured_s,
                "predicted_s": predicted_s,
                "measured_over_predicted": measured_s / predicted_s,
            }
        )
    return rows


def speeds_for(profile):
    """Bytes a second at which transfers and updates take SHARE of the time of a step's programs."""
    each_s = SHARE * works_s(profile)["compute"]
    sent = sum(profile.layers[group[0]].param_bytes for group in profile.groups)
    received = sum(layer.grad_bytes for layer in profile.layers)
    # Of each parameter: master and two moments both ways, the gradient, the compute copy, all in fp32.
    return {"load": sent / each_s, "store": received / each_s, "host": 8 * sent / each_s}


def shares_of(profile):
    """Upload, download and update over compute."""
    works = works_s(profile)
    return [works[name] / works["compute"] for name in works if name != "compute"]


def measured_profile(loss_fn, params, batch):
    return jaxferry.train_step(loss_fn, jaxferry.adamw(1e-4), profile="measure").measure(params, batch)


def trained(num_steps, num_rounds):
    """Trains with every policy, in turn."""
    emulator = library("cpu")
    loss_fn = model.make_loss(CONFIG)
    params = jax.jit(model.make_init(CONFIG))(jax.random.key(0))
    batch = {"tokens": jax.random.randint(jax.random.key(1), (BATCH, LENGTH + 1), 0, CONFIG.vocab_size)}
    profile = measured_profile(loss_fn, params, batch)
    for _ in range(MOST_SETTINGS):
        speeds = speeds_for(profile)
        for part, bytes_per_s in speeds.items():
            emulator.set_bandwidth(part, bytes_per_s)
        profile = measured_profile(loss_fn, params, batch)
        # A machine that was busy for a while gives another share; then once more, by what is known now.
        if all(abs(share - SHARE) < 0.05 for share in shares_of(profile)):
            break
    compared = compare_policies(
        POLICIES,
        profile,
        lambda policy: jaxferry.train_step(loss_fn, jaxferry.adamw(1e-4), policy=policy, profile=profile),
        lambda step: step.init(params),
        batch,
        num_steps=num_steps,
        num_rounds=num_rounds,
    )
    losses = {row.losses for row in compared.rows if row.policy in ("zero-offload", "native-offload", "l2l")}
    assert len(losses) == 1, "policies that only move data differ in their losses"
    return compared, profile, speeds


def recording_share(rows, profile):
    """The share of a step that reading the clock for every task takes."""
    start_s = time.perf_counter()
    for _ in range(100_000):
        time.perf_counter()
    reading_s = (time.perf_counter() - start_s) / 100_000
    num_tasks = 5 * len(profile.layers)
    return 2 * num_tasks * reading_s / min(row.measured_s for row in rows)


def print_dry(rows, title):
    table = Table("policy", "measured [s]", "predicted [s]", "measured / predicted", title=title)
    for row in rows:
        numbers = (row[key] for key in ("measured_s", "predicted_s", "measured_over_predicted"))
        table.add_row(row["policy"], *(f"{number:.3f}" for number in numbers))
    Console().print(table)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="only the executor's own logic; writes nothing")
    parser.add_argument("--steps", type=int, default=8, help="steps of each policy in a row")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    dry = {}
    for num_layers, step_s in ((16, 1.0), (96, 2.0)):
        dry[num_layers] = dry_rows(num_layers, step_s)
        print_dry(dry[num_layers], f"dry: {num_layers} layers")
    if arguments.dry:
        return
    compared, profile, speeds = trained(arguments.steps, arguments.rounds)
    Console(width=140).print(bench_table(compared), *bench_lines(compared), sep="\n")
    share = recording_share(compared.rows, profile)
    print(f"recording takes {share:.2e} of a step")
    plot_timelines(compared, measure.RESULTS / "overlap.png")
    rows = compared.to_json()["rows"]
    for row in rows:  # the picture shows them
        del row["measured"], row["predicted"]
    measure.write(
        "overlap",
        {
            "benchmark": "overlap",
            "machine": measure.machine(),
            "model": {"name": f"GPT-2 {CONFIG}", "batch": BATCH, "sequence": LENGTH},
            "expected": {"measured_over_predicted": [0.9, 1.1], "measured_over_bound": 1.15, "dry": 0.03},
            "share": SHARE,
            "emulated_bytes_per_s": speeds,
            "work_s": compared.work_s,
            "bound_s": compared.bound_s,
            "recording_share": share,
            "rows": rows,
            "dry": dry,
        },
    )


if __name__ == "__main__":
    main()
