"""Trains a model whose state is larger than the host memory that it may take, with the rest on a disk.

    python benchmarks/disk.py SCRATCH [--layers 60] [--width 4096] [--steps 6] [--shares 1 0.6 0.34] [--deferred 0.25]

The model of `host_bytes.py`, AdamW, in bfloat16 on a CPU, once in host memory and once for each share of the host
memory that it takes there (14.1 bytes a parameter), each in a process of its own; with the least memory also with some
updates deferred, beside the next forward. Losses must be equal to the bit.
Measured: the most memory that is resident during steps, beyond what was resident before the state was made; the time
of a step; and that time over the busiest lane's, from the recorder. Expected: the share of 14.1 bytes and XLA's own
0.2 GB; a step at most 1.1 times as long as the busiest lane.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import benchmark_paths  # noqa: F401 - makes the others importable
import host_bytes
import jax
import jax.numpy as jnp
import measure
import numpy as np
from rich.console import Console
from rich.table import Table

import jaxferry
from jaxferry.step import Lane

BYTES_A_PARAMETER = 14.125


def run(options):
    """What this process's training takes, with this share of host memory."""
    layers, width, num = options.layers, options.width, options.layers * options.width**2
    plan, init = host_bytes.chain_of(layers, width)
    plan = dataclasses.replace(plan, deferred_updates=int(options.deferred * layers))
    limit = int(options.run * BYTES_A_PARAMETER * num)
    disk = {} if options.run >= 1 else {"scratch": options.scratch, "host_memory": limit}
    optimizer = jaxferry.adamw(1e-4)
    step = jaxferry.train_step(
        host_bytes.loss_fn, optimizer, plan=plan, compute_dtype=jnp.bfloat16, record_steps=options.steps, **disk
    )
    batch = jnp.ones((host_bytes.BATCH, width), jnp.bfloat16)
    before = measure.status_bytes("VmRSS")
    state = step.init_from(init, jax.random.key(0))
    made, losses, times = measure.status_bytes("VmHWM"), [], []
    for number in range(options.steps + 1):
        if number == 1:
            state.block_until_ready()
            measure.reset_peak()
            times.append(time.perf_counter())
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    state.block_until_ready()
    times.append(time.perf_counter())
    assert np.isfinite(losses).all() and len(set(losses)) == len(losses)
    recorded, busy = step.recorded(), dict.fromkeys(Lane, 0.0)
    for task, start, end in zip(recorded.schedule.tasks, recorded.starts_s, recorded.ends_s, strict=True):
        busy[task.lane] += (end - start) / recorded.schedule.steps
    step_s = (times[1] - times[0]) / options.steps
    model = step.compiler.model
    return {
        "losses": losses,
        "step_s": step_s,
        "lanes_s": {lane.value: seconds for lane, seconds in busy.items()},
        "over_busiest_lane": step_s / max(busy.values()),
        "bytes_in_steps": (measure.status_bytes("VmHWM") - before) / num,
        "bytes_in_init": (made - before) / num,
        "counted_bytes": sum(model.host_bytes_of(step.prepare(batch)).values()) / num,
        "layers_on_disk": len(model.disk.groups(state.host.layers)),
        "gradient_buffers": step.prepare(batch).plan.gradient_buffers,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("scratch", help="a folder on the disk")
    parser.add_argument("--layers", type=int, default=60)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--shares", type=float, nargs="+", default=[1.0, 0.6, 0.34])
    parser.add_argument("--deferred", type=float, default=0.25, help="the share of updates to defer in the last run")
    parser.add_argument("--name", default="disk", help="name of the file under results/")
    parser.add_argument("--run", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        print(json.dumps(run(options)))
        return
    sizes = ["--layers", str(options.layers), "--width", str(options.width), "--steps", str(options.steps)]
    rows, table = (
        [],
        Table("share", "deferred", "layers on disk", "counted", "in steps", "in init", "s a step", "over busiest lane"),
    )
    for share, deferred in [*((share, 0.0) for share in options.shares), (options.shares[-1], options.deferred)]:
        own = ["--run", str(share), "--deferred", str(deferred)]
        command = [sys.executable, __file__, options.scratch, *sizes, *own]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        found = json.loads(done.stdout.splitlines()[-1])
        rows.append({"share": share, "deferred": deferred, **found})
        counts = (f"{found[key]:.2f}" for key in ("counted_bytes", "bytes_in_steps", "bytes_in_init"))
        speed = f"{found['step_s']:.2f}", f"{found['over_busiest_lane']:.2f}"
        table.add_row(f"{share:.2f}", f"{deferred:.2f}", str(found["layers_on_disk"]), *counts, *speed)
    assert all(row["losses"] == rows[0]["losses"] for row in rows), "the losses differ"
    Console().print(table)
    num = options.layers * options.width**2
    measure.write(
        options.name, {"machine": measure.machine(), "num_parameters": num, "steps": options.steps, "rows": rows}
    )


if __name__ == "__main__":
    main()
