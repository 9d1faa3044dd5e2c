"""Measures what updates on the GPU gain: simulated for estimated machines, and really trained on this one.

GPT-like models train on estimated machines, each within its device memory, in three ways: updates on the host alone,
also on the device where the state stays (`resident`), and also streamed through the GPU (`anywhere`). The ratios are
the host-only step over the others. With the batch of `simulated` the GPU takes longest; `host_bound` has one sample, so
that updates take longest on all machines.

Nodes of 8 A100 or H100 train data-parallel, with so many samples on each device, and with the state of the optimizer
split over the devices (ZeRO): each loads, updates and sends an eighth of every layer over its own link, and gathers
layers and scatters gradients over NVLink. The host's bandwidth, twice that of one socket, is shared by all. Updates do
not stream there (`docs/how-to/devices.md`), so `anywhere` is `resident`.

The sweep of `host_bound` gives the 7B model on an H200 budgets from the smallest to that of plain training. Step time
must never increase with the budget.

With everything on the device, a step is plain training. So a GPT-2 trains here (on a CPU) under the plan of `auto`
without a budget for an H200 with a slow host, in turns with one jitted Optax step of the same model, both with a C
library that keeps freed memory. Expected: at most 1.03 times its time.

    python benchmarks/update_placement.py [--batch 8] [--length 1024] [--only simulated|host_bound|trained]
        [--models 7B 13B]

With `--models`, the file keeps the rows of the others.
All activations are recomputed in the backward. Expected of the simulation by arithmetic (28 bytes of host memory a
parameter on the host, 12 up and 14 down a streamed one): nothing where compute takes longer than the updates; where the
host takes longest, 1.5 times as fast by streaming a third of the layers, twice with half of the state on the device.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import benchmark_paths  # noqa: F401 - makes the others importable
import jax
import jax.numpy as jnp
import measure
import optax
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track
from rich.table import Table

import jaxferry
from examples.gpt2 import model
from jaxferry.costs import MACHINES, estimate_profile, partition_costs
from jaxferry.engine import derivatives_of, with_program_facts
from jaxferry.errors import BudgetError
from jaxferry.modes import Mode, UpdatePlace
from jaxferry.partition import partition
from jaxferry.planner import Auto, AutoSearch, Column, Request, any_plan_lower_bound_s, make_plan
from jaxferry.step import Plan, needed_bytes, predict

MODELS = {
    "1.5B": model.Config(num_layers=48, num_heads=25, channels=1600),
    "7B": model.Config(num_layers=32, num_heads=32, channels=4096),
    "13B": model.Config(num_layers=40, num_heads=40, channels=5120),
    "70B": model.Config(num_layers=80, num_heads=64, channels=8192),
}
SYSTEMS = ("rtx4090-pcie4", "a100-pcie4", "h100-pcie5")
PLACES = {"host": (), "resident": (UpdatePlace.RESIDENT,), "anywhere": tuple(UpdatePlace)}
SWEPT = ("7B", "h200-pcie5")
POINTS = 24
NUM_DEVICES, NUM_SOCKETS = 8, 2
# One direction of NVLink (NVIDIA's A100 and H100 data sheets state 600 and 900 GB/s for both).
NVLINK_BYTES_PER_S = {"a100-pcie4": 300e9, "h100-pcie5": 450e9}
TRAINED_STEPS = 12
SLOW_BYTES_PER_S = 1e9


def partition_of(config, batch, length, num_devices=1):
    shapes = jax.eval_shape(model.make_init(config), jax.random.key(0))
    tokens = {"tokens": jax.ShapeDtypeStruct((num_devices * batch, length + 1), jnp.int32)}
    loss_fn = model.make_loss(config)
    return partition(loss_fn, shapes, (tokens,), compute_dtype=jnp.bfloat16, num_devices=num_devices)


def profile_of(parts, costs, derivatives, machine):
    estimated = estimate_profile(costs, machine, num_devices=parts.graph.num_devices)
    return with_program_facts(estimated, parts, derivatives)


def machine_of(system, num_devices):
    """The machine of a device, or of each of a node's; None if there is no such node."""
    machine = MACHINES[system]
    if num_devices == 1:
        return machine
    if system not in NVLINK_BYTES_PER_S:
        return None
    return dataclasses.replace(
        machine,
        host_bytes_per_s=NUM_SOCKETS * machine.host_bytes_per_s,
        interconnect_bytes_per_s=NVLINK_BYTES_PER_S[system],
    )


