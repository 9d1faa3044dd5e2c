"""Measures processor time, memory and gap of every policy on long models.

    python benchmarks/planner_scale.py [--layers 1000 20000] [--policies exact auto]

Prints a table and writes `benchmarks/results/planner_scale.json` after each plan; plans that are not made again stay in
it. Each plan is made in a process of its own, whose largest memory is that of the policy, the profile and the
interpreter. Gaps are those of the steady step to the bound
that the plan states. `auto, budget` plans within three quarters of the memory that `native-overlapped` needs.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import facts
from benchmarks.planner_gap import transformer
from jaxferry.plan.registry import policies
from jaxferry.planning import make_plan
from jaxferry.records import write_json

RESULTS = Path(__file__).parent / "results" / "planner_scale.json"
WITH_BUDGET = "auto, budget"
SHARE_OF_MEMORY = 0.75


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


def in_own_process(name: str, num_layers: int) -> dict[str, float | str | int]:
    """`measured` in a process of its own."""
    command = [sys.executable, __file__, "--one", name, str(num_layers)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    """Runs the study."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[1000, 20000], help="lengths of the models")
    parser.add_argument("--policies", nargs="+", default=[*policies(), WITH_BUDGET], help="policies to measure")
    parser.add_argument("--one", nargs=2, metavar=("POLICY", "LAYERS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measured(arguments.one[0], int(arguments.one[1]))))
        return
    cases = [(name, num_layers) for num_layers in arguments.layers for name in arguments.policies]
    known = json.loads(RESULTS.read_text())["plans"] if RESULTS.exists() else []
    rows = {(row["policy"], row["layers"]): row for row in known}
    for case in track(cases, description="plans", console=Console(stderr=True)):
        rows[case] = in_own_process(*case)
        write_json(RESULTS, {"machine": facts("none"), "plans": list(rows.values())})
    table = Table("policy", title="planning long models")
    for head in ("layers", "processor s", "peak MB", "gap"):
        table.add_column(head, justify="right")
    for row in rows.values():
        seconds, peak = f"{row['processor_s']:.1f}", f"{row['peak_bytes'] / 1e6:.0f}"
        table.add_row(row["policy"], str(row["layers"]), seconds, peak, f"{row['gap']:.2%}")
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
