"""Measures each policy's gap to `exact`, and planning times, on profiles shaped like transformers.

    python benchmarks/planner_gap.py [--models 30] [--most-layers 512] [--seeds 3]

Prints two tables and writes `benchmarks/results/planner_gap.json`. Every model has its own seed, which draws machine,
batch, width and the spread of its layers' times. Gaps are ratios of simulated times on the same profile, each policy
with its default reserve factor, so they do not depend on the machine that plans. Planning times do: they are processor
time, median and worst over several seeds. `auto` may keep layers resident on the device, which `exact` may not: its gap
is negative where that pays.
"""

import argparse
import platform
import random
import statistics
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmarks.papers.memferry_printed import MemFerryPrinted
from jaxferry.costs import LayerProfile, Profile
from jaxferry.planner import Objective, Policy, Request, make_plan, make_policy, policies
from jaxferry.records import write_json
from jaxferry.step import simulate

RESULTS = Path(__file__).parent / "results" / "planner_gap.json"
TIMES = {Objective.FORWARD: "forward_s", Objective.STEP: "step_s", Objective.STEADY: "steady_step_s"}
RIVALS = (*(name for name in policies() if name != "exact"), MemFerryPrinted.name)
LAYERS = (8, 16, 32, 64, 128, 256, 512)
MOST_LAYERS_OF_AUTO = 128