def compare(profile, budget_bytes):
    """Steady steps of `auto` within a budget for each of the places that updates may have, and the bound on all."""
    found = {"budget_bytes": budget_bytes, "bound_s": any_plan_lower_bound_s(profile, budget_bytes)}
    for name, places in PLACES.items():
        try:
            plan = predict(profile, AutoSearch(profile, Request(), places).plan(budget_bytes))
        except BudgetError as error:
            return found | {"smallest_budget_bytes": error.smallest_bytes}
        found[name] = {
            "steady_step_s": plan.predicted.steady_step_s,
            "peak_device_bytes": plan.predicted.peak_device_bytes,
            "binding": plan.details["binding"],
            "layers_updated_on_device": sum(plan.updates_on_device),
            "layers_streamed": sum(plan.updates_streamed),
            "num_layers": len(plan.layers),
        }
    host_s, resident_s, anywhere_s = (found[name]["steady_step_s"] for name in PLACES)
    return found | {"ratio_resident": host_s / resident_s, "ratio": host_s / anywhere_s}


def sweep(profile):
    """Steady step and memory for budgets from the smallest to that of plain training, on a logarithmic scale."""
    search = AutoSearch(profile, Request())
    stays = search.columns.uniform(Column(Mode.RESIDENT, update=UpdatePlace.RESIDENT))
    plain = Plan(Auto.name, 1.0, search.columns.layers(stays))
    smallest, most = search.smallest_bytes, needed_bytes(profile, plain)
    points = []
    for number in range(POINTS + 1):
        budget = round(smallest * (most / smallest) ** (number / POINTS))
        plan = predict(profile, search.plan(budget))
        points.append(
            {
                "budget_bytes": budget,
                "steady_step_s": plan.predicted.steady_step_s,
                "layers_updated_on_device": sum(plan.updates_on_device),
                "layers_streamed": sum(plan.updates_streamed),
                "num_layers": len(plan.layers),
            }
        )
    times = [point["steady_step_s"] for point in points]
    is_monotone = all(b <= a * (1 + 1e-9) for a, b in itertools.pairwise(times))
    return {"points": points, "plain_s": predict(profile, plain).predicted.steady_step_s, "is_monotone": is_monotone}


def draw(swept, path):
    figure = Figure(figsize=(7, 4))
    axes = figure.add_subplot()
    points = swept["points"]
    axes.axhline(swept["plain_s"], color="0.6", linewidth=1, label="plain training")
    axes.step(
        [point["budget_bytes"] / 2**30 for point in points], [point["steady_step_s"] for point in points],
        where="post", marker="o", markersize=4, label="auto",
    )  # fmt: skip
    # With the least memory, layers may be read in host memory, many times slower than with any more.
    least, second = points[:2]
    most_s = 1.3 * second["steady_step_s"]
    axes.set_ylim(0, most_s)
    if least["steady_step_s"] > most_s:
        text = f"{least['budget_bytes'] / 2**30:.1f} GiB: {least['steady_step_s']:.1f} s"
        axes.annotate(text, (1.05 * second["budget_bytes"] / 2**30, 1.2 * second["steady_step_s"]))
    axes.set_xscale("log")
    axes.set_xlabel("memory budget / GiB")
    axes.set_ylabel("steady step / s")
    axes.set_title(f"{SWEPT[0]} on {SWEPT[1]}, one sample a step (estimated)")
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def train():
    """The seconds of steps of plain JAX and of a plan that updates everything on the device, in turns."""
    measure.keep_freed_memory()
    config = dataclasses.replace(model.SIZES["tiny"], num_layers=6, channels=256, vocab_size=4096)
    loss_fn, params = model.make_loss(config), jax.jit(model.make_init(config))(jax.random.key(0))
    batch = {"tokens": jax.random.randint(jax.random.key(1), (8, 129), 0, config.vocab_size)}
    optimizer = optax.adamw(1e-3)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def plain_step(params, state):
        loss, gradients = jax.value_and_grad(loss_fn)(params, batch)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    parts = partition(loss_fn, params, (batch,))
    slow_host = dataclasses.replace(MACHINES[SWEPT[1]], host_bytes_per_s=SLOW_BYTES_PER_S)
    plan = make_plan(profile_of(parts, partition_costs(parts), derivatives_of(parts, "none"), slow_host), "auto")
    assert all(plan.updates_on_device)
    step = jaxferry.train_step(loss_fn, optimizer, plan=plan)
    ours, plain, losses = [step.init(params)], [jax.tree.map(jnp.copy, params)], {}
    plain.append(optimizer.init(plain[0]))

    def run_ours():
        ours[0], metrics = step(ours[0], batch)
        losses["ours"] = float(metrics["loss"])
        ours[0].block_until_ready()

    def run_plain():
        plain[0], plain[1], loss = plain_step(*plain)
        losses["plain"] = float(loss)
        jax.block_until_ready(plain)

    seconds = measure.interleaved({"ours": run_ours, "plain": run_plain}, TRAINED_STEPS)
    ratio = measure.median_ratio(seconds["ours"], seconds["plain"])
    return {"seconds": seconds, "ratio": ratio, "losses": losses, "expected_ratio": 1.03}


