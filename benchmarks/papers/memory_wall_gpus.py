"""Reproduces Table 2 of Breaking the Memory Wall, 1, 2 and 4 GPUs, by simulation.

    python benchmarks/papers/memory_wall_gpus.py

Writes `memory_wall_gpus.json`. Llama 2 13B trains in bfloat16 under `zero-offload`, one sequence of 2,048 tokens on
each H100, with the paper's machine: 55 GB/s to pinned memory, 140 GB/s between GPUs, and a host that updates 4.5
billion parameters a second alone. Each device loads its share of every layer over its own link and gathers the others'
(`estimate_profile` with `num_devices`), and the optimizer's state is split over the devices, as in ZeRO-3.

- F and BN: the forward and backward programs of a micro-batch alone.
- BB: from the first backward of the last micro-batch until its 16-bit gradients are on the host.
- U: from there until all updates have ended and the parameters are on the devices again.
- T: the products' operations of two micro-batches by the iteration's time, F + BN + F + BB + U, for each GPU.
"""

import dataclasses

import jax
import jax.numpy as jnp
from figures import Row, arguments, write

from examples.llama.workload import make
from jaxferry.costs import (
    UPDATE_BYTES_PER_PARAMETER,
    LayerCosts,
    Profile,
    estimate_profile,
    find_machine,
    partition_costs,
)
from jaxferry.partition import partition
from jaxferry.planner import make_plan
from jaxferry.step import Kind, machine, schedule_step

SIZE, LENGTH = "2-13b", 2048
DEVICES = (1, 2, 4)
MACHINE = dataclasses.replace(
    find_machine("h100-pcie5"),
    link_bytes_per_s=55e9,
    interconnect_bytes_per_s=140e9,
    host_bytes_per_s=4.5e9 * UPDATE_BYTES_PER_PARAMETER,
)
PAPER = {
    "F": {1: 0.31, 2: 0.37, 4: 0.39},
    "BN": {1: 1.03, 2: 0.82, 4: 0.7},
    "BB": {1: 11.2, 2: 6.13, 4: 3.8},
    "U": {1: 4.6, 2: 2.4, 4: 2.4},
    "T": {1: 18.9, 2: 32.6, 4: 23.4},
}
WHAT = {
    "F": ("forward", "half of the peak assumed, a sixth measured there; loads and gathers are part of U here"),
    "BN": ("backward before the last", "the programs alone; DeepSpeed 0.13 moves sums of gradients up and down"),
    "BB": ("last backward", "gradients leave while it runs, to pinned memory; DeepSpeed 0.13 blocks and converts"),
    "U": ("update and upload", "uploads overlap updates; the host updates as many parameters for any number of GPUs"),
    "T": ("TFLOPS", "the update is most of our iteration, and the last backward of DeepSpeed's"),
}


def costs_of(num_devices: int) -> tuple[LayerCosts, ...]:
    """The costs of the model with one sequence for each device."""
    loss_fn, init_fn, batch_of = make(SIZE, batch_size=num_devices, length=LENGTH)
    shapes, batch = jax.eval_shape(init_fn, jax.random.key(0)), jax.eval_shape(lambda: batch_of(0))
    parts = partition(loss_fn, shapes, (batch,), compute_dtype=jnp.bfloat16, num_devices=num_devices)
    return tuple(partition_costs(parts))


def column_of(num_devices: int) -> dict[str, float]:
    """Seconds of each stage, and the operations a second."""
    costs = costs_of(num_devices)
    found = stages_s(estimate_profile(costs, MACHINE, num_devices=num_devices))
    keys = ("forward_flops", "backward_flops", "inter_forward_flops", "inter_backward_flops")
    flops = 2 * sum(getattr(layer, key) for layer in costs for key in keys) / num_devices
    iteration_s = 2 * found["F"] + found["BN"] + found["BB"] + found["U"]
    return found | {"T": flops / iteration_s / 1e12}


def stages_s(profile: Profile) -> dict[str, float]:
    """Seconds of each stage."""
    plan = make_plan(profile, "zero-offload")
    run = machine.run(schedule_step(profile, plan))
    tasks = list(zip(run.schedule.tasks, run.starts_s, run.ends_s, strict=True))

    def ends_s(*kinds: Kind) -> list[float]:
        return [end for task, _, end in tasks if task.kind in kinds]

    def work_s(*kinds: Kind) -> float:
        return sum(task.duration_s for task, _, _ in tasks if task.kind in kinds)

    begin_s = min(start for task, start, _ in tasks if task.kind is Kind.BACKWARD)
    on_host_s = max(ends_s(Kind.BACKWARD, Kind.OFFLOAD))
    forward_s = work_s(Kind.FORWARD, Kind.INTER_FORWARD)
    return {
        "F": forward_s,
        "BN": work_s(Kind.BACKWARD, Kind.INTER_BACKWARD),
        "BB": on_host_s - begin_s,
        # The last part of the steady step: its uploads follow the updates, and its forwards follow all of them.
        "U": plan.predicted.steady_step_s - forward_s - (on_host_s - begin_s),
    }


def rows_of(found: dict[int, dict[str, float]]) -> list[Row]:
    """Returns the rows of the README's table."""

    def column(name: str, values: dict[int, float]) -> str:
        return ", ".join(f"{values[n]:.{1 if name == 'T' else 2}f}" for n in DEVICES) + ("" if name == "T" else " s")

    return [
        Row(
            "Breaking the Memory Wall, Table 2",
            f"{name}, {what}; 1, 2, 4 GPUs, simulated",
            column(name, PAPER[name]),
            column(name, {n: found[n][name] for n in DEVICES}),
            why,
        )
        for name, (what, why) in WHAT.items()
    ]


def main() -> None:
    output = arguments(__doc__).output
    found = {n: column_of(n) for n in DEVICES}
    facts = {"machine": MACHINE.to_json(), "model": f"Llama {SIZE}", "length": LENGTH}
    write(output, "memory_wall_gpus", {**facts, "table_2": found}, rows_of(found))


if __name__ == "__main__":
    main()
