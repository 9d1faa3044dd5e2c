"""Measures how far `auto` is from a proven bound, and how long it plans: ten real models, six machines, three budgets.

    python benchmarks/auto_gap.py [--models gpt2:124m llama:8b]

Prints a table and writes `benchmarks/results/auto_gap.json` after each model and machine; rows of other models stay in
it. Models are the examples', traced at their real sizes, one layer per block, in bfloat16; machines are estimated. The
budgets of a model on a machine are the device memory that a JAX process takes there (`machine`), and on a logarithmic
scale a half and a quarter of the way from the least memory that any plan needs to it (`middle`, `tight`). A fourth row
shows that least memory itself, which hardly leaves a choice. Where not even the leanest plan fits into the machine, the
budgets are 4, 2 and 1.4 times its memory. The bound holds for any plan within the budget: any modes, gradients, places
of updates, recomputation (`jaxferry/planner/place_bound.py`). Planning times are processor time.

Expected: gaps of at most 5 %, 2 s for 128 layers.
"""

import argparse
import json
import os
import time

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
from jaxferry.errors import BudgetError
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


def budgets_of(search: AutoSearch, machine: str) -> dict[str, int]:
    """The budgets by name, in bytes."""
    least = least_bytes(search)
    most = default_budget_bytes(MACHINES[machine].to_json())
    ratio = most / least if most > least else 4.0
    shares = {"least": 0.0, "tight": 0.25, "middle": 0.5, "machine": 1.0}
    return {title: int(least * ratio**share) for title, share in shares.items()}


def least_bytes(search: AutoSearch) -> int:
    """The smallest budget that any plan of the search needs."""
    try:
        search.plan(1)
    except BudgetError as error:
        return error.smallest_bytes
    raise AssertionError("no model trains in a byte")


def rows_of(name: str, machine: str, profile: Profile) -> list[dict]:
    """One row per budget."""
    start = time.process_time()
    search = AutoSearch(profile, Request())
    searched_s = time.process_time() - start
    rows = []
    for title, budget in budgets_of(search, machine).items():
        start = time.process_time()
        plan = predict(profile, search.plan(budget))
        planned_s = time.process_time() - start
        bound_s = any_plan_lower_bound_s(profile, budget)
        rows.append(
            {"model": name, "machine": machine, "budget": title, "budget_bytes": budget, "layers": len(profile.layers)}
            | {"steady_step_s": plan.predicted.steady_step_s, "bound_s": bound_s}
            | {"gap": plan.predicted.steady_step_s / bound_s - 1, **_choices(plan)}
            | {"search_processor_s": round(searched_s, 2), "plan_processor_s": round(planned_s, 2)}
        )
    return rows


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
    """Prints one line per model and budget: the worst machine, the mean, and planning times."""
    table = Table("model", "budget", title="auto over the proven bound, six machines")
    for head in ("layers", "mean gap", "worst gap", "on", "planning s"):
        table.add_column(head, justify="right")
    groups: dict[tuple[str, str], list[dict]] = {}
    for row in rows:
        groups.setdefault((row["model"], row["budget"]), []).append(row)
    for (model, budget), group in groups.items():
        worst = max(group, key=lambda row: row["gap"])
        seconds = max(row["search_processor_s"] + row["plan_processor_s"] for row in group)
        mean = sum(row["gap"] for row in group) / len(group)
        cells = (str(worst["layers"]), f"{mean:.1%}", f"{worst['gap']:.1%}", worst["machine"], f"{seconds:.1f}")
        table.add_row(model, budget, *cells)
    counted = [row["gap"] for row in rows if row["budget"] != "least"]
    within = sum(gap <= 0.05 for gap in counted)
    mean = sum(counted) / len(counted)
    Console(width=120).print(table, f"{within} of {len(counted)} plans above the least memory: gap at most 5 %")
    Console(width=120).print(f"their mean gap: {mean:.1%}, the largest: {max(counted):.1%}")


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
            known = [row for row in known if (row["model"], row["machine"]) != (name, machine)]
            known += rows_of(name, machine, traced.on(machine))
            measure.write("auto_gap", {"planned_on": facts("none"), "batch": BATCH, "rows": known})
    print_rows(known)


if __name__ == "__main__":
    main()