def simulate(models, batch, length):
    """Rows of the models on one device and on nodes."""
    rows = []
    for name, num_devices in track([*itertools.product(models, (1, NUM_DEVICES))], console=Console(stderr=True)):
        parts = partition_of(MODELS[name], batch, length, num_devices)
        costs, derivatives = partition_costs(parts, "full"), derivatives_of(parts, "full")
        for system in SYSTEMS:
            machine, about = machine_of(system, num_devices), {"model": name, "machine": system}
            if machine is not None:
                profile = profile_of(parts, costs, derivatives, machine)
                rows.append({**about, "num_devices": num_devices, **compare(profile, int(machine.memory_bytes))})
    return {"batch": batch, "length": length, "estimated": True, "rows": rows}


def swept(batch, length):
    """The sweep."""
    parts = partition_of(MODELS[SWEPT[0]], batch, length)
    return sweep(profile_of(parts, partition_costs(parts, "full"), derivatives_of(parts, "full"), MACHINES[SWEPT[1]]))


def merged(before, after):
    """All rows in the order of the models, each the later one of its model and machine."""
    rows = {(row["model"], row["machine"], row["num_devices"]): row for row in (*before, *after)}
    return [rows[key] for key in itertools.product(MODELS, SYSTEMS, (1, NUM_DEVICES)) if key in rows]


def print_rows(rows):
    heads = ("model", "machine", "devices", "host only", "resident", "anywhere", "ratio", "bound", "stays", "streams")
    table = Table(*heads, title="steady step")
    for row in rows:
        about = (row["model"], row["machine"], str(row["num_devices"]))
        if "ratio" not in row:
            table.add_row(*about, "does not fit", *["-"] * 6)
            continue
        anywhere = row["anywhere"]
        times = [f"{row[name]['steady_step_s']:.3f} s" for name in ("host", "resident", "anywhere")]
        counts = [str(anywhere[f"layers_{place}"]) for place in ("updated_on_device", "streamed")]
        table.add_row(*about, *times, f"{row['ratio']:.2f}", f"{row['bound_s']:.3f} s", *counts)
    Console().print(table)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--models", nargs="*", choices=tuple(MODELS), default=tuple(MODELS))
    parser.add_argument("--only", choices=("simulated", "host_bound", "trained"))
    arguments = parser.parse_args()
    path = measure.RESULTS / "update_placement.json"
    found = {}
    if arguments.only in (None, "simulated"):
        found["simulated"] = simulate(arguments.models, arguments.batch, arguments.length)
        print_rows(found["simulated"]["rows"])
    if arguments.only in (None, "host_bound"):
        found["host_bound"] = simulate(arguments.models, 1, arguments.length)
        found["host_bound"]["sweep"] = swept(1, arguments.length)
        print_rows(found["host_bound"]["rows"])
        draw(found["host_bound"]["sweep"], path.with_suffix(".png"))
    if arguments.only in (None, "trained"):
        found["trained"] = train()
        print(f"all on the device over one jitted step: {found['trained']['ratio']:.3f}")
    before = json.loads(path.read_text()) if path.exists() else {}
    for part in found.keys() & before.keys() & {"simulated", "host_bound"}:
        found[part] = before[part] | found[part] | {"rows": merged(before[part]["rows"], found[part]["rows"])}
    about = {"benchmark": "update_placement", "machine": measure.machine()}
    measure.write("update_placement", before | about | found)


if __name__ == "__main__":
    main()
