"""Measures how far `auto` is from a proven bound, and how long it plans: ten real models, six machines, three budgets.

    python benchmarks/auto_gap.py [--models gpt2:124m llama:8b]

Prints a table and writes `benchmarks/results/auto_gap.json` after each model and machine; rows of other models stay in
it. Models are the examples', traced at their real sizes, one layer per block, in bfloat16; machines are estimated. The
budgets of a model on a machine are the device memory that a JAX process takes there (`machine`), and on a logarithmic
scale a half and a quarter of the way from the least memory that any plan needs to it (`middle`, `tight`). A fourth row
shows that least memory itself, which hardly leaves a choice. Where not even the leanest plan fits into the machine, the
budgets are 4, 2 and 1.4 times its memory. The bound holds for any plan within the budget: any modes, gradients, places
of updates, recomputation (`jaxferry/planner/place_bound.py`).

`gap` is that of the plan that `auto` takes, `fastest_gap` that of the fastest plan that it finds. The plan taken may be
up to 2 % slower (`jaxferry/planner/preference.py`). Each budget is planned for by a search of its own, which takes
`planner_processor_s`. `former_gap` and `former_planner_processor_s` are those of the planner before, which had a search
for every way of updating. The gap is that of its plans for the same profiles and budgets; rows keep it when they are
written again. Its time is of an earlier run, where one search served all four budgets, and counts in each of them.

Expected: gaps of at most 5 %, 2 s for 128 layers.
"""

import argparse
import json
import os
import time
from collections.abc import Collection

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import benchmark_paths  # noqa: F401 - makes the others importable
import jax
import jax.numpy as jnp
import measure
from rich.console import Console
from rich.table import Table

from benchmarks.machine import facts
from jaxferry.cli.workload import find_function
from jaxferry.costs import MACHINES, Profile, default_budget_bytes, estimate_profile, partition_costs
from jaxferry.engine import RematVariants, with_program_facts
from jaxferry.partition import AUTO, partition
from jaxferry.planner import AutoSearch, Request, any_plan_lower_bound_s
from jaxferry.step import Plan, predict

MODELS = (
    "resnet:50",
    "vit:large",
    "bert:base",
    "bert:large",
    "roberta:base",
    "transformer_xl:1.7b",
    "gpt2:medium",
    "gpt2:xl",
    "gpt2:6.7b",
    "llama:8b",
)
BATCH = 8
RESULTS = measure.RESULTS / "auto_gap.json"
FORMER = ("former_gap", "former_planner_processor_s")
SECONDS = ("planner_processor_s", "former_planner_processor_s")


class Traced:
    """A model's shapes, segments and their counted costs; `on` gives its profile on a machine.

    Args:
      name: an example's model, such as `gpt2:medium`.
      sizes: arguments of its workload besides the batch size, such as `length`.
    """

    def __init__(self, name: str, batch_size: int = BATCH, **sizes: int):
        self.loss_fn, init_fn, batch_of = find_function(name)(batch_size=batch_size, **sizes)
        self.params = jax.eval_shape(init_fn, jax.random.key(0))
        self.batch = jax.eval_shape(lambda: batch_of(0))
        self.parts = partition(self.loss_fn, self.params, (self.batch,), compute_dtype=jnp.bfloat16)
        self.variants = RematVariants(self.parts, AUTO)
        self.costs = partition_costs(self.parts, AUTO, temporaries=True)

    def on(self, machine: str) -> Profile:
        """The estimated profile."""
        profile = estimate_profile(self.costs, MACHINES[machine])
        return with_program_facts(profile, self.variants.base, self.variants.derivatives)


TITLES = {"least": 0.0, "tight": 0.25, "middle": 0.5, "machine": 1.0}
"""The budgets, and how far each is from the least memory to the machine's, on a logarithmic scale."""


def budgets_of(search: AutoSearch, machine: str) -> dict[str, int]:
    """The budgets by name, in bytes."""
    least = search.smallest_bytes
    most = default_budget_bytes(MACHINES[machine].to_json())
    ratio = most / least if most > least else 4.0
    return {title: int(least * ratio**share) for title, share in TITLES.items()}


