"""The plans that `auto` takes for profiles of an H200, layer by layer, with their bounds.

    python benchmarks/h200_plans.py

Prints a table and writes `benchmarks/results/h200_plans.json`. Two profiles were measured on an H200: GPT-2 medium, 32
sequences of 1,024 tokens, with XLA's attention and with cuDNN's. One is estimated for it: a Llama of 3 G parameters, as
many tokens, every block recomputed. Budgets lie between the least memory of any plan and that of the plan without a
budget, on a logarithmic scale. The plans and bounds are predictions. docs/planning-search.md judges them.
"""

import itertools

import benchmark_paths  # noqa: F401 - makes the others importable
import measure
from rich.console import Console
from rich.table import Table

from benchmarks.machine import facts
from jaxferry.costs import Profile
from jaxferry.modes import GradientPlace, Remat, UpdatePlace
from jaxferry.planner import AutoSearch, Request, any_plan_lower_bound_s
from jaxferry.records import write_json
from jaxferry.step import LayerPlan, Plan, needed_bytes, predict, simulate
from jaxferry.units import format_bytes, format_seconds

PROFILES = ("profile_gpt2_medium", "profile_gpt2_medium_cudnn", "profile_llama_3g_estimated")
RESULTS = measure.RESULTS / "h200_plans.json"
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)


def choice(layer: LayerPlan) -> str:
    """A layer's choice in short, such as `RESIDENT, updated there`."""
    parts = [layer.mode.value]
    parts += ["GO"] * (layer.gradient is GradientPlace.HOST) + ["recomputes"] * (layer.remat is Remat.FULL)
    places = {UpdatePlace.RESIDENT: ["updated there"], UpdatePlace.GPU: ["update streams"]}
    return ", ".join(parts + places.get(layer.update, []))


def runs(profile: Profile, plan: Plan) -> list[str]:
    """Neighbouring layers with the same choice, each with that."""
    found = []
    for chosen, group in itertools.groupby(zip(profile.layers, plan.layers, strict=True), key=lambda x: choice(x[1])):
        names = [layer.name for layer, _ in group]
        found.append(f"{names[0]} to {names[-1]}: {chosen}" if len(names) > 1 else f"{names[0]}: {chosen}")
    return found


def plans(name: str) -> list[dict]:
    """The plans of a profile, one for each budget."""
    profile = Profile.load(measure.RESULTS / "gpu" / "h200" / f"{name}.json")
    search, rows = AutoSearch(profile, Request()), []
    least, most = search.smallest_bytes, needed_bytes(profile, search.plan(None))
    for share in SHARES:
        budget = int(least * (most / least) ** share)
        plan = predict(profile, search.plan(budget))
        assert plan.predicted is not None
        step_s, bound_s = plan.predicted.steady_step_s, any_plan_lower_bound_s(profile, budget)
        busy = {lane.value: use.busy_s for lane, use in simulate(profile, plan).lanes.items()}
        row = {"profile": name, "budget_bytes": budget, "steady_step_s": step_s, "bound_s": bound_s}
        rows.append({**row, "gap": step_s / bound_s - 1, "busy_s": busy, "layers": runs(profile, plan)})
    return rows


def main() -> None:
    """Makes and prints the plans."""
    rows = [row for name in PROFILES for row in plans(name)]
    write_json(RESULTS, {"machine": facts("none"), "rows": rows})
    table = Table("profile", "budget", "step", "gap", "plan", title="auto's plans for an H200")
    for row in rows:
        size, step_s = format_bytes(row["budget_bytes"]), format_seconds(row["steady_step_s"])
        table.add_row(
            row["profile"].removeprefix("profile_"), size, step_s, f"{row['gap']:.1%}", "; ".join(row["layers"])
        )
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
