"""Weak and strong scaling over devices and processes: simulated for GPUs, measured for processes of one CPU core each.

    python benchmarks/process_scaling.py [--only simulated]

**Simulated**: Transformer-XL of 6.7B parameters on machines of eight GPUs with a built-in machine's figures, by the
roofline model and the machine model, under three policies. Where there are several machines, each is assumed to have a
network of 50 GB/s. No GPU, link or network is here: their bandwidths are the emulated part. On one machine `auto` also
updates on the GPUs; those of several machines update on the hosts alone.

**Measured**: dense layers that really train on this machine, by one process on one core, and by two on a core each,
joined by gloo over loopback. Cores, memory and updates are real; the link is a copy in memory, and the network the
loopback. Each core computes its part of the batch and updates its part of the parameters; both share the memory's
bandwidth, and two exchange all parameters and gradients in each step. How much faster two cores are than one, where
nothing is exchanged, is measured by two trainings at once; efficiencies are relative to these. More processes than
cores would show nothing.

Strong: one global batch. Weak: one batch for each device. Prints tables and writes
`benchmarks/results/process_scaling.json`.
"""

import argparse
import dataclasses
import json
import os
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import benchmark_paths  # noqa: F401
from rich.console import Console
from rich.table import Table

import process_runs

MACHINE, BILLIONS, LENGTH, PER_DEVICE, GLOBAL = "h100-pcie5", 6.7, 384, 8, 64
NETWORK_BYTES_PER_S, DEVICES_OF_A_MACHINE = 5e10, 8
DEVICES = (1, 2, 4, 8, 16, 32)
POLICIES = ("auto", "memferry", "zero-offload")
NUM_LAYERS, WIDTH, ROWS = 8, 1024, 2048
NUM_RUNS, NUM_STEPS = 2, 5


def simulated(batch, num_devices):
    """The seconds of a step by policy, and the host memory bandwidth's share of it."""
    from papers.paper_models import transformer_xl

    from jaxferry.costs import estimate_profile, find_machine
    from jaxferry.planner import make_plan

    machine = dataclasses.replace(find_machine(MACHINE), network_bytes_per_s=NETWORK_BYTES_PER_S)
    num_processes = -(-num_devices // DEVICES_OF_A_MACHINE)
    layers = transformer_xl(BILLIONS, batch, LENGTH).layers()
    profile = estimate_profile(layers, machine, num_devices=num_devices, num_processes=num_processes)
    return {policy: make_plan(profile, policy).predicted.steady_step_s for policy in POLICIES}


class Member(process_runs.Member):
    """One of the processes, on a core of its own."""

    def strong(self):
        """The seconds of steps on its part of the batch."""
        import jax

        return self._seconds(ROWS // jax.process_count())

    def weak(self):
        """The seconds of steps on a batch of its own."""
        return self._seconds(ROWS)

    def apart(self):
        """Likewise, on the second core: a training of its own beside another one."""
        return self._seconds(ROWS)

    def _seconds(self, rows):
        import jax
        import jax.numpy as jnp
        import numpy as np
        import optax

        import jaxferry

        def init_fn(rng):
            keys = jax.random.split(rng, NUM_LAYERS)
            return {f"l{i}": jax.random.normal(keys[i], (WIDTH, WIDTH)) / WIDTH**0.5 for i in range(NUM_LAYERS)}

        def loss_fn(params, x):
            for name in sorted(params):
                x = jnp.tanh(x @ params[name])
            return jnp.mean(x**2)

        step = jaxferry.train_step(loss_fn, optax.adamw(1e-4), mesh=self.mesh)
        state, seconds = step.init_from(init_fn, jax.random.key(0)), []
        x = np.random.default_rng(self.number).normal(size=(rows, WIDTH)).astype(np.float32)
        for _ in range(2 + NUM_STEPS):
            start_s = time.perf_counter()
            state, _ = step(state, x)
            state.block_until_ready()
            seconds.append(time.perf_counter() - start_s)
        return seconds[2:]


def run(scenario, num_processes):
    """The seconds of steps; each is as slow as the slowest process."""
    with tempfile.TemporaryDirectory() as folder:
        ended = process_runs.start(scenario, num_processes, 1, Path(folder), script=__file__, flags="")
    failed = [own for own in ended if isinstance(own, str)]
    assert not failed, failed[0]
    return list(map(max, zip(*ended, strict=True)))


def measured():
    """The median seconds of a step: one process, two trainings of one process each at once, and two processes."""
    found = {"one": [], "two apart": [], "strong": [], "weak": []}
    with ThreadPoolExecutor(2) as threads:
        for _ in range(NUM_RUNS):
            found["one"] += run("weak", 1)
            found["two apart"] += map(max, *threads.map(run, ("weak", "apart"), (1, 1)))
            found["strong"] += run("strong", 2)
            found["weak"] += run("weak", 2)
    return {name: statistics.median(seconds) for name, seconds in found.items()}


def rows_of_simulation():
    """The times and efficiencies by number of devices."""
    rows = []
    for num in DEVICES:
        times = {"strong": simulated(GLOBAL, num), "weak": simulated(PER_DEVICE * num, num)}
        rows.append({"devices": num, "machines": -(-num // DEVICES_OF_A_MACHINE), **times})
    for row in rows:
        for kind, ideal in (("strong", row["devices"]), ("weak", 1)):
            row[f"{kind}_efficiency"] = {name: rows[0][kind][name] / row[kind][name] / ideal for name in POLICIES}
    return rows


def print_simulated(rows):
    heads = [f"{kind}, {name}" for kind in ("strong", "weak") for name in POLICIES]
    table = Table("devices", "machines", *heads, title=f"simulated: {BILLIONS}B on {MACHINE}, seconds and efficiency")
    for row in rows:
        pairs = [(row[kind][name], row[f"{kind}_efficiency"][name]) for kind in ("strong", "weak") for name in POLICIES]
        table.add_row(str(row["devices"]), str(row["machines"]), *(f"{s:.2f} s {share:4.0%}" for s, share in pairs))
    Console().print(table)


def ratios_of(seconds):
    """Speed and efficiencies, of the measured seconds."""
    one, apart = seconds["one"], seconds["two apart"]
    return {
        "two cores over one": 2 * one / apart,
        "strong": one / seconds["strong"],
        "strong efficiency": apart / 2 / seconds["strong"],
        "weak efficiency": apart / seconds["weak"],
    }


def main():
    import measure

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("simulated",), help="keep what was measured")
    path = measure.RESULTS / "process_scaling.json"
    is_simulated = parser.parse_args().only is not None
    rows = rows_of_simulation()
    print_simulated(rows)
    if is_simulated:
        found = json.loads(path.read_text())
    else:
        seconds = measured()
        ratios = ratios_of(seconds)
        print("measured:", ", ".join(f"{name} {own:.2f} s" for name, own in seconds.items()))
        print("measured:", ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items()))
        of_run = {"layers": NUM_LAYERS, "width": WIDTH, "rows": ROWS, "seconds": seconds, "ratios": ratios}
        found = {"machine": measure.machine(), "load_average": os.getloadavg()[0], "measured": of_run}
    measure.write("process_scaling", found | {"simulated": rows})


def member():
    """Runs a process on its core, which is chosen before XLA counts them."""
    cores = sorted(os.sched_getaffinity(0))
    number = 1 if sys.argv[6] == "apart" else int(sys.argv[3])
    os.sched_setaffinity(0, {cores[number % len(cores)]})
    process_runs.main(Member)


if __name__ == "__main__":
    member() if len(sys.argv) == 7 else main()
