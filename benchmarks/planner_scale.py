"""Measures processor time, memory and gap of every policy on long models, and of `auto` on GPT-like models.

    python benchmarks/planner_scale.py [--layers 1000 20000] [--policies exact auto]
    python benchmarks/planner_scale.py --blocks 16 32 64 128 256 [--granularities block module] [--machines h100-pcie5]
        [--jitters 0 0.05 0.1]

Prints tables and writes `benchmarks/results/planner_scale.json` after each plan; plans that are not made again stay in
it. Each plan is made in a process of its own, whose largest memory is that of the policy, the profile and the
interpreter. Gaps are those of the steady step to the bound that the plan states. `auto, budget` plans within three
quarters of the memory that `native-overlapped` needs.

With `--blocks`, `auto` plans for GPT-2's blocks at 4096 channels, 8 samples of 1024 tokens, on estimated machines
within the memory that JAX takes of them: with one layer a block, and with one a module. All ways of updating compete.
Their gaps are to the bound within the budget. `--jitters` multiplies each time of each layer by a factor that is drawn
from 1 - J to 1 + J, as in a profile whose layers were measured one by one.

Goals: 2 s for 128 layers of blocks, 10 s for the modules of 128 blocks. Found on a machine that did other work too: 1.8
to 2.2 s, 5 to 7 s; where all layers' times differ, up to 4 and 14 s, since each layer is then a class of its own.
"""

import argparse
import dataclasses
import itertools
import json
import os
import random
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import facts
from benchmarks.planner_gap import transformer
from jaxferry.costs import MACHINES, Profile, default_budget_bytes
from jaxferry.planner import any_plan_lower_bound_s, make_plan, policies
from jaxferry.records import write_json

RESULTS = Path(__file__).parent / "results" / "planner_scale.json"
WITH_BUDGET = "auto, budget"
SHARE_OF_MEMORY = 0.75
MACHINES_PLANNED = ("h100-pcie5", "rtx4090-pcie4")
MODEL_KEYS = ("blocks", "granularity", "machine", "jitter")
GOALS_S = {("block", 128): 2.0, ("module", 128): 10.0}
"""By granularity and blocks."""


def measured(name: str, num_layers: int) -> dict[str, float | str | int]:
    """Plans here: processor seconds, peak memory and gap."""
    profile = transformer(num_layers, seed=0)
    budget = sum(layer.param_bytes + layer.activation_bytes for layer in profile.layers) * SHARE_OF_MEMORY
    start = time.process_time()
    with_budget = name == WITH_BUDGET
    plan = make_plan(profile, "auto" if with_budget else name, memory_budget_bytes=int(budget) if with_budget else None)
    return {
        "policy": name,
        "layers": num_layers,
        "processor_s": round(time.process_time() - start, 2),
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "steady_step_s": plan.predicted.steady_step_s if plan.predicted else 0.0,
        "lower_bound_s": plan.details["lower_bound_s"],
        "gap": plan.details["gap"],
    }


def jittered(profile: Profile, share: float) -> Profile:
    """The profile with each time multiplied by a factor of its own, up to `share` from 1."""
    generator, layers = random.Random(0), []
    for layer in profile.layers:
        times = {key: getattr(layer, key) for key in vars(layer) if key.endswith("_s")}
        times = {key: value * generator.uniform(1 - share, 1 + share) for key, value in times.items() if value}
        for way in ("forward", "backward"):  # what a program takes of a link is no more than the program takes
            longest_s = times[f"{way}_dha_s"]
            times[f"{way}_read_s"] = min(times.get(f"{way}_read_s", 0.0), longest_s)
        layers.append(dataclasses.replace(layer, **times))
    return dataclasses.replace(profile, layers=tuple(layers))


