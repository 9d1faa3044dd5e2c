"""Measures what updates on the device gain where the host is slow: trained over an emulated link, by an emulated host.

The GPT-2 of `overlap.py` trains here; that file tells what the emulation does and what it cannot show. The speed of the
host's memory is set so that its updates take HOST times the compute time of a step, and those of the links so that a
load of all parameters takes LINK of it. Updates on the device really run, on the core that computes. Three plans train
in turns:

- `host`: the best plan of `auto` without updates on the device, within the budget;
- `anywhere`: the plan of `auto` within the same budget: some groups stream through the device or stay there;
- `unlimited`: the plan of `auto` without a budget: everything stays, which is plain training.

The budget is SPARE times the smallest in which any plan runs. The profile is measured; an update on the device is timed
as one jitted `jaxferry.adamw`, and its state is taken to pass the links at their emulated speeds.

Expected: `anywhere` at least 1.4 times as fast as `host`, and within 1.1 of the proven bound on any plan in that
budget; `unlimited` within 1.1 of the compute time.

    python benchmarks/slow_host.py [--steps 4] [--rounds 4]
"""

import argparse
import dataclasses
import statistics
import time

import overlap  # sets the environment before jax is imported

import jax  # isort: skip
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

import jaxferry
import measure
from jaxferry.compare import works_s
from jaxferry.native.library import library
from jaxferry.plan.any_bound import any_plan_lower_bound_s
from jaxferry.plan.auto import AutoSearch
from jaxferry.plan.base import Request
from jaxferry.planning import make_plan

HOST, LINK, SPARE = 2.0, 0.1, 1.5
STATE_BYTES = 12  # a parameter, in fp32: master and two moments
NUM_UPDATES = 5


def set_speeds(of):
    """Sets the emulator's speeds; returns them and the profile at these speeds."""
    profile, plain_s = of.profile()
    compute_s = works_s(profile)["compute"] * of.fastest_s / plain_s
    sent = sum(profile.layers[group[0]].param_bytes for group in profile.groups)
    # Per parameter, in fp32: read and write master and two moments, read the gradient, write the compute copy.
    speeds = {
        "load": sent / (LINK * compute_s),
        "store": sent / (LINK * compute_s),
        "host": 8 * sent / (HOST * compute_s),
    }
    for part, bytes_per_s in speeds.items():
        library("cpu").set_bandwidth(part, bytes_per_s)
    return speeds, *of.profile()


def device_update_s(num_parameters):
    """Seconds of an AdamW update of so many parameters in the device's memory, in place."""
    optimizer = jaxferry.adamw(1e-4)
    params = {"w": jnp.full(num_parameters, 0.1)}
    state = optimizer.init(params)

    def update(params, state, gradient):
        updates, state = optimizer.update({"w": gradient}, state, params)
        return jax.tree.map(jnp.add, params, updates), state

    jitted = jax.jit(update, donate_argnums=(0, 1))
    seconds, gradient = [], jnp.full(num_parameters, 0.01)
    for _ in range(NUM_UPDATES + 1):
        start_s = time.perf_counter()
        params, state = jax.block_until_ready(jitted(params, state, gradient))
        seconds.append(time.perf_counter() - start_s)
    return statistics.median(seconds[1:])