def rows_of(name: str, machine: str, profile: Profile, titles: Collection[str] = TITLES) -> list[dict]:
    """One row for each budget of these titles."""
    rows, budgets = [], budgets_of(AutoSearch(profile, Request()), machine)
    for title in titles:
        budget = budgets[title]
        start = time.process_time()
        search = AutoSearch(profile, Request())
        plan = predict(profile, search.plan(budget))
        planner_s = time.process_time() - start
        bound_s, fastest = any_plan_lower_bound_s(profile, budget), search.fastest(budget)
        assert plan.predicted is not None and fastest is not None
        gaps = {
            "gap": plan.predicted.steady_step_s / bound_s - 1,
            "fastest_gap": fastest.objective_s / bound_s - 1,
        }
        rows.append(
            {"model": name, "machine": machine, "budget": title, "budget_bytes": budget, "layers": len(profile.layers)}
            | {"steady_step_s": plan.predicted.steady_step_s, "bound_s": bound_s}
            | {**gaps, **_choices(plan), "planner_processor_s": round(planner_s, 2)}
        )
    return rows


def with_former(rows: list[dict], known: list[dict]) -> list[dict]:
    """The rows with the gaps and times of the former planner, where rows of before state them."""
    earlier = {(row["model"], row["machine"], row["budget"]): row for row in known}
    return [row | former(earlier.get((row["model"], row["machine"], row["budget"]), {})) for row in rows]


def former(row: dict) -> dict:
    """What a row of before says of the former planner; nothing if it has none."""
    if "search_processor_s" in row:  # of that planner itself
        seconds = round(row["search_processor_s"] + row["plan_processor_s"], 2)
        return {"former_gap": row["gap"], "former_planner_processor_s": seconds}
    return {key: row[key] for key in FORMER if key in row}


def _choices(plan: Plan) -> dict:
    modes = {mode.value: plan.modes.count(mode) for mode in dict.fromkeys(plan.modes)}
    return {
        "modes": modes,
        "recompute": sum(plan.recomputes),
        "updates_on_device": sum(plan.updates_on_device),
        "updates_streamed": sum(plan.updates_streamed),
        "binding": plan.details["binding"],
    }


def print_rows(rows: list[dict]) -> None:
    """Prints one line per model and budget: the worst machine, the means, and planning times."""
    table = Table("model", "budget", title="auto over the proven bound, by machines")
    for head in ("layers", "mean gap", "of the fastest", "formerly", "worst gap", "on", "planning s", "formerly"):
        table.add_column(head, justify="right")
    groups: dict[tuple[str, str], list[dict]] = {}
    for row in rows:
        groups.setdefault((row["model"], row["budget"]), []).append(row)
    for (model, budget), group in groups.items():
        worst = max(group, key=lambda row: row["gap"])
        means = (_mean(group, key) for key in ("gap", "fastest_gap", "former_gap"))
        seconds, before = (max((row[key] for row in group if key in row), default=None) for key in SECONDS)
        cells = (str(worst["layers"]), *means, f"{worst['gap']:.1%}", worst["machine"])
        table.add_row(model, budget, *cells, *("-" if each is None else f"{each:.1f}" for each in (seconds, before)))
    console, above = Console(width=120), [row for row in rows if row["budget"] != "least"]
    console.print(table)
    for title, key in (("plans taken", "gap"), ("fastest plans", "fastest_gap"), ("former plans", "former_gap")):
        counted = [row[key] for row in above if key in row]
        if counted:
            within = f"{sum(gap <= 0.05 for gap in counted)} of {len(counted)} {title} above the least memory"
            console.print(f"{within}: gap at most 5 %; mean {_mean(above, key)}, largest {max(counted):.1%}")


def _mean(rows: list[dict], key: str) -> str:
    known = [row[key] for row in rows if key in row]
    return f"{sum(known) / len(known):.1%}" if known else "-"


def main() -> None:
    """Runs the study."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS, help="examples' models by name and size")
    parser.add_argument("--machines", nargs="+", default=tuple(MACHINES), help="names of machines")
    parser.add_argument("--again", action="store_true", help="print the existing results")
    arguments = parser.parse_args()
    known = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
    if arguments.again:
        print_rows(known)
        return
    for name in arguments.models:
        traced = Traced(name)
        for machine in arguments.machines:
            rows = with_former(rows_of(name, machine, traced.on(machine)), known)
            known = [row for row in known if (row["model"], row["machine"]) != (name, machine)] + rows
            measure.write("auto_gap", {"planned_on": facts("none"), "batch": BATCH, "rows": known})
    print_rows(known)


if __name__ == "__main__":
    main()
