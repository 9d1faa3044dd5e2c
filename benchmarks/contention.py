"""Measures how fast loads, offloads and updates on the host are beside each other ("Breaking the Memory Wall", 5(c)).

    python benchmarks/contention.py [--rounds 5] [--threads 1] [-o OUTPUT.json]

A layer of 16M parameters is updated by AdamW again and again: by the fused update of `jaxferry.adamw`, which passes
over memory once, or by Optax's compiled by XLA. Beside it, 64 MiB are copied between pinned host memory and the device,
in either direction (`jaxferry/training/contention.py`). Speeds are relative to those of each alone; medians
over rounds that take turns. `benchmarks/gpu/check.sh` runs it on a GPU.

On a GPU, copies are the link's. On a CPU without one, a core makes each copy: updates get `--threads` cores, so that
one is left for it.

Expected on a GPU: copies keep 70 to 90 % beside updates, which keep 1 minus the link's share of the bandwidth of host
memory. In the paper, copies fall to 45 % beside the scaling of gradients, and less beside the optimizer's step; our
update scales in its one pass.

Found on 2 CPU cores: beside the fused update on one core copies lose nothing, and it loses 9 %: neither saturates that
memory. XLA's update runs on both cores, one of which copies: it keeps 60 %, copies 76 to 86 %.
"""

import argparse
import json
import os
import pathlib
import statistics

import jax
import jax.numpy as jnp
import measure
import numpy as np
import optax

import jaxferry
from jaxferry.costs import DOWN, HOST, SHARING, UP, Contention
from jaxferry.native import library
from jaxferry.step import Arrival
from jaxferry.training import HostUpdate, in_turn, speeds_in_pairs, transfers
from jaxferry.transport import make_placement

WIDTH = 4096
OPTIMIZERS = {"fused AdamW": jaxferry.adamw, "Optax's AdamW": optax.adamw}
LEAST_S = 0.5


def loss_fn(params, batch):
    """One layer."""
    return jnp.mean((batch @ params["layer"]) ** 2)


def host_update(optimizer):
    """The host update of the layer."""
    step = jaxferry.train_step(loss_fn, optimizer)
    step.declare({"layer": jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)})
    step.prepare(np.zeros((8, WIDTH), np.float32))
    layers, held = step.compiler.layers, step.compiler.model.optimizer
    [unit] = held.units_of(layers)
    return HostUpdate(held, make_placement(), unit, layers, [Arrival.OWN])


def rounds(num):
    """For each optimizer, the speeds of all pairs of lanes in each round."""
    work = {}
    for name, make in OPTIMIZERS.items():
        work[name] = {HOST: in_turn(host_update(make(1e-3))), **transfers(make_placement())}
    found = {name: [] for name in work}
    for _ in range(num):
        for name, lanes in work.items():
            found[name].append(speeds_in_pairs(lanes, LEAST_S))
    for lanes in work.values():
        lanes[UP].wait()
        lanes[DOWN].wait()
    return found


def medians(speeds):
    """The median of each pair."""
    return {pair: statistics.median(each[pair] for each in speeds) for pair in speeds[0]}


def main():
    """Measures, prints, and writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=None, help="of the updates; default: all, on a CPU all but one")
    parser.add_argument("-o", "--output", type=pathlib.Path, default=measure.RESULTS / "contention.json")
    options = parser.parse_args()
    threads = options.threads
    if threads is None and jax.default_backend() == "cpu":
        threads = max(1, len(os.sched_getaffinity(0)) - 1)
    threads = library("cpu").set_host_threads(threads or 0)
    found = {name: medians(speeds) for name, speeds in rounds(options.rounds).items()}
    for name, speeds in found.items():
        print(f"{name}: " + ", ".join(f"{lane} beside {other} {speed:.2f}" for (lane, other), speed in speeds.items()))
    rows = [
        {
            "update": name,
            "speeds": {lane: {other: speeds[lane, other] for other in SHARING if other != lane} for lane in SHARING},
            "contention": Contention.between(speeds).to_json(),
        }
        for name, speeds in found.items()
    ]
    result = {**measure.machine(), "host_threads": threads, "rounds": options.rounds, "rows": rows}
    options.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
