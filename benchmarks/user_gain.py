"""What users gain over ZeRO-Offload: less device memory at its speed, and larger models in the same memory.

    python benchmarks/user_gain.py

All is simulated with estimated profiles of the examples' models, one layer per block, in bfloat16, in the steady state
and within budgets that hold however long transfers take. Prints two tables and writes
`benchmarks/results/user_gain.json`.

- **Memory**: for each of the papers' models on a machine, the smallest budget in which `auto` is no slower than
  `zero-offload`, relative to what `zero-offload` needs: once with nothing recomputed, once with recomputation left to
  `auto`, and once with recomputation left to `auto` beside a `zero-offload` that recomputes every block, which needs
  less and takes longer. Updates may run anywhere. Budgets are found to 1 %.
- **Size**: the deepest Transformer-XL, with blocks like those of the 1.7B model, whose step fits into the memory that a
  JAX process takes of a machine, by policy; `zero-offload` also with every block recomputed. The last row has every
  block recomputed and what a block keeps in host memory until its backward (`offload_activations`), with the rest as
  `auto` has it where it needs the least. Only memory decides, not time. Host memory is not limited.

Expected: 42 % less memory on average, models 3 times as large.
"""

import argparse
import dataclasses
import statistics

import auto_gap  # sets the environment before jax is imported
import numpy as np
from rich.console import Console
from rich.table import Table

import measure
from benchmarks.machine import facts
from jaxferry.holdings import DHA, RELOAD
from jaxferry.modes import Remat
from jaxferry.plan.auto import AutoSearch
from jaxferry.plan.base import Request
from jaxferry.plan.base import make_plan as plan_of_codes
from jaxferry.plan.records import Plan
from jaxferry.planning import make_plan
from jaxferry.profiling.machines import MACHINES, default_budget_bytes
from jaxferry.profiling.records import Profile
from jaxferry.schedule import CROSSING_SLOTS, needed_bytes
from jaxferry.simulate.report import simulate

MODELS = (
    "bert:base",
    "roberta:base",
    "bert:large",
    "gpt2:medium",
    "transformer_xl:1b",
    "transformer_xl:2.4b",
    "transformer_xl:4.3b",
    "transformer_xl:6.7b",
)
MACHINE = "h200-pcie5"
DEEPENED, MACHINES_OF_SIZE = "transformer_xl:1.7b", ("v100-pcie3", "rtx4090-pcie4", "h200-pcie5")
MOST_BLOCKS = 4096
OFFLOADING = "auto, recomputing, activations in host memory"
BOTH = "both_recomputing"
COMPARED = {"not_recomputing": "nothing recomputed", "recomputing": "auto may recompute", BOTH: "both may recompute"}
BACKWARDS = ("backward_s", "backward_dha_s", "backward_go_s")
POLICIES = ("zero-offload", "native-overlapped", "memferry", "go-memferry", "l2l")


def without_recomputation(profile: Profile) -> Profile:
    """The profile in which no plan may recompute."""
    return profile.only_recomputing([False] * len(profile.layers))


def smallest_budget(profile: Profile, most_s: float, high: int) -> int:
    """The smallest budget, to 1 %, in which `auto` takes at most `most_s`; `high` is known to be enough."""
    search = AutoSearch(profile, Request())

    def is_enough(budget: int) -> bool:
        return simulate(profile, search.plan(budget)).steady_step_s <= most_s * (1 + 1e-9)

    low = auto_gap.least_bytes(search)
    if is_enough(low):
        return low
    while high > 1.01 * low:
        middle = int((low * high) ** 0.5)
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


def memory_row(name: str) -> dict:
    """The budgets of one model."""
    profile = auto_gap.Traced(name).on(MACHINE)
    plan = make_plan(profile, "zero-offload")
    own, seconds = needed_bytes(profile, plan), plan.predicted.steady_step_s
    again = _recomputing(profile, make_plan(without_recomputation(profile), "zero-offload"))
    least, longer_s = needed_bytes(profile, again), simulate(profile, again).steady_step_s
    found = {
        "not_recomputing": smallest_budget(without_recomputation(profile), seconds, own),
        "recomputing": smallest_budget(profile, seconds, own),
        "both_recomputing": smallest_budget(profile, longer_s, least),
    }
    saved = {f"saved_{key}": 1 - size / (least if key == BOTH else own) for key, size in found.items()}
    beside = {"recomputing_zero_offload_s": longer_s, "recomputing_zero_offload_bytes": least}
    return {"model": name, "zero_offload_s": seconds, "zero_offload_bytes": own, **beside, **found, **saved}