def gpt_like(num_blocks: int, granularity: str, machine: str) -> Profile:
    """The estimated profile of a GPT-2 of so many blocks; JAX is imported here only, since it takes much memory."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import jax
    import jax.numpy as jnp

    from examples.gpt2 import model
    from jaxferry.costs import estimate_profile, partition_costs
    from jaxferry.engine import RematVariants, with_program_facts
    from jaxferry.partition import AUTO, partition

    config = model.Config(num_layers=num_blocks, num_heads=32, channels=4096)
    shapes = jax.eval_shape(model.make_init(config), jax.random.key(0))
    batch = {"tokens": jax.ShapeDtypeStruct((8, 1025), jnp.int32)}
    parts = partition(
        model.make_loss(config), shapes, (batch,), compute_dtype=jnp.bfloat16, granularity=granularity
    )  # fmt: skip
    variants = RematVariants(parts, AUTO)
    profile = estimate_profile(partition_costs(parts, AUTO, temporaries=True), MACHINES[machine])
    return with_program_facts(profile, variants.base, variants.derivatives)


def measured_model(num_blocks: int, granularity: str, machine: str, jitter: float) -> dict[str, Any]:
    """Plans with `auto` here: processor seconds and gap."""
    start = time.process_time()
    profile = jittered(gpt_like(num_blocks, granularity, machine), jitter)
    partition_s = time.process_time() - start
    budget = default_budget_bytes(MACHINES[machine].to_json())
    start = time.process_time()
    plan = make_plan(profile, "auto", memory_budget_bytes=budget)
    seconds = time.process_time() - start
    assert plan.predicted is not None
    step_s, bound_s = plan.predicted.steady_step_s, any_plan_lower_bound_s(profile, budget)
    return {
        "blocks": num_blocks,
        "granularity": granularity,
        "machine": machine,
        "jitter": jitter,
        "layers": len(profile.layers),
        "processor_s": round(seconds, 2),
        "partition_processor_s": round(partition_s, 2),
        "goal_s": GOALS_S.get((granularity, num_blocks)),
        "steady_step_s": step_s,
        "lower_bound_s": bound_s,
        "gap": step_s / bound_s - 1,
    }


def in_own_process(*arguments: str | float) -> dict[str, float | str | int]:
    """`measured` or `measured_model` in a process of its own."""
    command = [sys.executable, __file__, "--one", *map(str, arguments)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    """Runs the study."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[1000, 20000], help="lengths of the models")
    parser.add_argument("--policies", nargs="+", default=[*policies(), WITH_BUDGET], help="policies to measure")
    parser.add_argument("--blocks", type=int, nargs="+", help="plan for GPT-like models of so many blocks instead")
    parser.add_argument("--granularities", nargs="+", default=["block", "module"], help="how fine their layers are")
    parser.add_argument("--machines", nargs="+", default=MACHINES_PLANNED, help="the machines that they train on")
    parser.add_argument(
        "--jitters", type=float, nargs="+", default=[0.0], help="how much the times of equal layers differ"
    )
    parser.add_argument("--one", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        name, *others = arguments.one
        print(
            json.dumps(
                measured_model(int(name), *others[:2], float(others[2]))
                if others[1:]
                else measured(name, int(others[0]))
            )
        )
        return
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    plans = {(row["policy"], row["layers"]): row for row in known.get("plans", ())}
    models = {tuple(row[key] for key in MODEL_KEYS): row for row in known.get("models", ())}
    if arguments.blocks:
        asked = (arguments.blocks, arguments.granularities, arguments.machines, arguments.jitters)
        rows, cases = models, [*itertools.product(*asked)]
    else:
        rows, cases = plans, [(name, layers) for layers in arguments.layers for name in arguments.policies]
    for case in track(cases, description="plans", console=Console(stderr=True)):
        rows[case] = in_own_process(*case)
        found = {"plans": list(plans.values()), "models": [models[key] for key in sorted(models)]}
        write_json(RESULTS, {"machine": facts("none"), **found})
    print_plans(list(plans.values()))
    print_models([models[key] for key in sorted(models)])


def print_plans(rows: list[dict]) -> None:
    """Prints the policies on long models."""
    table = Table("policy", title="planning long models")
    for head in ("layers", "processor s", "peak MB", "gap"):
        table.add_column(head, justify="right")
    for row in rows:
        seconds, peak = f"{row['processor_s']:.1f}", f"{row['peak_bytes'] / 1e6:.0f}"
        table.add_row(row["policy"], str(row["layers"]), seconds, peak, f"{row['gap']:.2%}")
    Console(width=100).print(table)


def print_models(rows: list[dict]) -> None:
    """Prints `auto` on GPT-like models."""
    table = Table("granularity", "machine", title="auto on GPT-like models")
    for head in ("jitter", "blocks", "layers", "partition s", "processor s", "goal s", "gap"):
        table.add_column(head, justify="right")
    for row in sorted(rows, key=lambda row: (row["granularity"], row["machine"], row["jitter"], row["blocks"])):
        goal, seconds = f"{row['goal_s'] or ''}", f"{row['processor_s']:.1f}"
        about = (row["granularity"], row["machine"], f"{row['jitter']:g}", str(row["blocks"]), str(row["layers"]))
        table.add_row(*about, f"{row['partition_processor_s']:.1f}", seconds, goal, f"{row['gap']:.2%}")
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
