"""Measures how well a step overlaps on a CPU: every policy's step against its prediction and against the busiest lane.

A GPT-2 is trained over an emulated link to an emulated host. The speeds of both directions and of the updates' memory
are set so that upload, download and host update each take SHARE of the compute time. All work is really done and then
waits for its emulated time: compute on one core, copies and updates on the other. The cores share memory bandwidth, so
the model has few parameters for its compute. SHARE is below 1 because gradients leave in backward order: those that the
next forward needs first arrive last, after the forward and the whole download. If download and compute took equally
long, a step would take 4/3 of either. Figures for each policy:

- measured / predicted: the measured step over the simulated step of the same tasks with profiled times. Expected
  between 0.9 and 1.1.
- measured / bound: over the longest of compute, upload, download and host update, each alone. Expected at most 1.15 for
  the best policy.
- measured / own bound: over the work of the busiest lane under the policy's plan (in which some layers compute longer
  in host memory, and others are loaded twice).

On a shared machine, compute speed varies by more than these tolerances. So a plain jitted gradient, without JaxFerry,
is timed before and after each profile and each round of steps. Its slowdown since the profile scales the programs'
times in prediction and bounds. Ratios are medians over the quieter rounds: those in which other virtual machines took
no more of this one's cycles than in the median round ("steal" in Linux's /proc/stat). The JSON holds every round.

XLA's CPU client allocates each result from the C library, which returns freed memory to Linux and gets it back page by
page: 20 to 80 thousand page faults per step, up to a tenth of its time. A profile, which repeats one call, has none of
these, and on a GPU memory stays in JAX's pool. So this benchmark makes the C library keep freed memory.

These figures cannot separate the executor's overhead from the machine's (memory bandwidth and cores shared by lanes).
So the executor also runs dry, for 16 and 96 layers: tasks wait for their profiled time and compute nothing. Expected:
within 3 % of the prediction, in the fastest DRY_ROW consecutive steps, because a busy machine wakes threads late by
milliseconds. A run that lost more than DRY_STOLEN of the processors' time is repeated, up to MOST_DRY_RUNS times, and
the quietest counts. On a machine that is never quiet, measured / slept separates the executor from late wake-ups: all
steps over the simulation with each task's actual sleep.

    python benchmarks/overlap.py [--only dry|trained] [--steps 4] [--rounds 6]
"""

import argparse
import dataclasses
import itertools
import json
import math
import os
import statistics
import time
from pathlib import Path

# One core for XLA, one for the host's updates.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["NPROC"] = "1"  # the number of threads of XLA's CPU client; its own flags leave two per program
os.environ["JAXFERRY_HOST_THREADS"] = "1"
os.environ["OPENBLAS_NUM_THREADS"] = "1"  # products in host memory are part of XLA's programs
os.environ["JAXFERRY_CACHE_DIR"] = "off"  # do not reuse measurements from a busy machine
import benchmark_paths  # noqa: F401 - makes the others importable
import jax
import measure
from rich.console import Console
from rich.table import Table

import jaxferry
import model
from jaxferry.cli.compare import compare_policies, ends_of_steps, own_bound_s, steps_in_the_middle, works_s
from jaxferry.cli.figures import plot_timelines
from jaxferry.engine import Lanes, TaskList
from jaxferry.native import library
from jaxferry.planner import make_plan, with_update_order
from jaxferry.step import Lane, leading_loads, machine, repeat, schedule_step
from profiles import transformer

POLICIES = ("zero-offload", "native-offload", "native-overlapped", "l2l", "memferry", "exact", "auto")
MOVING_DATA = POLICIES[:4]  # policies that only move data
CONFIG = model.Config(num_layers=48, num_heads=4, channels=192, max_length=128, vocab_size=2048)
BATCH, LENGTH = 6, 128
SHARE = 0.7
SHARE_ERROR = 0.05
MOST_SETTINGS = 3
NUM_PROFILES = 3
DRY_ROW = 4
DRY_STOLEN = 0.005
MOST_DRY_RUNS = 4
NUM_PLAIN = 4
AWAKE_S = 5e-4


def last_as_long_as(duration_s):
    """Waits, spinning at the end, because a sleeping thread wakes some tenths of a millisecond late."""
    end_s = time.perf_counter() + duration_s
    time.sleep(max(0.0, duration_s - AWAKE_S))
    while time.perf_counter() < end_s:
        time.sleep(0)  # lets the other lanes run