def deepened(profile: Profile, num_blocks: int) -> Profile:
    """The profile with as many copies of a block in the middle."""
    blocks = [index for index, layer in enumerate(profile.layers) if layer.name.startswith("block")]
    middle = profile.layers[blocks[len(blocks) // 2]]
    own = [
        dataclasses.replace(middle, name=f"block_{number}", parameters=f"block_{number}")
        for number in range(num_blocks)
    ]
    return dataclasses.replace(profile, layers=(*profile.layers[: blocks[0]], *own, *profile.layers[blocks[-1] + 1 :]))


def needs(profile: Profile, policy: str) -> int:
    """Device memory of a policy's plan; of `auto` that of its leanest."""
    if policy == OFFLOADING:
        return needs(offloading(profile), "auto")
    if policy == "auto":
        size = len(profile.layers)
        on_host = np.ones(size, dtype=bool)
        again = np.array([layer.can_recompute for layer in profile.layers])
        modes = [np.full(size, mode, dtype=np.int8) for mode in (DHA, RELOAD)]
        plans = [plan_of_codes(policy, 0.0, profile, each, on_host, recomputes=again) for each in modes]
        return min(needed_bytes(profile, plan) for plan in plans)
    name = policy.removesuffix(", recomputing")
    plan = make_plan(without_recomputation(profile), name)
    return needed_bytes(profile, _recomputing(profile, plan) if name != policy else plan)


def offloading(profile: Profile) -> Profile:
    """The profile in which every block recomputes, and what it keeps waits in host memory for its backward.

    What the last blocks keep stays, as in the engine: their backwards follow too soon.
    """
    blocks = [index for index, layer in enumerate(profile.layers) if layer.can_recompute]
    layers = list(profile.layers)
    for index in blocks:
        layer = layers[index]
        kept, is_moved = layer.kept_bytes(True), index in blocks[: -2 * CROSSING_SLOTS]
        moved = kept if is_moved else 0
        layers[index] = dataclasses.replace(
            layer.without_recomputation(),
            activation_bytes=kept,
            save_bytes=moved,
            fetch_bytes=moved,
            **{key: getattr(layer, key) + layer.recompute_s for key in BACKWARDS},
            temporary_bytes={
                name.removesuffix("_recompute"): size
                for name, size in sorted(layer.temporary_bytes.items(), key=lambda pair: len(pair[0]))
            },
        )
    return dataclasses.replace(profile, layers=tuple(layers))


def _recomputing(profile: Profile, plan: Plan) -> Plan:
    """The plan with every layer recomputed that can be."""
    layers = tuple(
        dataclasses.replace(layer, remat=Remat.FULL) if known.can_recompute else layer
        for layer, known in zip(plan.layers, profile.layers, strict=True)
    )
    return dataclasses.replace(plan, layers=layers)


def deepest(profile: Profile, policy: str, budget: int) -> float:
    """Parameters of the deepest model that fits, in billions."""

    def fits(num_blocks: int) -> bool:
        return needs(deepened(profile, num_blocks), policy) <= budget

    low, high = 1, 2
    while high < MOST_BLOCKS and fits(high):
        low, high = high, 2 * high
    while high - low > max(1, low // 50):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    found = deepened(profile, low)
    return sum(found.layers[members[0]].param_bytes for members in found.groups) / 2 / 1e9


def size_rows() -> list[dict]:
    """The deepest model of each policy, by machine."""
    traced, rows = auto_gap.Traced(DEEPENED), []
    for machine in MACHINES_OF_SIZE:
        profile, budget = traced.on(machine), default_budget_bytes(MACHINES[machine].to_json())
        names = (*POLICIES, "zero-offload, recomputing", "auto", OFFLOADING)
        found = {name: deepest(profile, name, budget) for name in names}
        rows.append({"machine": machine, "budget_bytes": budget, "billions": found})
    return rows


def print_rows(memory: list[dict], sizes: list[dict]) -> None:
    """Prints both tables."""
    table = Table("model", title=f"smallest memory in which auto is no slower than zero-offload, {MACHINE}")
    for head in ("zero-offload, GB", "recomputing, GB", *COMPARED.values()):
        table.add_column(head, justify="right")
    for row in memory:
        sizes_gb = [f"{row[f'{name}zero_offload_bytes'] / 1e9:.2f}" for name in ("", "recomputing_")]
        table.add_row(row["model"], *sizes_gb, *(f"-{row[f'saved_{key}']:.0%}" for key in COMPARED))
    means = [statistics.mean(row[f"saved_{key}"] for row in memory) for key in COMPARED]
    table.add_row("mean", "", "", *(f"-{mean:.0%}" for mean in means))
    deep = Table("policy", title=f"largest {DEEPENED.split(':')[0]} by memory, billions of parameters")
    for row in sizes:
        deep.add_column(row["machine"], justify="right")
    for name in sizes[0]["billions"]:
        deep.add_row(name, *(f"{row['billions'][name]:.1f}" for row in sizes))
    Console(width=120).print(table, deep)


def main() -> None:
    """Runs the study."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    memory = [memory_row(name) for name in MODELS]
    sizes = size_rows()
    print_rows(memory, sizes)
    measure.write("user_gain", {"computed_on": facts("none"), "machine": MACHINE, "memory": memory, "size": sizes})


if __name__ == "__main__":
    main()
