"""Compares `auto`'s search with brute force: every plan of small random profiles, simulated one by one.

    python benchmarks/brute_force.py [--profiles 240]

Prints a table and writes `benchmarks/results/brute_force.json`. A profile has two or three layers of random times and
sizes; some share parameters, recompute, lose time to other lanes, or may be updated through the GPU or on it. The
budget lies anywhere between the least memory of any plan and that of plain training. Brute force simulates all modes,
places of gradients and updates, recomputation and both orders of updates. `auto` would do likewise with so few plans;
here it has to search.

Expected: no plan is faster than the optimum or the bound, and the gap that a plan states covers its distance from the
optimum. The search need not find the optimum: the distance is the result.
"""

import argparse
import dataclasses
import random
import statistics

import benchmark_paths  # noqa: F401 - makes the others importable
import measure
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.machine import facts
from every_plan import every_plan
from jaxferry.costs import SHARING, Contention, LayerProfile, Profile
from jaxferry.modes import Mode, UpdatePlace
from jaxferry.planner import AutoSearch, Request, search
from jaxferry.records import write_json
from jaxferry.step import Kind, Plan, effective, needed_bytes, simulate

RESULTS = measure.RESULTS / "brute_force.json"
ROUNDING = 1 + 1e-9
NEARLY = (1e-9, 0.01, 0.02)
"""Distances from the optimum within which plans are counted."""


def random_profile(seed: int) -> Profile:
    """A profile of two layers, or of three that may not recompute."""
    draw = random.Random(seed)

    def times(most: int, *keys: str) -> dict[str, float]:
        return {f"{key}_s": draw.randint(0, most) / 8 for key in keys}

    size, layers = draw.choice((2, 2, 2, 3)), list[LayerProfile]()
    streams, is_tied = draw.random() < 0.5, draw.random() < 0.2
    for index in range(size):
        param_bytes = layers[0].param_bytes if is_tied and index == size - 1 else draw.randint(1, 60)
        more = times(24, "state_up", "state_down", "update_gpu") | {"state_bytes": 6 * param_bytes} if streams else {}
        if size == 2 and draw.random() < 0.5:
            more |= times(8, "recompute") | {"recompute_activation_bytes": draw.randint(0, 20)}
        layers.append(
            LayerProfile(
                name=f"layer{index}",
                parameters="layer0" if is_tied and index == size - 1 else f"layer{index}",
                param_bytes=param_bytes,
                grad_bytes=draw.randint(1, 60),
                activation_bytes=draw.randint(0, 60),
                **times(24, "load", "offload", "backward_dha", "backward_go"),
                **times(12, "forward", "forward_dha", "backward"),
                **times(32, "update"),
                **more,
            )
        )
    if is_tied and streams:
        layers[-1] = dataclasses.replace(
            layers[-1], **{key: getattr(layers[0], key) for key in ("update_gpu_s", "state_up_s", "state_down_s")}
        )
    lost = {lane: {other: draw.randint(0, 4) / 8 for other in SHARING if other != lane} for lane in SHARING}
    contention = Contention(lost if draw.random() < 0.3 else {})
    return Profile({"seed": seed}, tuple(layers), contention=contention)


def keeps_window(profile: Profile, plan: Plan) -> bool:
    """Whether the loads of DFGB layers end before the first gradient leaves, in a step alone (MemFerry's rule)."""
    if Mode.DFGB not in effective(profile, plan).modes:
        return True
    run = simulate(profile, dataclasses.replace(plan, memory_bytes=None)).run
    tasks = [*zip(run.schedule.tasks, run.ends_s, strict=True)]
    forwards = [place for place, (task, _) in enumerate(tasks) if task.kind in (Kind.FORWARD, Kind.INTER_FORWARD)]
    last = profile.program_ends[-1][0]
    backwards = [task for task, _ in tasks if task.kind in (Kind.BACKWARD, Kind.INTER_BACKWARD)]
    closes_s = tasks[forwards[-1]][1] + sum(task.duration_s for task in backwards if task.segment >= last)
    return all(end_s <= closes_s for task, end_s in tasks[forwards[-1] :] if task.kind is Kind.LOAD)


def optimum_s(profile: Profile, budget_bytes: int) -> tuple[float, int]:
    """The least steady step of all plans within a budget, in seconds, and the number of these plans."""
    places = tuple(UpdatePlace) if profile.layers[0].update_gpu_s is not None else (UpdatePlace.HOST,)
    least_s, number = float("inf"), 0
    for plan, step_s, needed in every_plan(profile, places=places, memory_bytes=budget_bytes):
        if needed <= budget_bytes and keeps_window(profile, plan):
            least_s, number = min(least_s, step_s), number + 1
    return least_s, number


def compared(seed: int) -> dict[str, float]:
    """One profile, by the search and by brute force."""
    profile = random_profile(seed)
    least = AutoSearch(profile, Request()).smallest_bytes
    most = AutoSearch(profile, Request()).fastest(None)
    assert most is not None
    budget = random.Random(seed).randint(least, max(least, most.needed_bytes))
    auto = AutoSearch(profile, Request())
    plan, found = auto.plan(budget), auto.search.within(budget)
    optimum, number = optimum_s(profile, budget)
    taken_s = simulate(profile, plan).steady_step_s
    assert needed_bytes(profile, plan) <= budget
    return {
        "seed": seed,
        "layers": len(profile.layers),
        "budget_bytes": budget,
        "plans": number,
        "simulated": len(found.known),
        "optimum_s": optimum,
        "fastest_s": found.best.objective_s,
        "taken_s": taken_s,
        "bound_s": found.solution.bound_s,
    }


def summary(rows: list[dict[str, float]]) -> dict[str, float]:
    """What all profiles say together. Steps of no time are optimal."""
    above = [row["fastest_s"] / row["optimum_s"] - 1 if row["optimum_s"] else 0.0 for row in rows]
    return {
        "profiles": len(rows),
        "plans": sum(int(row["plans"]) for row in rows),
        "bounds_above_the_optimum": sum(row["bound_s"] > row["optimum_s"] * ROUNDING for row in rows),
        "faster_than_the_optimum": sum(row["fastest_s"] * ROUNDING < row["optimum_s"] for row in rows),
        **{f"within_{share:g}": sum(each <= share for each in above) for share in NEARLY},
        "mean_above": statistics.mean(above),
        "most_above": max(above),
    }


def main() -> None:
    """Runs the study."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profiles", type=int, default=240, help="profiles to compare on")
    arguments = parser.parse_args()
    search.MOST_ENUMERATED = 0
    seeds = track(range(arguments.profiles), description="profiles", console=Console(stderr=True))
    rows = [compared(seed) for seed in seeds]
    found = summary(rows)
    write_json(RESULTS, {"machine": facts("none"), "summary": found, "rows": rows})
    table = Table("profiles", "plans", "bound above optimum", "plan below optimum", title="auto beside brute force")
    for head in ("optimal", "within 1 %", "within 2 %", "mean above", "most above"):
        table.add_column(head, justify="right")
    counts = (str(found[f"within_{share:g}"]) for share in NEARLY)
    errors = (str(found["bounds_above_the_optimum"]), str(found["faster_than_the_optimum"]))
    shares = (f"{found[key]:.2%}" for key in ("mean_above", "most_above"))
    table.add_row(str(found["profiles"]), str(found["plans"]), *errors, *counts, *shares)
    Console(width=130).print(table)


if __name__ == "__main__":
    main()