def transformer(num_layers: int, seed: int) -> Profile:
    """Makes a random machine's profile: embedding, repeated norm, attention, norm, MLP, and a head."""
    draw = random.Random(seed)
    link_bytes_per_s = draw.choice([6e9, 12e9, 25e9, 55e9])
    flops_per_s = draw.choice([60e12, 120e12, 300e12])
    host_bytes_per_s = draw.choice([25e9, 60e9, 150e9])
    tokens = draw.choice([512, 2048, 8192])
    width = draw.choice([768, 1024, 2048, 4096])
    layers = []
    for index in range(num_layers):
        kind = "norm" if index % 2 else ("attention", "mlp")[index % 4 // 2]
        kind = {0: "embedding", num_layers - 1: "head"}.get(index, kind)
        factor = {"embedding": 50257, "head": 50257, "norm": 2, "attention": 4 * width, "mlp": 8 * width}[kind]
        size = 2 * factor * width
        flops = 0 if kind in ("embedding", "norm") else 2 * tokens * factor * width
        touched = 2 * tokens * width
        forward_s = (flops / flops_per_s + 4 * touched / 1.5e12) * draw.uniform(0.9, 1.1) + 5e-6
        read_s = (touched if kind == "embedding" else size) / link_bytes_per_s * draw.uniform(1.05, 1.5)
        forward_dha_s = max(forward_s, read_s) * draw.uniform(1.0, 1.1) + 5e-6
        backward_s = 2 * forward_s
        layers.append(
            LayerProfile(
                name=f"{kind}{index}",
                param_bytes=size,
                grad_bytes=size,
                activation_bytes=touched * 4,
                load_s=size / link_bytes_per_s + 1e-5,
                forward_s=forward_s,
                forward_dha_s=forward_dha_s,
                backward_s=backward_s,
                backward_dha_s=backward_s + 0.3 * (forward_dha_s - forward_s),
                backward_go_s=max(backward_s, 0.9 * size / link_bytes_per_s) * 1.05,
                offload_s=size / link_bytes_per_s + 1e-5,
                update_s=15 * size / host_bytes_per_s,
            )
        )
    return Profile({"seed": seed}, tuple(layers))


def _policy(name: str) -> Policy:
    """Returns a policy of the registry, or MemFerry's algorithm as printed, which only studies use."""
    return MemFerryPrinted() if name == MemFerryPrinted.name else make_policy(name)


def gaps(num_models: int) -> dict[str, dict[str, dict[str, float]]]:
    """Returns per objective and policy the mean, worst and best gap to `exact`; for `exact`, to its proven bound."""
    found: dict[str, dict[str, list[float]]] = {objective: {} for objective in Objective}
    for seed in track(range(num_models), description="gaps", console=Console(stderr=True)):
        profile = transformer(random.Random(seed).choice([18, 34, 50, 98]), seed)
        rivals = {name: simulate(profile, _policy(name).plan(profile)) for name in RIVALS}
        for objective, key in TIMES.items():
            best = make_plan(profile, "exact", objective=objective)
            for name, simulation in rivals.items():
                gap = getattr(simulation, key) / getattr(best.predicted, key) - 1
                found[objective].setdefault(name, []).append(gap)
            found[objective].setdefault("exact, to the bound", []).append(best.details["gap"])
    return {
        objective: {name: {"mean": statistics.mean(x), "worst": max(x), "best": min(x)} for name, x in rows.items()}
        for objective, rows in found.items()
    }


def planning_times(most_layers: int, num_seeds: int) -> dict[str, dict[str, dict[str, float]]]:
    """Returns the median and worst planning seconds over the seeds, per number of layers and policy."""
    times: dict[str, dict[str, dict[str, float]]] = {}
    sizes = [num_layers for num_layers in LAYERS if num_layers <= most_layers]
    for num_layers in track(sizes, description="times", console=Console(stderr=True)):
        seconds: dict[str, list[float]] = {}
        for seed in range(num_seeds):
            profile = transformer(num_layers, seed)
            for title, name, request in _timed_requests(profile):
                start = time.process_time()
                _policy(name).plan(profile, request)
                seconds.setdefault(title, []).append(time.process_time() - start)
        times[str(num_layers)] = {
            title: {"median": statistics.median(found), "worst": max(found)} for title, found in seconds.items()
        }
    return times


def _timed_requests(profile: Profile) -> list[tuple[str, str, Request]]:
    """Returns titles, policies and requests to time."""
    budget = sum(layer.param_bytes + layer.activation_bytes for layer in profile.layers)
    asked = [(name, name, Request()) for name in ("memferry", "memferry-printed", "exact")]
    asked.append(("exact, factor 1", "exact", Request(1.0)))
    asked.append(("exact, forward", "exact", Request(objective=Objective.FORWARD)))
    if len(profile.layers) <= MOST_LAYERS_OF_AUTO:
        asked.append(("auto", "auto", Request(memory_budget_bytes=budget)))
    return asked


def main() -> None:
    """Runs the study."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=30, help="profiles to compare on")
    parser.add_argument("--most-layers", type=int, default=512, help="largest model to time")
    parser.add_argument("--seeds", type=int, default=3, help="models of each size to time")
    arguments = parser.parse_args()
    results = {
        "machine": {"processor": platform.processor() or platform.machine(), "python": platform.python_version()},
        "models": arguments.models,
        "seeds_of_times": arguments.seeds,
        "gaps": gaps(arguments.models),
        "planning_s": planning_times(arguments.most_layers, arguments.seeds),
    }
    RESULTS.parent.mkdir(exist_ok=True)
    write_json(RESULTS, results)
    console = Console(width=150)
    console.print(_gap_table(results["gaps"]), _time_table(results["planning_s"]))


def _gap_table(gaps_of: dict[str, dict[str, dict[str, float]]]) -> Table:
    table = Table("policy", title="time over exact's, mean (best to worst)")
    for objective in gaps_of:
        table.add_column(objective, justify="right")
    for name in next(iter(gaps_of.values())):
        cells = [rows[name] for rows in gaps_of.values()]
        table.add_row(name, *(f"{x['mean']:.2%} ({x['best']:.2%} to {x['worst']:.2%})" for x in cells))
    return table


def _time_table(times: dict[str, dict[str, dict[str, float]]]) -> Table:
    names = list(next(iter(times.values())))
    table = Table("layers", title="processor seconds to plan, median (worst)")
    for name in names:
        table.add_column(name, justify="right")
    for num_layers, rows in times.items():
        cells = [f"{rows[name]['median']:.3f} ({rows[name]['worst']:.3f})" if name in rows else "-" for name in names]
        table.add_row(num_layers, *cells)
    return table


if __name__ == "__main__":
    main()