def dry_steps_s(schedule, num_steps):
    """Returns the steady steps' seconds in a chain of sleeping tasks, and those predicted with their actual sleeps."""
    tasks, lanes, works, slept_s = TaskList(schedule), Lanes(), [], []

    def next_action():
        of_step = [0.0] * len(schedule.tasks)
        slept_s.append(of_step)

        def action(index):
            start_s = time.perf_counter()
            last_as_long_as(schedule.tasks[index].duration_s)
            of_step[index] = time.perf_counter() - start_s
            return True

        return action

    works.append(lanes.make(tasks, next_action()))
    for _ in range(num_steps):
        lanes.submit(works[-1])
        action = next_action()
        works.append(lanes.begin_ahead(tasks, action, works[-1], leading_loads(schedule)))
        works[-2].wait((Lane.GPU, Lane.D2H))
        works[-1].open(action)
    works.pop().stop()
    works[-1].wait()
    last = max(i for i, task in enumerate(schedule.tasks) if task.lane is Lane.GPU)
    chain = repeat(schedule, num_steps)
    durations_s = itertools.chain.from_iterable(slept_s[:num_steps])
    as_slept = [dataclasses.replace(t, duration_s=s) for t, s in zip(chain.tasks, durations_s, strict=True)]
    predicted = machine.run(dataclasses.replace(chain, tasks=tuple(as_slept)))
    return lengths_s([work.ends_s[last] for work in works]), lengths_s(ends_of_steps(predicted))


def lengths_s(ends_s):
    """Returns the seconds of each steady step, given the ends of all steps."""
    return [after - before for before, after in itertools.pairwise(ends_s[2:])]


def quietest_dry_run(schedule, num_steps):
    """Returns the stolen share of the processors' time in the quietest run, and the result of `dry_steps_s`."""
    runs = []
    while len(runs) < MOST_DRY_RUNS and min(runs, default=(1.0,))[0] > DRY_STOLEN:
        before_s, start_s = stolen_s(), time.perf_counter()
        steps = dry_steps_s(schedule, num_steps)
        runs.append(((stolen_s() - before_s) / (time.perf_counter() - start_s) / os.cpu_count(), *steps))
    return min(runs)


def stolen_s():
    """Returns the processor seconds stolen from this machine so far; 0 if unknown."""
    try:
        ticks = int(Path("/proc/stat").read_text().split("\n", 1)[0].split()[8])
    except (OSError, IndexError):
        return 0.0
    return ticks / os.sysconf("SC_CLK_TCK")


def scaled(profile, factor):
    layers = []
    for layer in profile.layers:
        known = {key: value for key, value in vars(layer).items() if key.endswith("_s") and value is not None}
        times = {key: value * factor for key, value in known.items()}
        layers.append(type(layer)(**{**vars(layer), **times}))
    return type(profile)(profile.machine, tuple(layers))


def dry_rows(num_layers, step_s, num_steps=8):
    """Measures the executor alone, for one size of model."""
    profile = transformer(num_layers)
    rows = []
    for policy in POLICIES:
        plan = make_plan(profile, policy)
        factor = step_s / machine.steady_step_s(schedule_step(profile, plan))
        slow = scaled(profile, factor)
        schedule = schedule_step(slow, with_update_order(slow, plan))
        (stolen, every_s, slept_s), predicted_s = quietest_dry_run(schedule, num_steps), machine.steady_step_s(schedule)
        measured_s = min(statistics.mean(every_s[i : i + DRY_ROW]) for i in range(len(every_s) - DRY_ROW + 1))
        rows.append(
            {
                "policy": policy,
                "measured_s": measured_s,
                "predicted_s": predicted_s,
                "measured_over_predicted": measured_s / predicted_s,
                "measured_over_slept": sum(every_s) / sum(slept_s),
                "step_s": every_s,
                "slept_s": slept_s,
                "stolen_share": stolen,
            }
        )
    return rows


def speeds_for(profile, slowness):
    """Returns the bytes per second at which transfers and updates each take SHARE of a step's compute time.

    `slowness` is the machine's slowdown at the time of the profile, compared with an idle machine.
    """
    each_s = SHARE * works_s(profile)["compute"] / slowness
    sent = sum(profile.layers[group[0]].param_bytes for group in profile.groups)
    received = sum(layer.grad_bytes for layer in profile.layers)
    # Per parameter, in fp32: read and write master and two moments, read the gradient, write the compute copy.
    return {"load": sent / each_s, "store": received / each_s, "host": 8 * sent / each_s}


