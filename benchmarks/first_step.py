"""Times the first step of a model: tracing, partition, planning and compilation, beside plain JAX's in one run.

    python benchmarks/first_step.py                   # kinds of tests/models/registry.py, and two deep ones
    python benchmarks/first_step.py --models "BERT"   # of all models, those whose name contains a text

Each figure is of a new process that has imported everything and has no cache of programs. Plain JAX is one jitted step
of Optax's AdamW and its `init`. JaxFerry's is `train_step`, `init`, `prepare` and the first step, with the default
options. Processes alternate, so that other load affects all alike. CPU seconds count all threads. Expected: at most 1.5
times plain JAX's, and less than it where equal layers share a program.
"""

import argparse
import collections
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

sys.path.append(str(Path(__file__).parent))
import benchmark_paths  # noqa: F401
import jax
import measure
import optax
from rich.progress import track

import jaxferry
from models import compare, gpt, nnx_net
from models.registry import MODELS, Model

DEEP = (
    Model("GPT-2, 12 blocks", "linen", lambda: gpt(depth=12, width=64)),
    Model("residual MLPs, 24 blocks", "NNX", lambda: nnx_net(depth=24)),
)
ALL = (*MODELS, *DEEP)
KINDS = (
    "GPT-2, tied head", "residual MLPs", "GPT-2 with dropout", "ResNet with BatchNorm", "U-Net", "encoder-decoder",
    "ALBERT: one block four times", "mixture of experts, top 2", "LSTM and GRU", "blocks under nn.scan",
    "LoRA, base as an argument", "BERT", "Llama", "BART", "ViT", "Mamba 2", *(model.name for model in DEEP),
)  # fmt: skip
SIDES = {"plain": False, "jaxferry": True}
STAGES = {"jaxpr_trace_duration": "trace_s", "backend_compile_duration": "compile_s"}


def first_step(task, is_ours):
    """Runs the first step of a task; returns the loss, and for JaxFerry the seconds of each call."""
    optimizer = optax.adamw(compare.LEARNING_RATE)
    if not is_ours:
        compare.quickly = jax.jit  # the tests' reference is compiled without optimisation
        return next(compare.plain_losses(task, optimizer)), {}
    times = [time.perf_counter()]
    step = jaxferry.train_step(task.loss_fn, optimizer)
    state = step.init(task.params)
    times.append(time.perf_counter())
    step.prepare(task.batch)
    times.append(time.perf_counter())
    _, metrics = step(state, task.batch)
    loss = float(metrics["loss"])
    times.append(time.perf_counter())
    names = ("init_s", "prepare_s", "step_s")
    return loss, {name: after - before for name, before, after in zip(names, times, times[1:], strict=False)}


def run_child(number, side):
    """Measures one model in this process and prints a line of JSON."""
    durations = collections.defaultdict(list)
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, seconds, **_: durations[name.rpartition("/")[2]].append(seconds)
    )
    task = ALL[number].make()
    jax.block_until_ready(jax.numpy.zeros(1) + 1)
    import jaxferry.training.entry  # noqa: F401  what `jaxferry.train_step` imports

    durations.clear()
    cpu_s, start_s = time.process_time(), time.perf_counter()
    loss, calls = first_step(task, SIDES[side])
    row = {"loss": loss, "wall_s": time.perf_counter() - start_s, "cpu_s": time.process_time() - cpu_s, **calls}
    row |= {short: sum(durations[name]) for name, short in STAGES.items()}
    print(json.dumps(row | {"num_programs": len(durations["backend_compile_duration"])}))


def measured(number, side):
    """Returns what a new process measures."""
    command = [sys.executable, __file__, "--child", str(number), side]
    environment = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    found = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(found.stdout.splitlines()[-1])


def row_of(number, repetitions):
    """Returns a model's row: the medians of each side, and their ratios to plain JAX's."""
    runs = {side: [] for side in SIDES}
    for _ in range(repetitions):
        for side in SIDES:
            runs[side].append(measured(number, side))
    medians = {
        side: {name: statistics.median(run[name] for run in found) for name in found[0]} for side, found in runs.items()
    }
    row = {"name": ALL[number].name, "style": ALL[number].style, "origin": ALL[number].origin, **medians}
    for kind in ("wall", "cpu"):
        pairs = zip(runs["jaxferry"], runs["plain"], strict=True)
        row[f"{kind}_ratio"] = statistics.median(ours[f"{kind}_s"] / plain[f"{kind}_s"] for ours, plain in pairs)
    return row


def main():
    """Measures, prints a table and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--child", nargs=2)
    options = parser.parse_args()
    if options.child:
        run_child(int(options.child[0]), options.child[1])
        return
    chosen = options.models is None
    numbers = [n for n, each in enumerate(ALL) if (each.name in KINDS if chosen else options.models in each.name)]
    rows = [row_of(number, options.repetitions) for number in track(numbers, "models")]
    print(f"{'model':40}{'plain s':>9}{'ratio':>8}{'of CPU':>8}")
    for row in rows:
        print(f"{row['name'] + ', ' + row['style']:40}", end="")
        print(f"{row['plain']['wall_s']:9.2f}{row['wall_ratio']:8.2f}{row['cpu_ratio']:8.2f}")
    median = {kind: statistics.median(row[kind] for row in rows) for kind in ("wall_ratio", "cpu_ratio")}
    print(f"{'median':49}{median['wall_ratio']:8.2f}{median['cpu_ratio']:8.2f}")
    if chosen:
        measure.write("first_step", {"machine": measure.machine(), "median": median, "models": rows})


if __name__ == "__main__":
    main()