def with_device_updates(profile, speeds):
    """The profile with the times of updates on the device."""
    sizes = {layer.param_bytes // 4 for layer in profile.layers}
    update_s, layers = {size: device_update_s(size) for size in sizes}, []
    for layer in profile.layers:
        state_bytes = STATE_BYTES * layer.param_bytes // 4
        layers.append(
            dataclasses.replace(
                layer,
                update_gpu_s=update_s[layer.param_bytes // 4],
                state_bytes=state_bytes,
                state_up_s=state_bytes / speeds["load"],
                state_down_s=(state_bytes + layer.param_bytes) / speeds["store"],
            )
        )
    return dataclasses.replace(profile, layers=tuple(layers))


def plans_of(profile, known):
    """The plans by name, and the budget of the first two. `known` is the profile with the times of device updates."""
    budget = int(SPARE * AutoSearch(profile, Request()).pool.smallest_needed_bytes())
    return budget, {
        "host": make_plan(profile, "auto", memory_budget_bytes=budget),
        "anywhere": make_plan(known, "auto", memory_budget_bytes=budget),
        "unlimited": make_plan(known, "auto"),
    }


class Trained:
    """One plan in training."""

    def __init__(self, of, plan):
        self._of = of
        self.step = jaxferry.train_step(of.loss_fn, jaxferry.adamw(1e-4), plan=plan)
        self._state = self.step.init(of.params)
        self.losses = []

    def step_s(self, num_steps):
        """The mean seconds of consecutive steps; the first of them is not counted."""
        start_s = 0.0
        for number in range(num_steps + 1):
            if number == 1:
                self._state.block_until_ready()
                start_s = time.perf_counter()
            self._state, metrics = self.step(self._state, self._of.batch)
            self.losses.append(float(metrics["loss"]))
        self._state.block_until_ready()
        return (time.perf_counter() - start_s) / num_steps


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=4)
    arguments = parser.parse_args()
    overlap.keep_freed_memory()
    of = overlap.Model()
    speeds, profile, plain_s = set_speeds(of)
    known = with_device_updates(profile, speeds)
    budget, plans = plans_of(profile, known)
    trained = {name: Trained(of, plan) for name, plan in plans.items()}
    rounds = []
    for number in range(arguments.rounds + 1):
        before_s = of.plain_s()
        seconds = {name: each.step_s(arguments.steps) for name, each in trained.items()}
        slowness = statistics.median(before_s + of.plain_s()) / plain_s
        if number:  # the first one compiles
            rounds.append({"slowness": slowness, "step_s": seconds})
    bound_s, compute_s = any_plan_lower_bound_s(known, budget), works_s(profile)["compute"]
    rows = []
    for name, plan in plans.items():
        predicted_s = plan.predicted.steady_step_s
        least_s = compute_s if name == "unlimited" else bound_s
        rows.append(
            {
                "plan": name,
                "step_s": statistics.median(one["step_s"][name] for one in rounds),
                "predicted_s": predicted_s,
                "host_over_this": statistics.median(one["step_s"]["host"] / one["step_s"][name] for one in rounds),
                "measured_over_predicted": statistics.median(one["step_s"][name] / predicted_s for one in rounds),
                "measured_over_bound": statistics.median(one["step_s"][name] / least_s for one in rounds),
                "peak_device_bytes": trained[name].step.prepare(of.batch).peak.total,
                "groups_resident": sum(plan.updates_on_device),
                "groups_streamed": sum(plan.updates_streamed),
                "losses": trained[name].losses[:4],
            }
        )
    heads = ("plan", "step [s]", "predicted [s]", "host / this", "/ predicted", "/ bound", "resident", "streamed")
    table = Table(*heads)
    for row in rows:
        times = (row["step_s"], row["predicted_s"], row["host_over_this"])
        ratios = (row["measured_over_predicted"], row["measured_over_bound"])
        counts = (row["groups_resident"], row["groups_streamed"])
        table.add_row(row["plan"], *(f"{x:.3f}" for x in (*times, *ratios)), *map(str, counts))
    Console().print(table)
    print({name: round(seconds, 3) for name, seconds in works_s(profile).items()}, f"bound {bound_s:.3f} s")
    measure.write(
        "slow_host",
        {
            "benchmark": "slow_host",
            "machine": measure.machine(),
            "model": {"name": f"GPT-2 {overlap.CONFIG}", "batch": overlap.BATCH, "sequence": overlap.LENGTH},
            "expected": {"host_over_anywhere": 1.4, "anywhere_over_bound": 1.1, "unlimited_over_compute": 1.1},
            "emulated_bytes_per_s": speeds,
            "host_over_compute": HOST,
            "budget_bytes": budget,
            "bound_s": bound_s,
            "work_s": works_s(profile),
            "rows": rows,
            "rounds": rounds,
        },
    )


if __name__ == "__main__":
    main()