class Model:
    """The trained model, and the machine's current speed on it.

    Attributes:
      measuring: the training step that measures profiles.
    """

    def __init__(self):
        self.loss_fn = model.make_loss(CONFIG)
        self.params = jax.jit(model.make_init(CONFIG))(jax.random.key(0))
        tokens = jax.random.randint(jax.random.key(1), (BATCH, LENGTH + 1), 0, CONFIG.vocab_size)
        self.batch = {"tokens": tokens}
        self._plain = jax.jit(jax.value_and_grad(self.loss_fn)).lower(self.params, self.batch).compile()
        self.measuring = jaxferry.train_step(self.loss_fn, jaxferry.adamw(1e-4), profile="measure")
        self.fastest_s = math.inf
        for _ in range(2):
            self.plain_s()

    def plain_s(self):
        """Returns several timings of a plain jitted gradient, in seconds."""
        times_s = []
        for _ in range(NUM_PLAIN):
            start_s = time.perf_counter()
            jax.block_until_ready(self._plain(self.params, self.batch))
            times_s.append(time.perf_counter() - start_s)
        self.fastest_s = min(self.fastest_s, *times_s)
        return times_s

    def profile(self, num_profiles=NUM_PROFILES):
        """Returns the median of several profiles by compute over plain gradient, and that gradient's seconds."""
        measured = []
        for _ in range(num_profiles):
            before_s = self.plain_s()
            profile = self.measuring.measure(self.params, self.batch)
            plain_s = statistics.median(before_s + self.plain_s())
            measured.append((works_s(profile)["compute"] / plain_s, profile, plain_s))
        _, profile, plain_s = sorted(measured, key=lambda found: found[0])[num_profiles // 2]
        return profile, plain_s


def set_speeds(of):
    """Sets the emulator's speeds, again if the first profile was off; returns them and the profile at these speeds."""
    emulator, speeds = library("cpu"), {}
    profile, plain_s = of.profile()
    for _ in range(MOST_SETTINGS):
        wanted = speeds_for(profile, plain_s / of.fastest_s)
        if all(math.isclose(speeds.get(part, 0), each, rel_tol=SHARE_ERROR) for part, each in wanted.items()):
            break
        speeds = wanted
        for part, bytes_per_s in speeds.items():
            emulator.set_bandwidth(part, bytes_per_s)
        profile, plain_s = of.profile()
    return speeds, profile, plain_s


def slowed(schedule, factor):
    """Returns the schedule with the programs' times multiplied by `factor`."""
    tasks = (
        dataclasses.replace(task, duration_s=task.duration_s * factor) if task.lane is Lane.GPU else task
        for task in schedule.tasks
    )
    return dataclasses.replace(schedule, tasks=tuple(tasks))


def round_of(schedule, work_s, step_s, slowness, stolen):
    """Returns one round of a policy: its median step, prediction and bounds, with programs slower by `slowness`.

    `stolen` is the processor time in seconds that was stolen from this machine meanwhile.
    """
    slow = slowed(schedule, slowness)
    return {
        "stolen_s": stolen,
        "slowness": slowness,
        "measured_s": statistics.median(step_s),
        "predicted_s": machine.steady_step_s(slow),
        "own_bound_s": own_bound_s(slow),
        "bound_s": max(seconds * slowness if name == "compute" else seconds for name, seconds in work_s.items()),
    }


def row_of(row, rounds):
    """Returns the medians over a policy's quieter rounds; these are all rounds if no time was stolen."""
    stolen_s = statistics.median(one["stolen_s"] for one in rounds)
    quiet = [one for one in rounds if one["stolen_s"] <= stolen_s]
    medians = {key: statistics.median(one[key] for one in quiet) for key in quiet[0]}
    ratios = {
        f"measured_over_{name}": statistics.median(one["measured_s"] / one[f"{name}_s"] for one in quiet)
        for name in ("predicted", "own_bound", "bound")
    }
    peak = {"peak_device_bytes": row.peak_device_bytes, "losses": list(row.losses)}
    return {"policy": row.policy, **medians, **ratios, **peak, "rounds": rounds}


def trained(num_steps, num_rounds):
    """Trains with every policy, in turn."""
    of = Model()
    speeds, profile, plain_s = set_speeds(of)
    steps, marks = {}, []

    def mark(*_):
        """Records the machine's speed and the time stolen since the previous mark."""
        marks.append((of.plain_s(), stolen_s()))

    def make_step(policy):
        options = {"policy": policy, "profile": profile, "record_steps": num_steps}
        steps[policy] = jaxferry.train_step(of.loss_fn, jaxferry.adamw(1e-4), **options)
        return steps[policy]

    compared = compare_policies(
        POLICIES,
        profile,
        make_step,
        lambda step: step.init(of.params),
        of.batch,
        num_steps=num_steps,
        num_rounds=num_rounds,
        report=mark,
    )
    mark()
    losses = {row.losses for row in compared.rows if row.policy in MOVING_DATA}
    assert len(losses) == 1, "policies that only move data differ in their losses"
    marks = marks[len(POLICIES) :]  # the first round is not counted
    rows, shown = [], []
    for place, row in enumerate(compared.rows):
        schedule, timed, rounds = steps[row.policy].prepare(of.batch).schedule, num_steps - 1, []
        for number in range(num_rounds):
            turn = number * len(POLICIES) + place
            (before_s, stolen_before_s), (after_s, stolen_after_s) = marks[turn : turn + 2]
            of_round = row.step_s[number * timed : (number + 1) * timed]
            slowness, stolen = statistics.median(before_s + after_s) / plain_s, stolen_after_s - stolen_before_s
            rounds.append(round_of(schedule, compared.work_s, of_round, slowness, stolen))
        rows.append(row_of(row, rounds))
        # The figure shows the last round, with predictions scaled to the machine's speed then.
        of_last = machine.run(repeat(slowed(schedule, rounds[-1]["slowness"]), num_steps))
        shown.append(dataclasses.replace(row, predicted=steps_in_the_middle(of_last)))
    return dataclasses.replace(compared, rows=tuple(shown)), rows, profile, speeds


def recording_share(rows, profile):
    """Returns the share of a step spent on reading the clock for every task."""
    start_s = time.perf_counter()
    for _ in range(100_000):
        time.perf_counter()
    reading_s = (time.perf_counter() - start_s) / 100_000
    num_tasks = 5 * len(profile.layers)
    return 2 * num_tasks * reading_s / min(row["measured_s"] for row in rows)


def print_rows(rows, title, *ratios):
    """Prints seconds and ratios, one line per policy."""
    table = Table("policy", "measured [s]", "predicted [s]", *(f"/ {name}" for name in ratios), title=title)
    for row in rows:
        numbers = [row["measured_s"], row["predicted_s"], *(row[f"measured_over_{name}"] for name in ratios)]
        table.add_row(row["policy"], *(f"{number:.3f}" for number in numbers))
    Console().print(table)


def report_trained(num_steps, num_rounds):
    """Trains, prints the results, and returns those to write."""
    compared, rows, profile, speeds = trained(num_steps, num_rounds)
    print_rows(rows, "trained", "predicted", "own_bound", "bound")
    print(", ".join(f"{name} {seconds:.3f} s" for name, seconds in compared.work_s.items()))
    share = recording_share(rows, profile)
    print(f"recording takes {share:.2e} of a step")
    plot_timelines(compared, measure.RESULTS / "overlap.png")
    return {
        "model": {"name": f"GPT-2 {CONFIG}", "batch": BATCH, "sequence": LENGTH},
        "expected": {"measured_over_predicted": [0.9, 1.1], "measured_over_bound": 1.15, "dry": 0.03},
        "share": SHARE,
        "emulated_bytes_per_s": speeds,
        "work_s": compared.work_s,
        "recording_share": share,
        "rows": rows,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("dry", "trained"), help="measure only this part again")
    parser.add_argument("--steps", type=int, default=4, help="consecutive steps per policy; the first is not timed")
    parser.add_argument("--rounds", type=int, default=6)
    arguments = parser.parse_args()
    measure.keep_freed_memory()
    path = measure.RESULTS / "overlap.json"
    found = json.loads(path.read_text()) if arguments.only and path.exists() else {}
    if arguments.only != "trained":
        found["dry"] = {}
        for num_layers, step_s in ((16, 1.0), (96, 2.0)):
            found["dry"][num_layers] = dry_rows(num_layers, step_s)
            print_rows(found["dry"][num_layers], f"dry: {num_layers} layers", "predicted", "slept")
    if arguments.only != "dry":
        found |= report_trained(arguments.steps, arguments.rounds)
    measure.write("overlap", {**found, "benchmark": "overlap", "machine": measure.machine()})


if __name__ == "__main__":
    main()
